// What a shortcut runs: operators of torch, ours among them, one after another (steps.py).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "tensors.h"

namespace easytorch {

// An argument of an operator: a tensor of the call, the result of the operator before, or what is always the same.
struct Argument {
  enum Kind { CONSTANT, GIVEN, RESULT } kind;
  int64_t place;  // of a given tensor
  c10::IValue value;
};

// A constant of Python, or `std::invalid_argument`.
inline c10::IValue constant_of(PyObject* object, const TensorTypes& types) {
  if (object == Py_None) return {};
  if (PyBool_Check(object)) return object == Py_True;
  if (PyLong_CheckExact(object)) {
    const long long number = PyLong_AsLongLong(object);
    if (number == -1 && PyErr_Occurred()) throw std::invalid_argument("a number is too large");
    return static_cast<int64_t>(number);
  }
  if (PyFloat_CheckExact(object)) return PyFloat_AS_DOUBLE(object);
  if (PyUnicode_CheckExact(object)) {
    Py_ssize_t size;
    const char* const text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) throw std::invalid_argument("a text is not UTF-8");
    return std::string(text, size);
  }
  if (types.plain(object)) return types.of(object);
  if (!PyTuple_CheckExact(object)) throw std::invalid_argument("a constant of another type");
  c10::List<int64_t> numbers;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
    numbers.push_back(constant_of(PyTuple_GET_ITEM(object, i), types).toInt());
  }
  return numbers;
}

struct Operator {
  c10::OperatorHandle handle;
  std::vector<Argument> arguments;

  at::Tensor run(const at::Tensor* given, at::Tensor before) const {
    torch::jit::Stack stack;
    stack.reserve(arguments.size());
    for (const Argument& one : arguments) {
      if (one.kind == Argument::CONSTANT) stack.push_back(one.value);
      else if (one.kind == Argument::GIVEN) stack.emplace_back(given[one.place]);
      else stack.emplace_back(std::move(before));
    }
    handle.callBoxed(stack);
    return std::move(stack[0]).toTensor();  // the first of several results
  }
};

struct Steps {
  std::vector<Operator> operators;
  bool given_turned = false, result_turned = false;

  // given: the tensors, turned where they are to be.
  at::Tensor run(const at::Tensor* given) const {
    at::Tensor result;
    for (const Operator& one : operators) result = one.run(given, std::move(result));
    return result_turned ? turned(result) : result;
  }
};

}  // namespace easytorch
