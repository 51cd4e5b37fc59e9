"""Shared by the operations with a recurrent state: their result, and how their paths run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from easytorch.kernels.cpu.recurrences import prefers
from easytorch.operations.dispatch.impl import OperationImpl
from easytorch.operations.dispatch.output import OperationOutput


@dataclass(kw_only=True)
class StateSpaceOutput(OperationOutput):
    """Result of an operation with a recurrent state.

    outputs: one for each token, of the tokens' shape and dtype.
    final_state: the `initial_state` of the next tokens, float32 (float64 for float64 tokens).
    """

    outputs: torch.Tensor | None = None
    final_state: torch.Tensor | None = None


torch.export.register_dataclass(StateSpaceOutput, serialized_type_name="easytorch.StateSpaceOutput")


class StateSpaceImpl(OperationImpl):
    """An operation whose paths are functions (tokens, ...) -> (outputs, final_state) of one signature."""

    casts: ClassVar[tuple[str, ...]] = ("x", "z")  # the arguments `metadata.runtime_dtype` applies to

    cpp_reason = "the state stays in the caches"

    def prefers_cpp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.metadata.runtime_dtype is not None:
            return False
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return prefers(tensors) and self.supports("cpu", *args, **kwargs) is None

    def run(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> StateSpaceOutput:
        if self.metadata.runtime_dtype is not None:
            given = inspect.signature(kernel).bind(*args, **kwargs).arguments
            for name in self.casts:
                if given.get(name) is not None:
                    given[name] = self.cast(given[name])
            args, kwargs = (), given
        outputs, final_state = kernel(*args, **kwargs)
        return StateSpaceOutput(outputs=outputs, final_state=final_state)
