// The module of Python that looks for a call's shortcut before any code of Python runs (docs/kernels/cpu.md).
//
// `Known` holds the calls of one operation. `watch(type)` makes the calls of a type's instances come here first: its
// slot for calls is set, which Python sets back where the type is given another `__call__`. A call that is not found
// goes on to that method, as ever.
#include <algorithm>
#include <exception>

#include "known.h"

namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);  // of libtorch_python
}

namespace easytorch {
namespace {

ternaryfunc call_of_python = nullptr;
// From an instance to its `Known`: two slots, the second in an object of the type `between`.
Py_ssize_t first_slot = 0, second_slot = 0;
PyTypeObject* between = nullptr;

PyObject* run(const KeptCall& call, PyObject* args) {
  if (call.run) return PyObject_Vectorcall(call.run.get(), &PyTuple_GET_ITEM(args, 0), call.tensors.size(), nullptr);
  try {
    // references of its own: what lets go of a tensor's last but one asks for Python's lock
    std::array<at::Tensor, MOST_TENSORS> given;
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      const at::Tensor& one = told.types.of(PyTuple_GET_ITEM(args, i));
      given[i] = call.steps.given_turned ? turned(one) : one;
    }
    at::Tensor result;
    {
      std::optional<Unlocked> unlocked;
      if (!call.brief) unlocked.emplace();
      result = call.steps.run(given.data());
    }
    Reference made = Reference::taking(THPVariable_Wrap(result));
    return made && call.output ? call.output->of(std::move(made)) : made.release();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyObject* slot(PyObject* object, Py_ssize_t place) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + place);
}

PyObject* call_of_instance(PyObject* self, PyObject* args, PyObject* kwargs) {
  PyObject* const held = slot(self, first_slot);
  if (held != nullptr && Py_TYPE(held) == between) {
    PyObject* const known = slot(held, second_slot);
    if (known != nullptr && Py_TYPE(known) == known_type) {
      Known& calls = *reinterpret_cast<Known*>(known);
      const auto call = find(calls, args, kwargs);
      if (call != nullptr && call->switched_alike()) {
        ++calls.found;
        return run(*call, args);
      }
    }
  }
  return call_of_python(self, args, kwargs);
}

// set_tensors(tensor, address, parameter, address): examples of both types, and where torch's own tensors lie.
PyObject* set_tensors(PyObject*, PyObject* args) {
  PyObject* examples[2];
  Py_ssize_t addresses[2];
  if (!PyArg_ParseTuple(args, "OnOn", &examples[0], &addresses[0], &examples[1], &addresses[1])) return nullptr;
  const auto in_both = [&](Py_ssize_t place) {
    for (int i = 0; i < 2; ++i) {
      if (*reinterpret_cast<Py_ssize_t*>(reinterpret_cast<char*>(examples[i]) + place) != addresses[i]) return false;
    }
    return true;
  };
  const Py_ssize_t size = std::min(Py_TYPE(examples[0])->tp_basicsize, Py_TYPE(examples[1])->tp_basicsize);
  constexpr Py_ssize_t word = sizeof(void*);
  for (Py_ssize_t place = sizeof(PyObject); place + word <= size; place += word) {
    if (!in_both(place)) continue;
    Py_INCREF(Py_TYPE(examples[0]));
    Py_INCREF(Py_TYPE(examples[1]));
    told.types = {Py_TYPE(examples[0]), Py_TYPE(examples[1]), place};
    Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

PyObject* set_switches(PyObject*, PyObject* args) {
  if (!told.switches.set(args)) return nullptr;
  Py_RETURN_NONE;
}

// set_marks(result, given): the object that stands for the result of the operator before, and the type of a place.
PyObject* set_marks(PyObject*, PyObject* args) {
  PyObject *result, *given;
  if (!PyArg_ParseTuple(args, "OO!", &result, &PyType_Type, &given)) return nullptr;
  Py_INCREF(result);
  Py_INCREF(given);
  told.result = result, told.given = reinterpret_cast<PyTypeObject*>(given);
  Py_RETURN_NONE;
}

// The place of an attribute of `__slots__`, by its descriptor; -1 with an exception for another object.
Py_ssize_t place_of(PyObject* descriptor) {
  const bool of_slot = Py_TYPE(descriptor) == &PyMemberDescr_Type;
  const PyMemberDef* const member =
      of_slot ? reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member : nullptr;
  if (member != nullptr && member->type == T_OBJECT_EX) return member->offset;
  PyErr_SetString(PyExc_TypeError, "an attribute of __slots__ is needed");
  return -1;
}

// set_slots(first, second): descriptors of the slot of an instance and of that in what it holds.
PyObject* set_slots(PyObject*, PyObject* args) {
  PyObject *first, *second;
  if (!PyArg_ParseTuple(args, "OO", &first, &second)) return nullptr;
  const Py_ssize_t places[2] = {place_of(first), place_of(second)};
  if (places[0] < 0 || places[1] < 0) return nullptr;
  first_slot = places[0], second_slot = places[1];
  between = reinterpret_cast<PyDescrObject*>(second)->d_type;
  Py_INCREF(between);
  Py_RETURN_NONE;
}

// watch(type): the calls of its instances, which have the first slot and a `__call__` of Python, come here first.
PyObject* watch(PyObject*, PyObject* given) {
  if (!PyType_Check(given) || between == nullptr) {
    PyErr_SetString(PyExc_TypeError, "a type is needed, after set_slots");
    return nullptr;
  }
  auto* const type = reinterpret_cast<PyTypeObject*>(given);
  if (call_of_python == nullptr) call_of_python = type->tp_call;
  if (type->tp_call == call_of_python) type->tp_call = call_of_instance;
  return PyBool_FromLong(type->tp_call == call_of_instance);
}

PyMethodDef functions[] = {
    {"set_tensors", set_tensors, METH_VARARGS, "Finds torch's tensor in an object of Python."},
    {"set_switches", set_switches, METH_VARARGS, "What must be as it is by default."},
    {"set_marks", set_marks, METH_VARARGS, "What stands for a tensor among an operator's arguments."},
    {"set_slots", set_slots, METH_VARARGS, "Where an instance keeps its known calls."},
    {"watch", watch, METH_O, "Looks for the calls of a type's instances before Python does."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "easytorch_repeated", nullptr, -1, functions};

}  // namespace
}  // namespace easytorch

PyMODINIT_FUNC PyInit_easytorch_repeated() {
  PyObject* const module = PyModule_Create(&easytorch::definition);
  PyObject* const type = module == nullptr ? nullptr : PyType_FromSpec(&easytorch::known_spec);
  if (type == nullptr || PyModule_AddObject(module, "Known", type) != 0) return nullptr;
  Py_INCREF(type);
  easytorch::known_type = reinterpret_cast<PyTypeObject*>(type);
  return module;
}
