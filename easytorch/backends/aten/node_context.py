"""The shapes, dtypes and attributes of an operation, known before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Node
from easytorch.backends.shapes import Shape


@dataclass(frozen=True, slots=True)
class NodeContext:
    """A node on a device. traced: torch.compile will trace the function, so that it must not look at values."""

    node: Node
    device: torch.device
    traced: bool = False

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the operands."""
        return tuple(op.shape for op in self.node.inputs)

    @property
    def operand(self) -> Shape:
        """The shape of the first operand."""
        return self.node.inputs[0].shape

    @property
    def dtype(self) -> DType:
        """The dtype of the first operand."""
        return self.node.inputs[0].shape.dtype

    @property
    def output(self) -> Shape:
        """The shape of the first output."""
        return self.node.shapes[0]

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The builder's arguments that are no operands, by name."""
        return self.node.attributes


Kernel = Callable[..., Any]
Binder = Callable[[NodeContext], Kernel]
