#include "prompt_lookup.hpp"

#include <algorithm>

namespace hardpoint::scheduler {
namespace {

constexpr int32_t kMostTried = 32;  // ends of a chain that one search looks at
constexpr int32_t kFewestEntries = 1024;

}  // namespace

PromptLookup::Match PromptLookup::find(const int32_t* tokens, int32_t count) {
  Match best;
  if (count <= min_length_) return best;
  reserve(tokens, count);
  for (int32_t end = std::max(num_entered_ + 1, min_length_); end < count; ++end) enter(tokens, end);
  num_entered_ = count - 1;
  const int32_t longest = std::min(max_length_, count - 1);
  int32_t tried = 0;
  for (int32_t end = newest_[hash(tokens + count)]; end > 0 && tried < kMostTried; end = previous_[end], ++tried) {
    const int32_t limit = std::min(longest, end);
    int32_t length = 0;
    while (length < limit && tokens[end - 1 - length] == tokens[count - 1 - length]) ++length;
    if (length >= min_length_ && length > best.length) best = {end, length};
    if (best.length == longest) break;
  }
  return best;
}

uint32_t PromptLookup::hash(const int32_t* end) const {
  uint64_t value = 0;
  for (int32_t i = 1; i <= min_length_; ++i) value = (value ^ static_cast<uint32_t>(end[-i])) * 0x9E3779B97F4A7C15u;
  return static_cast<uint32_t>(value >> 32) & static_cast<uint32_t>(newest_.size() - 1);
}

void PromptLookup::enter(const int32_t* tokens, int32_t end) {
  int32_t& newest = newest_[hash(tokens + end)];
  previous_[end] = newest;
  newest = end;
}

void PromptLookup::reserve(const int32_t* tokens, int32_t count) {
  if (static_cast<size_t>(count) <= previous_.size()) return;
  size_t size = std::max<size_t>(previous_.size(), kFewestEntries);
  while (size < static_cast<size_t>(count)) size *= 2;
  previous_.resize(size);
  newest_.assign(size, 0);
  for (int32_t end = min_length_; end <= num_entered_; ++end) enter(tokens, end);
}

}  // namespace hardpoint::scheduler
