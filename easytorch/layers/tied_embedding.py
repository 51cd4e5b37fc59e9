"""A tied weight's two uses in training, by one node of autograd (`kernels.cross_entropy.shared_weight`).

A head computes its loss within `sharing`; meanwhile the backbone's embedding of the same weight gives the head's too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from easytorch.kernels.cross_entropy import shared_weight
from easytorch.kernels.interop.torch_func import recording, transforming, untraced
from easytorch.layers.linear import watched
from easytorch.operations.dispatch.environment import untouched

# The fewest elements of a weight: of fewer the node takes the time, and a small model keeps transformers' bits.
SMALLEST_WEIGHT = 2**20

_FORWARD = nn.Embedding.forward


class _Scope(threading.local):
    weight: Tensor | None = None  # the head's
    shared: Tensor | None = None  # the same, from the node of the embedding


_scope = _Scope()


def sharing(head: nn.Module) -> AbstractContextManager[None]:
    """For a forward of the backbone and its loss by `head`: an embedding of its weight gives that of `of_head`."""
    weight = head._parameters.get("weight")
    takes = (
        weight is not None
        and type(weight) is nn.Parameter
        and weight.is_cpu
        and weight.numel() >= SMALLEST_WEIGHT
        and untraced()
        and not transforming()
        and recording(weight)
    )
    return _sharing(weight) if takes else nullcontext()


@contextmanager
def _sharing(weight: Tensor | None) -> Iterator[None]:
    before = _scope.weight, _scope.shared
    _scope.weight, _scope.shared = weight, None
    try:
        yield
    finally:
        _scope.weight, _scope.shared = before


def of_head(weight: Tensor) -> Tensor:
    """The weight by which a head computes its one loss: that of the embedding's node, where there is one."""
    shared, _scope.shared = _scope.shared, None
    return shared if shared is not None and _scope.weight is weight else weight


def embed(layer: nn.Module, input_ids: Tensor) -> Tensor:
    """`layer(input_ids)`: (B, T) -> (B, T, D). A layer that is hooked or wrapped is called as a module."""
    weight = layer._parameters.get("weight")
    if (
        weight is not None
        and _scope.weight is weight
        and _scope.shared is None
        and type(layer) is nn.Embedding
        and not (layer.sparse or layer.scale_grad_by_freq or layer.max_norm is not None)
        and nn.Embedding.forward is _FORWARD
        and not watched(layer)
        and untouched()
        and input_ids.is_cpu
    ):
        rows, _scope.shared = shared_weight.embedding_and_weight(input_ids, weight, layer.padding_idx)
        return rows
    embedded: Tensor = layer(input_ids)
    return embedded
