// Whose the CPU is, where that decides how memory is read fastest.
#pragma once

// Of each source by itself, as they are compiled for different instruction sets.
static inline bool is_intel() {
#if defined(__x86_64__)
  static const bool intel = __builtin_cpu_is("intel");
  return intel;
#else
  return false;
#endif
}
