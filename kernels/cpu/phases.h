// Work in phases inside one parallel region. A step of a model needs it: a region for each product would wait for its
// threads ten times a layer.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "torch_abi.h"

namespace easytorch {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Tasks with work stealing: each thread takes those of its own range in order, so that it reads memory in order, and then
// the rest of the others'. It waits only for tasks that another thread has begun, so a thread that is late or never starts
// does not block the others.
class Phase {
 public:
  Phase(int64_t tasks, int64_t threads) : tasks_(tasks), threads_(threads), lines_(new Line[static_cast<size_t>(threads)]) {
    for (int64_t thread = 0; thread < threads; ++thread) lines_[thread].next = first(thread);
  }

  // body(task) for some of the tasks; returns when all are done, also those of other threads. It must not throw.
  template <class Body>
  void run(int64_t thread, const Body& body) {
    int64_t done = 0;
    for (int64_t i = 0; i < threads_; ++i) {
      const int64_t of = (thread + i) % threads_, end = first(of + 1);
      std::atomic<int64_t>& next = lines_[of].next;
      while (next.load(std::memory_order_relaxed) < end) {
        const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
        if (task >= end) break;
        body(task);
        ++done;
      }
    }
    done_.fetch_add(done, std::memory_order_acq_rel);
    for (int64_t turn = 0; done_.load(std::memory_order_acquire) < tasks_; ++turn) {
      if (turn < SPINS) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  // Turns of waiting after which the core is given to another thread, if there is one: about 20 us.
  static constexpr int64_t SPINS = 1000;
  struct alignas(64) Line {
    std::atomic<int64_t> next{0};
  };
  int64_t first(int64_t thread) const { return tasks_ * thread / threads_; }

  const int64_t tasks_, threads_;
  std::unique_ptr<Line[]> lines_;
  alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace easytorch
