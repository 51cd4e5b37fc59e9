"""Every operation on ATen.

A binder takes a `NodeContext`, one operation of a graph with everything known about it before it runs, and gives the
function of tensors that runs it: element types, axes and sizes are decided once, not at each run.
"""
