// Threads of the memory engine: a few for the time of one operation, which take numbered items in order until one of them fails, and one in the
// background.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace hardpoint::memory {

// One piece of work at a time behind the callers' backs.
class BackgroundThread {
 public:
  BackgroundThread() = default;
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;
  ~BackgroundThread() { wait(); }

  // Begins `work`, which must not throw, when what was begun before has ended; returns false where the system has no thread left.
  bool begin(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    join();
    try {
      thread_ = std::make_unique<std::thread>(std::move(work));
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }
  void wait() {
    if (left_) return;
    std::lock_guard lock(mutex_);
    join();
  }
  // For a forked child, which has no such thread, and perhaps the mutex as it was in use.
  void leave() {
    left_ = true;
    (void)thread_.release();
  }

 private:
  void join() {
    if (!thread_) return;
    thread_->join();
    thread_.reset();
  }
  std::atomic<bool> left_{false};
  std::mutex mutex_;  // guards thread_
  std::unique_ptr<std::thread> thread_;
};

// Runs work(item, worker) for every item below `items` on `threads` threads and waits; rethrows the first failure, after which no further item
// is begun. `watch`, when given, is called in the calling thread about fifty times a second; its exception cancels likewise.
// At the end, when everything is done, `watch` is called once more. Items are done by the calling thread where one thread is enough and nobody
// watches, or where the system has no thread left.
inline void run_workers(size_t threads, size_t items, const std::function<void(size_t item, size_t worker)>& work,
                        const std::function<void()>& watch) {
  std::atomic<size_t> next{0};
  std::atomic<bool> stopped{false};
  std::mutex mutex;  // guards failure and running
  std::exception_ptr failure;
  const auto fail = [&] {
    std::lock_guard lock(mutex);
    if (!failure) failure = std::current_exception();
    stopped = true;
  };
  const auto take_items = [&](size_t worker) {
    try {
      for (size_t item; !stopped && (item = next.fetch_add(1)) < items;) work(item, worker);
    } catch (...) {
      fail();
    }
  };
  threads = threads < items ? threads : items;
  if (threads <= 1 && !watch) {
    take_items(0);
  } else {
    size_t running = 0;
    std::condition_variable ended;
    std::vector<std::thread> helpers;
    helpers.reserve(threads);
    std::unique_lock lock(mutex);
    try {
      for (size_t worker = 0; worker < threads; ++worker) {
        helpers.emplace_back([&, worker] {
          take_items(worker);
          std::lock_guard lock(mutex);
          if (--running == 0) ended.notify_one();
        });
        ++running;
      }
    } catch (const std::system_error&) {
      // Those that were started do everything.
    }
    if (helpers.empty()) {
      lock.unlock();
      take_items(0);
      lock.lock();
    }
    while (!ended.wait_for(lock, std::chrono::milliseconds(20), [&] { return running == 0; })) {
      if (!watch || stopped) continue;
      lock.unlock();
      try {
        watch();
      } catch (...) {
        fail();
      }
      lock.lock();
    }
    lock.unlock();
    for (std::thread& helper : helpers) helper.join();
    if (watch && !failure) watch();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace hardpoint::memory
