// The parts of torch that operators need, by its C interface for ahead-of-time compiled code: that is stable, so a
// library built with one torch loads in others (2.9 and later), and takes a tenth of the time of ATen's headers to compile.
#pragma once

#include <stdint.h>
#include <string.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

// Looked up when the library is loaded: torch has the first since 2.10; before, the OpenMP that it runs on is called.
extern "C" __attribute__((weak)) AOTITorchError
torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
// Lists of arguments too; before, torch refuses a call with one.
struct StableListOpaque;
extern "C" __attribute__((weak)) AOTITorchError torch_list_size(StableListOpaque* list, size_t* size);
extern "C" __attribute__((weak)) AOTITorchError torch_list_get_item(StableListOpaque* list, size_t index, uint64_t* item);
extern "C" __attribute__((weak)) AOTITorchError torch_delete_list(StableListOpaque* list);
extern "C" __attribute__((weak)) void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
extern "C" __attribute__((weak)) int omp_get_thread_num();
extern "C" __attribute__((weak)) int omp_get_num_threads();
extern "C" __attribute__((weak)) int omp_in_parallel();

namespace easytorch {

inline void check(AOTITorchError code, const char* what) {
  if (code != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("easytorch: torch refused to give ") + what);
}

inline void require(bool condition, const char* message) {
  if (!condition) throw std::runtime_error(std::string("easytorch: ") + message);
}

// The numbers of vector.h's Element for a dtype of torch, or -1.
inline int32_t element_of(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float32()) return 0;
  if (dtype == aoti_torch_dtype_bfloat16()) return 1;
  return dtype == aoti_torch_dtype_float16() ? 2 : -1;
}

inline int64_t numel_of(int64_t dim, const int64_t* sizes) {
  int64_t count = 1;
  for (int64_t d = 0; d < dim; ++d) count *= sizes[d];
  return count;
}

// Of the last dimensions, from `first` on: whether they lie one after another.
inline bool contiguous_of(int64_t dim, const int64_t* sizes, const int64_t* strides, int64_t first = 0) {
  int64_t expected = 1;
  for (int64_t d = dim - 1; d >= first; --d) {
    if (sizes[d] != 1 && strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

// A tensor as an operator receives it: a reference that it owns.
class Tensor {
 public:
  explicit Tensor(uint64_t value) : Tensor(reinterpret_cast<AtenTensorHandle>(value)) {
    check(aoti_torch_get_data_ptr(handle_, &data), "the memory of a tensor");
    check(aoti_torch_get_dim(handle_, &dim), "the dimensions of a tensor");
    check(aoti_torch_get_sizes(handle_, &sizes), "the sizes of a tensor");
    check(aoti_torch_get_strides(handle_, &strides), "the strides of a tensor");
    check(aoti_torch_get_dtype(handle_, &dtype), "the dtype of a tensor");
    require(stored(), "a tensor whose memory was freed or has shrunk since it was made");
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  // The reference, handed on as an operator's result.
  uint64_t release() {
    const uint64_t value = reinterpret_cast<uint64_t>(handle_);
    handle_ = nullptr;
    return value;
  }

  int64_t numel() const { return numel_of(dim, sizes); }
  bool contiguous(int64_t first = 0) const { return contiguous_of(dim, sizes, strides, first); }

  void* data = nullptr;
  int64_t dim = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  int32_t dtype = 0;

 private:
  // The one above goes on from it: an object by then, whose reference is given back where the rest throws.
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}

  // Whether the storage is large enough: FSDP resizes storages between layers and leaves their tensors unchanged.
  bool stored() const {
    int64_t last = 0, bytes = 0;
    check(aoti_torch_get_storage_offset(handle_, &last), "the place of a tensor");
    check(aoti_torch_get_storage_size(handle_, &bytes), "the storage of a tensor");
    for (int64_t d = 0; d < dim; ++d) {
      if (sizes[d] == 0) return true;
      last += (sizes[d] - 1) * strides[d];
    }
    return (last + 1) * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)) <= bytes;
  }

  AtenTensorHandle handle_;
};

// The value of an optional argument: torch puts it on the heap, with null for None, and its receiver frees it.
inline std::optional<uint64_t> given(uint64_t value) {
  if (value == 0) return {};
  const auto* const place = reinterpret_cast<const uint64_t*>(value);
  const uint64_t inner = *place;
  delete place;
  return inner;
}

// An argument of type "Tensor?".
class OptionalTensor {
 public:
  explicit OptionalTensor(uint64_t value) {
    if (const auto inner = given(value)) tensor_ = &own_.emplace(*inner);
  }
  // Of a caller's tensor, which outlives it; null or empty: None.
  explicit OptionalTensor(const Tensor* tensor) : tensor_(tensor == nullptr || tensor->numel() == 0 ? nullptr : tensor) {}
  OptionalTensor() = default;
  OptionalTensor(const OptionalTensor&) = delete;
  explicit operator bool() const { return tensor_ != nullptr; }
  const Tensor& operator*() const { return *tensor_; }
  const Tensor* operator->() const { return tensor_; }

 private:
  std::optional<Tensor> own_;
  const Tensor* tensor_ = nullptr;
};

// The elements of an argument that is a list, which is freed; tensors among them are the receiver's.
inline std::vector<uint64_t> values_of(uint64_t value) {
  require(torch_list_size != nullptr && torch_list_get_item != nullptr && torch_delete_list != nullptr,
          "lists of arguments need torch 2.10");
  StableListOpaque* const list = reinterpret_cast<StableListOpaque*>(value);
  size_t size = 0;
  check(torch_list_size(list, &size), "the size of a list");
  std::vector<uint64_t> values(size);
  for (size_t i = 0; i < size; ++i) check(torch_list_get_item(list, i, &values[i]), "an element of a list");
  check(torch_delete_list(list), "a list");
  return values;
}

// An argument of type float as it lies on the stack.
inline double number_of(uint64_t value) {
  double number;
  memcpy(&number, &value, sizeof number);
  return number;
}

// A new tensor on the CPU, contiguous.
inline uint64_t empty(int64_t dim, const int64_t* sizes, int32_t dtype) {
  int64_t strides[64], stride = 1;
  for (int64_t d = dim - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 0 ? sizes[d] : 1;
  }
  AtenTensorHandle handle = nullptr;
  check(aoti_torch_empty_strided(dim, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle), "a new tensor");
  return reinterpret_cast<uint64_t>(handle);
}

// A new tensor on the CPU; the sizes are those of `like` but for the last.
inline uint64_t empty_like_rows(const Tensor& like, int64_t last) {
  require(like.dim >= 1 && like.dim <= 64, "a tensor of 1 to 64 dimensions is needed");
  int64_t sizes[64];
  for (int64_t d = 0; d < like.dim; ++d) sizes[d] = d == like.dim - 1 ? last : like.sizes[d];
  return empty(like.dim, sizes, like.dtype);
}

// Where the rows (all dimensions but the last) of a tensor begin, in numbers.
inline int64_t row_offset(const Tensor& tensor, int64_t row) {
  int64_t offset = 0;
  for (int64_t d = tensor.dim - 2; d >= 0; --d) {
    offset += row % tensor.sizes[d] * tensor.strides[d];
    row /= tensor.sizes[d];
  }
  return offset;
}

template <class Body>
struct Region {
  const Body* body;
  int64_t count;
  static void range(int64_t begin, int64_t end, void* context) { (*static_cast<Region*>(context)->body)(begin, end); }
  static void share(void* context) {
    const Region& self = *static_cast<Region*>(context);
    const int64_t each = (self.count + omp_get_num_threads() - 1) / omp_get_num_threads();
    const int64_t begin = each * omp_get_thread_num();
    const int64_t end = begin + each < self.count ? begin + each : self.count;
    if (begin < end) (*self.body)(begin, end);
  }
};

// body(begin, end) on parts of 0..count, each of at least `grain`, by torch's threads. It must not throw.
template <class Body>
inline void parallel_for(int64_t count, int64_t grain, const Body& body) {
  Region<Body> region{&body, count};
  if (count <= grain) {
    body(static_cast<int64_t>(0), count);
  } else if (torch_parallel_for != nullptr) {
    check(torch_parallel_for(0, count, grain, Region<Body>::range, &region), "its threads");
  } else if (GOMP_parallel != nullptr && omp_in_parallel != nullptr && !omp_in_parallel()) {
    GOMP_parallel(Region<Body>::share, &region, 0, 0);
  } else {
    body(static_cast<int64_t>(0), count);
  }
}

// Registers operators in torch's namespace easytorch_cpu while it lives.
class Library {
 public:
  Library() {
    check(aoti_torch_library_init_fragment("easytorch_cpu", __FILE__, __LINE__, &definitions_), "a library");
    check(aoti_torch_library_init_impl("easytorch_cpu", "CPU", __FILE__, __LINE__, &kernels_), "a library");
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // The kernel reads its arguments from the stack, which it owns, and leaves its results there.
  void define(const char* schema, const char* name, void (*kernel)(uint64_t*, uint64_t, uint64_t)) {
    check(aoti_torch_library_def(definitions_, schema), "an operator");
    check(aoti_torch_library_impl(kernels_, name, kernel), "an operator");
  }

 private:
  TorchLibraryHandle definitions_ = nullptr, kernels_ = nullptr;
};

}  // namespace easytorch
