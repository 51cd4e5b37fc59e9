// Rows of any dtype as float32, and a tensor with a contiguous last dimension as the kernels see it.
#pragma once

#include "numbers.h"
#include "strided.h"

namespace {

inline const void* number_at(const void* data, int64_t index, int32_t dtype) {
  return static_cast<const char*>(data) + index * (dtype == FLOAT32 ? 4 : 2);
}
inline void* number_at(void* data, int64_t index, int32_t dtype) {
  return static_cast<char*>(data) + index * (dtype == FLOAT32 ? 4 : 2);
}

// Loads a vector from `p`, of which `count` elements are valid; the rest is zero.
inline Floats read_vector(const void* p, int64_t count, int32_t dtype) {
  switch (dtype) {
    case BFLOAT16: return read_some<NumbersBFloat16>(static_cast<const uint16_t*>(p), count);
    case FLOAT16: return read_some<NumbersFloat16>(static_cast<const uint16_t*>(p), count);
    default: return read_some<NumbersFloat32>(static_cast<const float*>(p), count);
  }
}
inline void write_vector(void* p, int64_t count, int32_t dtype, Floats v) {
  switch (dtype) {
    case BFLOAT16: return write_some<NumbersBFloat16>(static_cast<uint16_t*>(p), count, v);
    case FLOAT16: return write_some<NumbersFloat16>(static_cast<uint16_t*>(p), count, v);
    default: return write_some<NumbersFloat32>(static_cast<float*>(p), count, v);
  }
}

// `count` elements as float32, padded with zeros to a full vector.
inline void read_row(const void* from, int64_t count, int32_t dtype, float* to) {
  for (int64_t i = 0; i < count; i += WIDTH) {
    store(to + i, read_vector(number_at(from, i, dtype), count - i, dtype));
  }
}
inline void write_row(void* to, int64_t count, int32_t dtype, const float* from) {
  for (int64_t i = 0; i < count; i += WIDTH) write_vector(number_at(to, i, dtype), count - i, dtype, load(from + i));
}

inline const void* row_of(const Strided& t, int64_t b, int64_t token, int64_t head) {
  return number_at(t.data, b * t.of_batch + token * t.of_token + head * t.of_head, t.dtype);
}

// Prefetches a row: each is on another page, which the hardware prefetcher does not cross.
inline void prefetch_row(const void* row, int64_t count, int32_t dtype) {
  const int64_t bytes = count * (dtype == FLOAT32 ? 4 : 2);
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(row) + at, 0, 3);
}

}  // namespace
