"""How the tensors of a train step are divided over a mesh: weights as the model declares it, batches by their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from easytorch.backends.partitioning import Sharding
from easytorch.distributed.declared import partition_specs
from easytorch.distributed.mesh import DATA
from easytorch.distributed.rules import PartitionRules
from easytorch.distributed.specs import axis_names, entry, uneven_dimension, without_axes

# The axes over which weights are sharded for memory alone: they are gathered where they are used.
GATHERED = "fsdp"
_SUPPORTED = ("dp", "fsdp", "ep", "sp", "tp")


@dataclass(frozen=True)
class Layout:
    """axes: of the mesh, with their sizes. weights: parameter -> its sharding, which the optimizer's state shares."""

    axes: Mapping[str, int]
    weights: Mapping[str, Sharding]

    def gathered(self) -> dict[str, Sharding]:
        """Parameter -> how it is divided where it is used, of those that are divided over `GATHERED`."""
        found = {name: without_axes(sharding, (GATHERED,)) for name, sharding in self.weights.items()}
        return {name: sharding for name, sharding in found.items() if sharding != self.weights[name]}

    def batch(self, tensor: Tensor, name: str) -> Sharding:
        """Rows over the axes with data of their own, tokens over "sp"; one row is for all devices.

        `ValueError` where they do not divide.
        """
        found: list[str | tuple[str, ...] | None] = [None] * tensor.dim()
        if tensor.dim() and tensor.shape[0] > 1:
            found[0] = entry(axis for axis in self.axes if axis in DATA and self.axes[axis] > 1)
        if tensor.dim() > 1 and self.axes.get("sp", 1) > 1:
            found[1] = "sp"
        if (why := uneven_dimension(tensor.shape, tuple(found), self.axes)) is not None:
            raise ValueError(f"{name} of a batch: {why}")
        return tuple(found)


def layout_of(model: nn.Module, axes: Mapping[str, int], rules: PartitionRules | None, uneven: str = "error") -> Layout:
    """The layout of a model over a mesh.

    "fsdp" divides the first dimension that it can, and no vector that it cannot. `ValueError` where a dimension does
    not divide over another axis, unless `uneven` is "replicate"; `NotImplementedError` for an axis that is not
    supported.
    """
    if uneven not in ("error", "replicate"):
        raise ValueError(f"uneven must be 'error' or 'replicate', got {uneven!r}")
    if others := [name for name, size in axes.items() if name not in _SUPPORTED and size > 1]:
        raise NotImplementedError(
            f"a compiled train step supports the axes {', '.join(_SUPPORTED)}, and the mesh has {', '.join(others)}"
        )
    specs = partition_specs(model, rules, axes)
    weights = {}
    for name, parameter in model.named_parameters():
        spec = _moved(tuple(parameter.shape), specs[name], axes)
        if (why := uneven_dimension(parameter.shape, spec, axes)) is not None:
            if uneven == "error":
                raise ValueError(f"{name}: {why}, as would uneven='replicate'")
            spec = _moved(tuple(parameter.shape), (None,) * parameter.dim(), axes)
        weights[name] = spec
    return Layout(dict(axes), weights)


def _moved(shape: tuple[int, ...], spec: Sharding, axes: Mapping[str, int]) -> Sharding:
    """`spec` with "fsdp" on the first dimension that divides with it."""
    bare = without_axes(spec, (GATHERED,))
    if axes.get(GATHERED, 1) == 1 or not shape:
        return bare
    own = [index for index, one in enumerate(spec) if GATHERED in axis_names(one)]
    for index in [*own, *(index for index in range(len(shape)) if index not in own)]:
        tried = [*bare]
        tried[index] = entry([*axis_names(bare[index]), GATHERED])
        if uneven_dimension(shape, tuple(tried), axes) is None:
            return tuple(tried)
    return bare
