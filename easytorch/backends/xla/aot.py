"""Compiling a computation for devices that are not here, and what the compiler says of it: memory, FLOPs, collectives.

TPUs by libtpu, which contains the compiler and runs on a CPU host; CPUs by jaxlib's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from easytorch.backends.errors import BackendError
from easytorch.backends.graph import Graph
from easytorch.backends.interface import Executable
from easytorch.backends.xla import pjrt
from easytorch.backends.xla.backend import XlaBackend
from easytorch.backends.xla.folding import folds_large_values
from easytorch.backends.xla.program import matched_outputs
from easytorch.backends.xla.stablehlo import emit

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# an operation of optimized HLO: `%name = (f32[2,3]{1,0}, ...) all-gather-start(...)`
_CALL = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(COLLECTIVES)})(-start)?\(")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Facts:
    """What a compiler says of a program, for each device, in bytes and floating point operations a run.

    arguments, outputs, reused: of which outputs reuse arguments' memory. temporary: everything between. collectives:
    kind -> (how many, bytes of their results on a device).
    """

    arguments: int
    outputs: int
    reused: int
    temporary: int
    flops: float
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def memory(self) -> int:
        """Bytes of a device that the program takes while it runs."""
        return self.arguments + self.outputs - self.reused + self.temporary


def compile_for(graph: Graph, devices: Sequence[Any], donated: Sequence[int] = (), *, quickly: bool = False) -> Facts:
    """Compiles a finished graph for `devices`, of which as many are taken as its mesh has, and runs nothing.

    devices: jax's, or those of `tpu_devices`. donated: parameters whose memory outputs of the same shape reuse.
    quickly: the compiler spends less on the program's speed, which nobody runs.
    """
    mesh = graph.mesh
    count = 1 if mesh is None else mesh.size
    if len(devices) < count:
        raise BackendError(f"{graph.name!r} is for {count} devices, and {len(devices)} were given")
    text = emit(graph, 1, matched_outputs(frozenset(donated), graph))
    folding = not folds_large_values(graph)
    program = pjrt.compile_only(text, devices[:count], folding, mesh is not None, quickly=quickly)
    return facts(program)


def facts(program: Any) -> Facts:
    """Of a program that PJRT has compiled."""
    stats = program.get_compiled_memory_stats()
    costs = program.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    return Facts(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        float(costs.get("flops", 0.0)),
        count_collectives("\n".join(module.to_string() for module in program.hlo_modules())),
    )


def count_collectives(text: str) -> dict[str, tuple[int, int]]:
    """Kind -> (how many, bytes of their results) of optimized HLO. Those in the body of a loop count once.

    Each counts once: the TPU's compiler repeats an asynchronous one, with the same channel, in the fusions that it
    spans, and writes a reduce-scatter as an all-reduce in a computation that is named for it.
    """
    found: dict[str, tuple[int, int]] = {}
    seen: set[tuple[str, str]] = set()
    scattered = ""  # the result of the computation of a reduce-scatter that the line is in
    for line in text.splitlines():
        if line.endswith("{") and " -> " in line:
            name = line.split()[0].lstrip("%")
            scattered = line.rpartition(" -> ")[2] if name.startswith("all-reduce-scatter") else ""
        if (match := _CALL.search(line)) is None:
            continue
        result, kind, start = match.groups()
        channel = _CHANNEL.search(line)
        key = kind, channel[1] if channel else f"{line.split()[0]} {len(seen)}"
        if key in seen:
            continue
        seen.add(key)
        sizes = [_bytes(one) for one in _ARRAY.finditer(scattered or result)]
        # an asynchronous one returns its operands beside its results, and flags
        size = max(sizes, default=0) if start else sum(sizes)
        kind = "reduce-scatter" if scattered else kind
        number, total = found.get(kind, (0, 0))
        found[kind] = number + 1, total + size
    return found


def _bytes(match: re.Match[str]) -> int:
    elements = math.prod(int(size) for size in match[3].split(",") if size)
    bits = 8 if match[1] == "pred" else int(match[2])
    return elements * bits // 8


class AbsentDevices(XlaBackend):
    """A backend that records computations for devices that are not here; `compile_for` compiles them."""

    def __init__(self, count: int) -> None:
        super().__init__("cpu")
        self._count = count

    def num_devices(self) -> int:
        return self._count

    def compile_graph(self, graph: Graph, num_devices: int) -> Executable:
        raise BackendError(f"{graph.name!r}: the devices are not here; finish the graph and use compile_for")
