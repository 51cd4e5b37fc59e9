// `Known`, an object of Python: the calls that an operation has kept.
#pragma once

#include <memory>
#include <unordered_map>

#include "reading.h"

#include <structmember.h>  // after Python.h

namespace easytorch {

using Calls = std::unordered_map<uint64_t, std::vector<std::shared_ptr<const KeptCall>>>;

struct Known {
  PyObject_HEAD
  Py_ssize_t found;  // calls that were found since Python set it to 0
  Calls* calls;
};

inline PyTypeObject* known_type = nullptr;

// A number that calls which are alike have in common; false where none can be kept.
inline bool mark_of(PyObject* args, bool grad, uint64_t& mark) {
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  mark = (static_cast<uint64_t>(count) << 1) + (grad ? 1 : 0);
  for (Py_ssize_t i = 0; i < count && i < 2; ++i) {
    PyObject* const one = PyTuple_GET_ITEM(args, i);
    if (!told.types.plain(one)) return i > 0;
    const c10::TensorImpl& tensor = *told.types.of(one).unsafeGetTensorImpl();
    if (!dense(tensor)) return false;
    mark = mark * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(tensor.numel());
  }
  return count > 0;
}

inline std::shared_ptr<const KeptCall> find(const Known& known, PyObject* args, PyObject* kwargs) {
  const ThreadState now = ThreadState::now();
  uint64_t mark;
  if (known.calls->empty() || !mark_of(args, now.grad, mark)) return nullptr;
  const auto calls = known.calls->find(mark);
  if (calls == known.calls->end()) return nullptr;
  for (const auto& one : calls->second) {
    if (one->fits(args, kwargs, now, told.types)) return told.switches.untouched() ? one : nullptr;
  }
  return nullptr;
}

inline PyObject* known_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* const self = reinterpret_cast<Known*>(type->tp_alloc(type, 0));
  if (self != nullptr) self->found = 0, self->calls = new Calls;
  return reinterpret_cast<PyObject*>(self);
}

inline int known_traverse(PyObject* self, visitproc visit, void* context) {
  if (const int found = visit(reinterpret_cast<PyObject*>(Py_TYPE(self)), context)) return found;
  const Calls* const calls = reinterpret_cast<Known*>(self)->calls;
  if (calls == nullptr) return 0;
  for (const auto& [mark, some] : *calls) {
    for (const auto& one : some) {
      // one that runs just now is held by that call too
      if (one.use_count() > 1) continue;
      const int found = one->each([&](PyObject* object) { return object == nullptr ? 0 : visit(object, context); });
      if (found != 0) return found;
    }
  }
  return 0;
}

inline int known_clear(PyObject* self) {
  Calls* const calls = reinterpret_cast<Known*>(self)->calls;
  if (calls == nullptr) return 0;
  Calls gone;  // destroyed when nothing is left to be found: that may run code of Python
  gone.swap(*calls);
  return 0;
}

inline void known_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  known_clear(self);
  delete std::exchange(reinterpret_cast<Known*>(self)->calls, nullptr);
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// add(args, tensors, kwargs, run, operators, given_turned, result_turned, switches, output): keeps a call whose first
// `tensors` arguments are tensors. operators: a tuple, or None where `run` is called. `ValueError` for what is not
// kept.
inline PyObject* known_add(PyObject* self, PyObject* given) {
  PyObject *args, *kwargs, *run, *operators, *asked, *output;
  Py_ssize_t tensors;
  int given_turned, result_turned;
  if (!PyArg_ParseTuple(given, "O!nO!OOppO!O", &PyTuple_Type, &args, &tensors, &PyDict_Type, &kwargs, &run, &operators,
                        &given_turned, &result_turned, &PyDict_Type, &asked, &output)) {
    return nullptr;
  }
  try {
    if (tensors < 1 || tensors > MOST_TENSORS || tensors > PyTuple_GET_SIZE(args)) {
      throw std::invalid_argument("too many tensors, or none");
    }
    auto call = std::make_shared<KeptCall>();
    call->state = ThreadState::now(), call->tensors = keys_of(args, tensors);
    for (Py_ssize_t i = tensors; i < PyTuple_GET_SIZE(args); ++i) {
      call->values.push_back(Reference::to(PyTuple_GET_ITEM(args, i)));
    }
    call->brief = numbers_of(args, tensors) <= BRIEF;
    call->named = pairs_of(kwargs), call->switches = pairs_of(asked);
    for (const auto& [ask, answer] : call->switches) {
      if (!KeptCall::can_be_asked(ask.get())) throw std::invalid_argument("a switch that cannot be asked");
    }
    if (operators == Py_None) call->run = Reference::to(run);
    else call->steps = {operators_of(operators, tensors), given_turned != 0, result_turned != 0};
    call->output = output_of(output);
    uint64_t mark;
    if (!mark_of(args, call->state.grad, mark)) throw std::invalid_argument("a tensor that is not dense on the CPU");
    (*reinterpret_cast<Known*>(self)->calls)[mark].push_back(std::move(call));
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

inline PyObject* known_forget(PyObject* self, PyObject*) {
  known_clear(self);
  Py_RETURN_NONE;
}

inline PyMethodDef known_methods[] = {
    {"add", known_add, METH_VARARGS, "Keeps a call."},
    {"forget", known_forget, METH_NOARGS, "Keeps none any more."},
    {nullptr, nullptr, 0, nullptr},
};

inline PyMemberDef known_attributes[] = {
    {"found", T_PYSSIZET, offsetof(Known, found), 0, "Calls that were found since it was set to 0."},
    {nullptr, 0, 0, 0, nullptr},
};

inline PyType_Slot known_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(known_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(known_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(known_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(known_clear)},
    {Py_tp_methods, known_methods},
    {Py_tp_members, known_attributes},
    {0, nullptr},
};

inline PyType_Spec known_spec = {"easytorch_repeated.Known", sizeof(Known), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, known_slots};

}  // namespace easytorch
