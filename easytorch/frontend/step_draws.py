"""Random numbers of what is computed twice: drawn once, and the same again in the backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Draws(TorchDispatchMode):
    """Within this block the results of random operations are kept; within `again()` they are those that were kept.

    A layer that is recomputed has its dropout, whose masks are kept as booleans.
    """

    def __init__(self, kept: list[tuple[Any, list[Any]]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[tuple[Any, list[Any]]] = [] if kept is None else kept
        self._rest = None if kept is None else iter(kept)

    def again(self) -> Draws:
        """The draws of this block, once more and in their order."""
        return Draws(self._kept)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **keywords)
        written = _written(func, args, keywords)
        in_place = bool(func._schema.returns) and all(one.alias_info is not None for one in func._schema.returns)
        if self._rest is None:
            result = func(*args, **keywords)
            leaves = [] if in_place else pytree.tree_leaves(result)
            mask = func.overloadpacket in (torch.ops.aten.bernoulli, torch.ops.aten.bernoulli_)
            self._kept.append((func, [_kept(one, mask) for one in (*written, *leaves)]))
            return result
        drawn, values = next(self._rest, (None, []))
        if drawn != func:
            raise RuntimeError(f"a layer that is computed again draws {func}, and {drawn} at first")
        # otherwise called for its structure and dtypes: nobody uses the numbers
        result = written[0] if in_place else func(*args, **keywords)
        for one, value in zip(written, values, strict=False):
            one.copy_(value)
        if in_place:
            return result
        own, structure = pytree.tree_flatten(result)
        pairs = zip(values[len(written) :], own, strict=True)
        return pytree.tree_unflatten(
            [value.to(like.dtype) if isinstance(like, Tensor) else like for value, like in pairs], structure
        )


def _written(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that the operation writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else keywords[argument.name])
    return found


def _kept(one: Any, mask: bool) -> Any:
    if not isinstance(one, Tensor):
        return one
    return one.bool() if mask else one.clone()
