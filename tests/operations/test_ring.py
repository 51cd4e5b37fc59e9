"""`ring`: one process is plain attention; several are torchrun's, which run ring_ranks.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from easytorch.kernels.attention import native
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.ring import operators
from easytorch.kernels.ring.exchange import agree
from easytorch.operations import OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.attention.ring_mesh import Placement
from easytorch.operations.dispatch.check import relative_rms_error
from tests.processes import run_ranks

ROOT = Path(__file__).parents[2]
B, T, S, H, K, D, DV = 2, 63, 81, 6, 2, 60, 36


def tensors(value_dim: int = D) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, T, H, D), torch.randn(B, S, K, D), torch.randn(B, S, K, value_dim)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes(ranks):
    done = run_ranks(Path(__file__).with_name("ring_ranks.py"), ranks, processes=ranks, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(f"rank {rank} ok" in done.stdout for rank in range(ranks))


@pytest.mark.parametrize("backend", [None, "native", "aten"])
@pytest.mark.parametrize(
    "features",
    [
        {"causal": True},
        {"causal": True, "sliding_window": 9},
        {"softmax_scale": 0.3},
        {
            "softcap": 2.0,
            "mask": torch.rand(T, S, generator=torch.Generator().manual_seed(4)) > 0.5,
            "dropout_prob": 0.2,
            "seed": 4,
        },
    ],
    ids=lambda features: "-".join(features),
)
def test_one_process_is_plain_attention(features, backend):
    attend = OperationRegistry.create("ring", OperationMetadata(backend=backend))
    if backend == "aten" and "softcap" in features:
        with pytest.raises(UnsupportedOperationError, match="ATen"):
            attend(*tensors(), **features)
        return
    leaves = [x.requires_grad_() for x in tensors()]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    results = attend(*leaves, **features).attention_outputs, native.attention(*doubles, **features)[0]
    assert relative_rms_error(*results) < 1e-5
    gradients = [torch.autograd.grad(x.square().sum(), y) for x, y in zip(results, (leaves, doubles), strict=True)]
    for got, want in zip(*gradients, strict=True):
        assert relative_rms_error(got, want) < 1e-5


def test_the_choice():
    attend = OperationRegistry.create("ring")
    assert attend.choose(*tensors(), causal=True).backend == "aten"
    assert attend.choose(*tensors(DV), causal=True).backend == "native"
    assert "softcap" in attend.choose(*tensors(), softcap=1.0).reason


def test_settings_come_from_the_metadata():
    metadata = OperationMetadata(softmax_scale=0.3, runtime_dtype=torch.float64, sequence_layout="zigzag")
    got = OperationRegistry.create("ring", metadata)(*tensors()).attention_outputs
    want, _ = native.attention(*(x.double() for x in tensors()), softmax_scale=0.3)
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="contiguous, zigzag"):
        OperationMetadata(sequence_layout="striped")
    with pytest.raises(ValueError, match="contiguous, zigzag"):
        OperationRegistry.create("ring")(*tensors(), layout="striped")


def test_compile_export_and_checkpoint():
    attend = OperationRegistry.create("ring")

    class Module(torch.nn.Module):
        def forward(self, query, key, value):
            return attend(query, key, value, causal=True).attention_outputs

    module, leaves = Module(), [x.requires_grad_() for x in tensors()]
    want = module(*leaves)
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(*leaves), want)
    torch.testing.assert_close(torch.export.export(module, tuple(leaves)).module()(*leaves), want)
    again = checkpoint(module, *leaves, use_reentrant=False)
    for got, gradient in zip(
        torch.autograd.grad(again.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(got, gradient)


@pytest.mark.parametrize("kernel", ["native", "aten"])
def test_opcheck(kernel):
    query, key, value = (x[:, :9].requires_grad_() for x in tensors())
    extra = (torch.rand(B, 1, 9, 9) > 0.3, torch.randn(1, H, 9, 9, requires_grad=True))
    mask, bias = extra if kernel == "native" else (None, None)
    sinks = torch.randn(H, requires_grad=True)
    call = AttentionCall(mask=mask, bias=bias, sinks=sinks, scale=0.3, right=0)
    settings = ("", kernel, "contiguous", False, True)
    torch.library.opcheck(operators.ring_forward, (query, key, value, *call, *settings))


def test_the_differential_mode(compared):
    attend = OperationRegistry.create("ring")
    attend(*tensors(), causal=True)
    assert compared == ["ring:aten"]
    attend(*tensors(), dropout_prob=0.3)  # drawn by the call: not compared
    assert len(compared) == 1
    attend(*tensors(), dropout_prob=0.3, seed=torch.tensor(3))
    assert compared == ["ring:aten", "ring:native"]


def test_a_mesh_of_the_wrong_kind_is_refused():
    for mesh, message in [
        ("sp", "must be a DeviceMesh, a process group or a torch_xla Mesh, got str"),
        (SimpleNamespace(axis_names=("dp", "tp"), mesh_shape=(2, 2)), "no axis of the mesh .dp, tp."),
        (SimpleNamespace(axis_names=("sp",), mesh_shape=(2,)), "these are on cpu"),
    ]:
        attend = OperationRegistry.create("ring", OperationMetadata(mesh=mesh))
        with pytest.raises(UnsupportedOperationError, match=message):
            attend(*tensors())


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"mask": torch.ones(T, S)}, "mask must be boolean"),
        ({"bias": torch.zeros(H, T, T)}, "does not broadcast"),
        ({"query_segment_ids": torch.zeros(B, T, dtype=torch.int64)}, "go together"),
        ({"sinks": torch.zeros(K)}, "sinks must be"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"dropout_prob": 1.0}, "dropout_prob"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(features, message):
    with pytest.raises(ValueError, match=message):
        OperationRegistry.create("ring")(*tensors(), **features)


class Told:
    """A ring whose other ranks have said what they say."""

    rank, size = 0, 2

    def __init__(self, **other):
        self.other = other

    def gather(self, numbers, device):
        return [numbers, [*self.other["row"], 5]]


def test_what_differs_is_named_with_both_values():
    half = [0, 3, 4602678819172646912]  # no problem, 3, and the bits of 0.5
    assert agree(Told(row=half), {"heads": 3, "softcap": 0.5}, None, torch.device("cpu"), own=7) == [7, 5]
    with pytest.raises(ValueError, match=r"heads differs between rank 0 \(4\) and rank 1 \(3\)"):
        agree(Told(row=half), {"heads": 4, "softcap": 0.5}, None, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"softcap differs between rank 0 \(2.0\) and rank 1 \(0.5\)"):
        agree(Told(row=half), {"heads": 3, "softcap": 2.0}, None, torch.device("cpu"))
    with pytest.raises(ValueError, match="rank 1 of the ring refused"):
        agree(Told(row=[1, 0, 0]), {"heads": 3, "softcap": 2.0}, None, torch.device("cpu"))
    with pytest.raises(ValueError, match="mine"):
        agree(Told(row=half), {"heads": 3, "softcap": 0.5}, "mine", torch.device("cpu"))


def test_torch_func_transforms_one_process_and_refuses_more():
    operation = OperationRegistry.create("ring")
    query, key, value = tensors()

    def loss(query):
        return operation(query, key, value, causal=True, layout="zigzag").attention_outputs.square().sum()

    leaf = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(query), expected)
    operation._placement = Placement("a group", 2, ("cpu",))
    with pytest.raises(UnsupportedOperationError, match=r"torch\.func cannot transform what ranks send"):
        torch.func.grad(loss)(query)


def test_a_query_without_dimensions_is_refused_by_name() -> None:
    k = torch.zeros(1, 8, 2, 32)
    for settings in ({}, {"runtime_dtype": torch.float32}):
        with pytest.raises(ValueError, match=r"takes \(batch, seq, heads, head_dim\) tensors, got query \(\)"):
            OperationRegistry.create("ring", OperationMetadata(**settings))(torch.tensor(1.0), k, k)
