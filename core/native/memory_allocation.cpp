#include "memory_allocation.hpp"

#include <algorithm>

namespace hardpoint::memory {

std::optional<uint64_t> Blocks::take(size_t size) {
  const size_t needed = rounded(size);
  for (auto gap = free_.begin(); gap != free_.end(); ++gap) {
    if (gap->second < needed) continue;
    const auto [start, length] = *gap;
    free_.erase(gap);
    if (length > needed) free_.emplace(start + needed, length - needed);
    used_.emplace(start, size);
    bytes_ += size;
    return start;
  }
  return std::nullopt;
}

size_t Blocks::give(uint64_t start, bool in_use) {
  const auto block = used_.find(start);
  if (block == used_.end()) return 0;
  const size_t size = block->second;
  used_.erase(block);
  bytes_ -= size;
  if (in_use) {
    given_in_use_.push_back({start, rounded(size)});
  } else {
    add_gap({start, rounded(size)});
  }
  return size;
}

void Blocks::reuse() {
  for (const Range& gap : given_in_use_) add_gap(gap);
  given_in_use_.clear();
}

void Blocks::add_gap(const Range& range) {
  auto gap = free_.emplace(range.start, range.size).first;
  if (gap != free_.begin()) {
    const auto before = std::prev(gap);
    if (before->first + before->second == gap->first) {
      before->second += gap->second;
      free_.erase(gap);
      gap = before;
    }
  }
  const auto after = std::next(gap);
  if (after != free_.end() && gap->first + gap->second == after->first) {
    gap->second += after->second;
    free_.erase(after);
  }
}

Range Blocks::containing(uint64_t byte) const {
  auto after = used_.upper_bound(byte);
  if (after == used_.begin()) return {};
  const auto [start, size] = *std::prev(after);
  return byte - start < size ? Range{start, size} : Range{};
}

std::vector<Range> Blocks::live() const {
  std::vector<Range> ranges;
  for (const auto& [start, size] : used_) {
    if (!ranges.empty() && ranges.back().start + rounded(ranges.back().size) == start) {
      ranges.back().size = start + size - ranges.back().start;
    } else {
      ranges.push_back({start, size});
    }
  }
  return ranges;
}

size_t Allocation::mapped_now() const { return bytes_in(Chunk::State::kMapped); }
size_t Allocation::detached_now() const { return bytes_in(Chunk::State::kDetached); }

bool Allocation::is_intact() const {
  return std::all_of(chunks.begin(), chunks.begin() + static_cast<std::ptrdiff_t>(num_chunks()),
                     [](const Chunk& chunk) { return chunk.state != Chunk::State::kEmpty && chunk.intact; });
}

size_t Allocation::bytes_in(Chunk::State state) const {
  size_t bytes = 0;
  for (size_t index = 0; index < chunks.size(); ++index) {
    if (chunks[index].state == state) bytes += chunk_range(index).size;
  }
  return bytes;
}

void Allocation::drop_files() {
  sources.erase(std::remove_if(sources.begin(), sources.end(), [](const Source& source) { return source.file != nullptr; }), sources.end());
}

uint64_t Allocation::sourced() const {
  uint64_t bytes = 0;
  for (const Range& range : live()) {
    for (const Source& source : sources) {
      const uint64_t start = std::max(range.start, source.range.start), end = std::min(range.end(), source.range.end());
      if (end > start) bytes += end - start;
    }
  }
  return bytes;
}

}  // namespace hardpoint::memory
