#include "adapters.hpp"

#include <algorithm>
#include <vector>

#include "thread_pool.hpp"

namespace hp {
namespace {

struct Item {
  int slot;
  const int64_t* tokens;
  int count;
};

}  // namespace

void add_adapters(const AdapterCall& call) {
  const AdapterKernels& kernels = HP_DISPATCH(adapter_kernels_here);
  std::vector<Item> items;
  for (int64_t group = 0; group < call.groups; ++group)
    for (int32_t first = call.starts[group]; first < call.starts[group + 1]; first += kAdapterTokens)
      items.push_back({call.slots[group], call.tokens + first, std::min(kAdapterTokens, call.starts[group + 1] - first)});
  const size_t inner = static_cast<size_t>(kAdapterTokens * call.parts * call.max_rank);
  ThreadPool::global().parallel_for(static_cast<int64_t>(items.size()), 1, [&](int64_t begin, int64_t end, int) {
    static thread_local std::vector<float> scratch;
    if (scratch.size() < inner) scratch.resize(inner);
    for (int64_t i = begin; i < end; ++i) kernels.add(call, items[i].slot, items[i].tokens, items[i].count, scratch.data());
  });
}

}  // namespace hp
