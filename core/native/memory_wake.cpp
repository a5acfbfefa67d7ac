#include "memory_operation.hpp"

#include <algorithm>
#include <set>

namespace hardpoint::memory {

Wake::Wake(Pool& pool, const std::optional<std::vector<std::string>>& tags, const Progress& progress) : PoolOperation(pool, "wake", progress) {
  pool.retry_unreturned();
  choose(tags);
  try {
    report_.free_before = pool_.driver_.memory_info().free;
    check_backups();
    lap("plan");
    work();
    lap("copy");
    verify();
    await_callbacks();
  } catch (...) {
    undo();
    throw;
  }
}

void Wake::hold() {
  {
    std::lock_guard lock(pool_.books_);
    for (const Entry& entry : entries_) entry.allocation->state = State::kRestoring;
  }
  PoolOperation::hold();
}

void Wake::await_callbacks() {
  std::lock_guard lock(pool_.books_);
  for (const Entry& entry : entries_) {
    if (!entry.backup) continue;
    const auto& pieces = entry.backup->pieces;
    const bool waits = std::any_of(pieces.begin(), pieces.end(), [](const BackupPiece& piece) { return piece.rebuild != 0; });
    if (waits) entry.allocation->state = State::kRebuilding;
  }
}

Wake::~Wake() {
  if (!ended_ && can_act()) undo();
}

void Wake::choose(const std::optional<std::vector<std::string>>& tags) {
  std::lock_guard lock(pool_.books_);
  pool_.check_usable("wake");  // it may have been closed, its backups dropped, while this waited for another operation
  const std::vector<bool> chosen = pool_.selected(tags);
  for (const auto& [address, allocation] : pool_.allocations_) {
    if (!chosen[allocation->tag] || allocation->free_requested) continue;
    if (allocation->state == State::kLost) {
      throw MemoryFault(Fault::kForeign, "memory with tag '" + pool_.tags_[allocation->tag].name + "' cannot wake",
                        "its address was taken by something else while it slept", "Save it with read_backup, free it, and allocate it again");
    }
    if (allocation->state != State::kUnmapped) continue;
    Entry entry;
    entry.allocation = allocation.get();
    entry.backup = allocation->backup;
    entry.policy = allocation->asleep_as;
    entry.moves = entry.backup != nullptr;
    entries_.push_back(std::move(entry));
  }
  for (const Entry& entry : entries_) {
    entry.allocation->state = State::kRestoring;
    if (!entry.backup) {
      report_.discarded += entry.allocation->live_bytes();
      continue;
    }
    for (const BackupPiece& piece : entry.backup->pieces) {
      const Tier tier = piece.kind == BackupPiece::Kind::kHost ? Tier::kHost : piece.kind == BackupPiece::Kind::kDisk ? Tier::kDisk : Tier::kSource;
      report_.tiers[static_cast<int>(tier)] += piece.range.size;
      bytes_in_all_ += piece.range.size;
    }
    const Tier copies = entry.backup->tier == Tier::kDisk ? Tier::kDisk : Tier::kHost;
    report_.tiers[static_cast<int>(copies)] -= entry.backup->rounding;
  }
  for (const uint64_t bytes : report_.tiers) report_.preserved += bytes;
}

void Wake::check_backups() const {
  std::set<const void*> seen;
  for (const Entry& entry : entries_) {
    // What a sleep could not finish is no backup; its rollback left the bytes in the memory that it could not map again.
    if (!entry.backup || entry.allocation->is_intact()) continue;
    if (entry.backup->disk && seen.insert(entry.backup->disk.get()).second) {
      with_disk_faults([&] { entry.backup->disk->verify_header(); });
    }
    for (const BackupPiece& piece : entry.backup->pieces) {
      if (piece.file && seen.insert(piece.file.get()).second) piece.file->check();
    }
  }
}

void Wake::work() {
  std::vector<size_t> order(entries_.size());
  for (size_t index = 0; index < order.size(); ++index) order[index] = index;
  std::stable_partition(order.begin(), order.end(), [&](size_t index) { return entries_[index].moves; });
  const bool files = report_.tiers[static_cast<int>(Tier::kDisk)] + report_.tiers[static_cast<int>(Tier::kSource)] > 0;
  run(group(order, true), bytes_in_all_ >= kParallelBytes ? threads(files) : 1,
      [this](const Group& units, Mover& mover) { fill_in(units, mover); });
}

void Wake::fill_in(const Group& units, Mover& mover) {
  const Driver& driver = pool_.driver_;
  const bool fresh_is_zero = driver.has_flag(HP_FRESH_ZERO) && !driver.has_quirk(HP_QUIRK_STALE_PAGES);
  uint64_t pending = 0;
  for (const Unit& unit : units) {
    Entry& entry = entries_[unit.entry];
    Allocation& allocation = *entry.allocation;
    const bool created = attach(allocation, unit.chunk);
    if (entry.policy == Policy::kZero && !allocation.chunks[unit.chunk].intact && !(created && fresh_is_zero)) {
      const Range range = allocation.chunk_range(unit.chunk);
      driver.fill(allocation.address + range.start, 0, range.size, stream_of(mover));
    }
    for (uint32_t index = unit.first_piece; index < unit.first_piece + unit.num_pieces; ++index) {
      const BackupPiece& piece = entry.backup->pieces[index];
      if (!allocation.chunks[unit.chunk].intact) restore(entry, piece, mover);
      pending += piece.range.size;
      if (pending < kSyncBytes || !mover.stream) continue;
      mover.stream->synchronize();
      bytes_done_ += pending;
      pending = 0;
    }
  }
  if (mover.stream) mover.stream->synchronize();
  bytes_done_ += pending;
}

// On a stream of its own: where a mapping is used before the device sees it, the stream that wrote may read back what no other does.
void Wake::verify() {
  Mover mover;
  bool verified = false;
  for (const Entry& entry : entries_) {
    if (!entry.allocation->verify_wake || !entry.backup || !entry.backup->complete) continue;
    for (const BackupPiece& piece : entry.backup->pieces) {
      if (piece.kind == BackupPiece::Kind::kRebuild) continue;
      verified = true;
      if (is_same(entry, piece, mover)) continue;
      throw MemoryFault::driver_call("copy_to_device", 0,
                                     "byte " + std::to_string(piece.range.start) + " and following of tag '" + pool_.tag_name(*entry.allocation) +
                                         "' are not what was copied there; the memory is asleep again, with its backup");
    }
  }
  if (verified) lap("verify");
}

std::vector<uint64_t> Wake::rebuilds() const {
  std::set<uint64_t> callbacks;
  for (const Entry& entry : entries_) {
    if (!entry.backup) continue;
    for (const BackupPiece& piece : entry.backup->pieces) {
      if (piece.rebuild != 0) callbacks.insert(piece.rebuild);
    }
  }
  return {callbacks.begin(), callbacks.end()};
}

Report Wake::commit() {
  begin_end("commit a wake");
  await_transfers();
  for (const Entry& entry : entries_) report_.unmapped += entry.allocation->mapped_now();
  settle([](Entry& entry, size_t) {
    Allocation& allocation = *entry.allocation;
    allocation.state = State::kMapped;
    for (Chunk& chunk : allocation.chunks) chunk.intact = true;
    const Backup* backup = allocation.backup.get();
    if (backup == nullptr || !allocation.keep_backup || !backup->complete || !backup->copied()) allocation.backup.reset();
  });
  lap("finish");
  try {
    report_.free_after = pool_.driver_.memory_info().free;
  } catch (const MemoryFault&) {
    // The wake is done; only its figure is missing.
  }
  note_asleep();
  finish_times();
  return std::move(report_);
}

void Wake::rollback() {
  begin_end("roll back a wake");
  undo();
}

// Takes the new memory away again. What the driver refuses to unmap or release stays in the books of its chunk, where the next wake finds it; so
// does memory that an earlier sleep could neither map back nor give back, for it may be all that has the bytes.
void Wake::undo() {
  await_transfers();
  bool quiet = true;
  try {
    pool_.driver_.device_synchronize();  // copies may be under way
  } catch (const MemoryFault&) {
    quiet = false;
  }
  for (Entry& entry : entries_) {
    Allocation& allocation = *entry.allocation;
    for (size_t index = 0; quiet && index < allocation.chunks.size(); ++index) {
      Chunk& chunk = allocation.chunks[index];
      const Range range = allocation.chunk_range(index);
      try {
        if (chunk.state == Chunk::State::kMapped) {
          pool_.driver_.unmap(allocation.address + range.start, range.size);
          chunk.state = Chunk::State::kDetached;
        }
        if (chunk.state == Chunk::State::kDetached && !chunk.intact) {
          pool_.driver_.release(chunk.handle, range.size);
          chunk.state = Chunk::State::kEmpty;
        }
      } catch (const MemoryFault&) {
        continue;
      }
    }
    renew_address(allocation);
  }
  settle([](Entry& entry, size_t) { entry.allocation->state = State::kUnmapped; });
}

}  // namespace hardpoint::memory
