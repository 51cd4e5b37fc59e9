// What attention of many queries has beside the rules of scores: segments, and dropout (dropout.py).
#pragma once

#include "../cpu/vector.h"
#include "cpu_flash.h"

namespace {

inline bool segments_meet(const int64_t* a, int64_t count_a, const int64_t* b, int64_t count_b) {
  int64_t low_a = INT64_MAX, high_a = INT64_MIN, low_b = INT64_MAX, high_b = INT64_MIN;
  for (int64_t i = 0; i < count_a; ++i) low_a = a[i] < low_a ? a[i] : low_a, high_a = a[i] > high_a ? a[i] : high_a;
  for (int64_t i = 0; i < count_b; ++i) low_b = b[i] < low_b ? b[i] : low_b, high_b = b[i] > high_b ? b[i] : high_b;
  return low_a <= high_b && low_b <= high_a;
}

// Whether some of the queries [query, query + queries) may see one of the keys [key, key + keys) as far as segments go,
// and whether all see all of them.
struct Reach {
  bool some, all;
};
inline Reach reach_of(const FlashCall& c, int64_t b, int64_t query, int64_t queries, int64_t key, int64_t keys) {
  if (c.spans == nullptr) return {true, true};
  const int64_t* const spans = c.spans + 2 * (b * c.length + query);
  Reach reach{false, c.key_ids == nullptr};
  for (int64_t i = 0; i < queries; ++i) {
    reach.some = reach.some || (spans[2 * i] < key + keys && key < spans[2 * i + 1]);
    reach.all = reach.all && spans[2 * i] <= key && key + keys <= spans[2 * i + 1];
  }
  if (reach.some && c.key_ids != nullptr) {
    reach.some = segments_meet(c.query_ids + b * c.length + query, queries, c.key_ids + b * c.keys + key, keys);
  }
  return reach;
}

inline bool same_segment(const FlashCall& c, int64_t b, int64_t i, int64_t j) {
  const int64_t* const span = c.spans + 2 * (b * c.length + i);
  return span[0] <= j && j < span[1] && (c.key_ids == nullptr || c.query_ids[b * c.length + i] == c.key_ids[b * c.keys + j]);
}

// Integers of 32 bits, as many as a vector has numbers.
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));

inline Words words(uint32_t value) { return Words{} + value; }
inline Words counted_from(uint32_t first) {
  Words w = words(first);
  for (int i = 0; i < WIDTH; ++i) w[i] += static_cast<uint32_t>(i);
  return w;
}

// kernels/random/counter.py
template <class Number>
inline Number mix(Number x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}
inline uint32_t hash_of_head(const FlashCall& c, int64_t b, int64_t h) {
  return mix(c.seed ^ static_cast<uint32_t>(b * c.heads + h) * 0x9E3779B1u);
}
template <class Number>
inline Number hash_of_query(uint32_t head, Number i) { return mix(head ^ i * 0x85EBCA77u); }

// What weights are multiplied by, of queries and keys that differ in one of both.
template <class Number>
inline Floats kept(const FlashCall& c, Number queries, Words keys) {
  const Words hash = mix(queries ^ keys * 0xC2B2AE3Du);
  uint32_t bits;
  memcpy(&bits, &c.kept, sizeof bits);
  const Words numbers = reinterpret_cast<Words>(hash >= c.dropped) & bits;
  float found[WIDTH];
  memcpy(found, &numbers, sizeof found);
  return load(found);
}

}  // namespace
