// The module of Python that looks for a call's shortcut before any code of Python runs (docs/kernels/cpu.md).
//
// `Known` holds the calls of one operation. `watch(type)` makes the calls of a type's instances come here first: its slot
// for calls is set, which Python sets back where the type is given another `__call__`. A call that is not found goes on
// to that method, as ever.
#include <exception>
#include <memory>
#include <unordered_map>

#include "call.h"

#include <structmember.h>  // after Python.h

namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);  // of libtorch_python
}

namespace easytorch {
namespace {

// What Python has told of itself; never destroyed, since that would be after Python's end.
TensorTypes types;
Switches& switches = *new Switches;
PyObject* result_mark = nullptr;  // how Python writes the arguments of an operator that are no constants
PyTypeObject* given_mark = nullptr;
ternaryfunc call_of_python = nullptr;
// From an instance to its `Known`: two slots, the second in an object of the type `between`.
Py_ssize_t first_slot = 0, second_slot = 0;
PyTypeObject* between = nullptr;

using Calls = std::unordered_map<uint64_t, std::vector<std::shared_ptr<const KeptCall>>>;

struct Known {
  PyObject_HEAD
  Py_ssize_t found;  // calls that were found since Python set it to 0
  Calls* calls;
};

PyTypeObject* known_type = nullptr;

// A number that calls which are alike have in common; false where none can be kept.
bool mark_of(PyObject* args, bool grad, uint64_t& mark) {
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  mark = (static_cast<uint64_t>(count) << 1) + (grad ? 1 : 0);
  for (Py_ssize_t i = 0; i < count && i < 2; ++i) {
    PyObject* const one = PyTuple_GET_ITEM(args, i);
    if (!types.plain(one)) return i > 0;
    const c10::TensorImpl& tensor = *types.of(one).unsafeGetTensorImpl();
    if (!dense(tensor)) return false;
    mark = mark * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(tensor.numel());
  }
  return count > 0;
}

std::shared_ptr<const KeptCall> find(const Known& known, PyObject* args, PyObject* kwargs) {
  const ThreadState now = ThreadState::now();
  uint64_t mark;
  if (known.calls->empty() || !mark_of(args, now.grad, mark)) return nullptr;
  const auto calls = known.calls->find(mark);
  if (calls == known.calls->end()) return nullptr;
  for (const auto& one : calls->second) {
    if (one->fits(args, kwargs, now, types)) return switches.untouched() ? one : nullptr;
  }
  return nullptr;
}

PyObject* run(const KeptCall& call, PyObject* args) {
  if (call.run) return PyObject_Vectorcall(call.run.get(), &PyTuple_GET_ITEM(args, 0), call.tensors.size(), nullptr);
  try {
    // references of its own: what lets go of a tensor's last but one asks for Python's lock
    std::array<at::Tensor, MOST_TENSORS> given;
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      const at::Tensor& one = types.of(PyTuple_GET_ITEM(args, i));
      given[i] = call.steps.given_turned ? turned(one) : one;
    }
    at::Tensor result;
    {
      const Unlocked unlocked;
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
      const auto call = find(*reinterpret_cast<Known*>(known), args, kwargs);
      if (call != nullptr && call->switched_alike()) {
        ++reinterpret_cast<Known*>(known)->found;
        return run(*call, args);
      }
    }
  }
  return call_of_python(self, args, kwargs);
}

// Known

PyObject* known_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* const self = reinterpret_cast<Known*>(type->tp_alloc(type, 0));
  if (self != nullptr) self->found = 0, self->calls = new Calls;
  return reinterpret_cast<PyObject*>(self);
}

int known_traverse(PyObject* self, visitproc visit, void* context) {
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

int known_clear(PyObject* self) {
  Calls* const calls = reinterpret_cast<Known*>(self)->calls;
  if (calls == nullptr) return 0;
  Calls gone;  // destroyed when nothing is left to be found: that may run code of Python
  gone.swap(*calls);
  return 0;
}

void known_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  known_clear(self);
  delete std::exchange(reinterpret_cast<Known*>(self)->calls, nullptr);
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

Argument argument_of(PyObject* object) {
  if (object == result_mark) return {Argument::RESULT, 0, {}};
  if (Py_TYPE(object) != given_mark) {
    return {Argument::CONSTANT, 0, constant_of(object, types)};
  }
  const Reference place = Reference::taking(PyObject_GetAttrString(object, "place"));
  if (!place) throw std::invalid_argument("a given tensor without a place");
  return {Argument::GIVEN, constant_of(place.get(), types).toInt(), {}};
}

// operators: ((name, overload, arguments), ...).
std::vector<Operator> operators_of(PyObject* given, size_t tensors) {
  std::vector<Operator> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); ++i) {
    const char *name, *overload;
    PyObject* arguments;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, i), "ssO!", &name, &overload, &PyTuple_Type, &arguments)) {
      throw std::invalid_argument("an operator is a name, an overload and arguments");
    }
    Operator one{c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), {}};
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(arguments); ++j) {
      one.arguments.push_back(argument_of(PyTuple_GET_ITEM(arguments, j)));
      if (one.arguments.back().place < 0 || one.arguments.back().place >= static_cast<int64_t>(tensors)) {
        throw std::invalid_argument("the call has fewer tensors");
      }
    }
    if (one.arguments.size() != one.handle.schema().arguments().size()) {
      throw std::invalid_argument("an operator takes another number of arguments");
    }
    found.push_back(std::move(one));
  }
  return found;
}

std::vector<std::pair<Reference, Reference>> pairs_of(PyObject* dict) {
  std::vector<std::pair<Reference, Reference>> found;
  PyObject *key, *value;
  for (Py_ssize_t place = 0; PyDict_Next(dict, &place, &key, &value);) {
    found.emplace_back(Reference::to(key), Reference::to(value));
  }
  return found;
}

std::vector<TensorKey> keys_of(PyObject* args, Py_ssize_t count) {
  std::vector<TensorKey> found;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const one = PyTuple_GET_ITEM(args, i);
    if (!types.plain(one)) throw std::invalid_argument("a tensor of another type");
    const c10::TensorImpl& tensor = *types.of(one).unsafeGetTensorImpl();
    if (!dense(tensor) || tensor.dim() > MOST_DIMS || tensor.has_symbolic_sizes_strides()) {
      throw std::invalid_argument("a tensor that is not dense on the CPU, or has too many dimensions");
    }
    found.emplace_back(Py_TYPE(one), tensor);
  }
  return found;
}

// add(args, tensors, kwargs, run, operators, given_turned, result_turned, switches, output): keeps a call whose first
// `tensors` arguments are tensors. operators: a tuple, or None where `run` is called. output: None, or a type and the dict
// of an object's attributes, the first of which is the result. `ValueError` for what is not kept.
PyObject* known_add(PyObject* self, PyObject* given) {
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
    call->named = pairs_of(kwargs), call->switches = pairs_of(asked);
    if (operators == Py_None) call->run = Reference::to(run);
    else call->steps = {operators_of(operators, tensors), given_turned != 0, result_turned != 0};
    if (output != Py_None) {
      PyObject *type, *attributes;
      if (!PyArg_ParseTuple(output, "O!O!", &PyType_Type, &type, &PyDict_Type, &attributes)) return nullptr;
      call->output = Output{Reference::to(type), pairs_of(attributes)};
      if (call->output->attributes.empty()) throw std::invalid_argument("an output without attributes");
      call->output->attributes[0].second = Reference();
    }
    uint64_t mark;
    if (!mark_of(args, call->state.grad, mark)) throw std::invalid_argument("a tensor that is not dense on the CPU");
    (*reinterpret_cast<Known*>(self)->calls)[mark].push_back(std::move(call));
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* known_forget(PyObject* self, PyObject*) {
  known_clear(self);
  Py_RETURN_NONE;
}

PyMethodDef known_methods[] = {
    {"add", known_add, METH_VARARGS, "Keeps a call."},
    {"forget", known_forget, METH_NOARGS, "Keeps none any more."},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* found_of(PyObject* self, void*) { return PyLong_FromSsize_t(reinterpret_cast<Known*>(self)->found); }

int set_found(PyObject* self, PyObject* value, void*) {
  const Py_ssize_t count = value == nullptr ? -1 : PyLong_AsSsize_t(value);
  if (count == -1 && PyErr_Occurred()) return -1;
  reinterpret_cast<Known*>(self)->found = count;
  return 0;
}

PyGetSetDef known_attributes[] = {
    {"found", found_of, set_found, "Calls that were found since it was set to 0.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot known_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(known_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(known_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(known_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(known_clear)},
    {Py_tp_methods, known_methods},
    {Py_tp_getset, known_attributes},
    {0, nullptr},
};

PyType_Spec known_spec = {"easytorch_repeated.Known", sizeof(Known), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, known_slots};

// The module's functions

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
  for (Py_ssize_t place = sizeof(PyObject); place + static_cast<Py_ssize_t>(sizeof(void*)) <= size; place += sizeof(void*)) {
    if (!in_both(place)) continue;
    Py_INCREF(Py_TYPE(examples[0]));
    Py_INCREF(Py_TYPE(examples[1]));
    types = {Py_TYPE(examples[0]), Py_TYPE(examples[1]), place};
    Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

PyObject* set_switches(PyObject*, PyObject* args) {
  if (!switches.set(args)) return nullptr;
  Py_RETURN_NONE;
}

// set_marks(result, given): the object that stands for the result of the operator before, and the type of a place.
PyObject* set_marks(PyObject*, PyObject* args) {
  PyObject *result, *given;
  if (!PyArg_ParseTuple(args, "OO!", &result, &PyType_Type, &given)) return nullptr;
  Py_INCREF(result);
  Py_INCREF(given);
  result_mark = result, given_mark = reinterpret_cast<PyTypeObject*>(given);
  Py_RETURN_NONE;
}

// The place of an attribute of `__slots__`, by its descriptor; -1 with an exception for another object.
Py_ssize_t place_of(PyObject* descriptor) {
  const PyMemberDef* const member =
      Py_IS_TYPE(descriptor, &PyMemberDescr_Type) ? reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member : nullptr;
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
