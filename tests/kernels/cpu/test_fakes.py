"""What the C++ operators give without numbers: the shapes, dtypes and strides that they give with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import fakes, library

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")

NONE, NO_IDS = torch.empty(0), torch.empty(0, dtype=torch.int64)
TOP = library.BEST


def ones(*sizes: int, **settings: Any) -> torch.Tensor:
    return torch.ones(sizes, **settings)


def calls() -> list[tuple[str, tuple[Any, ...]]]:
    x, query, value = ones(2, 5, 6), ones(2, 5, 4, 8), ones(2, 5, 2, 6)
    key, lse = ones(2, 5, 2, 8), torch.zeros(2, 4, 2, 5)
    plain, sinks = tuple(AttentionCall(scale=0.5)), tuple(AttentionCall(scale=0.5, sinks=ones(4)))
    biased = tuple(AttentionCall(scale=0.5, bias=ones(4, 1, 5, dtype=torch.bfloat16)))
    output, tables = ones(2, 5, 4, 6), (torch.tensor([5]), torch.tensor([[0, 1]]), torch.tensor([0, 3]))
    half = ones(2, 5, 6, dtype=torch.bfloat16)
    step, weight, no_angles = ones(2, 1, 6), ones(6, 6), (ones(1, 1, 0), ones(1, 1, 0))
    dense = (weight, NONE, NONE.int(), NONE.byte(), -1, 0, 0)
    attention, network = (ones(6), *dense[:2] * 4, NONE, NONE), (ones(6), *dense[:2] * 3)
    gates, codes = ones(2, 5, 4), ones(3, 32, dtype=torch.int8)
    cache = ones(2, 2, 4, 3)
    return [
        ("rotary", (query, key, ones(2, 5, 8), ones(2, 5, 8), TOP)),
        ("rms_norm", (half.mT.contiguous().mT[..., :4].contiguous(), ones(4, dtype=torch.bfloat16), 1e-5, TOP)),
        ("norm_backward", (x, x, ones(6), NONE, 1e-5, False, TOP)),
        ("norm_backward", (x, x, ones(6), ones(6), 1e-5, True, TOP)),
        ("linear", (x, ones(3, 6), NONE, TOP)),
        ("linear_argmax", (x, ones(3, 6), NONE, TOP)),
        ("quantized_matmul", (ones(2, 32), codes, ones(3, 1), NONE.byte(), NONE, 0, 32, 32, TOP)),
        ("quantized_matmul", (ones(2, 32), codes.new_ones(2, 512), ones(32, 1), NONE.byte(), NONE, 0, 32, 32, TOP)),
        ("interleave_codes", (codes.new_ones(2, 512), 0, 32, 32, True, TOP)),
        ("glu", (x, x, 0, TOP)),
        ("glu_backward", (x, x, x, 0, TOP)),
        ("cross_entropy_rows", (ones(3, 5), torch.tensor([1, -1, 0]), ones(3), -1, 0.1, None, 0.0, TOP)),
        ("flash", (query, key, value, *plain, TOP)),
        ("flash_training", (query, key, value, *plain, TOP)),
        ("flash_backward", (output, query, key, value, output, lse, *plain, False, TOP)),
        ("flash_backward", (output, query, key, value, output, lse, *sinks, False, TOP)),
        ("flash_backward", (output, query, key, value, output, lse, *biased, True, TOP)),
        ("decode", (ones(2, 4, 1, 8), ones(2, 2, 5, 8), ones(2, 2, 5, 6), None, *plain, TOP)),
        ("decode_codes", (
            ones(2, 4, 1, 8), ones(2, 2, 5, 8).to(torch.int8), ones(2, 2, 5, 6).to(torch.int8), ones(2, 2, 5, 2),
            ones(2, 2, 5, 2), ones(2, 2, 3, 8), ones(2, 2, 3, 6), None, 4, *plain, TOP,
        )),
        ("multi_latent", (
            ones(2, 3, 4, 8), ones(2, 3, 4, 2), ones(2, 5, 6), ones(2, 5, 2), ones(4, 8, 6), ones(4, 7, 6), *plain, TOP,
        )),
        ("multi_latent", (ones(2, 3, 4, 6), ones(2, 3, 4, 2), ones(2, 5, 6), ones(2, 5, 2), None, None, *plain, TOP)),
        ("multi_latent_pages", (
            ones(3, 4, 8), ones(3, 4, 2), ones(2, 4, 6), ones(2, 4, 2), *tables, ones(4, 8, 6), ones(4, 7, 6),
            *AttentionCall(right=0), 9, TOP,
        )),
        ("experts_step", (
            ones(2, 6), torch.zeros(2, 1, dtype=torch.int64), ones(2, 1), ones(3, 8, 6), *dense[1:], ones(3, 6, 4),
            *dense[1:], 0, 1.0, 1.0, 1, TOP,
        )),
        ("ragged_page", (
            ones(3, 4, 8), ones(2, 4, 2, 8), ones(2, 4, 2, 6), *tables, None, None, 1, *AttentionCall(right=0), 9, TOP,
        )),
        ("attention_step", (
            step, ones(6), *dense * 4, NONE, NONE, 1e-5, 1e-5, *no_angles, cache, cache.clone(), *plain,
            0, 1, 2, 1, TOP,
        )),
        ("attention_step_pages", (
            step, ones(6), *dense * 4, NONE, NONE, 1e-5, 1e-5, *no_angles, ones(2, 4, 2, 3), ones(2, 4, 2, 3),
            torch.tensor([3, 4]), *tables[:2], torch.tensor([0, 2]), *plain, 1, TOP,
        )),
        ("decoder_layers", (
            step, [*attention, NONE, *network], [-1] * 7 + [0], [1e-5, 1e-5, 1.0, 0.0, 1e-5],
            [*no_angles, cache, cache.clone(), NONE.bool()], [0, 1, 2], 1, TOP,
        )),
        ("decoder_layers_pages", (
            step, [*attention, NONE, *network], [-1] * 7 + [0], [1e-5, 1e-5, 1.0, 0.0, 1e-5],
            [*no_angles, ones(2, 4, 2, 3), ones(2, 4, 2, 3), torch.tensor([3, 4]), *tables[:2], torch.tensor([0, 2])],
            [-1], 1, TOP,
        )),
        ("feed_forward_step", (step, ones(6), *dense * 3, 1e-5, 0, 1, TOP)),
        ("causal_conv1d", (x, ones(6, 4), NONE, NONE, NO_IDS, True, TOP)),
        ("causal_conv1d_backward", (half, NONE, half, ones(6, 4), NONE, NONE, NO_IDS, True, TOP)),
        ("ssm1", (x, x, ones(6, 3), ones(2, 5, 3), ones(2, 5, 3), NONE, NONE, NONE, NONE, NO_IDS, True, TOP)),
        ("ssm1_backward", (x, NONE, x, x, ones(6, 3), ones(2, 5, 3), ones(2, 5, 3), NONE, NO_IDS, TOP)),
        ("ssm2", (
            query, gates, ones(4), ones(2, 5, 2, 3), ones(2, 5, 2, 3), NONE, NONE, NONE, NONE, NO_IDS, True, 0.0, 1.0,
            TOP,
        )),
        ("ssm2_training", (
            query, gates, ones(4), ones(2, 5, 2, 3), ones(2, 5, 2, 3), NONE, query, NONE, NONE, NO_IDS, True, 0.0, 1.0,
            TOP,
        )),
        ("ssm2_backward", (
            query, NONE, query, gates, ones(4), ones(2, 5, 2, 3), ones(2, 5, 2, 3), ones(4), query, query, NONE, NO_IDS,
            TOP,
        )),
        ("gated_delta_rule", (
            key, key, ones(2, 5, 4, 6), gates, gates, NONE, NO_IDS, 1.0, False, 1e-6, TOP,
        )),
        ("gated_delta_rule_backward", (
            ones(2, 5, 4, 6), NONE, key, key, ones(2, 5, 4, 6), gates, gates, NONE, NO_IDS, 1.0, TOP,
        )),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "given"), [pytest.param(*one, id=f"{n}-{one[0]}") for n, one in enumerate(calls())])
def test_without_numbers_it_gives_the_same_shapes(name: str, given: tuple[Any, ...]) -> None:
    operator = getattr(torch.ops.easytorch_cpu, name).default
    torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


def test_every_operator_has_one() -> None:
    names = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("easytorch_cpu::")
    }
    assert names == set(fakes._FAKES) == {name for name, _ in calls()}


def test_it_runs_in_a_compiled_and_in_an_exported_program() -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            norm = torch.ops.easytorch_cpu.rms_norm.default(x, ones(6), 1e-5, TOP)
            return torch.ops.easytorch_cpu.linear.default(norm, ones(3, 6), NONE, TOP).relu()

    torch.manual_seed(0)
    x = torch.randn(2, 5, 6)
    want = Two()(x)
    assert torch.equal(torch.compile(Two(), fullgraph=True, backend="aot_eager")(x), want)
    exported = torch.export.export(Two(), (x,), dynamic_shapes=({1: torch.export.Dim("length")},))
    assert torch.equal(exported.module()(x[:, :3]), want[:, :3])
