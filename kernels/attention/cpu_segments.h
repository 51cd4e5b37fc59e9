// Segments of a call of many queries: where that of each query lies among the keys.
#pragma once

#include <unordered_map>
#include <vector>

#include "../cpu/torch_abi.h"
#include "cpu_flash.h"

namespace easytorch {

class Segments {
 public:
  // query_ids (B, T), key_ids (B, S): int64.
  Segments(const Tensor& query_ids, const Tensor& key_ids, int64_t batch, int64_t length, int64_t keys)
      : spans_(static_cast<size_t>(2 * batch * length)), queries_(read(query_ids, batch, length)),
        keys_(read(key_ids, batch, keys)) {
    for (int64_t b = 0; b < batch; ++b) find(queries_.data() + b * length, length, keys_.data() + b * keys, keys, b);
  }

  void give(FlashCall& call) const {
    call.spans = spans_.data();
    if (!contiguous_) call.query_ids = queries_.data(), call.key_ids = keys_.data();
  }

 private:
  struct Span {
    int64_t first, end, count;
  };

  static std::vector<int64_t> read(const Tensor& ids, int64_t batch, int64_t count) {
    require(ids.dim == 2 && ids.sizes[0] == batch && ids.sizes[1] == count && ids.dtype == aoti_torch_dtype_int64(),
            "flash: segment ids are (B, T) and (B, S), int64");
    std::vector<int64_t> found(static_cast<size_t>(batch * count));
    for (int64_t i = 0; i < batch * count; ++i) {
      const int64_t place = i / count * ids.strides[0] + i % count * ids.strides[1];
      found[static_cast<size_t>(i)] = static_cast<const int64_t*>(ids.data)[place];
    }
    return found;
  }

  void find(const int64_t* query_ids, int64_t length, const int64_t* key_ids, int64_t keys, int64_t b) {
    std::unordered_map<int64_t, Span> spans;
    Span* at = nullptr;
    for (int64_t j = 0; j < keys; ++j) {
      if (j == 0 || key_ids[j] != key_ids[j - 1]) at = &spans.try_emplace(key_ids[j], Span{j, j, 0}).first->second;
      at->end = j + 1, ++at->count;
    }
    Span span{};
    for (int64_t i = 0; i < length; ++i) {
      if (i == 0 || query_ids[i] != query_ids[i - 1]) {
        const auto found = spans.find(query_ids[i]);
        span = found == spans.end() ? Span{0, 0, 0} : found->second;
        contiguous_ = contiguous_ && span.count == span.end - span.first;
      }
      int64_t* const to = spans_.data() + 2 * (b * length + i);
      to[0] = span.first, to[1] = span.end;
    }
  }

  std::vector<int64_t> spans_, queries_, keys_;
  bool contiguous_ = true;  // a span holds keys of its segment alone
};

}  // namespace easytorch
