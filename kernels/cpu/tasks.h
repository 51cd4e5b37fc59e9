// Tasks of unequal length, which threads take one by one, each with memory of its own.
#pragma once

#include <atomic>
#include <memory>
#include <new>

#include "torch_abi.h"

namespace easytorch {

// Work of one task, in steps of a vector, below which another thread would cost more than it saves.
constexpr int64_t SMALLEST_TASK = 1 << 13;

// body(task, scratch) for every task; scratch: `numbers` of float32 that are not set. `each`: the work of one task.
template <class Body>
inline void run_tasks(int64_t tasks, int64_t each, int64_t numbers, const Body& body) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> short_of_memory{false};
  parallel_for(tasks, 1 + SMALLEST_TASK / (each + 1), [&](int64_t, int64_t) {
    const std::unique_ptr<float[]> scratch(new (std::nothrow) float[static_cast<size_t>(numbers)]);
    if (scratch == nullptr) short_of_memory = true;
    for (int64_t task = next++; task < tasks && scratch != nullptr; task = next++) body(task, scratch.get());
  });
  require(!short_of_memory, "not enough memory for a task");
}

}  // namespace easytorch
