// Shares work between the calling thread and XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

// The CPU that this thread runs on; -1 if unknown.
inline int OurCpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves this thread to another CPU if it runs on `cpu` and may run elsewhere.
inline void Leave([[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t all;
  if (sched_getcpu() != cpu || sched_getaffinity(0, sizeof all, &all) != 0) return;
  cpu_set_t others = all;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
  sched_setaffinity(0, sizeof all, &all);
#endif
}

// Calls work(i) for every i below `count`, in this thread and up to `helpers` of the pool's, and returns when all have
// ended.
//
// The caller may itself be a thread of the pool, so it never waits for a helper to begin: it takes the remaining items,
// and then waits for those that helpers are working on. A late helper finds none left and touches only the counter.
//
// The system may wake helpers on the caller's CPU while another one is idle, and leave them there for milliseconds. So
// the caller yields once, and a helper that runs on the caller's CPU moves to another.
//
// The caller sees all that work has stored, past the caches too (see `StoreResults`).
template <typename Work>
void ForEach(xla::ffi::ThreadPool& pool, int64_t count, int64_t helpers, const Work& work) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  auto take = [progress, count, &work] {
    int64_t taken = 0;
    for (int64_t i; (i = progress->next.fetch_add(1, std::memory_order_relaxed)) < count; taken++) work(i);
#if defined(__SSE__)
    _mm_sfence();
#endif
    progress->done.fetch_add(taken, std::memory_order_release);
  };
  helpers = std::min({helpers, count - 1, pool.num_threads() - 1});
  const int cpu = OurCpu();
  for (int64_t i = 0; i < helpers; i++)
    pool.Schedule([take, cpu] {
      Leave(cpu);
      take();
    });
  if (helpers > 0) std::this_thread::yield();
  take();
  while (progress->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

// Outputs of a kernel in an item of `ForEach`, a multiple of `least`. An item is a long run of memory, up to `run` bytes,
// which prefetchers follow, but every thread has several, so that all end at about the same time.
inline int64_t OutputsOfItem(int64_t out, int64_t bytes_of_output, int64_t least, const xla::ffi::ThreadPool& pool,
                             int64_t run = 1 << 18) {
  constexpr int64_t kOfThread = 4;
  const int64_t most = std::min(run / bytes_of_output, out / (kOfThread * pool.num_threads()));
  return std::max<int64_t>(1, most / least) * least;
}

}  // namespace jaxserve
