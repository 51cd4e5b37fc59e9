"""Collectives: functions of the tensors of one group's devices, one result per device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from easytorch.backends.aten.ops.reduction import reduced, values
from easytorch.backends.graph import Node
from easytorch.backends.types import OpType

Tensors = Sequence[Tensor]
# Of one node; takes and gives a tensor for each device of a group.
CollectiveBinder = Callable[[Node], Callable[[Tensors], Tensors]]


def _all_reduced(node: Node, tensors: Tensors) -> Tensors:
    kind, dtype = node.attributes["reduction_type"], node.shapes[0].dtype
    inward, back = values(dtype, kind)
    return [back(reduced(dtype, kind)(torch.stack([inward(one) for one in tensors]), (0,)))] * len(tensors)


def _all_reduce(node: Node) -> Callable[[Tensors], Tensors]:
    return lambda tensors: _all_reduced(node, tensors)


def _all_gather(node: Node) -> Callable[[Tensors], Tensors]:
    axis = node.attributes["axis"]
    return lambda tensors: [torch.cat(list(tensors), axis)] * len(tensors)


def _reduce_scatter(node: Node) -> Callable[[Tensors], Tensors]:
    axis = node.attributes["axis"]

    def scatter(tensors: Tensors) -> Tensors:
        totals = _all_reduced(node, tensors)
        return [total.tensor_split(len(tensors), axis)[place] for place, total in enumerate(totals)]

    return scatter


def _all_to_all(node: Node) -> Callable[[Tensors], Tensors]:
    split_axis, concat_axis = node.attributes["split_axis"], node.attributes["concat_axis"]

    def exchange(tensors: Tensors) -> Tensors:
        parts = [tensor.tensor_split(len(tensors), split_axis) for tensor in tensors]
        return [torch.cat(received, concat_axis) for received in zip(*parts, strict=True)]

    return exchange


def _collective_permute(node: Node) -> Callable[[Tensors], Tensors]:
    senders = {target: source for source, target in node.attributes["source_target_pairs"]}

    def permute(tensors: Tensors) -> Tensors:
        return [
            tensors[senders[device]] if device in senders else torch.zeros_like(tensor)
            for device, tensor in enumerate(tensors)
        ]

    return permute


COLLECTIVE: dict[OpType, CollectiveBinder] = {
    OpType.ALL_REDUCE: _all_reduce,
    OpType.ALL_GATHER: _all_gather,
    OpType.REDUCE_SCATTER: _reduce_scatter,
    OpType.ALL_TO_ALL: _all_to_all,
    OpType.COLLECTIVE_PERMUTE: _collective_permute,
}
