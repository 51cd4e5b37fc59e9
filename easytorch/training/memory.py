"""The memory that a model and its optimizer need, checked before allocation."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from easytorch.bridge.core.sizes import human_size
from easytorch.distributed.declared import DISPATCHED, expanded_plan
from easytorch.training.architecture import MODEL, REFUSALS
from easytorch.training.config import OPTIMIZERS as NAMES
from easytorch.training.config import TrainingConfig
from easytorch.training.optimizers import STATE_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# float32: the weight and its gradient; the optimizer's state comes on top.
BYTES_A_WEIGHT = 4 + 4


# A frozen weight in few bits, with its scales.
QUANTIZED_BYTES = {"nf4": 0.56, "int4": 0.56, "int8": 1.01}


@dataclass(frozen=True, kw_only=True)
class Held:
    """What each process holds of a model. shards: over how many each tensor is divided; expert_ranks: over how many the
    experts are, besides. reference: a frozen copy too. frozen_bytes: of a weight that is not trained; None if all are.
    """

    shards: int = 1
    expert_ranks: int = 1
    optimizer: str = "adamw"
    reference: bool = False
    frozen_bytes: float | None = None

    def bytes_of(self, parameters: int, experts: int = 0) -> int:
        """In one process, of a model with that many parameters, of which those of experts are counted in `experts`.

        Each process loads every weight before it keeps its part.
        """
        if self.frozen_bytes is not None:
            return int(parameters * self.frozen_bytes)
        own = (parameters - experts + experts / self.expert_ranks) / self.shards
        copies = 2 if self.reference else 1
        kept = own * (self._trained_bytes + (4 if self.reference else 0))
        return int(max(kept, parameters * 4 * copies))

    def describe(self, experts: int = 0) -> str:
        if self.frozen_bytes is not None:
            return (
                f"frozen weights: {self.frozen_bytes:g} bytes per parameter; the adapter, its gradients and optimizer"
            )
        words = f"weights, gradients and {NAMES[self.optimizer]}: {self._trained_bytes} bytes per parameter"
        if self.reference:
            words += ", and 4 of the frozen reference"
        if self.shards > 1:
            words += f", over {self.shards} shards"
        return words + (f", experts over {self.expert_ranks}" if experts and self.expert_ranks > 1 else "")

    @property
    def _trained_bytes(self) -> int:
        return BYTES_A_WEIGHT + STATE_BYTES[self.optimizer]


def held_by(config: TrainingConfig, processes: int) -> Held:
    """What each of the processes of a run holds."""
    axes = config.axes(processes)
    frozen = None if config.lora is None else QUANTIZED_BYTES.get(config.quantize or "", 4.0)
    return Held(
        shards=math.prod(axes.get(name, 1) for name in ("fsdp", "tp", "pp")),
        expert_ranks=axes.get("ep", 1),
        optimizer=config.optimizer,
        reference=config.task == "dpo" and config.lora is None,
        frozen_bytes=frozen,
    )


def count_parameters(architecture: PreTrainedConfig) -> int:
    """The parameters of the causal language model with this config, on meta; `ValueError` where it cannot be built."""
    return count_with_experts(architecture)[0]


def count_with_experts(architecture: PreTrainedConfig) -> tuple[int, int]:
    """(all parameters, those of experts that the model's plan divides over ranks), as `count_parameters`."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(architecture)
    except REFUSALS as error:
        raise ValueError(f"{MODEL}: these settings do not build a model: {type(error).__name__}: {error}") from error
    plan = expanded_plan(model, "ep_plan")
    modules = [one for name, one in model.named_modules() if plan.get(name) == DISPATCHED]
    experts = {parameter for one in modules for parameter in one.parameters()}
    return sum(one.numel() for one in model.parameters()), sum(one.numel() for one in experts)


def needed(
    parameters: int, processes: int, on_gpu: bool, available: int | None, held: Held | None = None, experts: int = 0
) -> str:
    """One line with the memory per process and in total; `ValueError` where the machine has less.

    experts: of the parameters those of experts. available: bytes of the CPU's memory, which processes share, or of one
    GPU's, of which each has its own.
    """
    held = held or Held()
    each = held.bytes_of(parameters, experts)
    total = each if on_gpu else each * processes
    words = (
        f"{parameters / 1e6:,.2f} M parameters take {human_size(each)} of memory in each of {processes} process(es) "
        f"({held.describe(experts)}), and activations come on top"
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


def describe(architecture: PreTrainedConfig, processes: int, device: torch.device, held: Held) -> str:
    """`needed` for this architecture on this device."""
    parameters, experts = count_with_experts(architecture)
    return needed(parameters, processes, device.type == "cuda", available_bytes(device), held, experts)
