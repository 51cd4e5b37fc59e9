// From objects of Python to what is kept of a call; `std::invalid_argument` for what is not kept.
#pragma once

#include <stdexcept>

#include "call.h"
#include "told.h"

namespace easytorch {

inline Argument argument_of(PyObject* object) {
  if (object == told.result) return {Argument::RESULT, 0, {}};
  if (Py_TYPE(object) != told.given) {
    return {Argument::CONSTANT, 0, constant_of(object, told.types)};
  }
  const Reference place = Reference::taking(PyObject_GetAttrString(object, "place"));
  if (!place) throw std::invalid_argument("a given tensor without a place");
  return {Argument::GIVEN, constant_of(place.get(), told.types).toInt(), {}};
}

// operators: ((name, overload, arguments), ...).
inline std::vector<Operator> operators_of(PyObject* given, size_t tensors) {
  std::vector<Operator> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); ++i) {
    const char *name, *overload;
    PyObject* arguments;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, i), "ssO!", &name, &overload, &PyTuple_Type, &arguments)) {
      throw std::invalid_argument("an operator is a name, an overload and arguments");
    }
    std::vector<Argument> read;
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(arguments); ++j) {
      read.push_back(argument_of(PyTuple_GET_ITEM(arguments, j)));
      if (read.back().place < 0 || read.back().place >= static_cast<int64_t>(tensors)) {
        throw std::invalid_argument("the call has fewer tensors");
      }
    }
    found.emplace_back(name, overload, std::move(read));
  }
  return found;
}

inline Pairs pairs_of(PyObject* dict) {
  Pairs found;
  PyObject *key, *value;
  for (Py_ssize_t place = 0; PyDict_Next(dict, &place, &key, &value);) {
    found.emplace_back(Reference::to(key), Reference::to(value));
  }
  return found;
}

inline std::vector<TensorKey> keys_of(PyObject* args, Py_ssize_t count) {
  std::vector<TensorKey> found;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const one = PyTuple_GET_ITEM(args, i);
    if (!told.types.plain(one)) throw std::invalid_argument("a tensor of another type");
    const c10::TensorImpl& tensor = *told.types.of(one).unsafeGetTensorImpl();
    if (!dense(tensor) || tensor.dim() > MOST_DIMS || tensor.has_symbolic_sizes_strides()) {
      throw std::invalid_argument("a tensor that is not dense on the CPU, or has too many dimensions");
    }
    found.emplace_back(Py_TYPE(one), tensor);
  }
  return found;
}

inline int64_t numbers_of(PyObject* args, Py_ssize_t count) {
  int64_t found = 0;
  for (Py_ssize_t i = 0; i < count; ++i) found += told.types.of(PyTuple_GET_ITEM(args, i)).numel();
  return found;
}

// output: None, or a type and the dict of an object's attributes, the first of which is the result.
inline std::optional<Output> output_of(PyObject* output) {
  if (output == Py_None) return {};
  PyObject *type, *attributes;
  if (!PyArg_ParseTuple(output, "O!O!", &PyType_Type, &type, &PyDict_Type, &attributes)) {
    throw std::invalid_argument("an output is a type and attributes");
  }
  Output found{Reference::to(type), pairs_of(attributes)};
  if (found.attributes.empty()) throw std::invalid_argument("an output without attributes");
  found.attributes[0].second = Reference();
  return found;
}

}  // namespace easytorch
