"""Parallel linear layers: of one process here, and of 2 and 4 in `parallel_linear_rank.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import easytorch.layers.linear
from easytorch import layers
from easytorch.layers import (
    ColumnParallelLinear,
    MatrixMultiplyMethod,
    ParallelLinear,
    RowParallelLinear,
    TensorParallelConfig,
    get_matmul_output_sharding,
    get_output_partition_spec,
    get_sharding,
    partition_specs,
)
from tests.processes import run_ranks

CLASSES = [ParallelLinear, ColumnParallelLinear, RowParallelLinear]


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes(ranks: int) -> None:
    done = run_ranks(Path(__file__).with_name("parallel_linear_rank.py"), processes=ranks, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    assert all(f"rank {rank} ok" in done.stdout for rank in range(ranks))


@pytest.mark.parametrize("layer_class", CLASSES)
@pytest.mark.parametrize("config", [None, TensorParallelConfig(), TensorParallelConfig(matmul_method="all_gather")])
@pytest.mark.parametrize("use_bias", [True, False])
def test_one_process_is_a_linear(layer_class, config, use_bias) -> None:
    """The same bits, values drawn included, and the same names."""
    torch.manual_seed(3)
    plain = nn.Linear(12, 7, bias=use_bias)
    torch.manual_seed(3)
    layer = layer_class(12, 7, use_bias=use_bias, parallel_config=config)
    assert layer.mesh is None and list(layer.state_dict()) == list(plain.state_dict())
    for name, one in plain.state_dict().items():
        assert torch.equal(layer.state_dict()[name], one)
    for shape in ((12,), (0, 12), (2, 5, 12)):
        inputs = torch.randn(shape, requires_grad=True)
        results = [
            (y, *torch.autograd.grad(y.square().sum(), [inputs, *module.parameters()]))
            for module in (plain, layer)
            for y in [module(inputs)]
        ]
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert torch.equal(layer.native_forward(inputs), layer(inputs))


def test_dtypes_and_initializers() -> None:
    layer = ParallelLinear(4, 3, dtype=torch.bfloat16, kernel_init=nn.init.ones_, bias_init=nn.init.zeros_)
    assert layer.weight.dtype == torch.float32 and layer(torch.ones(2, 4)).dtype == torch.bfloat16
    assert torch.equal(layer(torch.ones(2, 4)).float(), torch.full((2, 3), 4.0))
    half = ParallelLinear(4, 3, param_dtype=torch.bfloat16)
    assert half.weight.dtype == half.bias.dtype == torch.bfloat16
    assert half(torch.ones(2, 4)).dtype == torch.float32  # promoted, as flax does
    assert half(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    weight = torch.randn(3, 4)
    torch.testing.assert_close(layer.native_forward(torch.ones(4), weight).float(), weight.sum(1), rtol=2e-2, atol=2e-2)


def test_the_meta_device() -> None:
    with torch.device("meta"):
        ambient = ParallelLinear(4, 3)
    for layer in (ambient, ParallelLinear(4, 3, device="meta")):
        assert layer.weight.is_meta and layer(torch.ones(2, 4, device="meta")).shape == (2, 3)
        plain = nn.Linear(4, 3)
        layer.load_state_dict(plain.state_dict(), assign=True)
        assert torch.equal(layer(torch.ones(4)), plain(torch.ones(4)))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="in_features must be an int of at least 1, got 0"):
        ParallelLinear(0, 3)
    with pytest.raises(ValueError, match=r"set_float32_matmul_precision"):
        ParallelLinear(4, 3, precision="highest")
    with pytest.raises(ValueError, match=r"input is \(2, 5\): its last dimension must have in_features=4"):
        ParallelLinear(4, 3)(torch.ones(2, 5))
    with pytest.raises(ValueError, match="must have in_features=4"):
        ParallelLinear(4, 3)(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"w is \(4, 3\), and must be \(out_features, in_features\) = \(3, 4\)"):
        ParallelLinear(4, 3)(torch.ones(2, 4), torch.ones(4, 3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"matmul_method": "gather"}, "matmul_method must be one of all_gather, reduce_scatter or None, got 'gather'"),
        ({"reduce_output": True, "reduce_scatter_output": True}, "set one of them"),
        ({"reduce_output": 1}, "reduce_output must be True or False, got 1"),
        ({"axis_name": 0}, "axis_name must be the name of an axis"),
        ({"mesh": "tp"}, "mesh must be a torch.distributed DeviceMesh, got str"),
    ],
)
def test_bad_configs_are_refused(fields, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        TensorParallelConfig(**fields)


def test_a_config_is_written_and_read() -> None:
    config = TensorParallelConfig(axis_name="model", matmul_method=MatrixMultiplyMethod.REDUCE_SCATTER)
    assert config.to_dict() == {
        "mesh": None, "axis_name": "model", "matmul_method": "reduce_scatter", "reduce_output": False,
        "reduce_scatter_output": False,
    }  # fmt: skip
    assert TensorParallelConfig.from_dict(config.to_dict()) == config
    assert TensorParallelConfig.from_json(config.to_json(indent=1)) == config
    assert config.replace(reduce_output=True) == TensorParallelConfig(None, "model", "reduce_scatter", True)
    with pytest.raises(ValueError, match="has no field method; it has mesh, axis_name"):
        TensorParallelConfig.from_dict({"method": None})


def test_specs_of_products() -> None:
    assert get_matmul_output_sharding(("dp", None, "tp"), ("tp", None)) == ("dp", None, None)
    assert get_matmul_output_sharding(("dp", "sp", None), (None, "tp")) == ("dp", "sp", "tp")
    assert get_matmul_output_sharding(("tp", None), (None, "tp")) == ("tp", None)
    assert get_matmul_output_sharding((("dp", "fsdp"), None), (None, ("fsdp", "tp"))) == (("dp", "fsdp"), ("tp",))
    assert get_matmul_output_sharding((None,), ()) == (None,)
    assert get_matmul_output_sharding(None, ("tp",)) == get_matmul_output_sharding(("tp",), None) == ()
    assert get_sharding(torch.ones(2)) is None
    assert get_output_partition_spec(torch.ones(2, 2), torch.ones(2, 2), "all_gather", "tp") is None


def test_specs_of_products_by_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any other axes that the two are sharded over, which a mesh of one axis does not show."""
    monkeypatch.setattr(partition_specs, "get_sharding", lambda spec: spec)
    for method, lhs, rhs, expected in (
        ("all_gather", ("dp", "tp", None), (None, "tp"), ("dp", None, "tp")),
        ("all_gather", ("dp", ("sp", "tp"), None), ("fsdp", "tp"), ("dp", "sp", "tp")),
        ("all_gather", (None, None), (None, ("fsdp", "tp")), (None, ("fsdp", "tp"))),
        ("reduce_scatter", ("dp", None, "tp"), ("tp", None), ("dp", "tp", None)),
        ("reduce_scatter", ("dp", "sp", "tp"), ("tp", "fsdp"), ("dp", ("sp", "tp"), "fsdp")),
        ("reduce_scatter", (("dp", "sp"), "tp"), ("tp", None), (("dp", "sp", "tp"), None)),
    ):
        assert get_output_partition_spec(lhs, rhs, method, "tp") == expected, (method, lhs, rhs)
    with pytest.raises(ValueError, match="needs tokens to scatter"):
        get_output_partition_spec(("tp",), ("tp", None), "reduce_scatter", "tp")


def test_the_names_of_the_interface() -> None:
    assert layers.Linear is ParallelLinear and easytorch.layers.linear.RowParallelLinear is RowParallelLinear
    with pytest.raises(AttributeError, match="no attribute 'RowLinear'; it has ColumnParallelLinear"):
        getattr(layers, "Row" + "Linear")
    assert "in_features=4, out_features=3, bias=True" in repr(ParallelLinear(4, 3))
