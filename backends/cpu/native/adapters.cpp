#include "adapters.hpp"

#include <algorithm>

#include "thread_pool.hpp"

namespace hp {

void append_items(int slot, const int64_t* tokens, int64_t count, std::vector<AdapterItem>& items) {
  for (int64_t first = 0; first < count; first += kAdapterTokens)
    items.push_back({slot, tokens + first, static_cast<int>(std::min<int64_t>(kAdapterTokens, count - first))});
}

void add_adapters(const AdapterCall& call, const std::vector<AdapterItem>& items) {
  const AdapterKernels& kernels = HP_DISPATCH(adapter_kernels_here);
  const size_t inner = static_cast<size_t>(kAdapterTokens * call.matrices.parts * call.matrices.max_rank);
  ThreadPool::global().parallel_for(static_cast<int64_t>(items.size()), 1, [&](int64_t begin, int64_t end, int) {
    static thread_local std::vector<float> scratch;
    if (scratch.size() < inner) scratch.resize(inner);
    for (int64_t i = begin; i < end; ++i) kernels.add(call, items[static_cast<size_t>(i)], scratch.data());
  });
}

}  // namespace hp
