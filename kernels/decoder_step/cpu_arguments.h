// The arguments of an operator in their order: as its stack has them, or in lists, of which one call has those of many layers.
#pragma once

#include <vector>

#include "../cpu/torch_abi.h"

namespace easytorch {

// Of a stack. Tensors are references that their receiver owns.
class StackReader {
 public:
  static constexpr bool ALL_FIELDS = true;  // also those of codes where a weight is dense
  explicit StackReader(const uint64_t* stack) : at_(stack) {}
  uint64_t tensor() { return *at_++; }
  int64_t integer() { return static_cast<int64_t>(*at_++); }
  double number() { return number_of(*at_++); }
  // The next `count`, for a reader of its own.
  const uint64_t* skip(int count) {
    const uint64_t* const from = at_;
    at_ += count;
    return from;
  }

 private:
  const uint64_t* at_;
};

// An argument of type "int[]" or "float[]".
class ValueList {
 public:
  ValueList() = default;
  explicit ValueList(uint64_t list) : values_(values_of(list)) {}
  uint64_t next() {
    require(at_ < values_.size(), "a step over layers: a list is too short");
    return values_[at_++];
  }
  bool at_end() const { return at_ == values_.size(); }

 private:
  const std::vector<uint64_t> values_;
  size_t at_ = 0;
};

// An argument of type "Tensor[]": it owns the references that nobody has taken.
class TensorList : public ValueList {
 public:
  explicit TensorList(uint64_t list) : ValueList(list) {}
  ~TensorList() {
    while (!at_end()) aoti_torch_delete_tensor_object(reinterpret_cast<AtenTensorHandle>(next()));
  }
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;
};

// Of lists, each in the order of its type.
class ListReader {
 public:
  static constexpr bool ALL_FIELDS = false;
  ListReader(uint64_t tensors, uint64_t integers) : tensors_(tensors), integers_(integers) {}
  ListReader(uint64_t tensors, uint64_t integers, uint64_t numbers)
      : tensors_(tensors), integers_(integers), numbers_(numbers) {}
  uint64_t tensor() { return tensors_.next(); }
  int64_t integer() { return static_cast<int64_t>(integers_.next()); }
  double number() { return number_of(numbers_.next()); }
  bool at_end() const { return tensors_.at_end() && integers_.at_end() && numbers_.at_end(); }

 private:
  TensorList tensors_;
  ValueList integers_, numbers_;
};

}  // namespace easytorch
