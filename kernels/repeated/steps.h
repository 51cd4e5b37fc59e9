// What a shortcut runs: operators of torch, ours among them, one after another (steps.py).
#pragma once

#include <stdexcept>
#include <string>

#include "references.h"
#include "typed.h"

namespace easytorch {

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

class Operator {
 public:
  // `std::exception` for an operator that is not registered, or takes another number of arguments.
  Operator(const char* name, const char* overload, std::vector<Argument> arguments)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)), arguments_(std::move(arguments)),
        typed_(typed_of(handle_, name, arguments_)) {
    if (arguments_.size() != handle_.schema().arguments().size()) {
      throw std::invalid_argument("an operator takes other arguments");
    }
  }

  at::Tensor run(const at::Tensor* given, at::Tensor before) const {
    if (typed_) return typed_(given);
    torch::jit::Stack stack;
    stack.reserve(arguments_.size());
    for (const Argument& one : arguments_) {
      if (one.kind == Argument::CONSTANT) stack.push_back(one.value);
      else if (one.kind == Argument::GIVEN) stack.emplace_back(given[one.place]);
      else stack.emplace_back(std::move(before));
    }
    handle_.callBoxed(stack);
    return std::move(stack[0]).toTensor();  // the first of several results
  }

 private:
  c10::OperatorHandle handle_;
  std::vector<Argument> arguments_;
  Typed typed_;
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
