// The virtual-memory engine: the books of one engine's memory on one device, and its sleep and wake as transactions.
//
// Memory of an allocation comes and goes at an address that stays. `allocate` and `free` may be called at any time from any thread, also while an
// operation (sleep, wake, resize) is under way; operations follow one another. No Python, nothing printed, every failure a MemoryFault.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "memory_allocation.hpp"
#include "memory_arena.hpp"
#include "memory_driver.hpp"

namespace hardpoint::memory {

struct SleepPlan {
  std::optional<std::vector<std::string>> tags;  // none: all
  std::unordered_map<std::string, Policy> policies;
  std::vector<std::string> keep;
  Tier tier = Tier::kHost;
  bool verify = false;
  std::map<uint64_t, std::vector<Range>> live;  // by address of the allocation or block: the bytes of it that count
  std::optional<uint64_t> host_budget, disk_budget;
  std::string disk_directory;
};

// Called now and then with (bytes done, bytes in all); an exception of it cancels the operation, which is undone.
using Progress = std::function<void(uint64_t, uint64_t)>;

struct Report {
  uint64_t preserved = 0, discarded = 0, skipped = 0;
  uint64_t unmapped = 0;  // device bytes given back, or taken on wake
  uint64_t tiers[3] = {};
  uint64_t free_before = 0, free_after = 0;
  uint64_t retained = 0;  // bytes whose release the driver refused: kept in the books, released later
  bool disk_direct = true;
  std::vector<std::pair<std::string, double>> seconds;
  std::vector<std::string> still_asleep;
};

struct TagStats {
  std::string tag;
  uint64_t allocated = 0, mapped = 0, backed_up = 0, allocations = 0, sourced = 0;
  bool asleep = false;
};

struct Stats {
  std::vector<TagStats> tags;
  uint64_t peak_allocated = 0;
  uint64_t reserved = 0;                   // bytes of addresses
  uint64_t host_held = 0, host_used = 0;   // bytes of the host arena, and of backups in it
  uint64_t disk_used = 0;
  uint64_t unreturned = 0;  // bytes of freed memory that the driver has not taken back yet
};

class Operation;

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  explicit Pool(const hp_driver* table);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  const Driver& driver() const { return driver_; }
  // Throws kClosed, kForked.
  void check_usable(const char* what) const;
  // Makes tags known that no memory has yet.
  void know_tags(const std::vector<std::string>& tags);

  // Returns the address of an allocation of its own. `capacity` (0, or at least `size`) reserves addresses to grow into.
  uint64_t allocate(size_t size, const std::string& tag, Policy policy, size_t capacity = 0);
  // As `allocate`, small sizes cut from a shared allocation of the same tag and policy, where there is memory for one.
  uint64_t allocate_block(size_t size, const std::string& tag, Policy policy);
  // Gives back what either returned; where bytes of it are being copied, when that has ended. Throws kForeign. Memory that the driver does not
  // take back stays in the books and is tried again.
  void free(uint64_t address);
  // Grows or shrinks an allocation with capacity; bytes in [0, min(old, new)) stay. Throws kInvalid, kAsleep, kOutOfMemory.
  void resize(uint64_t address, size_t size);
  bool is_asleep(uint64_t address) const;

  // Copies between an awake allocation and host memory, to its end (a block's, where it is cut into blocks). Callbacks of a wake may, too. The memory
  // stays until the copy has ended: operations wait for it.
  void read(uint64_t address, void* target, size_t size);
  void write(uint64_t address, const void* source, size_t size);

  void declare_source(uint64_t address, std::vector<Source> sources);
  std::shared_ptr<const SourceFile> open_source(const std::string& path);
  // Callbacks that a declared source or a backup names.
  std::vector<uint64_t> callbacks() const;
  void mark_written(const std::vector<std::string>& tags);
  void discard_backup(const std::vector<std::string>& tags);
  void read_backup(uint64_t address, void* target, size_t size) const;
  void prepare_host(const SleepPlan& plan);
  // Pinned host memory for its owner's own use, in no book: `size` bytes in whole pages. Null where the driver pins none. With its last owner it
  // waits for the device and goes; a forked child, and the end of the process, leave it. Throws kBudgetExceeded, kDriverCall.
  std::shared_ptr<std::byte> pinned_host(size_t size);

  // Runs a sleep up to the point where only giving memory back is left. The operation is ended by its commit or rollback. Meanwhile those of other
  // threads wait, or are refused once it is held.
  std::unique_ptr<Operation> begin_sleep(const SleepPlan& plan, const Progress& progress);
  // Runs a wake up to the point where only callbacks (`Operation::rebuilds`) are left.
  std::unique_ptr<Operation> begin_wake(const std::optional<std::vector<std::string>>& tags, const Progress& progress);

  Stats stats() const;
  // Gives host memory without a backup back.
  void trim();
  // Frees everything that nobody uses; memory in use stays until it is freed, nothing new is handed out. Does nothing in a forked child.
  void close();
  // Drops the backups of a closed pool and their memory, but for those of an operation that has not ended.
  void drop_backups();
  // The process ends: removes files and stops threads, and makes every later call of `free` a no-op without a driver call.
  void abandon();

 private:
  friend class PoolOperation;
  friend class Sleep;
  friend class Wake;

  class Transfer;

  struct Tag {
    std::string name;
    uint64_t writes = 0;
  };

  std::string tag_name(const Allocation& allocation) const;
  bool is_forked() const;
  void check_process(const char* what) const;  // throws kForked, before a mutex is touched that the fork may have copied in use
  uint32_t tag_id(const std::string& tag);  // books locked
  std::vector<bool> selected(const std::optional<std::vector<std::string>>& tags) const;  // books locked; throws kUnknownTag
  Allocation* find(uint64_t address) const;                                               // books locked
  Allocation& need(uint64_t address) const;                                               // books locked; throws kForeign
  // The allocation, when `size` bytes from `address` on may be copied now. Books locked; throws kForeign, kAsleep, kInvalid.
  Allocation& transferable(uint64_t address, size_t size, const char* what) const;
  // Waits until no byte of an allocation that admits no new transfer is being copied. Books locked.
  void await_transfers(std::unique_lock<std::mutex>& lock, const Allocation& allocation);
  // Runs copies on a stream to their end.
  void copy(const std::function<void(uint64_t stream)>& queue) const;
  uint64_t generation(const Allocation& allocation) const { return tags_[allocation.tag].writes + allocation.writes; }
  std::unique_ptr<Allocation> make(size_t size, uint32_t tag, Policy policy, size_t capacity);
  std::unique_ptr<Allocation> take_memory(size_t size, uint32_t tag, Policy policy, size_t capacity);
  std::string free_memory_text() const;
  // Takes memory whose addresses are in no book. Those of a lost allocation may be free again for the system, but its bytes are still found by
  // them; what lands there is held until other memory was taken, and given back.
  std::unique_ptr<Allocation> beside_lost_ones(const std::function<std::unique_ptr<Allocation>()>& take);
  uint64_t insert(std::unique_ptr<Allocation> allocation);
  void count_allocated(int64_t bytes);  // books locked
  // Gives all memory and addresses of an allocation back; returns false, with what is left still in it, when the driver refuses.
  bool destroy(Allocation& allocation) noexcept;
  void defer_release(std::unique_ptr<Allocation> allocation);
  void retry_unreturned();
  // Gives backups up. Removing large files takes long and nobody waits for it: a thread does it.
  void drop(std::vector<std::shared_ptr<Backup>> backups);
  std::unique_ptr<DiskFile> disk_file(const SleepPlan& plan, uint64_t bytes, size_t pieces);

  // Waits for the operation under way; throws kBusy when that is this thread's own, or is held.
  void begin_operation(const char* what);
  void hold_operation();
  void check_not_held(const char* what);
  void end_operation();

  const int fork_generation_;
  Driver driver_;
  HostArena arena_;
  std::atomic<bool> closed_{false}, abandoned_{false};

  mutable std::mutex books_;  // guards everything down to the next comment; never held during a driver call or a callback
  std::vector<Tag> tags_;
  std::unordered_map<std::string, uint32_t> tag_ids_;
  std::map<uint64_t, std::unique_ptr<Allocation>> allocations_;  // by address; one in kSaving or kRestoring belongs to the operation
  std::vector<std::unique_ptr<Allocation>> unreturned_;
  std::map<std::string, std::weak_ptr<const SourceFile>> source_files_;
  std::condition_variable transfers_ended_;  // of some allocation
  uint64_t allocated_ = 0, peak_allocated_ = 0;
  std::map<std::string, std::shared_ptr<DiskStore>> disks_;  // by directory

  BackgroundThread dropping_;

  std::mutex operation_mutex_;  // guards the next three: one operation at a time
  std::condition_variable operation_changed_;  // ended or held
  bool operating_ = false, held_ = false;
  std::thread::id operator_;
};

// A sleep or wake between its work and its end. Dropped without either, it is rolled back.
class Operation {
 public:
  virtual ~Operation() = default;
  // Says that its end is long in coming, for others vote on it: operations that would wait for it throw kBusy instead, and its memory is unowned.
  // To be called when callbacks have run.
  virtual void hold() = 0;
  // Ends it for good and returns what was done. No call of the driver makes it fail.
  virtual Report commit() = 0;
  // Restores the state before it. A fault names what could not be restored; that memory is asleep with its backup, and a wake tries again.
  virtual void rollback() = 0;
  // Callbacks that must have run before a wake's commit, each once.
  virtual std::vector<uint64_t> rebuilds() const { return {}; }
};

}  // namespace hardpoint::memory
