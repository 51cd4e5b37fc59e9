"""Operations that compute nothing themselves: assertions, subgraphs, control flow."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from easytorch.backends.builder import Builder
from easytorch.backends.graph import Op
from easytorch.frontend.context import Context
from easytorch.frontend.errors import LoweringError
from easytorch.frontend.registry import lowering

aten = torch.ops.aten
higher = torch.ops.higher_order


@lowering(aten.sym_size.int)
def sym_size(ctx: Context, x: Op, axis: int) -> int:
    return x.shape.dimensions[ctx.axis(axis, x.shape.rank)]


@lowering(aten.sym_numel.default)
def sym_numel(ctx: Context, x: Op) -> int:
    return x.shape.size


@lowering(aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_async.default)
@lowering(aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)
def nothing(ctx: Context, *args: Any, **kwargs: Any) -> None:
    """The dtypes are checked where they are inferred; what depends on data cannot stop a compiled program."""


@lowering(aten._assert_scalar.default)
def assert_scalar(ctx: Context, value: Any, message: str) -> None:
    if not isinstance(value, Op) and not value:
        raise LoweringError(f"for these sizes an assertion of the module does not hold: {message}")


@lowering(higher.wrap_with_set_grad_enabled)
def wrap_with_set_grad_enabled(ctx: Context, enabled: bool, graph: GraphModule, *operands: Any) -> Any:
    return ctx.inline(graph, *operands)


@lowering(higher.wrap_with_autocast)
def wrap_with_autocast(
    ctx: Context, device: str, dtype: Any, enabled: bool, cache: bool, graph: GraphModule, *operands: Any
) -> Any:
    """The casts are in the graph."""
    return ctx.inline(graph, *operands)


@lowering(higher.cond)
def cond(ctx: Context, pred: Any, on_true: GraphModule, on_false: GraphModule, operands: Any = ()) -> Any:
    if not isinstance(pred, Op):
        return ctx.inline(on_true if pred else on_false, *operands)
    first, second = ctx.closure(on_true, *operands), ctx.closure(on_false, *operands)
    return ctx.builder.cond(ctx.reshape(pred, ()), first, second)


@lowering(higher.while_loop)
def while_loop(ctx: Context, test: GraphModule, body: GraphModule, carried: Any, additional: Any = ()) -> Any:
    count = len(carried)
    state = [value if isinstance(value, Op) else ctx.scalar(value, "int64") for value in carried]

    def proceed(builder: Builder, *ops: Op) -> Op:
        (flag,) = ctx.closure(test, *additional)(builder, *ops[:count])
        return builder.reshape(flag, ())

    return ctx.builder.while_loop(proceed, ctx.closure(body, *additional), *state)
