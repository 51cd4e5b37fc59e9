"""An output whose logits are computed when they are first read, which training on the loss alone never does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import ModelOutput


class DeferredLogits:
    """Logits that are not computed yet. torch's functions and attribute access compute them and see the tensor.

    It stands in the output's `items()` and `values()`, so that what rebuilds an output (accelerate's mixed precision,
    torch's pytrees) passes it on; `output.logits`, `output["logits"]`, an index and `to_tuple()` give the tensor.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._tensor: Tensor | None = None

    def materialize(self) -> Tensor:
        if self._compute is not None:
            self._tensor, self._compute = self._compute(), None
        assert self._tensor is not None
        return self._tensor

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        positional = [
            [materialized(one) for one in arg] if isinstance(arg, list) else materialized(arg) for arg in args
        ]
        return function(*positional, **{name: materialized(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_compute", "_tensor"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.materialize()[index]

    def __reduce__(self) -> Any:
        return materialized, (self.materialize(),)


def materialized(value: Any) -> Any:
    """`value`, and the tensor itself of logits that are deferred."""
    return value.materialize() if isinstance(value, DeferredLogits) else value


class _Deferring:
    """A mixin that goes before an output class, one of whose fields is a property of `_field`."""

    def __post_init__(self) -> None:
        made: Any = super()
        made.__post_init__()  # which reads every field
        self.__dict__["_made"] = True

    @contextmanager
    def left_deferred(self) -> Iterator[None]:
        """For code that looks through the fields for tensors: `logits` is what it is, and is not computed."""
        made = self.__dict__.pop("_made", None)
        try:
            yield
        finally:
            if made is not None:
                self.__dict__["_made"] = made

    def compute_before_backward(self) -> None:
        """For weights that are given up by a backward pass: what is still held of the output when that of its loss
        begins is computed then, and an output that was dropped for its loss costs nothing."""
        loss = self.__dict__.get("loss")
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return
        for value in self.__dict__.values():
            if isinstance(value, DeferredLogits):
                loss.register_hook(_computing(weakref.ref(value)))

    def __getitem__(self, key: Any) -> Any:
        output: Any = super()
        if isinstance(key, int):
            key = list(self.keys())[key]  # type: ignore[attr-defined]
        return materialized(output.__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        output: Any = super()
        return materialized(output.get(key, default))

    def __reduce__(self) -> Any:
        """An output of the class itself, with the logits computed."""
        fields: Any = self.__dataclass_fields__  # type: ignore[attr-defined]
        return type(self).__mro__[2], tuple(getattr(self, name) for name in fields)


def _computing(logits: weakref.ref[DeferredLogits]) -> Callable[[Tensor], None]:
    def compute(grad: Tensor) -> None:
        held = logits()
        if held is not None:
            with torch.enable_grad():
                held.materialize()

    return compute


def _field(name: str) -> property:
    """The field `name`, which is computed when it is read, but not while the output is being made."""

    def read(self: Any) -> Any:
        value = self.__dict__.get(name)
        return materialized(value) if "_made" in self.__dict__ else value

    def write(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    return property(read, write)


@functools.cache
def deferring(output_class: type[ModelOutput], logits: str = "logits") -> type[ModelOutput]:
    """A subclass of `output_class` whose field `logits` may be `DeferredLogits`."""
    return type(output_class.__name__, (_Deferring, output_class), {"__module__": __name__, logits: _field(logits)})


def defers(hidden_states: Tensor, weight: Tensor) -> bool:
    """Whether gradients are recorded and there are at least `SMALLEST` logits."""
    return (
        torch.is_grad_enabled()
        and hidden_states.requires_grad
        and hidden_states.shape[:-1].numel() * weight.shape[0] >= SMALLEST
    )


# The least number of logits that are deferred: 16 MiB in float32. Smaller models stay bit-equal to transformers.
SMALLEST = 2**22
