// Work shared between the thread that asks for it and those of XLA's own pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

// Calls work(i) for every i below `count`, in this thread and up to `helpers` of the pool's, and returns when all have
// ended.
//
// The caller may be a thread of the pool itself, so it never waits for one to begin: it takes what nobody has taken,
// and waits for what others are at. A helper that comes late finds nothing left and touches nothing but the counter.
template <typename Work>
void ForEach(xla::ffi::ThreadPool& pool, int64_t count, int64_t helpers, const Work& work) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  auto take = [progress, count, &work] {
    for (int64_t i; (i = progress->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      work(i);
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  helpers = std::min({helpers, count - 1, pool.num_threads() - 1});
  for (int64_t i = 0; i < helpers; i++) pool.Schedule(decltype(take)(take));
  take();
  while (progress->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

}  // namespace jaxserve
