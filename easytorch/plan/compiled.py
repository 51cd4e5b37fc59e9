"""A train step of a model on the meta device, compiled for a mesh of devices that are not here."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from easytorch.backends.xla.aot import AbsentDevices, Facts, compile_for
from easytorch.frontend.step_layout import Layout
from easytorch.frontend.step_program import build, spec_of
from easytorch.frontend.train_step import leaf_names, loss_of

# The sizes that a v5p slice may have along each of its three dimensions, and the chips of a host.
_LARGEST = (16, 20, 28)
_HOST = 4
COMPILERS = ("auto", "libtpu", "cpu")


def compile_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    batch: tuple[int, int],
    devices: Sequence[Any],
    *,
    recompute: bool,
    autocast: torch.dtype | None,
) -> Facts:
    """The facts of a step over (sequences, tokens of each) for the devices of a mesh."""
    spec = spec_of(model, optimizer, layout, loss=loss_of, max_norm=1.0, recompute=recompute, autocast=autocast)
    ids = torch.zeros(batch, dtype=torch.int64)
    leaves, structure = pytree.tree_flatten(((), {"input_ids": ids, "labels": ids, "use_cache": False}))
    backend = AbsentDevices(math.prod(layout.axes.values()))
    step = build(spec, backend, layout, leaves, structure, leaf_names(structure))
    return compile_for(step.finish(), devices, step.changed, quickly=True)


def compiler_devices(count: int, compiler: str = "auto") -> tuple[str, list[Any]]:
    """(the compiler's name, at least `count` devices it compiles for): a v5p slice of libtpu's, which has the most
    memory of the TPUs, else CPUs.

    A v5p slice of that many chips is taken for every device: no compiler of GPUs runs without one.
    """
    if compiler not in COMPILERS:
        raise ValueError(f"unknown compiler {compiler!r}; known: {', '.join(COMPILERS)}")
    from easytorch.backends.xla import pjrt
    from easytorch.kernels.interop.tpu_compile import ENVIRONMENT

    libtpu = compiler == "libtpu" or (compiler == "auto" and importlib.util.find_spec("libtpu") is not None)
    if libtpu and (shape := v5p_slice(count)) is not None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        return f"libtpu, v5p {shape}", pjrt.tpu_devices(f"v5p:{shape}")
    found = pjrt.devices("cpu")
    if len(found) < count:
        raise ValueError(
            f"a plan for {count} devices needs libtpu (pip install libtpu), or as many CPU devices of jax: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return "jaxlib, CPU", found


def v5p_slice(count: int) -> str | None:
    """The shape of a slice of v5p chips with at least `count`, "4x4x8"; None where there is none."""
    wanted = max(count, _HOST)
    found = []
    for x in range(2, _LARGEST[0] + 1, 2):
        for y in range(x, _LARGEST[1] + 1, 2):
            z = wanted // (x * y)
            if x * y * z == wanted and (z == 1 or (z >= y and z % 2 == 0)) and z <= _LARGEST[2]:
                found.append((max(x, y, z) - min(x, y, z), f"{x}x{y}x{z}"))
    return min(found)[1] if found else None
