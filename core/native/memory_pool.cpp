#include "memory_pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <system_error>
#include <tuple>

#include "hardpoint/host_memory.hpp"

namespace hardpoint::memory {
namespace {

constexpr size_t kLargest = size_t{1} << 47;  // what a 48-bit address space can hold at most
constexpr size_t kSmall = size_t{8} << 20;    // blocks below this share an allocation
constexpr size_t kMinShared = size_t{4} << 20, kMaxShared = size_t{64} << 20;
constexpr size_t kElasticPieces = 256;  // an elastic allocation grows in about this many steps to its capacity

const char* const kHeld = "a sleep or wake of this memory is prepared and neither committed nor rolled back";

// How many forks lie between this process and the first that used the library. A process-wide handler is the only way to learn of
// a fork without a system call in every operation.
std::atomic<int> fork_count{0};

// The size of equal chunks of at most `limit` that hold `size` bytes: of as many as are needed up to twice that many, those that waste least.
size_t even_chunk(size_t size, size_t unit, size_t limit) {
  const size_t units = size / unit, fewest = (units + limit / unit - 1) / (limit / unit);
  size_t best = 0, least = SIZE_MAX;
  for (size_t count = fewest; count <= 2 * fewest && least > 0; ++count) {
    const size_t chunk = (units + count - 1) / count, wasted = chunk * count - units;
    if (wasted < least) std::tie(best, least) = std::tie(chunk, wasted);
  }
  return best * unit;
}

int current_fork() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return fork_count.load(std::memory_order_relaxed);
}

}  // namespace

Pool::Pool(const hp_driver* table) : fork_generation_(current_fork()), driver_(table), arena_(driver_) {}

Pool::~Pool() {
  if (abandoned_) return;
  if (is_forked()) {
    abandon();
    return;
  }
  dropping_.wait();
  for (auto& [address, allocation] : allocations_) destroy(*allocation);
  for (auto& allocation : unreturned_) destroy(*allocation);
}

bool Pool::is_forked() const { return current_fork() != fork_generation_; }

void Pool::check_process(const char* what) const {
  if (!is_forked()) return;
  throw MemoryFault(Fault::kForked, std::string("cannot ") + what + " in a forked child", "the memory belongs to the parent process",
                    "Start processes by spawn, and make an allocator in each");
}

void Pool::check_usable(const char* what) const {
  check_process(what);
  if (closed_) throw MemoryFault(Fault::kClosed, std::string("cannot ") + what, "the allocator is closed", "Make a new one");
}

uint32_t Pool::tag_id(const std::string& tag) {
  const auto [entry, inserted] = tag_ids_.emplace(tag, tags_.size());
  if (inserted) tags_.push_back({tag});
  return entry->second;
}

void Pool::know_tags(const std::vector<std::string>& tags) {
  check_usable("add tags");
  std::lock_guard lock(books_);
  for (const std::string& tag : tags) tag_id(tag);
}

std::vector<bool> Pool::selected(const std::optional<std::vector<std::string>>& tags) const {
  std::vector<bool> chosen(tags_.size(), !tags.has_value());
  if (!tags) return chosen;
  for (const std::string& tag : *tags) {
    const auto entry = tag_ids_.find(tag);
    if (entry == tag_ids_.end()) {
      std::string known;
      for (const Tag& one : tags_) known += (known.empty() ? "" : ", ") + one.name;
      throw MemoryFault(Fault::kUnknownTag, "no memory has the tag '" + tag + "'", known.empty() ? "there are no tags" : "tags are " + known);
    }
    chosen[entry->second] = true;
  }
  return chosen;
}

std::string Pool::tag_name(const Allocation& allocation) const {
  std::lock_guard lock(books_);
  return tags_[allocation.tag].name;
}

Allocation* Pool::find(uint64_t address) const {
  auto after = allocations_.upper_bound(address);
  if (after == allocations_.begin()) return nullptr;
  Allocation* allocation = std::prev(after)->second.get();
  return allocation->contains(address) ? allocation : nullptr;
}

Allocation& Pool::need(uint64_t address) const {
  Allocation* allocation = find(address);
  if (allocation == nullptr || allocation->free_requested) {
    throw MemoryFault(Fault::kForeign, "there is no memory of this allocator at address " + std::to_string(address),
                      "it was never handed out, or was freed");
  }
  return *allocation;
}

void Pool::count_allocated(int64_t bytes) {
  allocated_ += static_cast<uint64_t>(bytes);
  peak_allocated_ = std::max(peak_allocated_, allocated_);
}

uint64_t Pool::allocate(size_t size, const std::string& tag, Policy policy, size_t capacity) {
  check_usable("allocate");
  uint32_t id;
  {
    std::lock_guard lock(books_);
    id = tag_id(tag);
  }
  return insert(beside_lost_ones([&] { return make(size, id, policy, capacity); }));
}

std::unique_ptr<Allocation> Pool::beside_lost_ones(const std::function<std::unique_ptr<Allocation>()>& take) {
  std::vector<std::unique_ptr<Allocation>> misplaced;
  const auto give_back = [&] {
    for (auto& allocation : misplaced) {
      if (!destroy(*allocation)) defer_release(std::move(allocation));
    }
  };
  try {
    for (;;) {
      auto allocation = take();
      bool booked;
      {
        std::lock_guard lock(books_);
        const auto next = allocations_.lower_bound(allocation->address);
        booked = find(allocation->address) != nullptr ||
                 (next != allocations_.end() && next->first < allocation->address + allocation->reserved);
      }
      if (!booked) {
        give_back();
        return allocation;
      }
      misplaced.push_back(std::move(allocation));
    }
  } catch (...) {
    give_back();
    throw;
  }
}

std::shared_ptr<std::byte> Pool::pinned_host(size_t size) {
  check_usable("take host memory");
  if (!driver_.registers_host_memory()) return nullptr;
  // Touching more than there is would not fail: the system would end a process.
  if (const uint64_t available = host::available_memory(); size > available) {
    throw MemoryFault(Fault::kBudgetExceeded, "cannot take " + std::to_string(size) + " bytes of host memory",
                      "the host has room for " + std::to_string(available) + " bytes");
  }
  const HostArena::Region region = arena_.map(size);
  std::shared_ptr<std::byte> memory(region.data, [pool = shared_from_this(), region](std::byte*) {
    if (pool->is_forked()) return;
    pool->arena_.note_undrained();
    pool->arena_.release(region.data, region.size, region.registered);
  });
  return region.registered ? memory : nullptr;
}

std::unique_ptr<Allocation> Pool::make(size_t size, uint32_t tag, Policy policy, size_t capacity) {
  try {
    return take_memory(size, tag, policy, capacity);
  } catch (const MemoryFault& fault) {
    if (fault.kind() != Fault::kOutOfMemory) throw;
    std::string name;
    {
      std::lock_guard lock(books_);
      name = tags_[tag].name;
    }
    throw MemoryFault(Fault::kOutOfMemory, "cannot allocate " + std::to_string(std::max(size, capacity)) + " bytes for '" + name + "'",
                      free_memory_text() + fault.found(),
                      "Lower the context length, the number of KV blocks or the memory utilisation, or put something else to sleep");
  }
}

std::string Pool::free_memory_text() const {
  try {
    const Driver::Info info = driver_.memory_info();
    return std::to_string(info.free) + " of " + std::to_string(info.total) + " bytes are free; ";
  } catch (const MemoryFault&) {
    return {};
  }
}

std::unique_ptr<Allocation> Pool::take_memory(size_t size, uint32_t tag, Policy policy, size_t capacity) {
  const hp_geometry& geometry = driver_.geometry();
  const size_t wanted = std::max(size, capacity);
  if (capacity != 0 && capacity < size) {
    throw MemoryFault(Fault::kInvalid, "cannot allocate " + std::to_string(size) + " bytes", "the capacity is " + std::to_string(capacity));
  }
  if (size == 0) throw MemoryFault(Fault::kInvalid, "cannot allocate 0 bytes", "an allocation has at least one");
  if (wanted > kLargest) {
    throw MemoryFault(Fault::kOutOfMemory, "cannot allocate " + std::to_string(wanted) + " bytes", "no address space is that large");
  }
  auto allocation = std::make_unique<Allocation>();
  allocation->size = size;
  allocation->tag = tag;
  allocation->policy = policy;
  const bool is_large = wanted >= geometry.recommended && (geometry.max_chunk == 0 || geometry.max_chunk >= geometry.recommended);
  const size_t unit = is_large ? geometry.recommended : geometry.granularity;
  allocation->mapped = round_up(size, unit);
  allocation->chunk_size = allocation->mapped;
  allocation->reserved = round_up(wanted, unit);
  if (capacity != 0 && driver_.has_quirk(HP_QUIRK_ADDRESS_HOLDS_MEMORY)) {
    throw MemoryFault(Fault::kRefused, "cannot allocate elastic memory on this device",
                      "its driver gives memory back only together with all of its addresses");
  }
  if (capacity != 0) {
    allocation->elastic = true;
    allocation->chunk_size = round_up(allocation->reserved / kElasticPieces + 1, unit);
    if (geometry.max_chunk != 0) allocation->chunk_size = std::min(allocation->chunk_size, geometry.max_chunk);
    allocation->reserved = round_up(wanted, allocation->chunk_size);
    allocation->mapped = round_up(size, allocation->chunk_size);
  } else if (geometry.max_chunk != 0 && allocation->mapped > geometry.max_chunk) {
    allocation->chunk_size = even_chunk(allocation->mapped, unit, geometry.max_chunk);
    allocation->reserved = allocation->mapped = round_up(allocation->mapped, allocation->chunk_size);
  }
  if (geometry.max_reservation != 0 && allocation->reserved > geometry.max_reservation) {
    throw MemoryFault(Fault::kOutOfMemory, "cannot allocate " + std::to_string(wanted) + " bytes in one piece",
                      "the device reserves at most " + std::to_string(geometry.max_reservation) + " bytes of addresses at a time",
                      "Split it");
  }
  allocation->address = driver_.reserve(allocation->reserved);
  allocation->chunks.resize((allocation->mapped + allocation->chunk_size - 1) / allocation->chunk_size);
  try {
    for (size_t index = 0; index < allocation->chunks.size(); ++index) {
      const Range range = allocation->chunk_range(index);
      Chunk& chunk = allocation->chunks[index];
      chunk.handle = driver_.create(range.size);
      chunk.state = Chunk::State::kDetached;
      driver_.map(allocation->address + range.start, range.size, chunk.handle);
      chunk.state = Chunk::State::kMapped;
      chunk.intact = true;
    }
  } catch (...) {
    if (!destroy(*allocation)) defer_release(std::move(allocation));
    throw;
  }
  return allocation;
}

uint64_t Pool::insert(std::unique_ptr<Allocation> allocation) {
  const uint64_t address = allocation->address;
  std::lock_guard lock(books_);
  count_allocated(static_cast<int64_t>(allocation->live_bytes()));
  allocations_.emplace(address, std::move(allocation));
  return address;
}

uint64_t Pool::allocate_block(size_t size, const std::string& tag, Policy policy) {
  if (size == 0 || size >= kSmall) return allocate(size, tag, policy);
  check_usable("allocate");
  uint32_t id;
  {
    std::lock_guard lock(books_);
    id = tag_id(tag);
    for (auto& [address, allocation] : allocations_) {
      if (!allocation->blocks || allocation->tag != id || allocation->policy != policy || allocation->state != State::kMapped ||
          allocation->free_requested) {
        continue;
      }
      if (const auto start = allocation->blocks->take(size)) {
        ++allocation->writes;
        count_allocated(static_cast<int64_t>(size));
        return address + *start;
      }
    }
  }
  std::unique_ptr<Allocation> allocation;
  try {
    allocation = beside_lost_ones([&] { return take_memory(std::clamp(size * 8, kMinShared, kMaxShared), id, policy, 0); });
  } catch (const MemoryFault& fault) {
    if (fault.kind() != Fault::kOutOfMemory) throw;
    return allocate(size, tag, policy);
  }
  allocation->size = allocation->mapped;
  allocation->blocks = std::make_unique<Blocks>(allocation->mapped);
  allocation->blocks->take(size);
  return insert(std::move(allocation));
}

void Pool::free(uint64_t address) {
  check_process("free memory");
  if (abandoned_) return;
  std::unique_ptr<Allocation> doomed;
  {
    std::lock_guard lock(books_);
    Allocation& allocation = need(address);
    if (allocation.blocks) {
      const uint64_t start = address - allocation.address;
      if (!allocation.blocks->holds(start)) {
        throw MemoryFault(Fault::kForeign, "there is no memory of this allocator at address " + std::to_string(address),
                          "it was never handed out, or was freed");
      }
      const uint64_t size = allocation.blocks->give(start, allocation.transfers > 0);
      count_allocated(-static_cast<int64_t>(size));
      auto& sources = allocation.sources;
      sources.erase(std::remove_if(sources.begin(), sources.end(),
                                   [&](const Source& source) {
                                     return source.range.start >= start && source.range.start < start + size;
                                   }),
                    sources.end());
      if (allocation.backup && allocation.state == State::kUnmapped) {
        // No callback is to write a block that is gone.
        auto& pieces = allocation.backup->pieces;
        pieces.erase(std::remove_if(pieces.begin(), pieces.end(),
                                    [&](const BackupPiece& piece) {
                                      return piece.rebuild != 0 && piece.range.start >= start && piece.range.start < start + size;
                                    }),
                     pieces.end());
      }
      if (!allocation.blocks->empty()) return;
    } else {
      if (address != allocation.address) {
        throw MemoryFault(Fault::kForeign, "address " + std::to_string(address) + " is within an allocation, not its first byte");
      }
      count_allocated(-static_cast<int64_t>(allocation.size));
    }
    if (allocation.is_owned_by_operation() || allocation.transfers > 0) {
      allocation.free_requested = true;
      return;
    }
    const auto entry = allocations_.find(allocation.address);
    doomed = std::move(entry->second);
    allocations_.erase(entry);
  }
  if (!destroy(*doomed)) defer_release(std::move(doomed));
}

bool Pool::destroy(Allocation& allocation) noexcept {
  allocation.backup.reset();
  try {
    const bool mapped = std::any_of(allocation.chunks.begin(), allocation.chunks.end(),
                                    [](const Chunk& chunk) { return chunk.state == Chunk::State::kMapped; });
    // Unmapping does not wait for work on the memory, and torch may drop a tensor while a stream still uses it.
    if (mapped && !driver_.has_flag(HP_COPIES_BLOCK)) driver_.device_synchronize();
    for (size_t index = 0; index < allocation.chunks.size(); ++index) {
      Chunk& chunk = allocation.chunks[index];
      const Range range = allocation.chunk_range(index);
      if (chunk.state == Chunk::State::kMapped) {
        driver_.unmap(allocation.address + range.start, range.size);
        chunk.state = Chunk::State::kDetached;
      }
      if (chunk.state == Chunk::State::kDetached) {
        driver_.release(chunk.handle, range.size);
        chunk.state = Chunk::State::kEmpty;
      }
    }
    if (allocation.state != State::kLost) driver_.release_address(allocation.address, allocation.reserved);
    return true;
  } catch (const MemoryFault&) {
    return false;
  }
}

void Pool::defer_release(std::unique_ptr<Allocation> allocation) {
  std::lock_guard lock(books_);
  unreturned_.push_back(std::move(allocation));
}

void Pool::retry_unreturned() {
  std::vector<std::unique_ptr<Allocation>> waiting;
  {
    std::lock_guard lock(books_);
    waiting.swap(unreturned_);
  }
  for (auto& allocation : waiting) {
    if (!destroy(*allocation)) defer_release(std::move(allocation));
  }
}

void Pool::resize(uint64_t address, size_t size) {
  check_usable("resize");
  begin_operation("resize");
  Allocation* allocation = nullptr;
  const auto finish = [&](State state) {
    std::unique_ptr<Allocation> doomed;
    {
      std::lock_guard lock(books_);
      allocation->state = state;
      if (allocation->free_requested) {
        const auto entry = allocations_.find(allocation->address);
        doomed = std::move(entry->second);
        allocations_.erase(entry);
      }
    }
    if (doomed && !destroy(*doomed)) defer_release(std::move(doomed));
    end_operation();
  };
  try {
    std::unique_lock lock(books_);
    Allocation& found = need(address);
    if (found.address != address || !found.elastic || size == 0 || size > found.reserved) {
      throw MemoryFault(Fault::kInvalid, "cannot resize to " + std::to_string(size) + " bytes",
                        found.elastic ? "the allocation has addresses for " + std::to_string(found.reserved) + " bytes"
                                      : "the allocation is not elastic",
                        "Give a capacity when it is allocated");
    }
    if (found.state != State::kMapped) {
      throw MemoryFault(Fault::kAsleep, "cannot resize memory that is asleep", "tag '" + tags_[found.tag].name + "'", "Wake it first");
    }
    found.state = State::kSaving;
    allocation = &found;
    await_transfers(lock, found);
  } catch (...) {
    end_operation();
    throw;
  }
  const size_t old_mapped = allocation->mapped;
  const size_t new_mapped = round_up(size, allocation->chunk_size);
  const size_t count = new_mapped / allocation->chunk_size, old_count = old_mapped / allocation->chunk_size;
  const auto range_of = [&](size_t index) { return Range{index * allocation->chunk_size, allocation->chunk_size}; };
  try {
    if (count > allocation->chunks.size()) allocation->chunks.resize(count);
    for (size_t index = old_count; index < count; ++index) {
      Chunk& chunk = allocation->chunks[index];
      const Range range = range_of(index);
      if (chunk.state == Chunk::State::kEmpty) {
        chunk.handle = driver_.create(range.size);
        chunk.state = Chunk::State::kDetached;
      }
      if (chunk.state == Chunk::State::kDetached) driver_.map(address + range.start, range.size, chunk.handle);
      chunk.state = Chunk::State::kMapped;
      chunk.intact = true;
    }
    if (count < old_count) {
      driver_.device_synchronize();
      for (size_t index = old_count; index-- > count;) {
        driver_.unmap(address + range_of(index).start, range_of(index).size);
        allocation->chunks[index].state = Chunk::State::kDetached;
      }
      bool released = false;
      for (size_t index = old_count; index-- > count;) {
        try {
          driver_.release(allocation->chunks[index].handle, range_of(index).size);
          allocation->chunks[index].state = Chunk::State::kEmpty;
          released = true;
        } catch (const MemoryFault&) {
          // Once bytes are gone the shrink is a fact: a chunk that the driver keeps stays in the books, for the next growth.
          if (!released) throw;
        }
      }
    }
  } catch (const MemoryFault&) {
    for (size_t index = old_count; index < count; ++index) {  // undo a growth
      Chunk& chunk = allocation->chunks[index];
      try {
        if (chunk.state == Chunk::State::kMapped) {
          driver_.unmap(address + range_of(index).start, range_of(index).size);
          chunk.state = Chunk::State::kDetached;
        }
        if (chunk.state == Chunk::State::kDetached) {
          driver_.release(chunk.handle, range_of(index).size);
          chunk.state = Chunk::State::kEmpty;
        }
      } catch (const MemoryFault&) {
        // It stays in the books beyond the end; the next growth uses it and `free` returns it.
      }
    }
    for (size_t index = count; index < old_count; ++index) {  // undo a shrink
      Chunk& chunk = allocation->chunks[index];
      if (chunk.state != Chunk::State::kDetached) continue;
      try {
        driver_.map(address + range_of(index).start, range_of(index).size, chunk.handle);
        chunk.state = Chunk::State::kMapped;
      } catch (const MemoryFault&) {
        allocation->asleep_as = Policy::kPreserve;
        finish(State::kUnmapped);  // the bytes are held: a wake maps them
        throw;
      }
    }
    finish(State::kMapped);
    throw;
  }
  {
    std::lock_guard lock(books_);
    if (!allocation->free_requested) count_allocated(static_cast<int64_t>(size) - static_cast<int64_t>(allocation->size));
    allocation->size = size;
    allocation->mapped = new_mapped;
    ++allocation->writes;
  }
  finish(State::kMapped);
}

bool Pool::is_asleep(uint64_t address) const {
  check_process("look at memory");
  std::lock_guard lock(books_);
  return need(address).state != State::kMapped;
}

Allocation& Pool::transferable(uint64_t address, size_t size, const char* what) const {
  Allocation& allocation = need(address);
  if (allocation.state != State::kMapped && allocation.state != State::kRebuilding) {
    throw MemoryFault(Fault::kAsleep, std::string("cannot ") + what + " memory that is asleep", "tag '" + tags_[allocation.tag].name + "'",
                      "Wake it, or use read_backup");
  }
  const Range extent = allocation.extent_of(address);
  const uint64_t start = address - allocation.address;
  if (start >= extent.end() || size > extent.end() - start) {
    throw MemoryFault(Fault::kInvalid, std::string("cannot ") + what + " " + std::to_string(size) + " bytes",
                      std::to_string(extent.end() - std::min(start, extent.end())) + " are left to the end");
  }
  return allocation;
}

// A read or write under way.
class Pool::Transfer {
 public:
  Transfer(Pool& pool, Allocation& allocation) : pool_(pool), allocation_(allocation) { ++allocation.transfers; }  // books locked
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer() {
    std::unique_ptr<Allocation> doomed;
    {
      std::lock_guard lock(pool_.books_);
      if (--allocation_.transfers > 0) return;
      if (allocation_.blocks) allocation_.blocks->reuse();
      if (allocation_.free_requested && !allocation_.is_owned_by_operation()) {
        const auto entry = pool_.allocations_.find(allocation_.address);
        doomed = std::move(entry->second);
        pool_.allocations_.erase(entry);
      }
    }
    pool_.transfers_ended_.notify_all();
    if (doomed && !pool_.abandoned_ && !pool_.destroy(*doomed)) pool_.defer_release(std::move(doomed));
  }

 private:
  Pool& pool_;
  Allocation& allocation_;
};

void Pool::await_transfers(std::unique_lock<std::mutex>& lock, const Allocation& allocation) {
  transfers_ended_.wait(lock, [&] { return allocation.transfers == 0; });
}

void Pool::copy(const std::function<void(uint64_t stream)>& queue) const {
  const Driver::Stream stream(driver_);
  try {
    queue(stream);
    stream.synchronize();
  } catch (...) {
    stream.drain();  // the copy may be under way, and its memory is about to be given back
    throw;
  }
}

void Pool::read(uint64_t address, void* target, size_t size) {
  check_usable("read");
  std::optional<Transfer> transfer;
  {
    std::lock_guard lock(books_);
    transfer.emplace(*this, transferable(address, size, "read"));
  }
  copy([&](uint64_t stream) { driver_.copy_to_host(target, address, size, stream); });
}

void Pool::write(uint64_t address, const void* source, size_t size) {
  check_usable("write");
  std::optional<Transfer> transfer;
  {
    std::lock_guard lock(books_);
    Allocation& allocation = transferable(address, size, "write");
    if (allocation.state == State::kMapped) {  // a callback writes what its source says
      ++allocation.writes;
      allocation.sources.clear();
    }
    transfer.emplace(*this, allocation);
  }
  copy([&](uint64_t stream) { driver_.copy_to_device(address, source, size, stream); });
}

std::shared_ptr<const SourceFile> Pool::open_source(const std::string& path) {
  check_usable("declare a source");
  std::lock_guard lock(books_);
  auto& known = source_files_[path];
  std::shared_ptr<const SourceFile> file = known.lock();
  if (!file || !file->is_current()) known = file = std::make_shared<const SourceFile>(path);
  return file;
}

void Pool::declare_source(uint64_t address, std::vector<Source> sources) {
  check_usable("declare a source");
  std::lock_guard lock(books_);
  Allocation& allocation = need(address);
  const uint64_t base = address - allocation.address;
  const Range extent = allocation.extent_of(address);
  const uint64_t room = extent.end() > base ? extent.end() - base : 0;
  const auto by_start = [](const Source& a, const Source& b) { return a.range.start < b.range.start; };
  std::sort(sources.begin(), sources.end(), by_start);
  uint64_t end = 0;
  for (const Source& source : sources) {
    const Range& range = source.range;
    const uint64_t in_file = source.file ? source.file->size() : UINT64_MAX;
    if (range.size == 0 || range.start < end || range.start > room || range.size > room - range.start || source.offset > in_file ||
        range.size > in_file - source.offset) {
      throw MemoryFault(Fault::kInvalid, "a declared source does not fit",
                        std::to_string(range.size) + " bytes from byte " + std::to_string(range.start) + " of " + std::to_string(room) +
                            ", at byte " + std::to_string(source.offset) + " of the file",
                        "Extents lie within their tensor and file, and do not overlap");
    }
    end = range.end();
  }
  auto& all = allocation.sources;
  for (Source& source : sources) {
    source.range.start += base;
    const Range& range = source.range;
    const auto overlaps = [&](const Source& old) { return old.range.end() > range.start && old.range.start < range.end(); };
    all.erase(std::remove_if(all.begin(), all.end(), overlaps), all.end());
  }
  all.insert(all.end(), std::make_move_iterator(sources.begin()), std::make_move_iterator(sources.end()));
  std::sort(all.begin(), all.end(), by_start);
}

std::vector<uint64_t> Pool::callbacks() const {
  check_process("ask for callbacks");
  std::set<uint64_t> found;
  std::lock_guard lock(books_);
  for (const auto& [address, allocation] : allocations_) {
    for (const Source& source : allocation->sources) found.insert(source.rebuild);
    if (!allocation->backup) continue;
    for (const BackupPiece& piece : allocation->backup->pieces) found.insert(piece.rebuild);
  }
  found.erase(0);
  return {found.begin(), found.end()};
}

void Pool::mark_written(const std::vector<std::string>& tags) {
  check_process("mark memory as written");
  std::lock_guard lock(books_);
  const std::vector<bool> chosen = selected(tags);
  for (size_t id = 0; id < tags_.size(); ++id) tags_[id].writes += chosen[id];
  for (auto& [address, allocation] : allocations_) {
    if (chosen[allocation->tag]) allocation->sources.clear();
  }
}

void Pool::discard_backup(const std::vector<std::string>& tags) {
  check_process("discard a backup");
  check_not_held("discard a backup");
  std::lock_guard lock(books_);
  const std::vector<bool> chosen = selected(tags);
  for (auto& [address, allocation] : allocations_) {
    if (!chosen[allocation->tag] || allocation->state != State::kUnmapped) continue;
    allocation->backup.reset();
    allocation->asleep_as = Policy::kDiscard;
    allocation->drop_files();
  }
}

void Pool::read_backup(uint64_t address, void* target, size_t size) const {
  check_usable("read a backup");
  std::shared_ptr<const Backup> backup;
  Range range;
  {
    std::lock_guard lock(books_);
    Allocation& allocation = need(address);
    if (allocation.state != State::kUnmapped && allocation.state != State::kLost) {
      throw MemoryFault(Fault::kInvalid, "cannot read the backup of memory that is awake", "tag '" + tags_[allocation.tag].name + "'",
                        "Read the memory itself");
    }
    if (!allocation.backup) {
      throw MemoryFault(Fault::kAsleep, "these bytes cannot be read", "they were not preserved by the sleep");
    }
    backup = allocation.backup;
    range = {address - allocation.address, size};
  }
  backup->read(range, static_cast<std::byte*>(target));
}

void Pool::drop(std::vector<std::shared_ptr<Backup>> backups) {
  const bool files = std::any_of(backups.begin(), backups.end(), [](const auto& backup) { return backup && backup->disk; });
  // Without a thread for it, the files go with the closure.
  if (files) dropping_.begin([backups = std::move(backups)]() mutable { backups.clear(); });
}

std::unique_ptr<DiskFile> Pool::disk_file(const SleepPlan& plan, uint64_t bytes, size_t pieces) {
  return with_disk_faults([&] {
    const uint64_t budget = plan.disk_budget.value_or(UINT64_MAX);
    std::shared_ptr<DiskStore> store;
    {
      std::lock_guard lock(books_);
      std::shared_ptr<DiskStore>& known = disks_[plan.disk_directory];
      // A cleaner of old files may have removed its folder.
      if (!known || !known->exists()) known = std::make_shared<DiskStore>(plan.disk_directory, budget);
      store = known;
    }
    store->set_budget(budget);
    try {
      return store->create(bytes, pieces);
    } catch (const BudgetExceeded&) {
    } catch (const DiskFull&) {
    }
    dropping_.wait();  // backups that were given up take room until they are gone
    return store->create(bytes, pieces);
  }, kOtherDirectory);
}

Stats Pool::stats() const {
  check_process("ask for the books");
  Stats stats;
  std::lock_guard lock(books_);
  stats.tags.resize(tags_.size());
  for (size_t id = 0; id < tags_.size(); ++id) stats.tags[id].tag = tags_[id].name;
  for (const auto& [address, allocation] : allocations_) {
    if (allocation->free_requested) continue;
    TagStats& tag = stats.tags[allocation->tag];
    stats.reserved += allocation->reserved;
    tag.allocated += allocation->live_bytes();
    tag.allocations += allocation->blocks ? allocation->blocks->count() : 1;
    tag.sourced += allocation->sourced();
    // What an operation under way owns is counted as it was before.
    if (allocation->state == State::kMapped) tag.mapped += allocation->mapped_now();
    if (allocation->state == State::kSaving) tag.mapped += allocation->mapped;
    if (allocation->state == State::kUnmapped || allocation->state == State::kLost) tag.mapped += allocation->mapped_now();
    if (!allocation->is_owned_by_operation()) stats.unreturned += allocation->detached_now();
    tag.asleep = tag.asleep || (allocation->state != State::kMapped && allocation->state != State::kSaving);
    if (allocation->backup && allocation->state != State::kSaving) tag.backed_up += allocation->backup->held();
  }
  for (const auto& allocation : unreturned_) {
    for (size_t index = 0; index < allocation->chunks.size(); ++index) {
      if (allocation->chunks[index].state != Chunk::State::kEmpty) stats.unreturned += allocation->chunk_range(index).size;
    }
  }
  stats.peak_allocated = peak_allocated_;
  stats.host_held = arena_.held();
  stats.host_used = arena_.used();
  for (const auto& [directory, store] : disks_) stats.disk_used += store ? store->bytes_used() : 0;
  return stats;
}

void Pool::trim() {
  check_process("trim");
  arena_.trim();
}

void Pool::close() {
  if (is_forked() || abandoned_) return;
  closed_ = true;
  drop_backups();
  retry_unreturned();
  driver_.drop_idle_streams();
}

// Nothing of a closed pool can be woken or read any more, while somebody may keep it: an exception, for one, whose frames lead here.
void Pool::drop_backups() {
  dropping_.wait();
  std::vector<std::shared_ptr<Backup>> useless;
  {
    std::lock_guard lock(books_);
    for (auto& [address, allocation] : allocations_) {
      if (!allocation->is_owned_by_operation()) useless.push_back(std::move(allocation->backup));
    }
    disks_.clear();
  }
  useless.clear();
  arena_.trim();
}

void Pool::abandon() {
  abandoned_ = true;
  closed_ = true;
  driver_.abandon();
  arena_.abandon(is_forked());
  if (is_forked()) {
    dropping_.leave();
    return;
  }
  dropping_.wait();
  std::lock_guard lock(books_);
  for (auto& [directory, store] : disks_) {
    if (store) store->remove_files();
  }
}

void Pool::begin_operation(const char* what) {
  std::unique_lock lock(operation_mutex_);
  const auto refuse = [&](const char* found) {
    throw MemoryFault(Fault::kBusy, std::string("cannot ") + what + " now", found, "Do it after that has ended");
  };
  if (operating_ && !held_ && operator_ == std::this_thread::get_id()) refuse("a sleep, wake or resize of this memory is under way in the same thread");
  operation_changed_.wait(lock, [this] { return !operating_ || held_; });
  if (operating_) refuse(kHeld);
  operating_ = true;
  operator_ = std::this_thread::get_id();
}

void Pool::hold_operation() {
  {
    std::lock_guard lock(operation_mutex_);
    held_ = true;
  }
  operation_changed_.notify_all();
}

void Pool::check_not_held(const char* what) {
  std::lock_guard lock(operation_mutex_);
  if (!held_) return;
  throw MemoryFault(Fault::kBusy, std::string("cannot ") + what + " now", kHeld, "Do it after that has ended");
}

void Pool::end_operation() {
  {
    std::lock_guard lock(operation_mutex_);
    operating_ = held_ = false;
  }
  operation_changed_.notify_one();
}

}  // namespace hardpoint::memory
