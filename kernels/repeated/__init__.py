"""Repeated calls of an operation, found and run in C++: an extension of Python, built by `build.py`, loaded by
`library.py`. `steps.py` says what such a call runs.
"""
