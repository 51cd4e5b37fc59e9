// A call that is kept: what a later one is compared with, and what is run for it.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "state.h"
#include "steps.h"

namespace easytorch {

using Pairs = std::vector<std::pair<Reference, Reference>>;

// An object that the result is given in: of that type, the first attribute the result, the others as here.
struct Output {
  Reference type;
  Pairs attributes;

  // Takes `result`; null with an exception where memory is short.
  PyObject* of(Reference result) const {
    const Reference none = Reference::taking(PyTuple_New(0));
    if (!none) return nullptr;
    auto* const of_type = reinterpret_cast<PyTypeObject*>(type.get());
    Reference made = Reference::taking(PyBaseObject_Type.tp_new(of_type, none.get(), nullptr));
    if (!made) return nullptr;
    for (const auto& [name, value] : attributes) {
      if (PyObject_GenericSetAttr(made.get(), name.get(), value ? value.get() : result.get()) != 0) return nullptr;
    }
    return made.release();
  }
};

// Whether two plain values, numbers, texts, flags or None, are of one type and equal, as in shortcuts.py.
inline bool same(PyObject* one, PyObject* other) {
  if (one == other) return true;
  if (Py_TYPE(one) != Py_TYPE(other)) return false;
  if (PyFloat_CheckExact(one)) return PyFloat_AS_DOUBLE(one) == PyFloat_AS_DOUBLE(other);
  if (!PyLong_CheckExact(one) && !PyUnicode_CheckExact(one)) return false;  // True, False and None are one object each
  const int equal = PyObject_RichCompareBool(one, other, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal == 1;
}

// Numbers of all tensors of a call that keeps Python's lock: giving it away and taking it again is 1 to 4 % of the
// time, and with so few no other thread waits for a millisecond.
constexpr int64_t BRIEF = 1 << 13;

struct KeptCall {
  ThreadState state;
  std::vector<TensorKey> tensors;
  std::vector<Reference> values;  // the positional arguments after them
  Pairs named;                    // those by name
  Pairs switches;                 // functions without arguments, or (module, name), and what each must give
  bool brief = false;             // whether it keeps Python's lock
  Reference run;                  // a function of the tensors, where `steps` has none
  Steps steps;
  std::optional<Output> output;

  // Whether a call of these arguments, in this state of the thread, is like this one.
  bool fits(PyObject* args, PyObject* kwargs, const ThreadState& now, const TensorTypes& types) const {
    const Py_ssize_t count = tensors.size();
    if (PyTuple_GET_SIZE(args) != count + static_cast<Py_ssize_t>(values.size()) || !(now == state)) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const one = PyTuple_GET_ITEM(args, i);
      if (!types.plain(one) || !tensors[i].fits(Py_TYPE(one), *types.of(one).unsafeGetTensorImpl())) return false;
    }
    for (size_t i = 0; i < values.size(); ++i) {
      if (!same(PyTuple_GET_ITEM(args, count + i), values[i].get())) return false;
    }
    return named_fit(kwargs);
  }

  bool switched_alike() const {
    for (const auto& [ask, answer] : switches) {
      const Reference now = answer_of(ask.get());
      if (!now) PyErr_Clear();
      if (now.get() != answer.get()) return false;
    }
    return true;
  }

  static bool can_be_asked(PyObject* what) {
    if (!PyTuple_CheckExact(what)) return PyCallable_Check(what) != 0;
    return PyTuple_GET_SIZE(what) == 2 && PyModule_Check(PyTuple_GET_ITEM(what, 0)) &&
           PyUnicode_Check(PyTuple_GET_ITEM(what, 1));
  }

  template <class Visit>
  int each(const Visit& visit) const {
    for (const auto& one : values) {
      if (const int found = visit(one.get())) return found;
    }
    for (const auto* pairs : {&named, &switches}) {
      for (const auto& [one, other] : *pairs) {
        if (const int found = visit(one.get())) return found;
        if (const int found = visit(other.get())) return found;
      }
    }
    return visit(run.get());
  }

 private:
  // What `what` gives now; null where it gives nothing.
  static Reference answer_of(PyObject* what) {
    if (!PyTuple_CheckExact(what)) return Reference::taking(PyObject_CallNoArgs(what));
    PyObject* const attributes = PyModule_GetDict(PyTuple_GET_ITEM(what, 0));
    return Reference::to(PyDict_GetItemWithError(attributes, PyTuple_GET_ITEM(what, 1)));
  }

  bool named_fit(PyObject* kwargs) const {
    if ((kwargs == nullptr ? 0 : PyDict_GET_SIZE(kwargs)) != static_cast<Py_ssize_t>(named.size())) return false;
    PyObject *name, *value;
    Py_ssize_t place = 0;
    for (const auto& [known, expected] : named) {
      // most calls give them in the same order, where the names are the same objects
      if (!PyDict_Next(kwargs, &place, &name, &value)) return false;
      if (name != known.get()) value = PyDict_GetItemWithError(kwargs, known.get());
      if (value == nullptr || !same(value, expected.get())) {
        PyErr_Clear();
        return false;
      }
    }
    return true;
  }
};

}  // namespace easytorch
