"""The operators in C++: the sources `kernels/<operation>/cpu*.cpp`, built by `build.py`, loaded by `library.py`.

`registration.cpp` registers them with torch, `*_simd.cpp` are compiled for each instruction set; the headers here are
shared.
"""
