"""Attention over pages in jax, and the Pallas kernel in its interpreter, against the definition in float64."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch

from easytorch.kernels.ragged_page import native
from easytorch.kernels.ragged_page.contract import resolve_features

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'easytorch[jax]'")
pytestmark = pytest.mark.jax_cpu

LENGTHS, CONTEXTS = [1, 5, 0, 20, 1], [150, 9, 5, 20, 33]
CASES: dict[str, dict[str, Any]] = {
    "mixed": {},
    "decode": {"lengths": [1, 1, 1], "contexts": [40, 1, 200]},
    "window_softcap_sinks": {"sliding_window": 9, "softcap": 2.0, "sinks": torch.linspace(-2, 2, 6)},
    "sides_num_seqs": {"sliding_window": (5, 2), "causal": False, "num_seqs": torch.tensor([3])},
}


def run(module: str, tensors: list[torch.Tensor], value: torch.Tensor | None, **features: Any) -> torch.Tensor:
    from easytorch.kernels.interop.dlpack import to_jax, to_torch

    num_seqs, sinks = features.pop("num_seqs", None), features.pop("sinks", None)
    query, key, lens, tables, starts = (to_jax(x.to(torch.int32) if x.dtype == torch.int64 else x) for x in tensors)
    value_dim = 20 if value is None else value.shape[3]
    call = resolve_features(query.shape[1], query.shape[2] ** -0.5, **features)
    call = call._replace(sinks=None if sinks is None else to_jax(sinks))
    attend = functools.partial(
        importlib.import_module(f"easytorch.kernels.ragged_page.{module}").ragged_page_attention, value_dim=value_dim,
        **({"interpret": True} if module == "pallas_kernel" else {}),
    )  # fmt: skip
    count = None if num_seqs is None else to_jax(num_seqs.to(torch.int32))
    arrays = (query, None, key, None, None if value is None else to_jax(value), lens, tables, starts, count, call)
    return to_torch(jax.jit(attend)(*arrays))


def make(lengths: list[int], contexts: list[int], dim: int, kv_heads: int) -> list[torch.Tensor]:
    """query, keys, values, context_lens, block_tables, query_start_loc; NaN in slots that are not in use."""
    torch.manual_seed(0)
    size = 16
    order = torch.randperm(sum(-(-c // size) for c in contexts) + 2).tolist()
    tables = torch.full((len(lengths), max(contexts) // size + 1), -1)
    pools = [torch.full((len(order), size, kv_heads, dim), float("nan")) for _ in range(2)]
    for row, context in enumerate(contexts):
        for column in range(-(-context // size)):
            tables[row, column] = page = order.pop()
            filled = min(size, context - column * size)
            for pool in pools:
                pool[page, :filled] = torch.randn(filled, kv_heads, dim)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return [torch.randn(int(starts[-1]) + 2, 6, dim), *pools, torch.tensor(contexts), tables, starts]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.isfinite().all()
    error = (got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error <= 1e-5, f"relative RMS error {error:.2e}"


def double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("module", ["jax_pages", "pallas_kernel"])
def test_equals_the_definition(module: str, name: str) -> None:
    features = dict(CASES[name])
    lengths, contexts = features.pop("lengths", LENGTHS), features.pop("contexts", CONTEXTS)
    query, key, value, *tables = make(lengths, contexts, 128, 2)
    exact = {name: double(x) for name, x in features.items()}
    want = native.ragged_page_attention(*map(double, (query, key, value)), *tables, **exact)
    assert_close(run(module, [query, key, *tables], value, **features), want)


@pytest.mark.parametrize("module", ["jax_pages", "pallas_kernel"])
def test_values_that_are_part_of_the_keys(module: str) -> None:
    """As in multi-head latent attention: one head, three dimensions, the first 20 columns."""
    query, key, _, *tables = make([1, 3], [40, 20], 36, 1)
    want = native.ragged_page_attention(query.double(), key.double(), key[..., :20].double(), *tables)
    assert_close(run(module, [query, key[:, :, 0].contiguous(), *tables], None), want)


@pytest.mark.parametrize("module", ["jax_pages", "pallas_kernel"])
def test_numbers_out_of_range_read_nothing_outside(module: str) -> None:
    """A device cannot raise: a context too long takes no longer than a full row of its table."""
    query, key, value, contexts, tables, starts = make([1, 3, 2], [9, 5, 30], 128, 2)
    contexts.copy_(torch.tensor([2**31 - 1, -5, 500]))
    tables.copy_(torch.tensor([-7, 10**6, 2**31 - 1, 0, -(2**31), 3])[torch.arange(tables.numel()) % 6].view_as(tables))
    pools = [key.nan_to_num(), value.nan_to_num()]
    count = torch.tensor([99], dtype=torch.int32)
    output = run(module, [query, pools[0], contexts, tables, starts], pools[1], num_seqs=count)
    assert output.isfinite().all() and (output[1:4] == 0).all()
    starts.copy_(torch.tensor([-40, 3, 10**6, 2]))
    run(module, [query, pools[0], contexts, tables, starts], pools[1], num_seqs=count)


def test_what_the_kernel_refuses() -> None:
    from easytorch.kernels.ragged_page.pallas_kernel import supports

    def struct(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "float32")

    def ask(dim: int, columns: int) -> str | None:
        return supports(struct(4, 8, dim), None, struct(9, 16, 8, dim), None, None, struct(4), struct(4, columns))

    assert ask(128, 64) is None
    assert "not a multiple of the 128 lanes" in (ask(64, 64) or "")
    assert "do not fit scalar memory" in (ask(128, 10**6) or "")
