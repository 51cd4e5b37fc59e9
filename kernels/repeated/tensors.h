// Tensors of Python: where torch's own stands in one, and what two must have in common to be computed alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <stdexcept>

#include "references.h"

// Of libtorch_python; its header would take ten times as long to compile as everything here.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace easytorch {

// Dimensions of a tensor, and tensors of a call: with more of them there is no shortcut.
constexpr int64_t MOST_DIMS = 6, MOST_TENSORS = 4;

// torch.Tensor and torch.nn.Parameter, and where in an object of theirs the tensor is: that differs between versions of
// torch, so it is looked for (module.cpp).
struct TensorTypes {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  Py_ssize_t place = 0;

  bool plain(PyObject* object) const { return Py_TYPE(object) == tensor || Py_TYPE(object) == parameter; }
  const at::Tensor& of(PyObject* object) const {
    return *reinterpret_cast<const at::Tensor*>(reinterpret_cast<const char*>(object) + place);
  }
};

// Dense, on the CPU and of no wrapper: sizes and strides are plain numbers that are in the tensor.
inline bool dense(const c10::TensorImpl& tensor) {
  constexpr c10::DispatchKeySet keys({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                      c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutocastCPU});
  const uint64_t of_tensor = tensor.key_set().raw_repr();
  return (of_tensor & ~keys.raw_repr()) == 0 && tensor.key_set().has(c10::DispatchKey::CPU);
}

// What is the same of tensors that are computed alike.
class TensorKey {
 public:
  TensorKey(PyTypeObject* type, const c10::TensorImpl& tensor)
      : type_(type), keys_(tensor.key_set()), dtype_(tensor.dtype()), grad_(tensor.requires_grad()),
        dim_(tensor.dim()) {
    for (int64_t d = 0; d < dim_; ++d) sizes_[d] = tensor.sizes()[d], strides_[d] = tensor.strides()[d];
  }

  bool fits(PyTypeObject* type, const c10::TensorImpl& tensor) const {
    if (type != type_ || !(tensor.key_set() == keys_) || tensor.dtype() != dtype_ || tensor.dim() != dim_) return false;
    const int64_t* const sizes = tensor.sizes().data();
    const int64_t* const strides = tensor.strides().data();
    for (int64_t d = 0; d < dim_; ++d) {
      if (sizes[d] != sizes_[d] || strides[d] != strides_[d]) return false;
    }
    return tensor.requires_grad() == grad_;
  }

 private:
  PyTypeObject* type_;
  c10::DispatchKeySet keys_;
  caffe2::TypeMeta dtype_;
  bool grad_;
  int64_t dim_, sizes_[MOST_DIMS], strides_[MOST_DIMS];
};

// (B, T, H, D) as (B, H, T, D), on the same memory: `transpose` takes five times as long, for the gradients of a view.
inline at::Tensor turned(const at::Tensor& tensor) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                             tensor.key_set(), tensor.dtype());
  int64_t sizes[MOST_DIMS], strides[MOST_DIMS];
  const int64_t dim = tensor.dim();
  if (dim < 3 || dim > MOST_DIMS) throw std::invalid_argument("(B, T, H, D) are needed");
  for (int64_t d = 0; d < dim; ++d) {
    const int64_t from = d == 1 ? 2 : d == 2 ? 1 : d;
    sizes[d] = tensor.sizes()[from], strides[d] = tensor.strides()[from];
  }
  view.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef(sizes, dim), c10::IntArrayRef(strides, dim),
                                                    tensor.storage_offset());
  return view;
}

}  // namespace easytorch
