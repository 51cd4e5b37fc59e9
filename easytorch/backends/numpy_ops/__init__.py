"""Every operation in NumPy: the living definition that the other backends are held to.

A function takes the operands as arrays and the attributes by the names of the builder's arguments, and gives an array,
or a tuple for several outputs. Narrow floats are computed in float32 and rounded once, as XLA does.
"""
