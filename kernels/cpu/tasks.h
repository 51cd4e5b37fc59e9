// Dynamic scheduling: threads take tasks of unequal cost one by one, each thread with its own scratch memory.
#pragma once

#include <atomic>

#include "buffer.h"
#include "torch_abi.h"

namespace easytorch {

// The cost of a task, in vector operations, below which another thread costs more than it saves.
constexpr int64_t SMALLEST_TASK = 1 << 13;

// body(task, scratch) for every task; scratch: `numbers` uninitialized floats, of whole lines. `each`: the cost of one task.
template <class Body>
inline void run_tasks(int64_t tasks, int64_t each, int64_t numbers, const Body& body) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> short_of_memory{false};
  parallel_for(tasks, 1 + SMALLEST_TASK / (each + 1), [&](int64_t, int64_t) {
    const Buffer memory = lines_or_null(numbers * static_cast<int64_t>(sizeof(float)));
    float* const scratch = reinterpret_cast<float*>(memory.get());
    if (scratch == nullptr) short_of_memory = true;
    for (int64_t task = next++; task < tasks && scratch != nullptr; task = next++) body(task, scratch);
  });
  require(!short_of_memory, "not enough memory for a task");
}

}  // namespace easytorch
