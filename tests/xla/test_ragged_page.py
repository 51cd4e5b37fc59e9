"""The operations over a paged or compressed cache on xla tensors: jax in the graph, equal to the definition."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.ragged_page.write import write_page
from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
LENS, TABLES, STARTS = (
    torch.tensor([9, 6, 12]), torch.tensor([[4, 1, 0, -1], [2, 5, -1, -1], [6, 3, 7, -1]]), torch.tensor([0, 1, 7, 8]),
)  # fmt: skip
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 5, "softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 4), "causal": False, "softmax_scale": 0.3},
    "num_seqs": {"num_seqs": 2},
}


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def move(value):
    return value.to("xla") if isinstance(value, torch.Tensor) else value


def equal_on_xla(name, tensors, features, backend="pallas"):
    operation = OperationRegistry.create(name)
    moved, features_moved = [move(x) for x in tensors], {k: move(v) for k, v in features.items()}
    assert operation.choose(*moved, **features_moved).backend == backend
    got = operation(*moved, **features_moved).attention_outputs
    definition = OperationRegistry.create(name, OperationMetadata(backend="native"))
    want = definition(*[x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in tensors], **{
        k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in features.items()
    }).attention_outputs  # fmt: skip
    assert got.dtype == tensors[0].dtype
    assert relative_rms_error(got.cpu(), want) <= TOLERANCE[got.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("features", FEATURES)
def test_ragged_page_attention(features, dtype):
    tensors = (
        randn(9, 4, 8, dtype=dtype),
        randn(8, 4, 2, 8, seed=1, dtype=dtype),
        randn(8, 4, 2, 6, seed=2, dtype=dtype),
    )
    equal_on_xla("ragged_page_attention", (*tensors, LENS, TABLES, STARTS), FEATURES[features])


def latents(dtype=torch.float32):
    up = [randn(4, width, 12, seed=3 + width, dtype=dtype) for width in (10, 6)]
    return [randn(9, 4, 10, dtype=dtype), randn(9, 4, 4, seed=1, dtype=dtype)], up


@pytest.mark.parametrize("features", FEATURES)
def test_ragged_page_multi_latent_attention(features):
    queries, (up_key, up_value) = latents()
    pages = randn(8, 4, 16, seed=2)
    given = {**FEATURES[features], "up_key": up_key, "up_value": up_value}
    equal_on_xla("ragged_page_multi_latent_attention", (*queries, pages, LENS, TABLES, STARTS), given)
    pair = tuple(part.contiguous() for part in pages.split([12, 4], dim=-1))
    operation = OperationRegistry.create("ragged_page_multi_latent_attention")
    arguments = [move(x) for x in (*queries, LENS, TABLES, STARTS)]
    outputs = [
        operation(
            *arguments[:2], cache, *arguments[2:], **{k: move(v) for k, v in given.items()}
        ).attention_outputs.cpu()
        for cache in (pages.to("xla"), tuple(map(move, pair)))
    ]
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("length", [1, 40])
def test_multi_latent_attention(length):
    """One query token is absorbed, a prompt expanded."""
    _, up = latents()
    tensors = [
        randn(2, length, 4, 10),
        randn(2, length, 4, 4, seed=1),
        randn(2, 40, 12, seed=2),
        randn(2, 40, 4, seed=3),
        *up,
    ]
    for features in ({"causal": True}, {"sliding_window": 9, "causal": True, "softcap": 3.0}):
        equal_on_xla("multi_latent_attention", tensors, features)
    equal_on_xla("multi_latent_attention", tensors[:2] + tensors[2:], {"mask": torch.rand(length, 40) > 0.3})


def test_gradients_of_multi_latent_attention():
    _, up = latents()
    tensors = [randn(2, 3, 4, 10), randn(2, 3, 4, 4, seed=1), randn(2, 20, 12, seed=2), randn(2, 20, 4, seed=3), *up]
    results = []
    for device in ("xla", "cpu"):
        leaves = [x.to(device).detach().requires_grad_() for x in tensors]
        output = OperationRegistry.create("mla")(*leaves, causal=True).attention_outputs
        output.square().sum().backward()
        results.append([x.grad.cpu() for x in leaves])
    for got, want in zip(*results, strict=True):
        assert relative_rms_error(got, want) < 1e-5


def test_another_count_or_other_lengths_compile_no_other_program(count_programs):
    operation = OperationRegistry.create("ragged_page_attention")
    tensors = [move(x) for x in (randn(9, 4, 8), randn(8, 4, 2, 8, seed=1), randn(8, 4, 2, 8, seed=2))]

    def run():
        for count, lens in ((3, LENS), (2, LENS), (3, LENS - 1)):
            operation(*tensors, *map(move, (lens, TABLES, STARTS)), count).attention_outputs.cpu()

    assert count_programs(run) == 1


def test_write_page():
    pages, rows, slots = randn(3, 4, 2), randn(3, 2, seed=1), torch.tensor([5, -1, 11])
    on_xla = pages.to("xla")
    assert write_page(on_xla, rows.to("xla"), slots.to("xla")) is on_xla
    assert torch.equal(on_xla.cpu(), write_page(pages, rows, slots))
