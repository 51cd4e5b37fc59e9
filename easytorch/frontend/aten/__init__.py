"""Lowerings of ATen's operations, a file a family; `registry` imports them all.

pointwise, views, creation, reductions, matmul, norm (softmax and layer norm among them), attention, embedding, structure.
"""
