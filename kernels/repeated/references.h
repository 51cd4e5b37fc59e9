// What the files here need of Python: a reference that gives itself back, and the lock that is let go.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <utility>

namespace easytorch {

// A reference that is owned; the lock is held wherever one is made, copied or given back.
class Reference {
 public:
  Reference() = default;
  static Reference to(PyObject* object) {
    Py_XINCREF(object);
    return Reference(object);
  }
  static Reference taking(PyObject* object) { return Reference(object); }
  Reference(const Reference& other) : object_(other.object_) { Py_XINCREF(object_); }
  Reference(Reference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Reference& operator=(Reference other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Reference() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Reference(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

// Other threads run while it lives, as in torch's own functions.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace easytorch
