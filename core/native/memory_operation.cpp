#include "memory_operation.hpp"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "checksum.hpp"

namespace hardpoint::memory {
namespace {

constexpr uint64_t kHostPiece = uint64_t{32} << 20;
constexpr uint64_t kDiskPiece = uint64_t{8} << 20;
constexpr uint64_t kStaging = kDiskPiece;
constexpr uint64_t kGroupBytes = uint64_t{32} << 20;
constexpr size_t kGroupUnits = 256;
constexpr uint64_t kSyncBytes = uint64_t{256} << 20;   // progress is reported at least this often
constexpr uint64_t kParallelBytes = uint64_t{8} << 20;  // below this, threads cost more than they save
constexpr uint64_t kSpanAlignment = 512;
constexpr int kAddressAttempts = 8;
constexpr auto kLagLimit = std::chrono::seconds(2);

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

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
    const Range extent = allocation.extent_of(given->first);
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

bool is_source(const Piece& piece) { return piece.kind == Piece::Kind::kFile || piece.kind == Piece::Kind::kRebuild; }

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
          Piece piece = Piece::at(source.file ? Piece::Kind::kFile : Piece::Kind::kRebuild, part);
          piece.file = source.file;
          piece.offset = source.offset + (part.start - source.range.start);
          piece.rebuild = source.rebuild;
          backup->pieces.push_back(std::move(piece));
        });
      }
      to_copy = without(to_copy, source.range);
    }
  } else if (tier == Tier::kDisk) {
    for (Range& range : to_copy) {
      const uint64_t end = round_up(range.end(), DiskStore::kAlignment);
      range.start = range.start / DiskStore::kAlignment * DiskStore::kAlignment;
      range.size = end - range.start;
    }
    to_copy = merged(std::move(to_copy));
  }
  const Piece::Kind kind = tier == Tier::kDisk ? Piece::Kind::kDisk : Piece::Kind::kHost;
  for (const Range& range : to_copy) {
    cut(range, allocation.chunk_size, tier == Tier::kDisk ? kDiskPiece : kHostPiece,
        [&](const Range& part) { backup->pieces.push_back(Piece::at(kind, part)); });
  }
  std::sort(backup->pieces.begin(), backup->pieces.end(), [](const Piece& a, const Piece& b) { return a.range.start < b.range.start; });
  uint64_t planned = 0;
  for (const Piece& piece : backup->pieces) planned += piece.range.size;
  backup->rounding = planned - wanted.bytes;
  return backup;
}

// Whether a sleep may use the backup of an earlier one instead of copying again.
bool is_reusable(const std::shared_ptr<Backup>& old, Tier tier, uint64_t generation) {
  return old && old->tier == tier && old->copied() && old->generation == generation;
}

const char* const kUndoFailed = "undoing met a second failure: memory that could not be mapped back is asleep with its backup; wake it to try again";

// Whether no sleep can use the backup any more.
bool is_void(const std::shared_ptr<Backup>& old, uint64_t generation) { return old && old->generation != generation; }

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
  if (can_act()) pool_.end_operation();
}

void PoolOperation::check_running(const char* what) const {
  if (ended_) throw MemoryFault(Fault::kInvalid, what, "the operation has ended", "Begin another one");
  pool_.check_usable(what);
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
  return files ? copiers + 1 : copiers;  // one more hides checksums behind transfers
}

void PoolOperation::run(const std::vector<Group>& groups, size_t threads, const std::function<void(const Group&, Mover&)>& work) {
  std::vector<Mover> movers(std::max<size_t>(threads, 1));
  std::function<void()> watch;
  if (progress_) watch = [this] { progress_(bytes_done_, bytes_in_all_); };
  try {
    run_workers(threads, groups.size(), [&](size_t item, size_t worker) { work(groups[item], movers[worker]); }, watch);
  } catch (...) {
    // Copies may be under way, and the host memory that they use is about to be given back.
    for (const Mover& mover : movers) {
      if (mover.stream) mover.stream->drain();
    }
    throw;
  }
}

std::vector<PoolOperation::Group> PoolOperation::group(const std::vector<size_t>& order) const {
  std::vector<Group> groups;
  uint64_t bytes = 0;
  for (const size_t index : order) {
    const Entry& entry = entries_[index];
    const Allocation& allocation = *entry.allocation;
    static const std::vector<Piece> none;
    const std::vector<Piece>& pieces = entry.moves ? entry.backup->pieces : none;
    uint32_t piece = 0;
    for (uint32_t chunk = 0; chunk < allocation.num_chunks(); ++chunk) {
      if (groups.empty() || bytes >= kGroupBytes || groups.back().size() >= kGroupUnits) {
        groups.emplace_back();
        bytes = 0;
      }
      Unit unit{index, chunk, piece, 0};
      const uint64_t end = allocation.chunk_range(chunk).end();
      for (; piece < pieces.size() && pieces[piece].range.start < end; ++piece, ++unit.num_pieces) bytes += pieces[piece].range.size;
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
  if (!mover.staging) mover.staging = std::make_unique<StagingBuffer>(pool_.driver_, kStaging);
  return *mover.staging;
}

void PoolOperation::restore(const Entry& entry, const Piece& piece, Mover& mover) const {
  const Driver& driver = pool_.driver_;
  const uint64_t address = entry.allocation->address + piece.range.start;
  if (piece.kind == Piece::Kind::kRebuild) return;
  if (piece.kind == Piece::Kind::kHost) {
    driver.copy_to_device(address, piece.span.data, piece.range.size, stream_of(mover));
    return;
  }
  const bool direct = driver.has_flag(HP_HOST_ACCESSIBLE);
  for (uint64_t at = 0; at < piece.range.size; at += kStaging) {
    const uint64_t size = std::min(kStaging, piece.range.size - at);
    std::byte* target = direct ? reinterpret_cast<std::byte*>(address + at) : staging_of(mover).data();
    if (piece.kind == Piece::Kind::kFile) {
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
    driver.release_address(allocation.address, allocation.reserved);
  } catch (const MemoryFault&) {
    return;  // the range is still ours, with the memory that it holds
  }
  std::vector<uint64_t> elsewhere;
  bool same = false;
  for (int attempt = 0; attempt < kAddressAttempts && !same; ++attempt) {
    try {
      const uint64_t address = driver.reserve(allocation.reserved, allocation.address);
      same = address == allocation.address;
      if (!same) elsewhere.push_back(address);
    } catch (const MemoryFault&) {
      std::this_thread::yield();
    }
  }
  for (const uint64_t address : elsewhere) {
    try {
      driver.release_address(address, allocation.reserved);
    } catch (const MemoryFault&) {
      // A range without memory: it costs addresses only.
    }
  }
  if (!same) allocation.address_lost = true;
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
    if (!pool_.destroy(*allocation)) pool_.bury(std::move(allocation));
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

// Sleep

Sleep::Sleep(Pool& pool, const SleepPlan& plan, const Progress& progress) : PoolOperation(pool, "sleep", progress) {
  pool.retry_unreturned();
  choose(plan);
  try {
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
        with_disk_faults([&] { disk_->commit(disk_pieces()); });
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
                                                  [](const Piece& piece) { return piece.kind != Piece::Kind::kRebuild; })) {
        throw MemoryFault(Fault::kInvalid, "cannot sleep with policy rebuild",
                          "a tensor with tag '" + pool_.tags_[allocation->tag].name + "' has no callback",
                          "Give it one with declare_source");
      }
      report_.discarded += live.bytes;
    } else if (entry.policy == Policy::kPreserve) {
      const uint64_t generation = pool_.generation(*allocation);
      const bool reuse = keep && is_reusable(allocation->backup, plan.tier, generation);
      entry.backup = reuse ? allocation->backup : planned_backup(pool_.arena_, *allocation, live, plan.tier, generation);
      entry.moves = !reuse && entry.backup->copied();
      const uint64_t counted = live.bytes;
      uint64_t sourced = 0;
      for (const Piece& piece : entry.backup->pieces) {
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
  report_.allocations = entries_.size();
}

void Sleep::check_sources() const {
  std::set<const void*> seen;
  for (const Entry& entry : entries_) {
    if (!entry.backup) continue;
    for (const Piece& piece : entry.backup->pieces) {
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
    for (const Piece& piece : entry.backup->pieces) {
      if (!is_source(piece)) bytes_in_all_ += piece.range.size;
      if (piece.kind == Piece::Kind::kHost) host += round_up(piece.range.size, kSpanAlignment);
      if (piece.kind != Piece::Kind::kDisk) continue;
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
    std::vector<Piece> placed;
    for (const Piece& piece : entry.backup->pieces) {
      if (piece.kind == Piece::Kind::kDisk) {
        placed.push_back(piece);
        placed.back().offset = offset;
        offset += piece.range.size;
        continue;
      }
      if (piece.kind != Piece::Kind::kHost) {
        placed.push_back(piece);
        continue;
      }
      for (uint64_t at = 0; at < piece.range.size;) {
        HostArena::Span& from = spans[span];
        const uint64_t size = std::min<uint64_t>(piece.range.size - at, from.size);
        const uint64_t taken = std::min<uint64_t>(round_up(size, kSpanAlignment), from.size);
        placed.push_back(Piece::at(Piece::Kind::kHost, {piece.range.start + at, size}));
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
    for (const Piece& piece : entry.backup->pieces) {
      // A piece that this sleep is to write is no claim yet.
      if (piece.kind == Piece::Kind::kRebuild || (entry.moves && !is_source(piece)) || is_same(entry, piece, mover)) continue;
      throw MemoryFault(Fault::kStale,
                        std::string(is_source(piece) ? "the declared source" : "the kept backup") + " of tag '" +
                            pool_.tag_name(*entry.allocation) + "' is not what the device holds",
                        "byte " + std::to_string(piece.range.start) + " and following were written since it was made",
                        "Call mark_written after every write, or leave the tag out of `keep`");
    }
  }
  if (!to_verify_.empty()) lap("verify");
}

bool Sleep::is_same(const Entry& entry, const Piece& piece, Mover& mover) const {
  Xxh64 hash;
  std::vector<std::byte> expected(piece.kind == Piece::Kind::kFile ? std::min(kStaging, piece.range.size) : 0);
  for (uint64_t at = 0; at < piece.range.size; at += kStaging) {
    const uint64_t size = std::min(kStaging, piece.range.size - at);
    const std::byte* held = staging_of(mover).data();
    pool_.driver_.copy_to_host(staging_of(mover).data(), entry.allocation->address + piece.range.start + at, size, stream_of(mover));
    stream_of(mover).synchronize();
    if (piece.kind == Piece::Kind::kDisk) {
      hash.update(held, size);
      continue;
    }
    if (piece.kind == Piece::Kind::kFile) piece.file->read(piece.offset + at, expected.data(), size);
    if (std::memcmp(held, piece.kind == Piece::Kind::kFile ? expected.data() : piece.span.data + at, size) != 0) return false;
  }
  return piece.kind != Piece::Kind::kDisk || hash.digest() == piece.checksum;
}

void Sleep::work() {
  std::vector<size_t> order(entries_.size());
  for (size_t index = 0; index < order.size(); ++index) order[index] = index;
  // What is preserved goes first: should anything fail, bytes that were to be dropped are still mapped.
  std::stable_partition(order.begin(), order.end(), [&](size_t index) { return entries_[index].moves; });
  const size_t workers = bytes_in_all_ >= kParallelBytes ? threads(disk_ != nullptr) : 1;
  run(group(order), workers, [this](const Group& units, Mover& mover) { copy_out(units, mover); });
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
      Piece& piece = entry.backup->pieces[index];
      const uint64_t address = entry.allocation->address + piece.range.start;
      if (piece.kind == Piece::Kind::kHost) {
        driver.copy_to_host(piece.span.data, address, piece.range.size, stream_of(mover));
        pending += piece.range.size;
        if (pending >= kSyncBytes) complete();
      } else if (piece.kind == Piece::Kind::kDisk) {
        const std::byte* bytes = reinterpret_cast<const std::byte*>(address);
        if (!driver.has_flag(HP_HOST_ACCESSIBLE)) {
          driver.copy_to_host(staging_of(mover).data(), address, piece.range.size, stream_of(mover));
          stream_of(mover).synchronize();
          bytes = staging_of(mover).data();
        }
        piece.checksum = xxh64(bytes, piece.range.size);
        with_disk_faults([&] { disk_->write(piece.offset, bytes, piece.range.size); });
        bytes_done_ += piece.range.size;
      }
    }
  }
  complete();
  for (const Unit& unit : units) {
    Allocation& allocation = *entries_[unit.entry].allocation;
    Chunk& chunk = allocation.chunks[unit.chunk];
    if (chunk.state != Chunk::State::kMapped) continue;
    const Range range = allocation.chunk_range(unit.chunk);
    driver.unmap(allocation.address + range.start, range.size);
    chunk.state = Chunk::State::kDetached;
  }
}

std::vector<DiskPiece> Sleep::disk_pieces() const {
  std::vector<DiskPiece> pieces;
  for (const Entry& entry : entries_) {
    if (!entry.moves) continue;
    for (const Piece& piece : entry.backup->pieces) {
      if (piece.kind == Piece::Kind::kDisk) pieces.push_back({piece.offset, piece.range.size, piece.checksum});
    }
  }
  return pieces;
}

bool Sleep::recoverable(const Entry& entry) {
  return entry.backup && !entry.narrowed && std::none_of(entry.backup->pieces.begin(), entry.backup->pieces.end(),
                                      [](const Piece& piece) { return piece.kind == Piece::Kind::kRebuild; });
}

Report Sleep::commit() {
  check_running("commit a sleep");
  try {
    release_all();
  } catch (MemoryFault& fault) {
    try {
      undo();
    } catch (const MemoryFault& second) {
      fault.append(std::string(kUndoFailed) + " (" + second.problem() + ": " + second.found() + ")");
    }
    throw;
  }
  for (Entry& entry : entries_) renew_address(*entry.allocation);
  settle([&](Entry& entry, size_t index) {
    Allocation& allocation = *entry.allocation;
    allocation.backup = entry.backup;
    allocation.asleep_as = entry.policy;
    allocation.keep_backup = keep_[index];
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

// Gives the memory back: first what a backup can restore, then what is dropped. As long as nothing is lost, a failure is undone by the caller;
// after that it is a fact that the rest follows: memory that the driver does not take stays in the books and is released by a later operation.
void Sleep::release_all() {
  bool lost_bytes = false;
  for (const bool want_recoverable : {true, false}) {
    for (Entry& entry : entries_) {
      if (recoverable(entry) != want_recoverable) continue;
      Allocation& allocation = *entry.allocation;
      for (size_t index = 0; index < allocation.chunks.size(); ++index) {
        Chunk& chunk = allocation.chunks[index];
        if (chunk.state != Chunk::State::kDetached) continue;
        const uint64_t size = allocation.chunk_range(index).size;
        try {
          pool_.driver_.release(chunk.handle, size);
        } catch (const MemoryFault&) {
          if (!lost_bytes) throw;
          report_.retained += size;
          pool_.bury(remains(chunk, size));
          chunk.state = Chunk::State::kEmpty;
          continue;
        }
        chunk.state = Chunk::State::kEmpty;
        report_.unmapped += size;
        lost_bytes = lost_bytes || !want_recoverable;
      }
    }
  }
}

void Sleep::rollback() {
  check_running("undo a sleep");
  undo();
}

void Sleep::undo() {
  Mover mover;
  std::unique_ptr<MemoryFault> failure;
  std::vector<bool> awake(entries_.size(), true);
  for (size_t index = 0; index < entries_.size(); ++index) {
    try {
      bring_back(entries_[index], mover);
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

void Sleep::bring_back(Entry& entry, Mover& mover) {
  Allocation& allocation = *entry.allocation;
  renew_address(allocation);
  if (allocation.address_lost) {
    throw MemoryFault(Fault::kForeign, "the address of memory was taken by something else while it was asleep");
  }
  for (size_t index = 0; index < allocation.num_chunks(); ++index) {
    attach(allocation, index);
    if (allocation.chunks[index].intact || !entry.backup) continue;
    const Range range = allocation.chunk_range(index);
    for (const Piece& piece : entry.backup->pieces) {
      if (piece.range.start >= range.start && piece.range.start < range.end()) restore(entry, piece, mover);
    }
  }
  if (mover.stream) mover.stream->synchronize();
  for (Chunk& chunk : allocation.chunks) chunk.intact = true;
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

// Wake

Wake::Wake(Pool& pool, const std::optional<std::vector<std::string>>& tags, const Progress& progress) : PoolOperation(pool, "wake", progress) {
  pool.retry_unreturned();
  choose(tags);
  try {
    report_.free_before = pool_.driver_.memory_info().free;
    check_backups();
    lap("plan");
    work();
    lap("copy");
    await_callbacks();
  } catch (...) {
    undo();
    throw;
  }
}

void Wake::await_callbacks() {
  std::lock_guard lock(pool_.books_);
  for (const Entry& entry : entries_) {
    if (!entry.backup) continue;
    const auto& pieces = entry.backup->pieces;
    const bool waits = std::any_of(pieces.begin(), pieces.end(), [](const Piece& piece) { return piece.rebuild != 0; });
    if (waits) entry.allocation->state = State::kRebuilding;
  }
}

Wake::~Wake() {
  if (!ended_ && can_act()) undo();
}

void Wake::choose(const std::optional<std::vector<std::string>>& tags) {
  std::lock_guard lock(pool_.books_);
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
    for (const Piece& piece : entry.backup->pieces) {
      const Tier tier = piece.kind == Piece::Kind::kHost ? Tier::kHost : piece.kind == Piece::Kind::kDisk ? Tier::kDisk : Tier::kSource;
      report_.tiers[static_cast<int>(tier)] += piece.range.size;
      bytes_in_all_ += piece.range.size;
    }
    const Tier copies = entry.backup->tier == Tier::kDisk ? Tier::kDisk : Tier::kHost;
    report_.tiers[static_cast<int>(copies)] -= entry.backup->rounding;
  }
  for (const uint64_t bytes : report_.tiers) report_.preserved += bytes;
  report_.allocations = entries_.size();
}

void Wake::check_backups() const {
  std::set<const void*> seen;
  for (const Entry& entry : entries_) {
    if (!entry.backup) continue;
    if (entry.backup->disk && seen.insert(entry.backup->disk.get()).second) {
      with_disk_faults([&] { entry.backup->disk->verify_header(); });
    }
    for (const Piece& piece : entry.backup->pieces) {
      if (piece.file && seen.insert(piece.file.get()).second) piece.file->check();
    }
  }
}

void Wake::work() {
  std::vector<size_t> order(entries_.size());
  for (size_t index = 0; index < order.size(); ++index) order[index] = index;
  std::stable_partition(order.begin(), order.end(), [&](size_t index) { return entries_[index].moves; });
  const bool files = report_.tiers[static_cast<int>(Tier::kDisk)] + report_.tiers[static_cast<int>(Tier::kSource)] > 0;
  run(group(order), bytes_in_all_ >= kParallelBytes ? threads(files) : 1,
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
      const Piece& piece = entry.backup->pieces[index];
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

std::vector<uint64_t> Wake::rebuilds() const {
  std::set<uint64_t> callbacks;
  for (const Entry& entry : entries_) {
    if (!entry.backup) continue;
    for (const Piece& piece : entry.backup->pieces) {
      if (piece.rebuild != 0) callbacks.insert(piece.rebuild);
    }
  }
  return {callbacks.begin(), callbacks.end()};
}

Report Wake::commit() {
  check_running("commit a wake");
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
  check_running("undo a wake");
  undo();
}

// Takes the new memory away again. What the driver refuses to unmap or release stays in the books of its chunk, where the next wake finds it; so
// does memory that an earlier sleep could neither map back nor give back, for it may be all that has the bytes.
void Wake::undo() {
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

void Pool::prepare_host(const SleepPlan& plan) {
  check_usable("prepare a sleep");
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
      for (const Piece& piece : backup->pieces) {
        if (piece.kind == Piece::Kind::kHost) bytes += round_up(piece.range.size, kSpanAlignment);
      }
    }
  }
  replaced.clear();
  if (bytes > 0) arena_.prepare(bytes, plan.host_budget);
}

std::unique_ptr<Operation> Pool::begin_sleep(const SleepPlan& plan, const Progress& progress) {
  return std::make_unique<Sleep>(*this, plan, progress);
}

std::unique_ptr<Operation> Pool::begin_wake(const std::optional<std::vector<std::string>>& tags, const Progress& progress) {
  return std::make_unique<Wake>(*this, tags, progress);
}

}  // namespace hardpoint::memory
