"""Every operation on ATen.

A binder takes a `Site`, the place of one operation in a graph with everything known about it before it runs, and gives
the function of tensors that runs there: element types, axes and sizes are decided once, not at each run.
"""
