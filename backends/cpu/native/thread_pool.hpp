// Work-sharing thread pool of the CPU backend, and the only one in it.
//
// parallel_for publishes [0, n) in chunks of `grain`; the calling thread takes chunks itself, and returns as soon as all chunks
// are finished. It waits only for helpers that hold a chunk, never for one that has not started: a helper that the operating
// system has not scheduled costs nothing (OpenMP's fork-join collapses there). Helpers spin for a short while after a job, so
// that the hundreds of small jobs of one decode step need no system call, and then sleep. A nested call runs inline.
// Jobs of several calling threads are serialised. Any of them may change the number of threads between two jobs: a job with something
// for each thread says how many threads it has that for.
#pragma once
#include <climits>
#include <cstdint>
#include <type_traits>

namespace hp {

class ThreadPool {
 public:
  // `fn(context, begin, end, thread)`: items [begin, end); thread is in [0, min(num_threads(), most)), the caller is 0.
  using Body = void (*)(void* context, int64_t begin, int64_t end, int thread);

  static ThreadPool& global();

  void set_num_threads(int n);  // caller included; at least 1
  int num_threads() const;
  void run(int64_t n, int64_t grain, Body body, void* context, int most);

  // On at most `most` threads.
  template <class F>
  void parallel_for(int64_t n, int64_t grain, F&& f, int most = INT_MAX) {
    using Fn = std::remove_reference_t<F>;
    run(n, grain, [](void* c, int64_t b, int64_t e, int t) { (*static_cast<Fn*>(c))(b, e, t); },
        const_cast<void*>(static_cast<const void*>(&f)), most);
  }

 private:
  ThreadPool();
  ~ThreadPool();
  struct State;
  State* state_;
};

}  // namespace hp
