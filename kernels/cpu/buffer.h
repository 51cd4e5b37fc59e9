// Memory aligned to a cache line: loading a vector of 64 bytes across two lines takes twice the time.
#pragma once

#include <stdint.h>

#include <memory>
#include <new>

namespace easytorch {

struct FreeLines {
  void operator()(char* p) const { ::operator delete(p, std::align_val_t(64)); }
};
typedef std::unique_ptr<char[], FreeLines> Buffer;

inline Buffer lines(int64_t bytes) {
  return Buffer(static_cast<char*>(::operator new(static_cast<size_t>(bytes > 0 ? bytes : 1), std::align_val_t(64))));
}

// The same, or null where there is not enough memory: for code that must not throw.
inline Buffer lines_or_null(int64_t bytes) {
  const size_t size = static_cast<size_t>(bytes > 0 ? bytes : 1);
  return Buffer(static_cast<char*>(::operator new(size, std::align_val_t(64), std::nothrow)));
}

}  // namespace easytorch
