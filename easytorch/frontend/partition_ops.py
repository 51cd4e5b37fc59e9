"""Operators that say where a traced computation is divided over a mesh, and what is computed again.

`with_sharding(x, sharding)` is x, divided over the mesh's axes, an entry a dimension: "dp,fsdp|tp|" is
(("dp", "fsdp"), "tp", None). Its gradient is divided as it comes, or likewise if `both_ways`. `barrier(xs)` are the
tensors, as a compiler does not know them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.backends.partitioning import Sharding

_LIBRARY = torch.library.Library("easytorch_frontend", "FRAGMENT")
_LIBRARY.define("with_sharding(Tensor x, str sharding, bool both_ways=False) -> Tensor")
_LIBRARY.define("barrier(Tensor[] xs) -> Tensor[]")


def _copy(x: Tensor, sharding: str, both_ways: bool = False) -> Tensor:
    return x.clone()


def _copies(xs: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in xs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.sharding, ctx.both_ways = inputs


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    if ctx.both_ways:
        grad = torch.ops.easytorch_frontend.with_sharding(grad, ctx.sharding, True)
    return grad, None, None


_LIBRARY.impl("with_sharding", _copy, "CompositeExplicitAutograd")
_LIBRARY.impl("barrier", _copies, "CompositeExplicitAutograd")
torch.library.register_autograd("easytorch_frontend::with_sharding", _gradient, setup_context=_keep, lib=_LIBRARY)


def with_sharding(x: Tensor, sharding: Sharding, *, both_ways: bool = False) -> Tensor:
    """x, divided over the mesh like this; both_ways: its gradient too."""
    result: Tensor = torch.ops.easytorch_frontend.with_sharding(x, _text(sharding), both_ways)
    return result


def barrier(xs: list[Tensor]) -> list[Tensor]:
    """The tensors, without gradients, as a compiler does not know them."""
    result: list[Tensor] = torch.ops.easytorch_frontend.barrier(xs)
    return result


def _text(sharding: Sharding) -> str:
    return "|".join(",".join((entry,) if isinstance(entry, str) else entry or ()) for entry in sharding)


def parse(text: str, rank: int) -> Sharding:
    """The sharding that `with_sharding` was given."""
    return tuple(tuple(filter(None, entry.split(","))) or None for entry in text.split("|")) if rank else ()
