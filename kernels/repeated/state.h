// What a call depends on beside its arguments: the state of the thread, and switches of this process.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "references.h"

namespace easytorch {

// Whether gradients are recorded; and, in the thread's dispatch keys, autocast, inference mode, dispatch modes,
// torch.func's transforms and tracing.
struct ThreadState {
  static ThreadState now() {
    const auto& keys = c10::impl::raw_local_dispatch_key_set;
    return {keys.included_, keys.excluded_, c10::GradMode::is_enabled()};
  }
  bool operator==(const ThreadState& other) const {
    return included == other.included && excluded == other.excluded && grad == other.grad;
  }
  uint64_t included, excluded;
  bool grad;
};

// Switches that are read where Python keeps them.
class Switches {
 public:
  // environment: dict without `names` while nothing is forced or compared. compiling: a module's dict and the name of
  // the flag in it. levels: likewise, of the level of forward-mode gradients, `outside` of all of them.
  bool set(PyObject* args) {
    PyObject *environment, *names, *compiling, *flag, *levels, *level, *outside;
    if (!PyArg_ParseTuple(args, "O!O!O!UO!UO!", &PyDict_Type, &environment, &PyTuple_Type, &names, &PyDict_Type,
                          &compiling, &flag, &PyDict_Type, &levels, &level, &PyLong_Type, &outside)) {
      return false;
    }
    environment_ = Reference::to(environment), names_ = Reference::to(names);
    compiling_ = Reference::to(compiling), flag_ = Reference::to(flag);
    levels_ = Reference::to(levels), level_ = Reference::to(level), outside_ = Reference::to(outside);
    return true;
  }

  // Whether nothing is forced, compared, compiled, differentiated forward or given to a mode of torch's functions.
  // False too where that cannot be said; no exception is set.
  bool untouched() const {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names_.get()); ++i) {
      if (const int there = PyDict_Contains(environment_.get(), PyTuple_GET_ITEM(names_.get(), i)); there != 0) {
        PyErr_Clear();
        return false;
      }
    }
    return found(compiling_, flag_) == Py_False && found(levels_, level_) == outside_.get() &&
           !at::impl::torch_function_mode_enabled();
  }

 private:
  static PyObject* found(const Reference& dict, const Reference& name) {
    PyObject* const value = PyDict_GetItemWithError(dict.get(), name.get());
    if (value == nullptr) PyErr_Clear();
    return value;
  }

  Reference environment_, names_, compiling_, flag_, levels_, level_, outside_;
};

}  // namespace easytorch
