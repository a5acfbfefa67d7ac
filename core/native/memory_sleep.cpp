#include "memory_operation.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "checksum.hpp"

namespace hardpoint::memory {
namespace {

constexpr uint64_t kHostPiece = uint64_t{32} << 20;
constexpr uint64_t kDiskPiece = PoolOperation::kStaging;
constexpr uint64_t kSpanAlignment = 512;
constexpr auto kLagLimit = std::chrono::seconds(2);

// Sorted, without overlap, neighbours merged.
std::vector<Range> merged(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.start < b.start; });
  std::vector<Range> result;
  for (const Range& range : ranges) {
    if (range.size == 0) continue;
    if (!result.empty() && range.start <= result.back().end()) {
      result.back().size = std::max(result.back().end(), range.end()) - result.back().start;
    } else {
      result.push_back(range);
    }
  }
  return result;
}

std::vector<Range> without(const std::vector<Range>& ranges, const Range& hole) {
  std::vector<Range> result;
  for (const Range& range : ranges) {
    if (range.start < hole.start) result.push_back({range.start, std::min(range.end(), hole.start) - range.start});
    if (range.end() > hole.end()) {
      const uint64_t start = std::max(range.start, hole.end());
      result.push_back({start, range.end() - start});
    }
    if (!result.empty() && result.back().size == 0) result.pop_back();
  }
  return result;
}

uint64_t total(const std::vector<Range>& ranges) {
  uint64_t sum = 0;
  for (const Range& range : ranges) sum += range.size;
  return sum;
}

// Cuts at the chunks' ends and so that no part is longer than `limit`; calls back for each part.
template <class Call>
void cut(const Range& range, uint64_t chunk_size, uint64_t limit, Call&& call) {
  for (uint64_t at = range.start; at < range.end();) {
    const uint64_t chunk_end = (at / chunk_size + 1) * chunk_size;
    const uint64_t end = std::min({range.end(), chunk_end, at + limit});
    call(Range{at, end - at});
    at = end;
  }
}

// What the plan says counts of an allocation: everything, or for some of its blocks only the ranges given.
struct Live {
  std::vector<Range> ranges;
  uint64_t bytes;  // without what lies between blocks
  bool narrowed = false;
};

Live live_ranges(const Allocation& allocation, const SleepPlan& plan) {
  std::vector<Range> live = allocation.live();
  bool narrowed = false;
  for (auto given = plan.live.lower_bound(allocation.address); given != plan.live.end() && allocation.contains(given->first); ++given) {
    const uint64_t base = given->first - allocation.address;
    const Range extent = allocation.blocks ? allocation.extent_of(given->first) : Range{0, allocation.size};
    const uint64_t room = extent.end() > base ? extent.end() - base : 0;
    for (const Range& range : given->second) {
      if (range.start > room || range.size > room - range.start) {
        throw MemoryFault(Fault::kInvalid, "live ranges lie beyond the end of their tensor",
                          std::to_string(range.size) + " bytes from byte " + std::to_string(range.start) + " of " + std::to_string(room));
      }
    }
    narrowed = true;
    live = without(live, {base, room});
    for (const Range& range : given->second) live.push_back({base + range.start, range.size});
  }
  live = merged(std::move(live));
  const uint64_t bytes = narrowed ? total(live) : allocation.live_bytes();
  return {std::move(live), bytes, narrowed};
}

// Memory that the driver did not take, for the books of what it is offered again.
std::unique_ptr<Allocation> remains(const Chunk& chunk, size_t size) {
  auto allocation = std::make_unique<Allocation>();
  allocation->state = State::kLost;  // has no address
  allocation->mapped = allocation->chunk_size = size;
  allocation->chunks = {chunk};
  return allocation;
}

bool is_source(const BackupPiece& piece) { return piece.kind == BackupPiece::Kind::kFile || piece.kind == BackupPiece::Kind::kRebuild; }

// The range, and where it ends with a block, what lies between that and the next one: nobody's bytes, which nothing has to hold.
Range with_gap(const Allocation& allocation, Range range) {
  if (!allocation.blocks || allocation.blocks->containing(range.end() - 1).end() != range.end()) return range;
  return {range.start, round_up(range.end(), Blocks::kAlignment) - range.start};
}

// Where the bytes of an allocation will be, without the places yet.
std::shared_ptr<Backup> planned_backup(HostArena& arena, const Allocation& allocation, const Live& wanted, Tier tier, uint64_t generation) {
  const std::vector<Range>& live = wanted.ranges;
  auto backup = std::make_shared<Backup>(arena, tier, generation);
  std::vector<Range> to_copy = live;
  if (tier == Tier::kSource) {
    for (const Source& source : allocation.sources) {
      for (const Range& range : live) {
        const uint64_t start = std::max(range.start, source.range.start), end = std::min(range.end(), source.range.end());
        if (end <= start) continue;
        cut({start, end - start}, allocation.chunk_size, kHostPiece, [&](const Range& part) {
          BackupPiece piece = BackupPiece::at(source.file ? BackupPiece::Kind::kFile : BackupPiece::Kind::kRebuild, part);
          piece.file = source.file;
          piece.offset = source.offset + (part.start - source.range.start);
          piece.rebuild = source.rebuild;
          backup->pieces.push_back(std::move(piece));
        });
      }
      to_copy = without(to_copy, with_gap(allocation, source.range));
    }
  } else if (tier == Tier::kDisk) {
    for (Range& range : to_copy) {
      const uint64_t end = round_up(range.end(), DiskStore::kAlignment);
      range.start = range.start / DiskStore::kAlignment * DiskStore::kAlignment;
      range.size = end - range.start;
    }
    to_copy = merged(std::move(to_copy));
  }
  const BackupPiece::Kind kind = tier == Tier::kDisk ? BackupPiece::Kind::kDisk : BackupPiece::Kind::kHost;
  for (const Range& range : to_copy) {
    cut(range, allocation.chunk_size, tier == Tier::kDisk ? kDiskPiece : kHostPiece,
        [&](const Range& part) { backup->pieces.push_back(BackupPiece::at(kind, part)); });
  }
  std::sort(backup->pieces.begin(), backup->pieces.end(), [](const BackupPiece& a, const BackupPiece& b) { return a.range.start < b.range.start; });
  uint64_t planned = 0;
  for (const BackupPiece& piece : backup->pieces) planned += piece.range.size;
  backup->rounding = planned - wanted.bytes;
  return backup;
}

// Whether a sleep may use the backup of an earlier one instead of copying again.
bool is_reusable(const std::shared_ptr<Backup>& old, Tier tier, uint64_t generation) {
  return old && old->tier == tier && old->copied() && old->generation == generation;
}

// Whether the file of a backup, if it is in one, is still what was written, as far as that is seen without reading all of it.
bool is_whole(const Backup& backup) {
  try {
    if (backup.disk) backup.disk->verify_header();
    return true;
  } catch (const CorruptFile&) {
    return false;
  } catch (const DiskError&) {
    return false;
  }
}

const char* const kUndoFailed = "undoing met a second failure: memory that could not be mapped back is asleep with its backup; wake it to try again";

// Whether no sleep can use the backup any more.
bool is_void(const std::shared_ptr<Backup>& old, uint64_t generation) { return old && old->generation != generation; }

}  // namespace

Sleep::Sleep(Pool& pool, const SleepPlan& plan, const Progress& progress) : PoolOperation(pool, "sleep", progress), verifies_(plan.verify) {
  pool.retry_unreturned();
  choose(plan);
  try {
    await_transfers();
    replaced_.clear();
    check_sources();
    take_room(plan);
    lap("plan");
    report_.free_before = pool_.driver_.memory_info().free;
    if (!entries_.empty()) {
      pool_.driver_.device_synchronize();
      lap("drain");
      verify();
      work();
      if (disk_) {
        with_disk_faults([&] { disk_->commit(disk_pieces()); }, kOtherDirectory);
        report_.disk_direct = disk_->direct();
      }
      for (const Entry& entry : entries_) {
        if (entry.backup) entry.backup->complete = true;
      }
      lap("copy");
    }
  } catch (MemoryFault& fault) {
    try {
      undo();
    } catch (const MemoryFault& second) {
      fault.append(std::string(kUndoFailed) + " (" + second.problem() + ": " + second.found() + ")");
    }
    throw;
  } catch (...) {
    try {
      undo();
    } catch (const MemoryFault&) {
      // The first exception is the reason; what could not be mapped back is asleep with its backup.
    }
    throw;
  }
}

Sleep::~Sleep() {
  try {
    if (!ended_ && can_act()) undo();
  } catch (const MemoryFault&) {
    // Asleep with its backup.
  }
}

void Sleep::check_live_addresses(const SleepPlan& plan) const {
  for (const auto& [address, ranges] : plan.live) {
    const Allocation& allocation = pool_.need(address);
    if (allocation.extent_of(address).size == 0) {
      throw MemoryFault(Fault::kForeign, "live ranges are given for address " + std::to_string(address), "it belongs to no tensor");
    }
  }
}

void Sleep::choose(const SleepPlan& plan) {
  std::lock_guard lock(pool_.books_);
  check_live_addresses(plan);
  const std::vector<bool> chosen = pool_.selected(plan.tags);
  std::vector<const Policy*> policies(pool_.tags_.size());
  for (const auto& [tag, policy] : plan.policies) {
    pool_.selected(std::vector<std::string>{tag});  // throws for an unknown one
    policies[pool_.tag_ids_.at(tag)] = &policy;
  }
  const std::vector<bool> kept = pool_.selected(plan.keep);
  std::map<const DiskFile*, bool> whole;
  for (const auto& [address, allocation] : pool_.allocations_) {
    if (!chosen[allocation->tag] || allocation->state != State::kMapped || allocation->free_requested) continue;
    Entry entry;
    entry.allocation = allocation.get();
    entry.policy = policies[allocation->tag] ? *policies[allocation->tag] : allocation->policy;
    if (entry.policy == Policy::kResident) continue;
    const Live live = live_ranges(*allocation, plan);
    const bool keep = kept[allocation->tag] && !live.narrowed;
    entry.narrowed = live.narrowed;
    if (entry.policy == Policy::kRebuild) {
      entry.backup = planned_backup(pool_.arena_, *allocation, live, Tier::kSource, pool_.generation(*allocation));
      if (entry.backup->held() > 0 || std::any_of(entry.backup->pieces.begin(), entry.backup->pieces.end(),
                                                  [](const BackupPiece& piece) { return piece.kind != BackupPiece::Kind::kRebuild; })) {
        throw MemoryFault(Fault::kInvalid, "cannot sleep with policy rebuild",
                          "a tensor with tag '" + pool_.tags_[allocation->tag].name + "' has no callback",
                          "Give it one with declare_source");
      }
      report_.discarded += live.bytes;
    } else if (entry.policy == Policy::kPreserve) {
      const uint64_t generation = pool_.generation(*allocation);
      bool reuse = keep && is_reusable(allocation->backup, plan.tier, generation);
      if (reuse) {
        // Its bytes are here still: a sleep that trusted a file that was damaged since would lose them.
        const auto known = whole.try_emplace(allocation->backup->disk.get(), false);
        if (known.second) known.first->second = is_whole(*allocation->backup);
        reuse = known.first->second;
        if (!reuse) replaced_.push_back(std::move(allocation->backup));
      }
      entry.backup = reuse ? allocation->backup : planned_backup(pool_.arena_, *allocation, live, plan.tier, generation);
      entry.moves = !reuse && entry.backup->copied();
      const uint64_t counted = live.bytes;
      uint64_t sourced = 0;
      for (const BackupPiece& piece : entry.backup->pieces) {
        if (is_source(piece)) sourced += piece.range.size;
      }
      sourced = std::min(sourced, counted);  // a kept backup may also have blocks that were freed since
      (reuse ? report_.skipped : report_.preserved) += counted - sourced;
      report_.skipped += sourced;
      report_.tiers[static_cast<int>(Tier::kSource)] += sourced;
      report_.tiers[static_cast<int>(plan.tier == Tier::kDisk ? Tier::kDisk : Tier::kHost)] += counted - sourced;
      if (plan.verify && (reuse || sourced > 0)) to_verify_.push_back(entries_.size());
      // A void backup would take the budget twice.
      if (is_void(allocation->backup, generation)) replaced_.push_back(std::move(allocation->backup));
    } else {
      report_.discarded += live.bytes;
    }
    entries_.push_back(std::move(entry));
    keep_.push_back(keep);
  }
  for (const Entry& entry : entries_) entry.allocation->state = State::kSaving;
}

void Sleep::check_sources() const {
  std::set<const void*> seen;
  for (const Entry& entry : entries_) {
    if (!entry.backup) continue;
    for (const BackupPiece& piece : entry.backup->pieces) {
      if (piece.file && seen.insert(piece.file.get()).second) piece.file->check();
    }
  }
}

// Gives every piece its place. Pieces of the host tier may be cut once more, where a span of the arena ends.
void Sleep::take_room(const SleepPlan& plan) {
  uint64_t host = 0, disk = 0;
  size_t disk_count = 0;
  for (const Entry& entry : entries_) {
    if (!entry.moves) continue;
    for (const BackupPiece& piece : entry.backup->pieces) {
      if (!is_source(piece)) bytes_in_all_ += piece.range.size;
      if (piece.kind == BackupPiece::Kind::kHost) host += round_up(piece.range.size, kSpanAlignment);
      if (piece.kind != BackupPiece::Kind::kDisk) continue;
      disk += piece.range.size;
      ++disk_count;
    }
  }
  if (disk > 0) disk_ = pool_.disk_file(plan, disk, disk_count);
  std::vector<HostArena::Span> spans;
  if (host > 0) spans = pool_.arena_.take(host, plan.host_budget);
  size_t span = 0;
  uint64_t offset = 0;
  for (Entry& entry : entries_) {
    if (!entry.moves) continue;
    if (disk_) entry.backup->disk = disk_;
    std::vector<BackupPiece> placed;
    for (const BackupPiece& piece : entry.backup->pieces) {
      if (piece.kind == BackupPiece::Kind::kDisk) {
        placed.push_back(piece);
        placed.back().offset = offset;
        offset += piece.range.size;
        continue;
      }
      if (piece.kind != BackupPiece::Kind::kHost) {
        placed.push_back(piece);
        continue;
      }
      for (uint64_t at = 0; at < piece.range.size;) {
        HostArena::Span& from = spans[span];
        const uint64_t size = std::min<uint64_t>(piece.range.size - at, from.size);
        const uint64_t taken = std::min<uint64_t>(round_up(size, kSpanAlignment), from.size);
        placed.push_back(BackupPiece::at(BackupPiece::Kind::kHost, {piece.range.start + at, size}));
        placed.back().span = {from.data, taken, from.slab};
        from.data += taken;
        from.size -= taken;
        if (from.size == 0) ++span;
        at += size;
      }
    }
    entry.backup->pieces = std::move(placed);
  }
  for (; span < spans.size(); ++span) {
    if (spans[span].size > 0) pool_.arena_.give(spans[span]);
  }
}

// Compares what backups of earlier sleeps and source files hold with the device's bytes.
void Sleep::verify() {
  Mover mover;
  for (const size_t index : to_verify_) {
    const Entry& entry = entries_[index];
    for (const BackupPiece& piece : entry.backup->pieces) {
      // A piece that this sleep is to write is no claim yet.
      if (piece.kind == BackupPiece::Kind::kRebuild || (entry.moves && !is_source(piece)) || is_same(entry, piece, mover)) continue;
      throw MemoryFault(Fault::kStale,
                        std::string(is_source(piece) ? "the declared source" : "the kept backup") + " of tag '" +
                            pool_.tag_name(*entry.allocation) + "' is not what the device holds",
                        "byte " + std::to_string(piece.range.start) + " and following were written since it was made",
                        "Call mark_written after every write, or leave the tag out of `keep`");
    }
  }
  if (!to_verify_.empty()) lap("verify");
}

void Sleep::work() {
  std::vector<size_t> order(entries_.size());
  for (size_t index = 0; index < order.size(); ++index) order[index] = index;
  // What is preserved goes first: should anything fail, bytes that were to be dropped are still mapped.
  std::stable_partition(order.begin(), order.end(), [&](size_t index) { return entries_[index].moves; });
  const size_t workers = bytes_in_all_ >= kParallelBytes ? threads(disk_ != nullptr) : 1;
  const std::vector<Group> groups = group(order, !pool_.driver_.has_flag(HP_HOST_ACCESSIBLE));
  run(groups, workers, [this](const Group& units, Mover& mover) { copy_out(units, mover); });
  if (!unmaps_last()) return;
  for (const Group& units : groups) unmap(units);
}

void Sleep::copy_out(const Group& units, Mover& mover) {
  const Driver& driver = pool_.driver_;
  uint64_t pending = 0;
  const auto complete = [&] {
    if (pending == 0) return;
    stream_of(mover).synchronize();
    bytes_done_ += pending;
    pending = 0;
  };
  for (const Unit& unit : units) {
    Entry& entry = entries_[unit.entry];
    for (uint32_t index = unit.first_piece; index < unit.first_piece + unit.num_pieces; ++index) {
      BackupPiece& piece = entry.backup->pieces[index];
      const uint64_t address = entry.allocation->address + piece.range.start;
      if (piece.kind == BackupPiece::Kind::kHost) {
        driver.copy_to_host(piece.span.data, address, piece.range.size, stream_of(mover));
        pending += piece.range.size;
        if (pending >= kSyncBytes) complete();
      } else if (piece.kind == BackupPiece::Kind::kDisk) {
        const std::byte* bytes = reinterpret_cast<const std::byte*>(address);
        if (!driver.has_flag(HP_HOST_ACCESSIBLE)) {
          driver.copy_to_host(staging_of(mover).data(), address, piece.range.size, stream_of(mover));
          stream_of(mover).synchronize();
          bytes = staging_of(mover).data();
        }
        piece.checksum = xxh64(bytes, piece.range.size);
        with_disk_faults([&] { disk_->write(piece.offset, bytes, piece.range.size); }, kOtherDirectory);
        bytes_done_ += piece.range.size;
      }
    }
  }
  complete();
  if (!unmaps_last()) unmap(units);
}

// Where the host is the device, moving pages away interrupts every core that is copying (about 10 us for each of them), and is nearly free when
// none is; some devices' drivers wait for all copies. Other devices' memory is unmapped behind the copies instead.
bool Sleep::unmaps_last() const { return pool_.driver_.has_flag(HP_HOST_ACCESSIBLE) || pool_.driver_.has_flag(HP_UNMAP_WAITS); }

void Sleep::unmap(const Group& units) {
  for (const Unit& unit : units) {
    Allocation& allocation = *entries_[unit.entry].allocation;
    Chunk& chunk = allocation.chunks[unit.chunk];
    if (chunk.state != Chunk::State::kMapped) continue;
    const Range range = allocation.chunk_range(unit.chunk);
    pool_.driver_.unmap(allocation.address + range.start, range.size);
    chunk.state = Chunk::State::kDetached;
  }
}

std::vector<DiskPiece> Sleep::disk_pieces() const {
  std::vector<DiskPiece> pieces;
  for (const Entry& entry : entries_) {
    if (!entry.moves) continue;
    for (const BackupPiece& piece : entry.backup->pieces) {
      if (piece.kind == BackupPiece::Kind::kDisk) pieces.push_back({piece.offset, piece.range.size, piece.checksum});
    }
  }
  return pieces;
}

Report Sleep::commit() {
  begin_end("commit a sleep");
  disk_.reset();  // the backups have it, and go before this object may
  release_all();
  for (Entry& entry : entries_) renew_address(*entry.allocation);
  settle([&](Entry& entry, size_t index) {
    Allocation& allocation = *entry.allocation;
    allocation.backup = entry.backup;
    allocation.asleep_as = entry.policy;
    allocation.keep_backup = keep_[index];
    allocation.verify_wake = verifies_;
    allocation.state = State::kUnmapped;
    // What wakes with other bytes is not what its file holds, and zero is not what a callback writes.
    if (entry.policy == Policy::kZero) allocation.sources.clear();
    if (entry.policy == Policy::kDiscard || entry.narrowed) allocation.drop_files();
  });
  lap("release");
  wait_for_lagging_counter();
  note_asleep();
  finish_times();
  return std::move(report_);
}

// Gives the memory back, by several threads: where the host itself is the device, giving pages back is the processor's work. What the driver does
// not take stays in the books and is offered to it again by a later operation.
void Sleep::release_all() {
  std::vector<std::pair<Chunk*, uint64_t>> held;
  uint64_t bytes = 0;
  for (Entry& entry : entries_) {
    for (size_t index = 0; index < entry.allocation->chunks.size(); ++index) {
      Chunk& chunk = entry.allocation->chunks[index];
      if (chunk.state != Chunk::State::kDetached) continue;
      held.emplace_back(&chunk, entry.allocation->chunk_range(index).size);
      bytes += held.back().second;
    }
  }
  const auto release = [&](size_t item, size_t) {
    const auto [chunk, size] = held[item];
    try {
      pool_.driver_.release(chunk->handle, size);
      chunk->state = Chunk::State::kEmpty;
    } catch (const MemoryFault&) {
      // It is still detached, which is looked for below.
    }
  };
  run_workers(bytes >= kParallelBytes ? threads(false) : 1, held.size(), release, {});
  for (const auto& [chunk, size] : held) {
    if (chunk->state == Chunk::State::kEmpty) {
      report_.unmapped += size;
      continue;
    }
    report_.retained += size;
    pool_.defer_release(remains(*chunk, size));
    chunk->state = Chunk::State::kEmpty;
  }
}

void Sleep::rollback() {
  begin_end("roll back a sleep");
  undo();
}

// Nothing has been released and no address given up: all bytes are in the memory that is mapped again.
void Sleep::undo() {
  disk_.reset();
  std::unique_ptr<MemoryFault> failure;
  std::vector<bool> awake(entries_.size(), true);
  for (size_t index = 0; index < entries_.size(); ++index) {
    try {
      Allocation& allocation = *entries_[index].allocation;
      for (size_t chunk = 0; chunk < allocation.num_chunks(); ++chunk) attach(allocation, chunk);
    } catch (const MemoryFault& fault) {
      awake[index] = false;
      if (!failure) failure = std::make_unique<MemoryFault>(fault);
    }
  }
  settle([&](Entry& entry, size_t index) {
    Allocation& allocation = *entry.allocation;
    allocation.state = awake[index] ? State::kMapped : State::kUnmapped;
    if (awake[index]) return;
    allocation.backup = entry.backup;
    allocation.asleep_as = entry.policy;
    allocation.keep_backup = false;
  });
  if (failure) throw *failure;
}

void Sleep::wait_for_lagging_counter() {
  const auto limit = std::chrono::steady_clock::now() + kLagLimit;
  do {
    try {
      report_.free_after = pool_.driver_.memory_info().free;
    } catch (const MemoryFault&) {
      return;  // the sleep is done; only its figure is missing
    }
    if (!pool_.driver_.has_quirk(HP_QUIRK_FREE_LAGS) || report_.free_after >= report_.free_before + report_.unmapped) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  } while (std::chrono::steady_clock::now() < limit);
}

void Pool::prepare_host(const SleepPlan& plan) {
  check_usable("prepare a sleep");
  if (plan.tier == Tier::kDisk) DiskStore::remove_abandoned(plan.disk_directory);
  uint64_t bytes = 0;
  std::vector<std::shared_ptr<Backup>> replaced;
  {
    std::lock_guard lock(books_);
    const std::vector<bool> chosen = selected(plan.tags), kept = selected(plan.keep);
    for (const auto& [address, allocation] : allocations_) {
      if (!chosen[allocation->tag] || allocation->state != State::kMapped || plan.tier == Tier::kDisk) continue;
      const auto override = plan.policies.find(tags_[allocation->tag].name);
      if ((override == plan.policies.end() ? allocation->policy : override->second) != Policy::kPreserve) continue;
      const Live live = live_ranges(*allocation, plan);
      if (is_void(allocation->backup, generation(*allocation))) replaced.push_back(std::move(allocation->backup));
      if (kept[allocation->tag] && !live.narrowed && is_reusable(allocation->backup, plan.tier, generation(*allocation))) continue;
      const std::shared_ptr<Backup> backup = planned_backup(arena_, *allocation, live, plan.tier, 0);
      for (const BackupPiece& piece : backup->pieces) {
        if (piece.kind == BackupPiece::Kind::kHost) bytes += round_up(piece.range.size, kSpanAlignment);
      }
    }
  }
  replaced.clear();
  if (bytes > 0) arena_.prepare(bytes, plan.host_budget);
}

}  // namespace hardpoint::memory
