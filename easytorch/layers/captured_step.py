"""A decode step as a function of static tensors, which is captured as a CUDA graph where the device has such.

A captured step does on every replay what it did once, at the same addresses: inputs are written into tensors that
stay, results are read from such, and nothing on the way may depend on a value that is read back to the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from easytorch.layers import cuda_graph
from easytorch.layers.cuda_graph import GraphPool

logger = logging.getLogger(__name__)

T = TypeVar("T")

_aten = torch.ops.aten
# They have a dynamic shape where an index is a mask, which they look for.
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}
_COPIES = {_aten._to_copy.default, _aten.copy_.default, _aten.to.device, _aten.to.dtype_layout}
_DEPENDS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class HostReads(TorchDispatchMode):
    """Notes which operators wait for the device: those that read a value, or copy between it and the host.

    What an operator of ours, or a higher-order one, does inside is not seen.
    """

    supports_higher_order_operators = True  # those of a registered attention, such as flex_attention

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if _waits(func, args, output):
            self.found.append(str(func))
        return output


def _waits(func: Any, args: tuple[Any, ...], output: Any) -> bool:
    if func in _INDEXING:
        return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if func in _COPIES:
        source = args[1] if func is _aten.copy_.default else args[0]
        # a number made on the host is an argument of the kernel that fills
        filled = func is _aten.copy_.default and source.dim() == 0 and source.is_cpu
        return isinstance(output, Tensor) and output.device != source.device and not filled
    return any(tag in getattr(func, "tags", ()) for tag in _DEPENDS)  # a higher-order operator has none


class CapturedStep(Generic[T]):
    """`run()` again and again: first as it is, then captured, then replayed; always as it is on other devices.

    run: a function of tensors that stay where they are. It returns tensors, in any pytree; they are valid until the
    next call of this step, or of another one of its pool. Nothing else that it does in Python happens at a replay.
    refusal: why the step is not captured, None where it is or will be.
    """

    def __init__(self, run: Callable[[], T], device: torch.device, pool: GraphPool | None = None) -> None:
        self._run = run
        self._graph = cuda_graph.graph_of(device, GraphPool() if pool is None else pool)
        self.refusal = f"steps on {device.type} are not captured" if self._graph is None else None
        self._warm, self._captured = False, False
        self._output: Any = None

    def __call__(self) -> T:
        if self._graph is None:
            return self._run()
        if self._captured:
            self._graph.replay()
            output: T = self._output
            return output
        if not self._warm:
            self._warm = True
            with HostReads() as reads:
                output = self._graph.warm_up(self._run)
            if reads.found:
                self._refuse(f"{', '.join(dict.fromkeys(reads.found))} waits for the device")
            return output
        try:
            self._output = self._graph.capture(self._run)
        except RuntimeError as error:  # CUDA itself knows what cannot be captured, inside of operators
            self._refuse(f"the capture failed: {error}".splitlines()[0])
            return self._run()
        self._captured = True
        self._graph.replay()
        output = self._output
        return output

    @property
    def captured(self) -> bool:
        return self._captured

    def forget_run(self) -> None:
        """Lets go of `run` and what it holds, such as the model; a captured step needs it no more."""
        assert self._captured, "a step that is not captured runs `run`"
        self._run = _gone

    def _refuse(self, reason: str) -> None:
        self.refusal, self._graph = reason, None
        logger.warning("decoding runs without a CUDA graph: %s", reason)


def _gone() -> Any:
    raise AssertionError("a captured step is replayed")


class StaticInputs:
    """Copies of a call's tensors that stay where they are; `take` writes those of another call into them.

    inputs: a pytree of tensors and plain values. `call` is the same pytree with the copies.
    """

    def __init__(self, inputs: Any) -> None:
        self._leaves, self._spec = pytree.tree_flatten(inputs)
        self._leaves = [one.clone() if isinstance(one, Tensor) else one for one in self._leaves]
        self.call: Any = pytree.tree_unflatten(self._leaves, self._spec)

    def take(self, inputs: Any) -> bool:
        """False, and nothing is written, where shapes, dtypes or the other values are not those of the first call."""
        leaves, spec = pytree.tree_flatten(inputs)
        if spec != self._spec or not all(map(_alike, leaves, self._leaves)):
            return False
        for given, kept in zip(leaves, self._leaves, strict=True):
            if isinstance(given, Tensor):
                kept.copy_(given)
        return True


def _alike(given: Any, kept: Any) -> bool:
    if isinstance(kept, Tensor):
        return (
            isinstance(given, Tensor)
            and given.shape == kept.shape
            and given.dtype == kept.dtype
            and given.device == kept.device
        )
    return given is kept or (type(given) is type(kept) and bool(given == kept))
