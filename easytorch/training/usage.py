"""How much of the machine a run uses: model FLOPs utilization (MFU) and peak memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from easytorch.bridge.core.sizes import human_size
from easytorch.training.config import TrainingConfig
from easytorch.training.processes import Processes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Dense FLOP/s in bfloat16 by the makers' data sheets; the first name that the device's has.
_PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12,
    "MI300X": 1307e12, "MI250X": 383e12, "A10": 125e12,
}  # fmt: skip


class Usage:
    """Figures of one run. MFU is given where the peak of the device is known, and the run computes in bfloat16."""

    def __init__(self, model: PreTrainedModel, config: TrainingConfig, processes: Processes) -> None:
        self._device, self._flops = processes.device, flops_per_token(model, config.block_size)
        name = torch.cuda.get_device_name(processes.device) if processes.device.type == "cuda" else ""
        peak = next((peak for known, peak in _PEAKS.items() if known in name), None)
        self._peak = peak * processes.world if peak is not None and config.dtype == "bfloat16" else None

    def figures(self, rate: float) -> dict[str, float]:
        """rate: tokens per second of all processes. memory: the largest of this process up to now, in bytes."""
        found: dict[str, float] = {"memory": self._memory()}
        if self._peak is not None:
            found["mfu"] = rate * self._flops / self._peak
        return found

    def words(self, figures: Mapping[str, float]) -> str:
        mfu = f"  MFU {figures['mfu']:.1%}" if "mfu" in figures else ""
        return f"{mfu}  {human_size(int(figures['memory']))}"

    def _memory(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def flops_per_token(model: PreTrainedModel, length: int) -> float:
    """FLOPs of forward and backward: 6 for each parameter of a matrix product, 12 L H Q T for attention (PaLM, appendix
    B, arXiv:2204.02311); of experts, those that a token is routed to."""
    config = model.config.get_text_config()
    table = getattr(model.get_input_embeddings(), "weight", None)
    head = getattr(model.get_output_embeddings(), "weight", None)
    tied = table is not None and table is head
    share = _active_share(config)
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or (parameter is table and not tied):
            continue
        total += parameter.numel() * (share if ".experts." in name else 1.0)
    layers, heads = (getattr(config, name, 0) or 0 for name in ("num_hidden_layers", "num_attention_heads"))
    size = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // max(1, heads))
    return 6 * total + 12 * layers * heads * size * length


def _active_share(config: object) -> float:
    chosen = getattr(config, "num_experts_per_tok", None)
    experts = next(
        (
            one
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if (one := getattr(config, name, None))
        ),
        None,
    )
    return chosen / experts if chosen and experts else 1.0
