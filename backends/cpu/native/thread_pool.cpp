#include "thread_pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "pause.hpp"

namespace hp {
namespace {

constexpr auto kSpin = std::chrono::microseconds(80);
constexpr int kPausesPerClockRead = 32;
constexpr int kPausesBeforeYield = 4000;

// Index of this thread in the job it is working on; -1 outside a job.
thread_local int t_thread_index = -1;

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

int default_num_threads() {
  const char* text = std::getenv("HARDPOINT_CPU_THREADS");
  if (!text || !*text) return usable_cores();
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value < 1 || value > 4096)
    throw std::invalid_argument(std::string("HARDPOINT_CPU_THREADS must be an integer from 1 to 4096, not '") + text + "'");
  return static_cast<int>(value);
}

void run_inline(int64_t n, int64_t grain, ThreadPool::Body body, void* context, int thread) {
  for (int64_t begin = 0; begin < n; begin += grain) body(context, begin, std::min(n, begin + grain), thread);
}

}  // namespace

// A job is open while `ticket` says that chunks remain. Whoever decrements the remainder owns one chunk, and only an owner
// reads the job's fields; the caller does not touch them again before `done` has counted every chunk. A helper that arrives
// late sees a remainder of zero (or another job's number) and leaves without a trace, so nobody waits for it. `most` is stored before
// the ticket: a thread that has seen a ticket, then `most`, and can still take a chunk of that ticket, has seen that job's.
struct ThreadPool::State {
  struct alignas(64) Job {
    Body body = nullptr;
    void* context = nullptr;
    int64_t n = 0;
    int64_t grain = 1;
    uint32_t chunks = 0;
  };

  explicit State(int threads) : num_threads(threads) {}

  alignas(64) std::atomic<uint64_t> ticket{0};  // job number << 32 | chunks not yet taken
  std::atomic<int> most{INT_MAX};               // threads that may take part in the job
  alignas(64) std::atomic<uint32_t> done{0};
  Job job;

  std::mutex run_mutex;  // held by the calling thread for the length of its job; guards job, helpers, job_number, stopped
  std::vector<std::thread> helpers;
  uint32_t job_number = 0;
  bool stopped = false;
  std::atomic<int> num_threads;

  std::mutex sleep_mutex;  // guards the decision to sleep: `sleepers` changes, and is re-checked against `ticket`, under it
  std::condition_variable wake;
  std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};

  bool work_available(int thread) const {
    return static_cast<uint32_t>(ticket.load(std::memory_order_seq_cst)) != 0 && thread < most.load(std::memory_order_seq_cst);
  }

  // Takes and runs chunks until none remain.
  void work(int thread) {
    t_thread_index = thread;
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(seen) != 0 && thread < most.load(std::memory_order_acquire)) {
      if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      const int64_t chunk = job.chunks - static_cast<uint32_t>(seen);
      const int64_t begin = chunk * job.grain;
      job.body(job.context, begin, std::min(job.n, begin + job.grain), thread);
      done.fetch_add(1, std::memory_order_release);
      seen = ticket.load(std::memory_order_acquire);
    }
    t_thread_index = -1;
  }

  bool spin_for_work(int thread) const {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < kPausesPerClockRead; ++i) {
        if (work_available(thread) || stop.load(std::memory_order_relaxed)) return true;
        pause_cpu();
      }
    } while (std::chrono::steady_clock::now() < deadline);
    return false;
  }

  void helper_main(int thread) {
    pthread_setname_np(pthread_self(), ("hp-cpu-" + std::to_string(thread)).c_str());
    while (!stop.load(std::memory_order_acquire)) {
      if (!spin_for_work(thread)) {
        std::unique_lock<std::mutex> lock(sleep_mutex);
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        wake.wait(lock, [&] { return work_available(thread) || stop.load(std::memory_order_seq_cst); });
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
      }
      work(thread);
    }
  }

  // Requires run_mutex. Helpers take no signals: those belong to the application's threads.
  void start_helpers() {
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    try {
      while (static_cast<int>(helpers.size()) + 1 < num_threads.load(std::memory_order_relaxed)) {
        const int thread = static_cast<int>(helpers.size()) + 1;
        helpers.emplace_back([this, thread] { helper_main(thread); });
      }
    } catch (const std::system_error&) {
      // The system refuses more threads: the caller and the helpers that exist do all the work.
      num_threads.store(static_cast<int>(helpers.size()) + 1);
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  }

  // Requires run_mutex.
  void stop_helpers() {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex);
      stop.store(true, std::memory_order_seq_cst);
    }
    wake.notify_all();
    for (auto& helper : helpers) helper.join();
    helpers.clear();
    stop.store(false);
  }

  // `all`: not every helper takes part, and one that is woken alone might be none of those that do.
  void wake_helpers(uint32_t chunks, bool all) {
    const int asleep = sleepers.load(std::memory_order_seq_cst);
    if (asleep == 0) return;
    { std::lock_guard<std::mutex> lock(sleep_mutex); }
    if (all || chunks > static_cast<uint32_t>(asleep)) {
      wake.notify_all();
    } else {
      for (uint32_t i = 1; i < chunks; ++i) wake.notify_one();
    }
  }

  void run(int64_t n, int64_t grain, Body body, void* context, int threads) {
    std::lock_guard<std::mutex> lock(run_mutex);
    if (n <= grain || stopped || std::min(threads, num_threads.load(std::memory_order_relaxed)) == 1) {
      t_thread_index = 0;
      run_inline(n, grain, body, context, 0);
      t_thread_index = -1;
      return;
    }
    if (static_cast<int>(helpers.size()) + 1 < num_threads.load(std::memory_order_relaxed)) start_helpers();
    const uint32_t chunks = static_cast<uint32_t>((n + grain - 1) / grain);
    job.body = body;
    job.context = context;
    job.n = n;
    job.grain = grain;
    job.chunks = chunks;
    done.store(0, std::memory_order_relaxed);
    most.store(threads, std::memory_order_seq_cst);
    ticket.store(uint64_t{++job_number} << 32 | chunks, std::memory_order_seq_cst);
    wake_helpers(chunks, threads <= static_cast<int>(helpers.size()));
    work(0);
    for (int pauses = 0; done.load(std::memory_order_acquire) != chunks; ++pauses) {
      // A helper that holds a chunk may have lost its core to another process: give ours up for it.
      if (pauses < kPausesBeforeYield) pause_cpu();
      else std::this_thread::yield();
    }
  }
};

ThreadPool::ThreadPool() : state_(new State(default_num_threads())) {
  // A forked child has none of the helpers, and may have inherited locks that nobody will release: it starts from a new
  // state. The old one is left alone, for its mutexes and threads cannot be destroyed.
  pthread_atfork(nullptr, nullptr, [] {
    ThreadPool& pool = global();
    pool.state_ = new State(pool.state_->num_threads.load(std::memory_order_relaxed));
  });
}

// Runs at exit. The state stays, for a thread that nobody joined may still call in; its jobs then run inline.
ThreadPool::~ThreadPool() {
  std::lock_guard<std::mutex> lock(state_->run_mutex);
  state_->stop_helpers();
  state_->stopped = true;
}

ThreadPool& ThreadPool::global() {
  static ThreadPool pool;
  return pool;
}

void ThreadPool::set_num_threads(int n) {
  if (n < 1 || n > 4096) throw std::invalid_argument("number of threads must be from 1 to 4096, not " + std::to_string(n));
  if (t_thread_index >= 0) throw std::logic_error("the number of threads cannot change inside a parallel job");
  std::lock_guard<std::mutex> lock(state_->run_mutex);
  if (n == state_->num_threads.load()) return;
  state_->stop_helpers();
  state_->num_threads.store(n);
}

int ThreadPool::num_threads() const { return state_->num_threads.load(std::memory_order_relaxed); }

void ThreadPool::run(int64_t n, int64_t grain, Body body, void* context, int most) {
  if (n <= 0) return;
  // The number of chunks must fit the ticket's 32 bits.
  grain = std::max({grain, int64_t{1}, (n + INT32_MAX - 1) / INT32_MAX});
  if (t_thread_index >= 0) return run_inline(n, grain, body, context, t_thread_index);
  state_->run(n, grain, body, context, most);
}

}  // namespace hp
