"""Linear layers whose weight is sharded over the ranks of a mesh axis (Megatron-LM, arXiv:1909.08053, 2205.05198).

Weight and bias are DTensors, and all communication is DTensor's redistribution, in the backward too. Its collectives
are functional: under `torch.compile` on a GPU, `torch._inductor.config._micro_pipeline_tp` overlaps those over
tokens with their products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from easytorch.layers.tensor_parallel import MatrixMultiplyMethod, TensorParallelConfig

Initializer = Callable[[Tensor], object]
Direction = Literal["row", "column"]


class ParallelLinear(nn.Module):
    """x (..., in_features) @ weight.T + bias -> (..., out_features), the weight sharded as `parallel_config` says.

    Without a config, or without a mesh in it, this is `nn.Linear`. "column" shards the output features, "row" the input
    features; this class takes the one that its `matmul_method` belongs to, "column" without. A plain tensor is this
    rank's local part, a DTensor has its placements; the output is plain or a DTensor as the input is.

    column: takes the same input on every rank, or with ALL_GATHER the rank's own tokens. The output is the same on
    every rank, or with `reduce_scatter_output` the rank's own features.

    row: takes the rank's own features. The output is the same on every rank, or with REDUCE_SCATTER or
    `reduce_scatter_output` the rank's own tokens, without `reduce_output`.

    The width of a plain input shows whether it is full or local: a column parallel layer gathers local features, and a
    row parallel layer slices its own from full ones. Ranks must hold equally many tokens.

    dtype: of the matmul; None for the one that input and parameters promote to.
    param_dtype: of weight (out_features, in_features) and bias (out_features,).
    precision: None. torch sets the precision of float32 matmuls for the process.
    kernel_init, bias_init: called with the full tensor to fill, as those of `torch.nn.init`; `nn.Linear`'s unless
        given. Rank 0's values are broadcast.
    device: "meta" allocates nothing; fill with `to_empty` and `reset_parameters`, or load with `assign=True`.
    """

    _direction: ClassVar[Direction | None] = None
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: torch.dtype | None = None,
        param_dtype: torch.dtype = torch.float32,
        precision: None = None,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        parallel_config: TensorParallelConfig | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {size!r}")
        if precision is not None:
            raise ValueError(
                f"precision must be None, got {precision!r}: torch sets the precision of float32 products for the "
                f"process, by torch.set_float32_matmul_precision"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.kernel_init = kernel_init
        self.bias_init = bias_init
        self.parallel_config = parallel_config
        self.direction = self._find_direction()
        mesh = self.mesh
        if mesh is not None:
            self._check_sizes(mesh)
        self.weight = self._empty((out_features, in_features), device)
        self.register_parameter("bias", self._empty((out_features,), device) if use_bias else None)
        if not self.weight.is_meta:
            self.reset_parameters()

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of one axis that the layer is sharded over; None for a layer of one process."""
        return None if self.parallel_config is None else self.parallel_config.axis

    def placements(self) -> dict[str, Placement]:
        """How the parameters are sharded over `mesh`."""
        if self.direction == "column":
            return {"weight": Shard(0), "bias": Shard(0)}
        return {"weight": Shard(1), "bias": Replicate()}

    def reset_parameters(self) -> None:
        """Reinitialize weight and bias. A collective call of all ranks of the mesh: rank 0 broadcasts the values."""
        bound = 1 / math.sqrt(self.in_features)
        fill = {
            "weight": self.kernel_init or (lambda x: nn.init.kaiming_uniform_(x, a=math.sqrt(5))),
            "bias": self.bias_init or (lambda x: nn.init.uniform_(x, -bound, bound)),
        }
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                if isinstance(parameter, DTensor):
                    full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                    fill[name](full)
                    parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))
                else:
                    fill[name](parameter)

    def forward(self, inputs: Tensor, w: Tensor | None = None) -> Tensor:
        return self.native_forward(inputs, w)

    def native_forward(self, inputs: Tensor, w: Tensor | None = None) -> Tensor:
        """inputs (..., in_features) -> (..., out_features), sharded as the class says.

        w: a weight (out_features, in_features) in place of the layer's: a plain tensor, the same on every rank, or a
        DTensor.
        """
        mesh = self.mesh
        x = self._enter(inputs, mesh)
        weight = self._local(self.weight if w is None else w, "weight", mesh)
        bias = None if self.bias is None else self._local(self.bias, "bias", mesh)
        dtype = self.dtype or torch.promote_types(x.dtype, weight.dtype)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if mesh is None or self.direction == "column":
            y = F.linear(x, weight, bias)
            return y if mesh is None else self._leave(y, Shard(x.ndim - 1), inputs, mesh)
        # the bias is added after the sum over the ranks, or it would be added by each of them
        return self._leave(F.linear(x, weight), Partial(), inputs, mesh, bias)

    def _enter(self, inputs: Tensor, mesh: DeviceMesh | None) -> Tensor:
        """This rank's inputs of the matmul."""
        width = inputs.shape[-1] if inputs.ndim else 0
        placed: Tensor = inputs
        if isinstance(inputs, DTensor):
            if inputs.device_mesh != mesh:
                raise ValueError(f"the input is sharded over {inputs.device_mesh}, and this layer over {mesh}")
        elif mesh is not None:
            placed = DTensor.from_local(inputs, mesh, [self._placement_of(inputs, mesh)], run_check=False)
            width = placed.shape[-1]
        if width != self.in_features:
            parts = f", or its part of {self.in_features // mesh.size()}" if mesh is not None else ""
            raise ValueError(
                f"the input is {tuple(inputs.shape)}: its last dimension must have "
                f"in_features={self.in_features}{parts}"
            )
        if mesh is None:
            return inputs
        needed: Placement = Replicate() if self.direction == "column" else Shard(inputs.ndim - 1)
        # each rank computes a partial gradient of the replicated input
        gradient = Partial() if self.direction == "column" else needed
        return cast(DTensor, placed).redistribute(placements=[needed]).to_local(grad_placements=[gradient])

    def _placement_of(self, inputs: Tensor, mesh: DeviceMesh) -> Placement:
        """The placement of a plain tensor within the full input."""
        width = inputs.shape[-1] if inputs.ndim else 0
        if width * mesh.size() == self.in_features and (mesh.size() > 1 or self.direction == "row"):
            return Shard(inputs.ndim - 1)
        if self.direction == "column" and self._method is MatrixMultiplyMethod.ALL_GATHER:
            self._check_tokens(inputs)
            return Shard(inputs.ndim - 2)
        return Replicate()

    def _local(self, parameter: Tensor, name: str, mesh: DeviceMesh | None) -> Tensor:
        """This rank's part of the weight or bias."""
        if name == "weight" and parameter.shape != (self.out_features, self.in_features):
            wanted = (self.out_features, self.in_features)
            raise ValueError(f"w is {tuple(parameter.shape)}, and must be (out_features, in_features) = {wanted}")
        if mesh is None:
            return parameter
        placement = self.placements()[name]
        if not isinstance(parameter, DTensor):
            parameter = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
        # a replicated bias that each rank adds to its own tokens gets a partial gradient
        partial = isinstance(placement, Replicate) and self._scatters
        gradient = Partial() if partial else placement
        local = parameter.redistribute(placements=[placement])
        if partial:  # reduced here: an optimizer would square the parts
            local = DTensor.from_local(local.to_local(), mesh, [placement], run_check=False)
        return local.to_local(grad_placements=[gradient])

    def _leave(
        self, product: Tensor, placement: Placement, inputs: Tensor, mesh: DeviceMesh, bias: Tensor | None = None
    ) -> Tensor:
        """The output of this rank's product, and the bias that is still to be added to it."""
        output: Placement = Replicate()
        if self._scatters and self.direction == "column":
            output = placement
        elif self._scatters:
            self._check_tokens(inputs)
            output = Shard(product.ndim - 2)
            if product.shape[-2] % mesh.size():
                raise ValueError(
                    f"a reduce-scatter over {mesh.size()} ranks splits the tokens, dimension -2 of the input "
                    f"{tuple(inputs.shape)}, evenly: pad {product.shape[-2]} to a multiple of {mesh.size()}"
                )
        placed = DTensor.from_local(product, mesh, [placement], run_check=False).redistribute(placements=[output])
        result = placed.to_local()
        if bias is not None:
            result = result + bias
        if not isinstance(inputs, DTensor):
            return result
        return DTensor.from_local(result, mesh, [output], run_check=False)

    @property
    def _method(self) -> MatrixMultiplyMethod | None:
        return None if self.parallel_config is None else self.parallel_config.matmul_method

    @property
    def _scatters(self) -> bool:
        """Whether the output stays sharded."""
        config = self.parallel_config
        if config is None:
            return False
        scattered = self._method is MatrixMultiplyMethod.REDUCE_SCATTER and not config.reduce_output
        return scattered or config.reduce_scatter_output

    def _find_direction(self) -> Direction | None:
        if self.mesh is None:
            return None
        of_method: Direction | None = None
        if self._method is not None:
            of_method = "column" if self._method is MatrixMultiplyMethod.ALL_GATHER else "row"
        if self._direction is not None and of_method not in (None, self._direction):
            raise ValueError(
                f"matmul_method={cast(MatrixMultiplyMethod, self._method).value!r} is of {of_method} parallel layers, "
                f"and {type(self).__name__} is {self._direction} parallel: a column parallel layer gathers its input, "
                f"a row parallel layer reduces its output"
            )
        return self._direction or of_method or "column"

    def _check_sizes(self, mesh: DeviceMesh) -> None:
        ranks = mesh.size()
        name = "out_features" if self.direction == "column" else "in_features"
        size = getattr(self, name)
        if size % ranks:
            fit = sorted({max(size // ranks, 1) * ranks, (size // ranks + 1) * ranks})
            raise ValueError(
                f"{name}={size} of a {self.direction} parallel layer does not divide over the {ranks} ranks of the "
                f"mesh; {' or '.join(map(str, fit))} would"
            )

    def _check_tokens(self, inputs: Tensor) -> None:
        if inputs.ndim < 2:
            raise ValueError(f"tokens are split over the ranks: the input {tuple(inputs.shape)} must be (..., T, D)")

    def _empty(self, shape: tuple[int, ...], device: torch.device | str | None) -> nn.Parameter:
        mesh = self.mesh
        if mesh is None:
            return nn.Parameter(torch.empty(shape, dtype=self.param_dtype, device=device))
        placement = self.placements()["weight" if len(shape) == 2 else "bias"]
        local = list(shape)
        if isinstance(placement, Shard):
            local[placement.dim] //= mesh.size()
        # of this rank's part alone, and where the ambient device is meta, of nothing
        default = torch.get_default_device()
        device = device or ("meta" if default.type == "meta" else mesh.device_type)
        empty = torch.empty(local, dtype=self.param_dtype, device=device)
        return nn.Parameter(DTensor.from_local(empty, mesh, [placement], run_check=False))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Also takes full tensors, of which each rank keeps its part."""
        for name, parameter in self._parameters.items():
            given = cast(Mapping[str, Tensor], state_dict).get(prefix + name)
            if given is None or isinstance(given, DTensor) or not isinstance(parameter, DTensor):
                continue
            if given.shape == parameter.shape:  # otherwise torch's own error names both
                mesh, placements = parameter.device_mesh, parameter.placements
                state_dict[prefix + name] = distribute_tensor(given, mesh, placements, src_data_rank=None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        parallel = "" if self.direction is None else f", {self.direction} parallel over {self.mesh}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}{parallel}"


class ColumnParallelLinear(ParallelLinear):
    """`ParallelLinear` whose output features are sharded."""

    _direction = "column"


class RowParallelLinear(ParallelLinear):
    """`ParallelLinear` whose input features are sharded."""

    _direction = "row"


Linear = ParallelLinear
