"""Modules of transformers' own classes whose forward calls our operations: `specialise` changes one instance.

The instance's class becomes a subclass of its own with the same name, as FSDP and torch's parametrizations do: hooks,
`isinstance`, copies, pickles and state dicts work as before, and no other instance is changed. What `easytorch.auto`
found equal is described by a `Norm`, a `GatedMLP`, an `MLP` or a `StockAttention`. The module's own forward still
runs in graphs, and wherever our operation would be the slower one.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from easytorch.function_globals import global_of, with_attributes, with_global
from easytorch.layers.fused_linear import SMALLEST_WEIGHT, FusedProjections
from easytorch.layers.gate import gated
from easytorch.layers.linear import linear
from easytorch.layers.norm import layer_norm, rms_norm
from easytorch.layers.rotary import rotary
from easytorch.operations.dispatch.environment import untouched


class Specialised(nn.Module):
    """The first base of a specialised class. stock: the class of the instance before; tried: its forward then, which
    ours stands for: one that replaces it later is called."""

    how: ClassVar[Any]
    stock: ClassVar[type[nn.Module]]
    tried: Callable[..., Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the stock class, from which this one is made again."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (_remade, (self.stock, self.how), *reduced[2:])


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension. formula: a key of `FORMULAS`; eps: the attribute that holds it."""

    formula: str
    eps: str

    def bases(self) -> tuple[type[nn.Module], ...]:
        return (SpecialisedNorm,)

    def body(self, stock: type[nn.Module]) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class GatedMLP:
    """down(act(gate(x)) * up(x)); attribute names. up None: `gate` has the rows of both, the gate's first if `first`.

    act None: SiLU as a function. dropouts: modules that must be inactive.
    """

    gate: str
    up: str | None
    down: str
    act: str | None
    dropouts: tuple[str, ...] = ()
    first: bool = True

    def bases(self) -> tuple[type[nn.Module], ...]:
        return (SpecialisedMergedMLP,) if self.up is None else (SpecialisedGatedMLP, FusedProjections)

    def body(self, stock: type[nn.Module]) -> dict[str, Any]:
        return {} if self.up is None else {"fused": (self.gate, self.up)}


@dataclass(frozen=True)
class MLP:
    """down(act(up(x))), as `GatedMLP`."""

    up: str
    down: str
    act: str
    dropouts: tuple[str, ...] = ()

    def bases(self) -> tuple[type[nn.Module], ...]:
        return (SpecialisedMLP,)

    def body(self, stock: type[nn.Module]) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class StockAttention:
    """An attention whose own forward runs, and calls our operations in place of what it names.

    function: a function of its module (q, k, cos, sin), heads before positions, or None; partial: it turns the first
    features of a head where the tables are narrower. projections: attributes that its forward calls, `nn.Linear`s.
    """

    function: str | None
    partial: bool
    projections: tuple[str, ...]

    def bases(self) -> tuple[type[nn.Module], ...]:
        return (SpecialisedAttention,)

    def body(self, stock: type[nn.Module]) -> dict[str, Any]:
        forward: Any = stock.forward
        ours = with_attributes(forward, {name: _OURS + name for name in self.projections})
        if self.function is not None:
            ours = with_global(ours, self.function, turning(global_of(forward, self.function), self.partial))

        @functools.wraps(forward)
        def either(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            current = stock.forward  # another one where it was replaced since
            # torch.compile looks a global up in the module of its name, whatever the function's globals are
            return (ours if current is forward and _eager() else current)(module, *args, **kwargs)

        return {"forward": either, **{_OURS + name: _projection(name) for name in self.projections}}


_OURS = "_easytorch_"  # before the name of a projection


def _projection(name: str) -> Callable[..., Any]:
    """A method that calls the layer `name` by the path that `linear` chooses; what else stands there, such as adapters
    and quantized layers, and a layer with hooks, is called as it is."""

    def project(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layer = module._modules.get(name)
        if type(layer) is nn.Linear and len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return linear(layer, args[0])
        return getattr(module, name)(*args, **kwargs)

    return project


How = Norm | GatedMLP | MLP | StockAttention


def specialise(module: nn.Module, how: How) -> None:
    """Replaces the forward of this instance by ours. accelerate's hooks, which hold the old one, get the new one."""
    stock = type(module)
    module.__class__ = specialised_class(stock, how)  # type: ignore[arg-type]
    if isinstance(module, SpecialisedGatedMLP):
        module.joins = sum(getattr(module, name).weight.numel() for name in module.fused) >= SMALLEST_WEIGHT
    hooked = module.__dict__.get("_old_forward")
    if getattr(hooked, "__func__", None) is stock.forward:
        module._old_forward = types.MethodType(type(module).forward, module)  # type: ignore[assignment]


@functools.cache
def specialised_class(stock: type[nn.Module], how: How) -> type[nn.Module]:
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    kept = {"how": how, "stock": stock, "tried": staticmethod(stock.forward)}
    return type(stock.__name__, (*how.bases(), stock), {**names, **kept, **how.body(stock)})


def _remade(stock: type[nn.Module], how: How) -> nn.Module:
    made: type[nn.Module] = specialised_class(stock, how)  # type: ignore[arg-type]
    return made.__new__(made)


def _eager() -> bool:
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None


_TRIED: ContextVar[bool] = ContextVar("tried", default=False)


@contextmanager
def operations_always() -> Iterator[None]:
    """A context in which specialised modules call our operations even where that is slower, for trials."""
    token = _TRIED.set(True)
    try:
        yield
    finally:
        _TRIED.reset(token)


def _operation_runs(x: Tensor) -> bool:
    """True where a call goes through the dispatch: on a GPU, in a trial, as EASYTORCH_OPS and EASYTORCH_CHECK ask.

    On a CPU what remains of our norms and rotation beside the operators in C++ is not faster than the modules'.
    """
    return x.is_cuda or not untouched() or _TRIED.get()


class SpecialisedAttention(Specialised):
    how: ClassVar[StockAttention]


class SpecialisedNorm(Specialised):
    how: ClassVar[Norm]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and self.stock.forward is self.tried and _eager():
            parameters = self._parameters
            weight, bias = parameters.get("weight"), parameters.get("bias")
            if weight is None or weight.dtype is args[0].dtype:
                rows = FORMULAS[self.how.formula](args[0], weight, bias, getattr(self, self.how.eps))
                if rows is not None:
                    return rows
        return self.stock.forward(self, *args, **kwargs)


def _rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    return rms_norm(x, weight, eps) if _operation_runs(x) else rms_norm.try_cpp(x, weight, eps)


def _rms_rounded_last(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    rows = _rms(x.float(), None if weight is None else weight.float(), None, eps)
    return None if rows is None else rows.to(x.dtype)


def _rms_zero_centred(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor | None:
    rows = _rms(x.float(), 1.0 + weight.float(), None, eps)
    return None if rows is None else rows.to(x.dtype)


def _layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    return layer_norm(x, weight, bias, eps) if x.is_cpu or x.is_cuda else None


# How a norm rounds is part of it: a formula is found for each class by what it gives in half precision.
FORMULAS: dict[str, Callable[..., Tensor | None]] = {
    "rms_norm": _rms,
    "rms_norm, rounded last": _rms_rounded_last,
    "rms_norm, zero-centred": _rms_zero_centred,
    "layer_norm": _layer,
}


class SpecialisedFeedForward(Specialised):
    """Shared by the feed-forward networks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        as_tried = self.stock.forward is self.tried
        if as_tried and len(args) == 1 and not kwargs and _eager() and not self._drops():
            return self._ours(args[0])
        return self.stock.forward(self, *args, **kwargs)

    def _drops(self) -> bool:
        return self.training and any(getattr(self, name).p > 0 for name in self.how.dropouts)

    def _act(self) -> nn.Module:
        act: nn.Module = _SILU if self.how.act is None else self._modules[self.how.act]  # type: ignore[assignment]
        return act

    def _ours(self, x: Tensor) -> Tensor:
        raise NotImplementedError


_SILU = nn.SiLU()


class SpecialisedGatedMLP(SpecialisedFeedForward):
    how: ClassVar[GatedMLP]
    fused: ClassVar[tuple[str, ...]]
    joins: bool
    projections: Callable[[Tensor], list[Tensor]]  # of FusedProjections, the base behind this one

    def _ours(self, x: Tensor) -> Tensor:
        gate, up = self.projections(x)
        return linear(getattr(self, self.how.down), gated(self._act(), gate, up))


class SpecialisedMergedMLP(SpecialisedFeedForward):
    how: ClassVar[GatedMLP]

    def _ours(self, x: Tensor) -> Tensor:
        first, second = linear(getattr(self, self.how.gate), x).chunk(2, dim=-1)
        gate, up = (first, second) if self.how.first else (second, first)
        return linear(getattr(self, self.how.down), gated(self._act(), gate, up))


class SpecialisedMLP(SpecialisedFeedForward):
    how: ClassVar[MLP]

    def _ours(self, x: Tensor) -> Tensor:
        return linear(getattr(self, self.how.down), self._act()(linear(getattr(self, self.how.up), x)))


@functools.cache
def turning(stock: Callable[..., Any], partial: bool) -> Callable[..., Any]:
    """`stock`, a function (q, k, cos, sin) of transformers that turns halves, by the `rotary` operation.

    q (B, H, T, D), k (B, K, T, D), cos and sin (B or 1, T, R). Calls with more arguments are `stock`'s.
    """

    @functools.wraps(stock)
    def turn(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 4 or kwargs or not _eager():
            return stock(*args, **kwargs)
        query, key, cos, sin = args
        if query.dim() != 4 or key.dim() != 4 or not (partial or cos.shape[-1] == query.shape[-1]):
            return stock(*args)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        turned = rotary(query, key, cos, sin) if _operation_runs(query) else rotary.try_cpp(query, key, cos, sin)
        return stock(*args) if turned is None else tuple(one.transpose(1, 2) for one in turned)

    return turn
