"""Layers: building blocks of models. Each computes through an operation, so each runs on every platform.

The layers over several ranks have EasyDeL's names here, and load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from easytorch.lazy_names import load_on_first_use

_HOME = {
    **dict.fromkeys(
        ("ColumnParallelLinear", "Linear", "ParallelLinear", "RowParallelLinear"), "easytorch.layers.parallel_linear"
    ),
    **dict.fromkeys(("MatrixMultiplyMethod", "TensorParallelConfig"), "easytorch.layers.tensor_parallel"),
    **dict.fromkeys(("get_matmul_output_sharding", "get_output_partition_spec"), "easytorch.layers.partition_specs"),
    "get_sharding": "easytorch.distributed.specs",
}

if TYPE_CHECKING:
    from easytorch.distributed.specs import get_sharding as get_sharding
    from easytorch.layers.parallel_linear import ColumnParallelLinear as ColumnParallelLinear
    from easytorch.layers.parallel_linear import Linear as Linear
    from easytorch.layers.parallel_linear import ParallelLinear as ParallelLinear
    from easytorch.layers.parallel_linear import RowParallelLinear as RowParallelLinear
    from easytorch.layers.partition_specs import get_matmul_output_sharding as get_matmul_output_sharding
    from easytorch.layers.partition_specs import get_output_partition_spec as get_output_partition_spec
    from easytorch.layers.tensor_parallel import MatrixMultiplyMethod as MatrixMultiplyMethod
    from easytorch.layers.tensor_parallel import TensorParallelConfig as TensorParallelConfig

__getattr__ = load_on_first_use(__name__, _HOME)
