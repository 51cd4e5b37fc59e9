"""The shapes of what a rank computes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Shapes(TorchDispatchMode):
    """Collects the shapes of what is computed on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and not isinstance(one, DTensor):
                self.seen.add(tuple(one.shape))
        return found
