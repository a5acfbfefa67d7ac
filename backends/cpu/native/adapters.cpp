#include "adapters.hpp"

#include <algorithm>

#include "thread_pool.hpp"

namespace hp {
namespace {

constexpr int kChunksPerThread = 4;  // the fewer, the more often a thread knows what it will read next

}  // namespace

void append_items(int slot, const int64_t* tokens, int64_t count, std::vector<AdapterItem>& items) {
  for (int64_t first = 0; first < count; first += kAdapterTokens)
    items.push_back({slot, tokens + first, static_cast<int>(std::min<int64_t>(kAdapterTokens, count - first))});
}

void add_adapters(const AdapterCall& call, const std::vector<AdapterItem>& items) {
  const AdapterKernels& kernels = HP_KERNELS(adapter_kernels_here);
  const size_t inner = static_cast<size_t>(kAdapterTokens * call.matrices.parts * call.matrices.max_rank);
  const int64_t count = static_cast<int64_t>(items.size());
  ThreadPool::global().parallel_for(count, std::max<int64_t>(1, count / (kChunksPerThread * ThreadPool::global().num_threads())), [&](int64_t begin, int64_t end, int) {
    static thread_local std::vector<float> scratch;
    if (scratch.size() < inner) scratch.resize(inner);
    for (int64_t i = begin; i < end; ++i) {
      const AdapterItem* item = items.data() + i;
      kernels.add(call, *item, i + 1 < end ? item + 1 : nullptr, scratch.data());
    }
  });
}

}  // namespace hp
