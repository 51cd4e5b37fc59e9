"""Outputs of a graph that are views of one another, as fake tensors describe them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

# Size, strides and offset: what `as_strided` takes.
View = tuple[tuple[int, ...], tuple[int, ...], int]


def shared_roots(outputs: Sequence[Any]) -> dict[int, Node]:
    """For the outputs that show the same memory as others, by place: the node that computes it.

    AOTAutograd restores views of inputs itself, and leaves those of intermediate results to the compiler.
    """
    roots = {place: root(node) for place, node in enumerate(outputs) if isinstance(node, Node)}
    distinct = {node: root(node) for node in outputs if isinstance(node, Node)}
    shown = Counter(distinct.values())
    return {place: found for place, found in roots.items() if shown[found] > 1 and found.op != "placeholder"}


def root(node: Node) -> Node:
    """The node of which `node` is a view, over any number of views; itself if it is none."""
    while True:
        source = node.args[0] if node.target is getitem else node
        target = source.target if isinstance(source, Node) else None
        if not isinstance(target, torch._ops.OpOverload) or not target.is_view:
            return node
        assert isinstance(source, Node) and isinstance(source.args[0], Node)
        node = source.args[0]


def sizes_of(placeholders: Sequence[Node], given: Sequence[Any]) -> dict[Any, int]:
    """The value of each symbol of the graph, read off the arguments."""
    found: dict[Any, int] = {}
    for node, value in zip(placeholders, given, strict=True):
        symbol = node.meta.get("val")
        pairs = zip(symbol.shape, value.shape, strict=True) if isinstance(symbol, torch.Tensor) else ((symbol, value),)
        found |= {name.node.expr: size for name, size in pairs if isinstance(name, torch.SymInt)}
    return found


def view_of(node: Node, base: Node, sizes: Mapping[Any, int]) -> View:
    """How `node` shows the memory of `base`."""
    shown, memory = node.meta["val"], base.meta["val"]

    def known(number: int | torch.SymInt) -> int:
        return int(number.node.expr.xreplace(sizes)) if isinstance(number, torch.SymInt) else number

    offset = known(shown.storage_offset()) - known(memory.storage_offset())
    return tuple(map(known, shown.shape)), tuple(map(known, shown.stride())), offset
