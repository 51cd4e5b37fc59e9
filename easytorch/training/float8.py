"""Training with matrix products of 8 bits (torchao's float8 training), where the device has them.

Inputs, weights and gradients are rounded to float8 for each product, with a scale for each tensor that is found anew in
each step (arXiv:2209.05433); the weights and the optimizer stay float32, everything else is computed in bfloat16.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from easytorch.training.config import flag

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MULTIPLE = 16  # sizes that the GPUs' products take


def check_float8(device: torch.device) -> None:
    """`ValueError` where the device has no products of float8, or torchao is missing."""
    if (why := refusal(device)) is not None:
        raise ValueError(f"{flag('dtype')} float8: {why}; use bfloat16")
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(f"{flag('dtype')} float8 needs torchao: pip install torchao")


def refusal(device: torch.device) -> str | None:
    """Why the device cannot compute it; None where it can."""
    if device.type != "cuda":
        return f"the device {device.type} has no products of float8, which are those of GPUs"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return None if name.startswith(("gfx94", "gfx95")) else f"{name} has no products of float8 (MI300 and later)"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= (8, 9):
        return None
    return f"this GPU has compute capability {major}.{minor}, and products of float8 come with 8.9 (L4, L40S, H100)"


def use_float8(model: PreTrainedModel) -> int:
    """Make the linear layers of the model's layers compute in float8; returns their number. To be called before the
    layers are compiled or sharded. Heads, routers and stacks of experts stay, and sizes that are no multiples of 16.

    `ValueError` where no layer is left.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    head: Any = model.get_output_embeddings()
    chosen = {
        name
        for name, one in model.named_modules()
        if type(one) is nn.Linear
        and one is not head
        and one.in_features % _MULTIPLE == 0
        and one.out_features % _MULTIPLE == 0
    }
    if not chosen:
        raise ValueError(
            f"{flag('dtype')} float8: {type(model).__name__} has no linear layers whose sizes are multiples of "
            f"{_MULTIPLE}"
        )
    # a GPU's own; elsewhere, where a test comes past `check_float8`, the same rounding in float32
    config = Float8LinearConfig(emulate=model.device.type != "cuda")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)
    return len(chosen)
