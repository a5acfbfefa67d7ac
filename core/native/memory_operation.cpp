#include "memory_operation.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "checksum.hpp"

namespace hardpoint::memory {
namespace {

constexpr uint64_t kGroupBytes = uint64_t{32} << 20;
constexpr size_t kGroupUnits = 256;

}  // namespace

PoolOperation::PoolOperation(Pool& pool, const char* what, const Progress& progress)
    : pool_(pool), keep_alive_(pool.shared_from_this()), progress_(progress) {
  pool.check_usable(what);
  pool.begin_operation(what);
  start_ = lap_ = std::chrono::steady_clock::now();
}

PoolOperation::~PoolOperation() { end(); }

void PoolOperation::end() {
  if (!holds_slot_) return;
  holds_slot_ = false;
  if (!can_act()) return;
  pool_.end_operation();
  if (pool_.closed_) pool_.drop_backups();  // it was closed meanwhile, which left this operation's
}

void PoolOperation::hold() {
  if (ended_) return;
  held_since_ = std::chrono::steady_clock::now();
  pool_.hold_operation();
}

void PoolOperation::begin_end(const char* what) {
  pool_.check_process(what);
  if (ended_) throw MemoryFault(Fault::kEnded, std::string("cannot ") + what, "it has ended", "Begin another one");
  if (!held_since_) return;
  const auto held = std::chrono::steady_clock::now() - *held_since_;
  start_ += held;
  lap_ += held;
  held_since_.reset();
}

bool PoolOperation::can_act() const { return !pool_.abandoned_ && !pool_.is_forked(); }

void PoolOperation::lap(const char* phase) {
  const auto now = std::chrono::steady_clock::now();
  report_.seconds.emplace_back(phase, std::chrono::duration<double>(now - lap_).count());
  lap_ = now;
}

void PoolOperation::finish_times() {
  report_.seconds.emplace_back("total", std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count());
}

size_t PoolOperation::threads(bool files) const {
  const auto copiers = static_cast<size_t>(std::max(pool_.driver_.geometry().copy_threads, 1));
  return files ? copiers + 2 : copiers;  // two more keep the disk busy while others compute checksums
}

void PoolOperation::run(const std::vector<Group>& groups, size_t threads, const std::function<void(const Group&, Mover&)>& work) {
  std::vector<Mover> movers(std::max<size_t>(threads, 1));
  std::function<void()> watch;
  if (progress_) {
    watch = [this] {
      if (bytes_done_ > 0) progress_(bytes_done_, bytes_in_all_);
    };
  }
  try {
    run_workers(threads, groups.size(), [&](size_t item, size_t worker) { work(groups[item], movers[worker]); }, watch);
  } catch (...) {
    // Copies may be under way, and the host memory that they use is about to be given back.
    for (const Mover& mover : movers) {
      if (mover.stream && !mover.stream->drain()) pool_.arena_.note_undrained();
    }
    throw;
  }
}

std::vector<PoolOperation::Group> PoolOperation::group(const std::vector<size_t>& order, bool whole_chunks) const {
  std::vector<Group> groups;
  uint64_t bytes = 0;
  const uint64_t limit = whole_chunks ? kGroupBytes : kStaging;
  const auto begin_group = [&] {
    groups.emplace_back();
    bytes = 0;
  };
  for (const size_t index : order) {
    const Entry& entry = entries_[index];
    const Allocation& allocation = *entry.allocation;
    static const std::vector<BackupPiece> none;
    const std::vector<BackupPiece>& pieces = entry.moves ? entry.backup->pieces : none;
    uint32_t piece = 0;
    for (uint32_t chunk = 0; chunk < allocation.num_chunks(); ++chunk) {
      if (groups.empty() || bytes >= limit || groups.back().size() >= kGroupUnits) begin_group();
      Unit unit{index, chunk, piece, 0};
      const uint64_t end = allocation.chunk_range(chunk).end();
      for (; piece < pieces.size() && pieces[piece].range.start < end; ++piece, ++unit.num_pieces) {
        if (!whole_chunks && bytes >= limit) {
          groups.back().push_back(unit);
          begin_group();
          unit = {index, chunk, piece, 0};
        }
        bytes += pieces[piece].range.size;
      }
      groups.back().push_back(unit);
    }
  }
  return groups;
}

const Driver::Stream& PoolOperation::stream_of(Mover& mover) const {
  if (!mover.stream) mover.stream = std::make_unique<Driver::Stream>(pool_.driver_);
  return *mover.stream;
}

const StagingBuffer& PoolOperation::staging_of(Mover& mover) const {
  if (mover.staging) return *mover.staging;
  // As large as the largest piece: its pages are made at once, which for small pieces would cost more than to move them.
  uint64_t largest = 1;
  for (const Entry& entry : entries_) {
    if (!entry.backup) continue;
    for (const BackupPiece& piece : entry.backup->pieces) largest = std::max(largest, piece.range.size);
  }
  constexpr uint64_t kSector = DiskStore::kAlignment;
  mover.staging = std::make_unique<StagingBuffer>(
      pool_.driver_, pool_.arena_, std::min(kStaging, (largest + kSector - 1) / kSector * kSector));
  return *mover.staging;
}

void PoolOperation::restore(const Entry& entry, const BackupPiece& piece, Mover& mover) const {
  const Driver& driver = pool_.driver_;
  const uint64_t address = entry.allocation->address + piece.range.start;
  if (piece.kind == BackupPiece::Kind::kRebuild) return;
  if (piece.kind == BackupPiece::Kind::kHost) {
    driver.copy_to_device(address, piece.span.data, piece.range.size, stream_of(mover));
    return;
  }
  const bool direct = driver.has_flag(HP_HOST_ACCESSIBLE);
  for (uint64_t at = 0; at < piece.range.size; at += kStaging) {
    const uint64_t size = std::min(kStaging, piece.range.size - at);
    std::byte* target = direct ? reinterpret_cast<std::byte*>(address + at) : staging_of(mover).data();
    if (piece.kind == BackupPiece::Kind::kFile) {
      piece.file->read(piece.offset + at, target, size);
    } else {
      with_disk_faults([&] {
        entry.backup->disk->read(piece.offset + at, target, size);
        if (xxh64(target, size) != piece.checksum) throw CorruptFile(entry.backup->disk->path(), "a checksum differs");
      });
    }
    if (direct) continue;
    driver.copy_to_device(address + at, target, size, stream_of(mover));
    stream_of(mover).synchronize();
  }
}

bool PoolOperation::is_same(const Entry& entry, const BackupPiece& piece, Mover& mover) const {
  Xxh64 hash;
  std::vector<std::byte> expected(piece.kind == BackupPiece::Kind::kFile ? std::min(kStaging, piece.range.size) : 0);
  for (uint64_t at = 0; at < piece.range.size; at += kStaging) {
    const uint64_t size = std::min(kStaging, piece.range.size - at);
    const std::byte* held = staging_of(mover).data();
    pool_.driver_.copy_to_host(staging_of(mover).data(), entry.allocation->address + piece.range.start + at, size, stream_of(mover));
    try {
      stream_of(mover).synchronize();
    } catch (...) {
      if (!stream_of(mover).drain()) pool_.arena_.note_undrained();  // the copy may be under way, and its host memory is about to be given back
      throw;
    }
    if (piece.kind == BackupPiece::Kind::kDisk) {
      hash.update(held, size);
      continue;
    }
    if (piece.kind == BackupPiece::Kind::kFile) piece.file->read(piece.offset + at, expected.data(), size);
    if (std::memcmp(held, piece.kind == BackupPiece::Kind::kFile ? expected.data() : piece.span.data + at, size) != 0) return false;
  }
  return piece.kind != BackupPiece::Kind::kDisk || hash.digest() == piece.checksum;
}

bool PoolOperation::attach(Allocation& allocation, size_t index) const {
  Chunk& chunk = allocation.chunks[index];
  if (chunk.state == Chunk::State::kMapped) return false;
  const Range range = allocation.chunk_range(index);
  const bool created = chunk.state == Chunk::State::kEmpty;
  if (created) {
    chunk.handle = pool_.driver_.create(range.size);
    chunk.intact = false;
    chunk.state = Chunk::State::kDetached;
  }
  pool_.driver_.map(allocation.address + range.start, range.size, chunk.handle);
  chunk.state = Chunk::State::kMapped;
  return created;
}

void PoolOperation::renew_address(Allocation& allocation) const {
  const Driver& driver = pool_.driver_;
  if (!driver.has_quirk(HP_QUIRK_ADDRESS_HOLDS_MEMORY) || allocation.address_lost || allocation.mapped_now() > 0) return;
  try {
    allocation.address_lost = !driver.renew_address(allocation.address, allocation.reserved);
  } catch (const MemoryFault&) {
    return;  // the range is still ours, with the memory that it holds
  }
}

void PoolOperation::await_transfers() {
  std::unique_lock lock(pool_.books_);
  for (const Entry& entry : entries_) {
    if (entry.allocation->state == State::kRebuilding) entry.allocation->state = State::kRestoring;
  }
  for (const Entry& entry : entries_) pool_.await_transfers(lock, *entry.allocation);
}

void PoolOperation::settle(const std::function<void(Entry&, size_t)>& set) {
  std::vector<std::unique_ptr<Allocation>> doomed;
  std::vector<std::shared_ptr<Backup>> dropped;  // their memory is given back outside of the lock
  {
    std::lock_guard lock(pool_.books_);
    for (size_t index = 0; index < entries_.size(); ++index) {
      Entry& entry = entries_[index];
      dropped.push_back(entry.allocation->backup);
      set(entry, index);
      if (entry.allocation->address_lost) entry.allocation->state = State::kLost;
      if (!entry.allocation->free_requested) continue;
      const auto booked = pool_.allocations_.find(entry.allocation->address);
      doomed.push_back(std::move(booked->second));
      pool_.allocations_.erase(booked);
    }
  }
  for (auto& allocation : doomed) {
    if (!pool_.destroy(*allocation)) pool_.defer_release(std::move(allocation));
  }
  // Last references: what the operation still holds of a replaced backup goes with the others.
  for (Entry& entry : entries_) dropped.push_back(std::move(entry.backup));
  entries_.clear();
  pool_.drop(std::move(dropped));
  ended_ = true;
  end();
}

void PoolOperation::note_asleep() {
  std::lock_guard lock(pool_.books_);
  std::set<uint32_t> tags;
  for (const auto& [address, allocation] : pool_.allocations_) {
    if (allocation->state == State::kUnmapped || allocation->state == State::kLost) tags.insert(allocation->tag);
  }
  for (const uint32_t tag : tags) report_.still_asleep.push_back(pool_.tags_[tag].name);
}

std::unique_ptr<Operation> Pool::begin_sleep(const SleepPlan& plan, const Progress& progress) {
  return std::make_unique<Sleep>(*this, plan, progress);
}

std::unique_ptr<Operation> Pool::begin_wake(const std::optional<std::vector<std::string>>& tags, const Progress& progress) {
  return std::make_unique<Wake>(*this, tags, progress);
}

}  // namespace hardpoint::memory
