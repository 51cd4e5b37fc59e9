// What Python has told of itself and of torch, once; never destroyed, since that would be after Python's end.
#pragma once

#include "state.h"
#include "tensors.h"

namespace easytorch {

struct Told {
  TensorTypes types;
  Switches switches;
  // how the arguments of an operator are written that are no constants: an object, and a type with a place
  PyObject* result = nullptr;
  PyTypeObject* given = nullptr;
};

inline Told& told = *new Told;

}  // namespace easytorch
