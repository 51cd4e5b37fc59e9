"""`AttentionCall` inside jax: its tensors are traced, its numbers are constants of the compiled program."""

from __future__ import annotations

import jax

from easytorch.kernels.attention.call import TENSORS, AttentionCall

__all__ = ["AttentionCall"]

jax.tree_util.register_pytree_node(
    AttentionCall,
    lambda call: (call[:TENSORS], call.numbers),
    lambda numbers, tensors: AttentionCall(*tensors, *numbers),
)
