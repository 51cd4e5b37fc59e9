"""What each process of test_parallel_linear.py's torchrun does; prints "rank r ok" when everything held."""

from __future__ import annotations

import copy
import functools
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from easytorch.layers import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
    TensorParallelConfig,
    get_output_partition_spec,
    get_sharding,
)
from tests.processes import leave_group

IN, OUT, TOKENS = 24, 16, 8
COLUMN = {"replicated": {}, "explicit": {"reduce_output": True}, "own features": {"reduce_scatter_output": True}}
COLUMN |= {f"gathered, {name}": {**one, "matmul_method": "all_gather"} for name, one in COLUMN.items()}
ROW = {
    "replicated": {},
    "explicit": {"reduce_output": True},
    "own tokens": {"reduce_scatter_output": True},
    "method": {"matmul_method": "reduce_scatter"},
    "method, replicated": {"matmul_method": "reduce_scatter", "reduce_output": True},
    "method, own tokens": {"matmul_method": "reduce_scatter", "reduce_scatter_output": True},
}
CASES = [(ColumnParallelLinear, *case) for case in COLUMN.items()] + [
    (RowParallelLinear, *case) for case in ROW.items()
]


def part(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(size, dim)[rank].contiguous()


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(got: torch.Tensor, want: torch.Tensor, case: object) -> None:
    bound = 1e-5 if want.dtype == torch.float32 else 8e-3
    assert got.dtype == want.dtype and got.shape == want.shape, (case, got.dtype, got.shape, want.shape)
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < bound, f"{case}: relative error {error}"


def output_dim(layer_class: type, fields: dict) -> int | None:
    """The dimension of the output that stays sharded."""
    if layer_class is ColumnParallelLinear:
        return -1 if fields.get("reduce_scatter_output") else None
    scatters = "matmul_method" in fields and not fields.get("reduce_output")
    return -2 if scatters or fields.get("reduce_scatter_output") else None


def check_equals_one_process() -> None:
    """Outputs and gradients, by plain tensors and DTensors, of any part of the input that the layer takes."""
    for (layer_class, name, fields), use_bias, dtype in itertools.product(
        CASES, (True, False), (torch.float32, torch.bfloat16)
    ):
        torch.manual_seed(5)
        plain = nn.Linear(IN, OUT, bias=use_bias).to(dtype)
        full, weights = torch.randn(3, TOKENS, IN, dtype=dtype), torch.randn(3, TOKENS, OUT, dtype=dtype)
        x = full.clone().requires_grad_()
        y = plain(x)
        (y * weights).sum().backward()
        config = TensorParallelConfig(mesh, **fields)
        layer = layer_class(IN, OUT, use_bias=use_bias, param_dtype=dtype, parallel_config=config)
        layer.load_state_dict(plain.state_dict())
        dim = output_dim(layer_class, fields)
        gathers = fields.get("matmul_method") == "all_gather"
        for given in (-1, -2) if gathers else (-1, None):
            case = (layer_class.__name__, name, use_bias, dtype, given)
            layer.zero_grad()
            leaf = (full if given is None else part(full, given)).clone().requires_grad_()
            output = layer(leaf)
            close(output, y.detach() if dim is None else part(y.detach(), dim), case)
            (output * (weights if dim is None else part(weights, dim))).sum().backward()
            close(leaf.grad, x.grad if given is None else part(x.grad, given), (*case, "input"))
            for key, parameter in layer.named_parameters():
                assert parameter.grad.placements == parameter.placements, (case, key)
                close(whole(parameter.grad), getattr(plain, key).grad, (*case, key))
            if dtype == torch.bfloat16 or size > 2:
                continue
            layer.zero_grad()
            placement = Replicate() if given is None else Shard(given % 3)
            leaf = distribute_tensor(full, mesh, [placement]).requires_grad_()
            output = layer(leaf)
            assert output.placements == (Replicate() if dim is None else Shard(dim % 3),), (case, output.placements)
            close(whole(output.detach()), y.detach(), (*case, "DTensor"))
            (output * distribute_tensor(weights, mesh, [Replicate()])).sum().backward()
            close(whole(leaf.grad), x.grad, (*case, "DTensor's input"))
            for key, parameter in layer.named_parameters():
                close(whole(parameter.grad), getattr(plain, key).grad, (*case, "DTensor", key))


def check_a_pair() -> None:
    """Column, then row parallel with nothing sent between them, on all tokens and on each rank's own."""
    torch.manual_seed(6)
    up, down = nn.Linear(IN, 4 * OUT), nn.Linear(4 * OUT, IN)
    full = torch.randn(2, TOKENS, IN)
    x = full.clone().requires_grad_()
    y = down(torch.relu(up(x)))
    y.square().sum().backward()
    for methods, dim in (((None, None), None), (("all_gather", "reduce_scatter"), -2)):
        configs = [TensorParallelConfig(mesh, matmul_method=method) for method in methods]
        column = ColumnParallelLinear(IN, 4 * OUT, parallel_config=configs[0].replace(reduce_scatter_output=True))
        row = RowParallelLinear(4 * OUT, IN, parallel_config=configs[1])
        column.load_state_dict(up.state_dict())
        row.load_state_dict(down.state_dict())
        leaf = (full if dim is None else part(full, dim)).clone().requires_grad_()

        def call(leaf, column=column, row=row):
            return row(torch.relu(column(leaf)))

        compiled = [torch.compile(call, fullgraph=True, backend="aot_eager")] if size == 2 else []
        for function in (call, *compiled):
            leaf.grad = None
            column.zero_grad()
            row.zero_grad()
            output = function(leaf)
            close(output, y.detach() if dim is None else part(y.detach(), dim), (methods, function))
            output.square().sum().backward()
            close(leaf.grad, x.grad if dim is None else part(x.grad, dim), (methods, function))
            for layer, plain in ((column, up), (row, down)):
                for key, parameter in layer.named_parameters():
                    close(whole(parameter.grad), getattr(plain, key).grad, (methods, function, key))


def check_state() -> None:
    """The state of a full layer loads, and gathers back bit-equal; values drawn are rank 0's; the meta device."""
    for layer_class in (ColumnParallelLinear, RowParallelLinear):
        torch.manual_seed(7)
        plain = nn.Linear(IN, OUT)
        torch.manual_seed(7 + rank)
        config = TensorParallelConfig(mesh)
        layer = layer_class(IN, OUT, parallel_config=config)
        drawn = {key: whole(one) for key, one in layer.state_dict().items()}
        assert all(torch.equal(one, getattr(plain, key)) for key, one in drawn.items()), "rank 0's values count"
        torch.manual_seed(8)
        other = nn.Linear(IN, OUT)
        with torch.device("meta"):
            ambient = layer_class(IN, OUT, parallel_config=config)
        meta = layer_class(IN, OUT, parallel_config=config, device="meta")
        assert meta.weight.is_meta and ambient.weight.is_meta
        for target, assign in ((layer, False), (layer, True), (meta, True), (ambient.to_empty(device="cpu"), False)):
            assert target.weight.to_local().numel() == IN * OUT // size
            target.load_state_dict(other.state_dict(), assign=assign)
            for key, one in target.state_dict().items():
                assert isinstance(one, DTensor) and torch.equal(whole(one), getattr(other, key))
        holder = nn.Sequential(layer_class(IN, OUT, parallel_config=config))
        holder.load_state_dict({f"0.{key}": one for key, one in layer.state_dict().items()})
        assert torch.equal(whole(holder[0].weight), other.weight)
        copied = copy.deepcopy(layer)
        assert copied.mesh == layer.mesh and torch.equal(whole(copied.weight), other.weight)
        larger = nn.Linear(IN, 2 * OUT).state_dict()
        refused("size mismatch for weight", functools.partial(layer.load_state_dict, larger))
        again = layer_class(IN, OUT, parallel_config=config, device="meta").to_empty(device="cpu")
        torch.manual_seed(7)
        again.reset_parameters()
        assert torch.equal(whole(again.weight), plain.weight)


def check_another_weight() -> None:
    torch.manual_seed(9)
    x, full = torch.randn(3, IN), torch.randn(OUT, IN)
    for layer_class in (ColumnParallelLinear, RowParallelLinear):
        layer = layer_class(IN, OUT, use_bias=False, parallel_config=TensorParallelConfig(mesh))
        leaf = full.clone().requires_grad_()
        output = layer.native_forward(x, leaf)
        close(output, x @ full.t(), layer_class)
        output.square().sum().backward()
        close(leaf.grad, 2 * (x @ full.t()).t() @ x, layer_class)


def check_errors() -> None:
    """Every rank raises, none waits for the others."""
    config = TensorParallelConfig(mesh)
    uneven = f"out_features={size + 1} of a column parallel layer does not divide over the {size} ranks"
    refused(
        f"{uneven} of the mesh; {size} or {2 * size} would", lambda: ParallelLinear(3, size + 1, parallel_config=config)
    )
    refused("in_features=1 of a row", lambda: RowParallelLinear(1, 8, parallel_config=config))
    refused(f"{size} would", lambda: RowParallelLinear(1, 8, parallel_config=config))
    scatter = TensorParallelConfig(mesh, matmul_method="reduce_scatter")
    row = RowParallelLinear(IN, OUT, parallel_config=scatter)
    refused(f"pad {size + 1} to a multiple of {size}", lambda: row(torch.ones(size + 1, IN // size)))
    refused("must be (..., T, D)", lambda: row(torch.ones(IN // size)))
    refused(f"in_features={IN}, or its part of {IN // size}", lambda: row(torch.ones(2, IN + 1)))
    gather = scatter.replace(matmul_method="all_gather")
    refused("of row parallel layers", lambda: ColumnParallelLinear(IN, OUT, parallel_config=scatter))
    refused("of column parallel layers", lambda: RowParallelLinear(IN, OUT, parallel_config=gather))
    column = ColumnParallelLinear(IN, OUT, parallel_config=gather)
    refused("must be (..., T, D)", lambda: column(torch.ones(IN)))
    other = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    refused("is sharded over", lambda: column(distribute_tensor(torch.ones(2, IN), other, [Replicate(), Replicate()])))
    refused("'ep' is no axis of the mesh, which has dp, tp", lambda: TensorParallelConfig(other, "ep"))
    assert ParallelLinear(IN, OUT, parallel_config=scatter).direction == "row"
    assert ParallelLinear(IN, OUT, parallel_config=gather).direction == "column"


def refused(message: str, function) -> None:
    try:
        function()
    except (ValueError, RuntimeError) as error:
        assert message in str(error), f"{error} instead of {message}"
    else:
        raise AssertionError(f"{message}: was not refused")


def check_specs_and_configs() -> None:
    config = TensorParallelConfig(mesh, matmul_method="all_gather")
    again = TensorParallelConfig.from_json(config.to_json())
    assert again == config and again.axis.mesh.tolist() == list(range(size))
    column = ColumnParallelLinear(IN, OUT, parallel_config=config)
    row = RowParallelLinear(IN, OUT, parallel_config=TensorParallelConfig(mesh))
    assert get_sharding(column.weight) == ("tp", None) and get_sharding(row.weight) == (None, "tp")
    assert get_sharding(column.bias) == ("tp",) and get_sharding(row.bias) == (None,)
    tokens = distribute_tensor(torch.ones(2, TOKENS, IN), mesh, [Shard(1)])
    features = distribute_tensor(torch.ones(2, TOKENS, IN), mesh, [Shard(2)])
    of_column = get_output_partition_spec(tokens, column.weight.t(), "all_gather", "tp")
    of_row = get_output_partition_spec(features, row.weight.t(), "reduce_scatter", "tp")
    assert of_column == (None, None, "tp") and of_row == (None, "tp", None)
    own = ColumnParallelLinear(IN, OUT, parallel_config=config.replace(reduce_scatter_output=True))
    assert get_sharding(own(tokens)) == of_column
    scattering = TensorParallelConfig(mesh, matmul_method="reduce_scatter")
    assert get_sharding(RowParallelLinear(IN, OUT, parallel_config=scattering)(features)) == of_row


def check_beside_fsdp() -> None:
    """An axis of a mesh of two, the other one FSDP2's, which each see other rows of the batch."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(10)
    plain = nn.Linear(IN, OUT)
    full = torch.randn(4, TOKENS, IN)
    plain(full).square().mean().backward()
    layer = RowParallelLinear(IN, OUT, parallel_config=TensorParallelConfig(both))
    layer.load_state_dict(plain.state_dict())
    fully_shard(layer, mesh=both["dp"])
    assert layer.weight.to_local().numel() == IN * OUT // 4
    layer(full.chunk(2)[both.get_local_rank("dp")]).square().mean().backward()
    for key, parameter in layer.named_parameters():
        close(whole(parameter.grad), getattr(plain, key).grad, key)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    check_equals_one_process()
    check_a_pair()
    check_state()
    check_another_weight()
    check_errors()
    check_specs_and_configs()
    if size == 4:
        check_beside_fsdp()
    dist.barrier()
    print(f"rank {rank} ok\n", end="", flush=True)
    leave_group()
