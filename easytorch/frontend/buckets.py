"""Dynamic sizes rounded up to a few buckets: one program per bucket instead of per size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from easytorch.frontend.module import CompiledModule


def bucketed(compiled: CompiledModule, pad: Mapping[str, float | bool], sizes: Sequence[int] | None = None) -> Bucketed:
    """`compiled`, whose sizes named in `dynamic_shapes` are rounded up: to the next of `sizes`, or power of two.

    pad: by argument name, the value that pads each tensor argument with such a size, at the end of the axis.

    The contract: the results for the given elements must not depend on the padding. That cannot be proved of a
    module, so there are no buckets unless this is called; a module with an attention mask, padded with 0, satisfies
    it, a mean over the padded axis does not. Results are cropped to their unpadded sizes.
    `ValueError` for an argument without a value in `pad`, a name in it that is none, and a module that writes to
    buffers or inputs, which would hold padding.
    """
    return Bucketed(compiled, pad, sizes)


class Bucketed:
    def __init__(
        self, compiled: CompiledModule, pad: Mapping[str, float | bool], sizes: Sequence[int] | None = None
    ) -> None:
        self.compiled = compiled
        self._sizes = None if sizes is None else sorted(sizes)
        signature = compiled.program.graph_signature
        written = [spec.target for spec in signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT]
        if written:
            raise ValueError(f"bucketed: the module writes to {', '.join(map(str, written))}, which would hold padding")
        values = {node.name: node.meta.get("val") for node in compiled.program.graph.nodes}
        user = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        self._pads: list[tuple[torch.Tensor, float | bool] | None] = []
        known = set()
        for spec in user:
            value = values[spec.arg.name] if isinstance(spec.arg, TensorArgument) else None
            if value is None or not any(isinstance(size, torch.SymInt) for size in value.shape):
                self._pads.append(None)
                continue
            known.add(spec.arg.name)
            if spec.arg.name not in pad:
                raise ValueError(f"bucketed: pad says nothing of {spec.arg.name!r}, whose sizes change")
            self._pads.append((value, pad[spec.arg.name]))
        if set(pad) - known:
            raise ValueError(f"bucketed: pad names {sorted(set(pad) - known)}; sizes change of {sorted(known)}")
        self._outputs = [values.get(spec.arg.name) for spec in signature.output_specs]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the module's forward."""
        leaves = self.compiled.flatten(args, kwargs)
        actual: dict[Any, int] = {}
        padded: list[Any] = []
        for leaf, rule in zip(leaves, self._pads, strict=True):
            if rule is None:
                padded.append(leaf)
                continue
            value, fill = rule
            widths: list[int] = []
            for size, given in zip(value.shape, leaf.shape, strict=True):
                if isinstance(size, torch.SymInt):
                    actual[size.node.expr] = given
                    widths = [0, self._fitting(size.node.expr, given) - given, *widths]
                else:
                    widths = [0, 0, *widths]
            padded.append(torch.nn.functional.pad(leaf, widths, value=fill))
        results, shape = pytree.tree_flatten(self.compiled.call_flat(padded))
        return pytree.tree_unflatten(
            [_cropped(result, value, actual) for result, value in zip(results, self._outputs, strict=True)], shape
        )

    def _fitting(self, symbol: Any, size: int) -> int:
        """The bucket, but no more than the module was captured for."""
        limits = self.compiled.program.range_constraints.get(symbol)
        wanted = self.bucket(size)
        return max(size, int(limits.upper)) if limits is not None and wanted > limits.upper else wanted

    def bucket(self, size: int) -> int:
        """The size that `size` is rounded up to. `ValueError` beyond the largest."""
        if self._sizes is None:
            return 1 << max(size - 1, 0).bit_length()
        found = next((number for number in self._sizes if number >= size), None)
        if found is None:
            raise ValueError(f"bucketed: {size} does not fit the buckets {self._sizes}")
        return found


def _cropped(result: Any, value: Any, actual: Mapping[Any, int]) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    for axis, size in enumerate(value.shape):
        if isinstance(size, torch.SymInt):
            result = result.narrow(axis, 0, int(size.node.expr.xreplace(actual)))
    return result
