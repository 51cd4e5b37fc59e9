"""HLO that another framework traced, compiled for the devices of a TPU topology on any host, and what it needs.

torch_xla's SPMD graphs are such HLO: one program for all devices, with GSPMD's annotations. jaxlib hands it to libtpu.
The one file that knows those names of jaxlib (0.7 to 0.10); the process is started with `tpu_compile.ENVIRONMENT`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from jax.experimental import topologies
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# a tuple or an array, then the operation; asynchronous ones begin with -start
_COLLECTIVE = re.compile(rf"= (?P<type>\(.*?\)|\S+) (?P<kind>{'|'.join(_KINDS)})(?:-start)?\(")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_KERNEL = 'custom_call_target="tpu_custom_call"'


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a program, and the bytes of their results, of one device (of a reduce-scatter, of
    what it reduces)."""

    count: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Figures:
    """What a program needs on each device, as the compiler states it. FLOPs count one device's part.

    arguments, outputs, temporaries, code: bytes. aliased: bytes of outputs in the memory of donated arguments.
    kernels: calls of Pallas kernels. collectives: by kind.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    flops: float
    bytes_accessed: float
    kernels: int
    collectives: dict[str, Traffic] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Bytes: all that is there while the program runs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def compile_hlo(proto: bytes, topology: str, *, donate: bool = True) -> Any:
    """A serialized HLO module, compiled as one program for all devices of `topology` ("v5e:2x2"), not to be run.

    Outputs are sharded as the partitioner propagates it. donate: arguments give their memory to outputs of their shape,
    as torch_xla's do where a tensor is updated in place. `RuntimeError` is the compiler's own.
    """
    devices: Any = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    count = len(devices)
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    options.num_replicas = build.num_replicas = 1
    options.num_partitions = build.num_partitions = count
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(count).reshape(1, count))
    build.use_spmd_partitioning, build.use_shardy_partitioner = True, False
    build.allow_spmd_sharding_propagation_to_output = [True]
    with mlir.make_ir_context():
        module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(proto))
        if donate:
            _donate_arguments(module)
        # jaxlib 0.7 takes a module's text, later ones the module
        program: Any = str(module) if "computation: str" in (devices[0].client.compile.__doc__ or "") else module
        return devices[0].client.compile(program, xla_client.DeviceList(tuple(devices)), options)


def figures_of(executable: Any) -> Figures:
    """The figures of what `compile_hlo` returns."""
    memory, costs = executable.get_compiled_memory_stats(), executable.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    text = executable.hlo_modules()[0].to_string()
    return Figures(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=costs.get("flops", 0.0),
        bytes_accessed=costs.get("bytes accessed", 0.0),
        kernels=text.count(_KERNEL),
        collectives=collectives_in(text),
    )


def collectives_in(text: str) -> dict[str, Traffic]:
    """Kind -> the collectives of a compiled module's text.

    Each counts once: the TPU's compiler repeats an asynchronous one, with the same channel, in the fusions that it
    spans, and writes a reduce-scatter as an all-reduce in a computation named for it.
    """
    found: dict[str, Traffic] = {}
    seen: set[tuple[str, str]] = set()
    computation = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.split()[0].lstrip("%")
        if (match := _COLLECTIVE.search(line)) is None:
            continue
        kind = "reduce-scatter" if computation.startswith("all-reduce-scatter") else match["kind"]
        channel = _CHANNEL.search(line)
        key = (match["kind"], channel[1] if channel else line.split()[0])
        if key in seen:
            continue
        seen.add(key)
        before = found.get(kind, Traffic())
        found[kind] = Traffic(before.count + 1, before.bytes + _bytes(match["type"]))
    return found


def _donate_arguments(module: Any) -> None:
    for operation in module.body.operations:
        if "main" in str(operation.attributes["sym_name"]):
            count = len(operation.type.inputs)
            given = [dict[str, Any]() for _ in range(count)]
            if "arg_attrs" in operation.attributes:
                given = [{one.name: one.attr for one in own} for own in operation.attributes["arg_attrs"]]
            marked = [ir.DictAttr.get({**one, "jax.buffer_donor": ir.BoolAttr.get(True)}) for one in given]
            operation.attributes["arg_attrs"] = ir.ArrayAttr.get(marked)


def _bytes(type_: str) -> int:
    """The bytes of the arrays of a type, "(bf16[8,128]{1,0}, f32[])"."""
    total = 0
    for name, shape in _ARRAY.findall(type_):
        bits = 8 if name == "pred" else int(re.sub(r"[a-z]+(\d+).*", r"\1", name))
        total += math.prod(int(length) for length in shape.split(",") if length) * bits // 8
    return total
