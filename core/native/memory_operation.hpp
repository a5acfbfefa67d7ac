// Sleep and wake: plan, work with an undo for every step, and the end of the transaction.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory_pool.hpp"
#include "memory_workers.hpp"

namespace hardpoint::memory {

// What both have in common: the pool's one operation slot, the allocations that it owns, times, and moving bytes.
class PoolOperation : public Operation {
 public:
  static constexpr uint64_t kStaging = uint64_t{8} << 20;  // bytes that pass through a staging buffer at a time

  ~PoolOperation() override;
  void hold() override;

 protected:
  static constexpr uint64_t kSyncBytes = uint64_t{256} << 20;   // progress is reported at least this often
  static constexpr uint64_t kParallelBytes = uint64_t{8} << 20;  // below this, threads cost more than they save

  // One chunk and the pieces within it: what one worker does without interruption.
  struct Unit {
    size_t entry;
    uint32_t chunk, first_piece, num_pieces;
  };
  // An allocation of the operation, with the recipe of its bytes.
  struct Entry {
    Allocation* allocation;
    std::shared_ptr<Backup> backup;  // none: bytes are not preserved
    Policy policy;
    bool moves = false;  // the operation moves the backup's bytes
    bool narrowed = false;  // the backup has some of the bytes only
  };
  // Units that one worker takes at a time, about kGroupBytes to copy.
  using Group = std::vector<Unit>;

  PoolOperation(Pool& pool, const char* what, const Progress& progress);

  // Ends the operation for good: another one may begin, however long this object lives.
  void end();
  // Begins the end of the operation; the time for which it was held counts for no phase. Throws kEnded when it has ended, kForked; `what`: what cannot be
  // done with it.
  void begin_end(const char* what);
  // Whether the driver may still be called: false in a forked child and at the end of the process.
  bool can_act() const;
  void lap(const char* phase);  // ends a phase of the report's times
  void finish_times();
  size_t threads(bool files) const;
  // Cuts the entries' chunks into groups; pieces of an entry are ordered and none crosses a chunk's end. Where chunks need not stay whole, groups
  // are small, so that the threads end together.
  std::vector<Group> group(const std::vector<size_t>& order, bool whole_chunks) const;
  // What a worker needs to move bytes, made when it first needs it.
  struct Mover {
    std::unique_ptr<Driver::Stream> stream;
    std::unique_ptr<StagingBuffer> staging;
  };
  void run(const std::vector<Group>& groups, size_t threads, const std::function<void(const Group&, Mover&)>& work);
  const Driver::Stream& stream_of(Mover& mover) const;
  const StagingBuffer& staging_of(Mover& mover) const;
  // Writes a piece's bytes to device memory. Host pieces are under way on the mover's stream when it returns; others are there.
  void restore(const Entry& entry, const BackupPiece& piece, Mover& mover) const;
  // Whether the device holds what the piece does, which is no kRebuild.
  bool is_same(const Entry& entry, const BackupPiece& piece, Mover& mover) const;
  // Maps memory at the chunk's address. Returns whether it is new; otherwise it has the bytes it had.
  bool attach(Allocation& allocation, size_t chunk) const;
  // Where memory returns only with its addresses: gives the range up and takes it again, when nothing of the allocation is mapped. Sets
  // `address_lost` when the range was taken by something else in between.
  void renew_address(Allocation& allocation) const;
  // Returns the allocations to the books; those that were freed meanwhile are destroyed.
  void settle(const std::function<void(Entry&, size_t index)>& set);
  // Lets nobody but the operation touch its memory any more, and waits for those who do.
  void await_transfers();
  void note_asleep();

  Pool& pool_;
  const std::shared_ptr<Pool> keep_alive_;
  const Progress progress_;
  std::vector<Entry> entries_;
  Report report_;
  std::atomic<uint64_t> bytes_done_{0};
  uint64_t bytes_in_all_ = 0;
  bool ended_ = false;  // its outcome is settled

 private:
  bool holds_slot_ = true;
  std::chrono::steady_clock::time_point start_, lap_;
  std::optional<std::chrono::steady_clock::time_point> held_since_;
};

class Sleep final : public PoolOperation {
 public:
  Sleep(Pool& pool, const SleepPlan& plan, const Progress& progress);
  ~Sleep() override;
  Report commit() override;
  void rollback() override;

 private:
  void choose(const SleepPlan& plan);
  void check_live_addresses(const SleepPlan& plan) const;  // books locked
  void check_sources() const;
  void take_room(const SleepPlan& plan);
  void verify();
  void work();
  void copy_out(const Group& group, Mover& mover);
  bool unmaps_last() const;
  void unmap(const Group& units);
  void release_all();
  std::vector<DiskPiece> disk_pieces() const;
  void undo();
  void wait_for_lagging_counter();

  const bool verifies_;
  std::shared_ptr<DiskFile> disk_;
  std::vector<bool> keep_;        // by entry
  std::vector<size_t> to_verify_;  // entries
  std::vector<std::shared_ptr<Backup>> replaced_;  // void, dropped before room is taken
};

class Wake final : public PoolOperation {
 public:
  Wake(Pool& pool, const std::optional<std::vector<std::string>>& tags, const Progress& progress);
  ~Wake() override;
  void hold() override;
  Report commit() override;
  void rollback() override;
  std::vector<uint64_t> rebuilds() const override;

 private:
  void choose(const std::optional<std::vector<std::string>>& tags);
  void check_backups() const;
  // Lets callbacks write the memory that they rebuild.
  void await_callbacks();
  void work();
  void fill_in(const Group& group, Mover& mover);
  // Reads back what was written, where the sleep asked for it.
  void verify();
  void undo();
};

}  // namespace hardpoint::memory
