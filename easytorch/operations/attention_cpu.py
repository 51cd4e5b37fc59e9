"""Where XLA's online softmax is measured faster than ATen's fused attention on a CPU."""

from __future__ import annotations

from typing import Any

import torch


def xla_is_faster(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **features: Any) -> bool:
    return False
