"""The memory that a model and its optimizer need, checked before allocation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from easytorch.bridge.core.sizes import human_size
from easytorch.training.architecture import MODEL, REFUSALS
from easytorch.training.config import OPTIMIZERS as NAMES
from easytorch.training.optimizers import STATE_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# float32: the weight and its gradient; the optimizer's state comes on top.
BYTES_A_WEIGHT = 4 + 4


def count_parameters(architecture: PreTrainedConfig) -> int:
    """The parameters of the causal language model with this config, on meta; `ValueError` where it cannot be built."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(architecture)
    except REFUSALS as error:
        raise ValueError(f"{MODEL}: these settings do not build a model: {type(error).__name__}: {error}") from error
    return sum(parameter.numel() for parameter in model.parameters())


def needed(
    parameters: int, processes: int, on_gpu: bool, available: int | None, shards: int = 1, optimizer: str = "adamw"
) -> str:
    """One line with the memory per process and in total; `ValueError` where the machine has less.

    shards: over how many processes each tensor is sharded. available: bytes of the CPU's memory, which processes
    share, or of one GPU's, of which each has its own.
    """
    # each process loads every weight before it keeps its shard
    bytes_a_parameter = BYTES_A_WEIGHT + STATE_BYTES[optimizer]
    each = max(parameters * bytes_a_parameter // shards, parameters * 4)
    over = f", over {shards} shards" if shards > 1 else ""
    total = each if on_gpu else each * processes
    words = (
        f"{parameters / 1e6:,.2f} M parameters take {human_size(each)} of memory in each of {processes} process(es) "
        f"(weights, gradients and {NAMES[optimizer]}: {bytes_a_parameter} bytes per parameter{over}), "
        f"and activations come on top"
    )
    if available is not None and total > available:
        raise ValueError(
            f"{MODEL}: {words}. That is {human_size(total)}, and {'a GPU' if on_gpu else 'this machine'} has "
            f"{human_size(available)}: give a smaller model (hidden_size, num_hidden_layers, ...)"
        )
    return words


def available_bytes(device: torch.device) -> int | None:
    """All the memory of the GPU, or of this machine or container with its swap; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + _swap()
    except (ValueError, OSError, AttributeError):  # names that this system does not have
        return None
    return min(machine, _container_limit() or machine)


def _swap() -> int:
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:"))


def _container_limit() -> int | None:
    """The memory limit of the control group (version 2, then 1)."""
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            return int(text)
    return None


def describe(
    architecture: PreTrainedConfig, processes: int, device: torch.device, shards: int = 1, optimizer: str = "adamw"
) -> str:
    """`needed` for this architecture on this device."""
    parameters = count_parameters(architecture)
    return needed(parameters, processes, device.type == "cuda", available_bytes(device), shards, optimizer)
