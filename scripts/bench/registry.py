"""The registry of cases: one decorated function a family of them.

    @bench("swiglu", shapes=("B1 T1024 N14336",), tiny=("T1 N64",), dtypes=("float32", "bfloat16"))
    def swiglu(tensors: Tensors, s: Shape) -> Calls:
        gate, up = tensors.randn(s["T"], s["N"]), tensors.randn(s["T"], s["N"])
        torchs = {"F.silu": lambda: F.silu(gate) * up}
        return Calls(*ours("swiglu", gate, up), torchs, moved=3 * nbytes(gate))

It is called once for each shape, dtype and pass; `registry.Calls` says what it returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from easytorch.operations import Choice, OperationRegistry

Shape = dict[str, int]

FORWARD, BOTH = "forward", "forward+backward"
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The ratio to reach, time over torch's best; `of` names a baseline where it is counted against that one."""

    ratio: float
    of: str | None = None


@dataclass
class Calls:
    """One case, ready to run.

    ours: the operation, chosen automatically. torch: the ways torch itself has, by name; they return the same numbers
    in the same layout (measure.py compares them). choice: `operation.choose` of the call. moved: the bytes that the
    forward pass cannot avoid to read and write, for a case that memory bounds; flops: what it multiplies and adds.
    """

    ours: Callable[[], Any]
    choice: Choice
    torch: dict[str, Callable[[], Any]]
    moved: int | None = None
    moved_backward: int | None = None
    flops: float | None = None
    flops_backward: float | None = None


class Tensors:
    """Makes a case's inputs, seeded; remembers those the backward pass takes gradients of."""

    def __init__(self, device: torch.device, dtype: torch.dtype, backward: bool) -> None:
        self.device, self.dtype, self.backward = device, dtype, backward
        self.leaves: list[Tensor] = []
        self._generator = torch.Generator(device).manual_seed(0)

    def randn(self, *shape: int, scale: float = 1.0, grad: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.randn(shape, generator=self._generator, device=self.device).mul_(scale).to(dtype or self.dtype)
        if self.backward and grad:
            self.leaves.append(made.requires_grad_())
        return made

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device=self.device)


@dataclass(frozen=True, kw_only=True)
class Case:
    operation: str
    name: str
    shape: str
    dtype: str
    backward: bool
    tiny: bool
    devices: tuple[str, ...]
    reach: Reach | None
    make: Callable[[Tensors, Shape], Calls] = field(repr=False, compare=False)

    @property
    def passes(self) -> str:
        return BOTH if self.backward else FORWARD

    @property
    def label(self) -> str:
        """The text that `--only` is matched against."""
        name = f"{self.operation}: {self.name}" if self.name else self.operation
        return f"{name} {self.shape} {self.dtype} {self.passes}"

    def build(self, device: torch.device) -> tuple[Calls, Tensors]:
        tensors = Tensors(device, getattr(torch, self.dtype), self.backward)
        return self.make(tensors, parse(self.shape)), tensors


CASES: list[Case] = []


def bench(
    operation: str,
    name: str = "",
    *,
    shapes: tuple[str, ...] = (),
    tiny: tuple[str, ...] = (),
    dtypes: tuple[str, ...] = DTYPES,
    backward: tuple[bool, ...] = (False,),
    devices: tuple[str, ...] = ("cpu", "cuda"),
    reach: dict[tuple[str, bool], Reach | float] | None = None,
) -> Callable[[Callable[[Tensors, Shape], Calls]], Callable[[Tensors, Shape], Calls]]:
    """Registers a case for each shape, dtype and pass. shapes: "B1 H16 T1024 D64". tiny: those of the quick run.

    reach: by (dtype, backward), for `shapes`.
    """

    def register(make: Callable[[Tensors, Shape], Calls]) -> Callable[[Tensors, Shape], Calls]:
        for shape, small in [*((s, False) for s in shapes), *((s, True) for s in tiny)]:
            parse(shape)
            for dtype in dtypes:
                for both in backward:
                    goal = None if small or reach is None else reach.get((dtype, both))
                    case = Case(
                        operation=operation, name=name, shape=shape, dtype=dtype, backward=both, tiny=small,
                        devices=devices, reach=Reach(ratio=goal) if isinstance(goal, float) else goal, make=make,
                    )  # fmt: skip
                    if any(case.label == other.label and set(devices) & set(other.devices) for other in CASES):
                        raise ValueError(f"the case {case.label!r} is registered twice")
                    CASES.append(case)
        return make

    return register


def select(only: str | None = None, device: str | None = None, quick: bool = False) -> Iterator[Case]:
    """The cases whose label matches the regular expression `only`, for `device`; with `quick` the tiny ones."""
    pattern = re.compile(only or "")
    for case in CASES:
        if pattern.search(case.label) and (device is None or device in case.devices) and (case.tiny or not quick):
            yield case


def parse(shape: str) -> Shape:
    """ "B1 KV8 T4096" -> {"B": 1, "KV": 8, "T": 4096}."""
    words = [re.fullmatch(r"([A-Za-z]+)(\d+)", word) for word in shape.split()]
    if not all(words):
        raise ValueError(f"a shape is written as names and sizes, as in 'B1 H16 T1024 D64'; got {shape!r}")
    return {word[1]: int(word[2]) for word in words if word}


def ours(name: str, *args: Any, **kwargs: Any) -> tuple[Callable[[], Any], Choice]:
    """A call of the operation `name`, and what it runs: the first two fields of `Calls`."""
    operation = OperationRegistry.create(name)
    return lambda: operation(*args, **kwargs), operation.choose(*args, **kwargs)


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
