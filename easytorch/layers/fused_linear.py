"""Projections of one input as one matrix product, while modules, parameters and checkpoints keep them apart.

Parameters that lie side by side in one storage are read as one matrix: nothing is copied, and nothing new is saved.
`lay_side_by_side` makes them so; a checkpoint's files often have them so already (safetensors sorts by name: gate and
up, query and value).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from easytorch.kernels.linear import recorded
from easytorch.layers.linear import linear, product, watched
from easytorch.operations.dispatch.environment import untouched

# The least elements of the joint matrix: smaller ones gain little, and a small model stays bit-equal to transformers.
SMALLEST_WEIGHT = 2**16

_ADDRESS = operator.itemgetter(0)


class MemoryLayout(NamedTuple):
    """The memory layout of the parameters when last checked, and the runs of adjacent ones."""

    weights: tuple[Any, ...]  # address, shape and dtype of each
    biases: tuple[Any, ...]  # None for none
    runs: tuple[tuple[int, ...], ...]  # indices of layers whose product is one


class FusedProjections(nn.Module):
    """A module with `nn.Linear`s that share an input: `projections` runs them as one product where possible.

    fused: their names, of the class or of one layer. A family may have none of that name, or another kind of module.
    They stay side by side when the module is moved, cast or copied.
    """

    fused: tuple[str, ...]
    joins: bool = False  # large enough, and all plain, when it was made
    _neighbours: MemoryLayout | None = None

    def lay_projections(self) -> None:
        """Move what `fused` names into one storage, where all of them are plain and large enough to be one product."""
        layers: list[Any] = [self._modules.get(name) for name in self.fused]
        if all(type(layer) is nn.Linear for layer in layers):
            self.joins = sum(layer.weight.numel() for layer in layers) >= SMALLEST_WEIGHT
            if self.joins:
                lay_side_by_side(layers)

    def projections(self, x: Tensor) -> list[Tensor]:
        """x (..., K) -> the output of each of `fused`, (..., N): views of one product, or products of their own.

        One product where no graph is traced, the layers are plain and without hooks, and their parameters lie side by
        side; with gradients on a CPU alone, where `kernels.linear.recorded` is ahead.
        """
        modules: Any = self._modules
        if self.joins and not torch.compiler.is_compiling():
            joint = self._recorded(x) if torch.is_grad_enabled() else self._joined(x)
            if joint is not None:
                return joint
        outputs = []
        for name in self.fused:
            outputs.append(linear(modules[name], x))
        return outputs

    def _joined(self, x: Tensor) -> list[Tensor] | None:
        """`projections` as one product or a few, without gradients; None where not."""
        if not _reads_memory(x):
            return None
        modules, layers = self._modules, []
        for name in self.fused:  # no comprehension: it is a call, and a token has many
            layers.append(modules[name])
        neighbours = self._find(layers)
        return None if neighbours is None else _by_runs(layers, neighbours.runs, x)

    def _recorded(self, x: Tensor) -> list[Tensor] | None:
        """`projections` as one product that autograd records; None where not."""
        if not recorded.takes(x) or not untouched():
            return None
        layers: list[Any] = [self._modules[name] for name in self.fused]
        neighbours = self._find(layers)
        if neighbours is None or len(neighbours.runs) != 1:
            return None
        order = neighbours.runs[0]
        weights = [layers[index]._parameters["weight"] for index in order]
        if not recorded.prefers(x, weights):
            return None
        biases = [layers[index]._parameters["bias"] for index in order]
        parts = recorded.linear(x, weights, () if biases[0] is None else biases).split(
            [len(one) for one in weights], -1
        )
        return [part for _, part in sorted(zip(order, parts, strict=True), key=_ADDRESS)]

    def _find(self, layers: Sequence[Any]) -> MemoryLayout | None:
        """The memory layout of the parameters; None if one of them must be read through its layer."""
        weights, biases = [], []
        for layer in layers:
            if type(layer) is not nn.Linear or watched(layer):
                return None
            parameters = layer._parameters
            weight, bias = parameters.get("weight"), parameters.get("bias")
            if type(weight) is not nn.Parameter or "bias" not in parameters or not weight.is_contiguous():
                return None
            weights.append((weight.data_ptr(), weight.shape, weight.dtype))
            biases.append(None if bias is None else (bias.data_ptr(), bias.shape, bias.dtype, bias.stride()))
        found = self._neighbours
        if found is None or found.weights != tuple(weights) or found.biases != tuple(biases):
            self._neighbours = found = MemoryLayout(tuple(weights), tuple(biases), _fitting_runs(layers))
        return found

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        together = self._together() or any(weight.is_meta for weight in self.parameters())
        apply: Callable[..., Self] = super()._apply
        apply(fn, recurse)
        if together and not self._together():
            self.lay_projections()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by `copy.deepcopy` and `pickle`; the former copies each parameter by itself."""
        super().__setstate__(state)
        if not self._together():
            self.lay_projections()

    def _together(self) -> bool:
        layers: list[Any] = [self._modules.get(name) for name in self.fused]
        if any(type(layer) is not nn.Linear for layer in layers):
            return False
        weights = [layer.weight for layer in layers]
        # sharded and quantized parameters, and those of XLA, have no address to ask for
        return all(type(one) is nn.Parameter and _addressed(one) for one in weights) and len(runs(weights)) == 1


def _reads_memory(x: Tensor) -> bool:
    """True in eager mode without autocast, whose cache of cast parameters does not take views of them."""
    plain = untouched() and (x.is_cpu or x.is_cuda) and torch._C._get_tracing_state() is None
    return plain and not torch.is_autocast_enabled(x.device.type)


def _by_runs(layers: Sequence[Any], together: Sequence[Sequence[int]], x: Tensor) -> list[Tensor]:
    outputs: list[Any] = [None] * len(layers)
    for run in together:
        if len(run) == 1:
            outputs[run[0]] = linear(layers[run[0]], x)
            continue
        first, bias = layers[run[0]]._parameters["weight"], layers[run[0]]._parameters["bias"]
        sizes = []
        for index in run:
            sizes.append(layers[index]._parameters["weight"].shape[0])
        rows, inputs = sum(sizes), first.shape[1]
        weight = first.as_strided((rows, inputs), (inputs, 1))
        bias = None if bias is None else bias.as_strided((rows,), (1,))
        for index, part in zip(run, torch.split_with_sizes(product(x, weight, bias), sizes, -1), strict=True):
            outputs[index] = part
    return outputs


def _fitting_runs(layers: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """`runs` of the layers, split where weights or biases do not form one matrix and one vector."""
    found: list[tuple[int, ...]] = []
    for run in runs([layer.weight for layer in layers]):
        whole = _fit([layers[index] for index in run])
        found += [tuple(run)] if whole else [(index,) for index in run]
    return tuple(found)


def _fit(layers: Sequence[nn.Linear]) -> bool:
    """True where neighbours are one matrix, in one storage, and their biases one vector."""
    weights: list[Any] = [layer.weight for layer in layers]
    biases: list[Any] = [layer.bias for layer in layers]
    first, rows = weights[0], sum(weight.shape[0] for weight in weights)
    if any(one.shape[1:] != first.shape[1:] or not _beside(one, first) for one in weights):
        return False
    if rows * first.shape[1] < SMALLEST_WEIGHT or not _hold(first, rows * first.shape[1]):
        return False
    if all(bias is None for bias in biases):
        return True
    if any(type(bias) is not nn.Parameter or not _beside(bias, biases[0]) for bias in biases):
        return False
    return runs(biases) == [list(range(len(biases)))] and _hold(biases[0], rows)


def _beside(one: Tensor, first: Tensor) -> bool:
    return one.is_contiguous() and one.dtype is first.dtype and one.device == first.device


def lay_side_by_side(layers: Sequence[nn.Linear]) -> None:
    """Move the weights, and the biases, of layers with one input into one storage each, in this order.

    Parameters stay the objects that they are. Those that are not plain, on a device without addresses, of several
    dtypes, or shared with another tensor's storage are left where they are.
    """
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    if not all(_movable(weight, weights[0]) for weight in weights):
        return
    _move(weights)
    if all(bias is not None and _movable(bias, weights[0]) for bias in biases):
        _move(biases)


def _movable(parameter: Tensor, first: Tensor) -> bool:
    plain = type(parameter) is nn.Parameter and parameter.is_contiguous() and parameter.grad is None
    return plain and _addressed(parameter) and parameter.dtype == first.dtype and parameter.device == first.device


def _addressed(tensor: Tensor) -> bool:
    return tensor.is_cpu or tensor.is_cuda


def _move(parameters: Sequence[Tensor]) -> None:
    with torch.no_grad():
        joined = torch.cat([parameter.detach() for parameter in parameters])
        rows = joined.split([parameter.shape[0] for parameter in parameters])
        for parameter, part in zip(parameters, rows, strict=True):
            parameter.data = part


def runs(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The indices of tensors in runs that are adjacent in memory, in memory order."""
    found: list[list[int]] = []
    end = -1
    for address, index in sorted([(tensor.data_ptr(), index) for index, tensor in enumerate(tensors)], key=_ADDRESS):
        if address == end:
            found[-1].append(index)
        else:
            found.append([index])
        tensor = tensors[index]
        end = address + tensor.numel() * tensor.element_size()
    return found


def _hold(first: Tensor, numbers: int) -> bool:
    """Whether the storage of `first` has at least `numbers` elements from its offset on.

    Adjacent addresses may belong to different storages.
    """
    storage = first.untyped_storage()
    return (first.storage_offset() + numbers) * first.element_size() <= storage.nbytes()
