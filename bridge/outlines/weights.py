"""What the modules of outlines hold: each weight with its shape, and its leaf and layout in HF Flax's convention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    """A weight of a torch module, and where the convention puts it (`bridge.flax_leaves`)."""

    name: str
    shape: tuple[int, ...]
    leaf: str
    transform: str = "identity"


def _weight(module: str, last: str, leaf: str, shape: tuple[int, ...], transform: str = "identity") -> Weight:
    return Weight(f"{module}.{last}", shape, f"{module}.{leaf}".replace(".", "/"), transform)


def bare(name: str, *shape: int) -> Weight:
    """A parameter of no module that Flax has."""
    return Weight(name, shape, name.replace(".", "/"))


def linear(module: str, outputs: int, inputs: int, *, bias: bool = True) -> Iterator[Weight]:
    """torch.nn.Linear."""
    yield _weight(module, "weight", "kernel", (outputs, inputs), "linear")
    if bias:
        yield _weight(module, "bias", "bias", (outputs,))


def conv1d(module: str, inputs: int, outputs: int) -> Iterator[Weight]:
    """GPT-2's Conv1D: a linear layer, whose matrix torch holds the other way round than Linear's."""
    yield _weight(module, "weight", "kernel", (inputs, outputs), "linear")
    yield _weight(module, "bias", "bias", (outputs,))


def embedding(module: str, rows: int, width: int) -> Iterator[Weight]:
    """torch.nn.Embedding."""
    yield _weight(module, "weight", "embedding", (rows, width))


def layer_norm(module: str, width: int) -> Iterator[Weight]:
    """torch.nn.LayerNorm."""
    yield _weight(module, "weight", "scale", (width,))
    yield _weight(module, "bias", "bias", (width,))


def rms_norm(module: str, width: int) -> Iterator[Weight]:
    """A family's own norm, whose weight keeps its name."""
    yield _weight(module, "weight", "weight", (width,))
