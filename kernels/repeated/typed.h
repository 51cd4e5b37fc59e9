// Operators that are called by their type in C++: a stack of arguments takes up to 4 % of a call of few numbers.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstring>
#include <functional>
#include <vector>

#include "tensors.h"

namespace easytorch {

// An argument of an operator: a tensor of the call, the result of the operator before, or what is always the same.
struct Argument {
  enum Kind { CONSTANT, GIVEN, RESULT } kind;
  int64_t place;  // of a given tensor
  c10::IValue value;
};

using Typed = std::function<at::Tensor(const at::Tensor*)>;

namespace typed {

using Optional = std::optional<at::Tensor>;
using Linear = at::Tensor(const at::Tensor&, const at::Tensor&, const Optional&);
using Flash = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, double, bool,
                                                 const Optional&, std::optional<double>);

inline bool given(const std::vector<Argument>& arguments, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (arguments[i].kind != Argument::GIVEN || arguments[i].place != static_cast<int64_t>(i)) return false;
  }
  return true;
}

inline bool none(const Argument& argument) { return argument.kind == Argument::CONSTANT && argument.value.isNone(); }

inline Typed linear(const c10::OperatorHandle& handle, const std::vector<Argument>& arguments) {
  if (arguments.size() != 3 || !given(arguments, 2)) return {};
  const auto call = handle.typed<Linear>();
  if (none(arguments[2])) return [call](const at::Tensor* of) { return call.call(of[0], of[1], {}); };
  if (!given(arguments, 3)) return {};
  return [call](const at::Tensor* of) { return call.call(of[0], of[1], of[2]); };
}

inline Typed flash(const c10::OperatorHandle& handle, const std::vector<Argument>& arguments) {
  if (arguments.size() != 7 || !given(arguments, 3) || !arguments[3].value.isDouble() || !arguments[4].value.isBool() ||
      !none(arguments[5]) || !(none(arguments[6]) || arguments[6].value.isDouble())) {
    return {};
  }
  const auto call = handle.typed<Flash>();
  const double dropout = arguments[3].value.toDouble();
  const bool causal = arguments[4].value.toBool();
  const std::optional<double> scale = arguments[6].value.toOptional<double>();
  return [=](const at::Tensor* of) { return std::get<0>(call.call(of[0], of[1], of[2], dropout, causal, {}, scale)); };
}

}  // namespace typed

// Empty for an operator, or arguments, that are not written out here, and where torch has changed the type.
inline Typed typed_of(const c10::OperatorHandle& handle, const char* name, const std::vector<Argument>& arguments) {
  try {
    if (std::strcmp(name, "aten::linear") == 0) return typed::linear(handle, arguments);
    if (std::strcmp(name, "aten::_scaled_dot_product_flash_attention_for_cpu") == 0) {
      return typed::flash(handle, arguments);
    }
  } catch (const c10::Error&) {
  }
  return {};
}

}  // namespace easytorch
