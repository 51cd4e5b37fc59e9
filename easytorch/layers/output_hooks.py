"""The hooks by which transformers records hidden states, attentions and router logits: put on a model's modules when a
call first asks for one of them, and left there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import output_capturing


def recording() -> bool:
    """Whether a call of a model that is in progress has asked for them."""
    return bool(output_capturing._active_collector.get())


def idle(hooks: Mapping[int, Any]) -> bool:
    """Whether they are such hooks alone, which now do nothing."""
    if torch.compiler.is_compiling() or recording():  # a graph has its hooks
        return False
    return all(getattr(hook, "__module__", None) == output_capturing.__name__ for hook in hooks.values())
