"""Random operations that activation checkpointing runs twice, the second time from the first one's state.

Of these nodes the graph says neither type nor size, so that the state is the program's own, uint64[3].
"""

from __future__ import annotations

from typing import Any

from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from easytorch.backends.graph import Op
from easytorch.frontend.context import Context
from easytorch.frontend.errors import UnsupportedOpError
from easytorch.frontend.registry import lowering, lowerings


@lowering(run_and_save_rng_state)
def save_state(ctx: Context, target: Any, *args: Any, **kwargs: Any) -> tuple[Op, Any]:
    """The state before the operation, and its result."""
    return ctx.random.current(), _result(ctx, target, args, kwargs)


@lowering(run_with_rng_state)
def with_state(ctx: Context, state: Op, target: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of the operation from that state; the program's own state is unchanged."""
    own = ctx.random.value
    ctx.random.value = state
    result = _result(ctx, target, args, kwargs)
    ctx.random.value = own
    return result


def _result(ctx: Context, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if target not in lowerings():
        raise UnsupportedOpError(f"{target}: no lowering, within {ctx.node}")
    return lowerings()[target](ctx, *args, **kwargs)
