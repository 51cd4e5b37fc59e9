"""`TensorParallelConfig`: over which ranks a parallel linear layer is sharded, and how its ranks exchange results."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from torch.distributed.device_mesh import DeviceMesh


class MatrixMultiplyMethod(StrEnum):
    """The collective that goes with a matrix product, over the tokens, dimension -2 (sequence parallel).

    ALL_GATHER: a column parallel layer gets each rank's own tokens, and gathers them for its product.
    REDUCE_SCATTER: a row parallel layer reduces its product so that each rank keeps its own tokens.
    """

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


@dataclass(frozen=True)
class TensorParallelConfig:
    """Tensor parallelism of a linear layer.

    mesh: the `DeviceMesh`, of whose axes `axis_name` shards the layer; None for a layer of one process.
    axis_name: the axis; a mesh of one axis need not name it.
    matmul_method: the collective of the product (`MatrixMultiplyMethod`, or its value as a string), None for none.
    reduce_output: the output is replicated. It is so by default, but for a REDUCE_SCATTER product.
    reduce_scatter_output: the output stays sharded: a column parallel layer's over its features, as a row parallel
        layer after it takes them; a row parallel layer's over the tokens.
    """

    mesh: DeviceMesh | None = None
    axis_name: str = "tp"
    matmul_method: MatrixMultiplyMethod | None = None
    reduce_output: bool = False
    reduce_scatter_output: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.axis_name, str):
            raise TypeError(f"axis_name must be the name of an axis of the mesh, got {self.axis_name!r}")
        for name in ("reduce_output", "reduce_scatter_output"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.reduce_output and self.reduce_scatter_output:
            raise ValueError(
                "reduce_output asks for a replicated output, reduce_scatter_output for a sharded one: set one of them"
            )
        if self.matmul_method is not None:
            methods = [method.value for method in MatrixMultiplyMethod]
            if self.matmul_method not in methods:
                raise ValueError(
                    f"matmul_method must be one of {', '.join(methods)} or None, got {self.matmul_method!r}"
                )
            object.__setattr__(self, "matmul_method", MatrixMultiplyMethod(self.matmul_method))
        object.__setattr__(self, "_axis", self._find_axis())  # once: slicing a mesh takes longer than a small product

    @property
    def axis(self) -> DeviceMesh | None:
        """The part of the mesh that shards the layer, of one axis; None without a mesh."""
        found: DeviceMesh | None = self.__dict__["_axis"]
        return found

    def _find_axis(self) -> DeviceMesh | None:
        mesh = self.mesh
        if mesh is None:
            return None
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a torch.distributed DeviceMesh, got {type(mesh).__name__}")
        names = mesh.mesh_dim_names
        if names is None and mesh.ndim == 1:
            return mesh
        if names is None or self.axis_name not in names:
            raise ValueError(
                f"axis_name {self.axis_name!r} is no axis of the mesh, which has {', '.join(names or ()) or 'no names'}"
            )
        return mesh if mesh.ndim == 1 else mesh[self.axis_name]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, the mesh as its ranks and the names of its axes."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.mesh is not None:
            names = self.mesh.mesh_dim_names
            fields["mesh"] = {
                "device_type": self.mesh.device_type,
                "ranks": self.mesh.mesh.tolist(),
                "axis_names": None if names is None else list(names),
            }
        if self.matmul_method is not None:
            fields["matmul_method"] = self.matmul_method.value
        return fields

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The config of `to_dict`. Its mesh is made anew, which every rank of the process group must do together."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(known)}")
        mesh = data.get("mesh")
        if isinstance(mesh, dict):
            mesh = DeviceMesh(mesh["device_type"], mesh["ranks"], mesh_dim_names=mesh["axis_names"])
        return cls(**{**data, "mesh": mesh})

    def to_json(self, **kwargs: Any) -> str:
        """`to_dict` as JSON. kwargs: `json.dumps`'s."""
        return json.dumps(self.to_dict(), **kwargs)

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        return cls.from_dict(json.loads(json_str))

    def replace(self, **kwargs: Any) -> Self:
        """A new instance with the given fields replaced."""
        return dataclasses.replace(self, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # frozen, and a mesh is the ranks': a copied layer is on the same
