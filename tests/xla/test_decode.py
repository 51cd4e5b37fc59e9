"""decode on xla tensors: one node of the graph, equal to the CPU's; a call that wants gradients goes elsewhere."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.decode.native import decode as definition
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error

B, S, H, K, D = 3, 63, 6, 2, 60
LENGTHS = torch.tensor([0, 17, S])
GENERATOR = torch.Generator().manual_seed(0)
CASES = {
    "plain": {},
    "lengths": {"lengths": LENGTHS},
    "window": {"causal": True, "sliding_window": 9, "lengths": LENGTHS},
    "everything": {
        "mask": torch.rand(B, H, 1, S, generator=GENERATOR) > 0.3,
        "bias": torch.randn(1, H, 1, S, generator=GENERATOR), "softcap": 3.0,
        "query_segment_ids": torch.zeros(B, 1, dtype=torch.int64),
        "key_segment_ids": torch.randint(0, 2, (B, S), generator=GENERATOR),
        "sinks": torch.randn(H, generator=GENERATOR), "softmax_scale": 0.3, "lengths": LENGTHS,
    },
}  # fmt: skip


def tensors(dtype=torch.float32):
    return [torch.randn(B, 1, H, D).to(dtype), *(torch.randn(B, S, K, D).to(dtype) for _ in range(2))]


def moved(features):
    return {name: x.to("xla") if isinstance(x, torch.Tensor) else x for name, x in features.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case, dtype):
    given = tensors(dtype)
    operation = OperationRegistry.create("decode")
    on_xla = [tensor.to("xla") for tensor in given]
    assert operation.choose(*on_xla, **CASES[case]).backend == "xla"
    got = operation(*on_xla, **moved(CASES[case])).attention_outputs.cpu()
    expected = definition(*(tensor.double() for tensor in given), **CASES[case])
    assert relative_rms_error(got, expected) < (1e-5 if dtype == torch.float32 else 8e-3)


def test_attention_takes_it_for_one_query_in_one_program(count_programs):
    attention = OperationRegistry.create("attention")
    query, key, value = (tensor.to("xla") for tensor in tensors())
    assert attention.choose(query, key, value, causal=True).implementation == "decode"
    assert attention.choose(query.repeat(1, 2, 1, 1), key, value, causal=True).implementation == "flash"

    def run():
        for _ in range(2):
            (attention(query + 1, key, value, causal=True).attention_outputs * 2).cpu()

    assert count_programs(run) == 1
    key.requires_grad_()
    assert attention.choose(query, key, value, causal=True).implementation == "flash"
    with torch.no_grad():
        assert attention.choose(query, key, value, causal=True).implementation == "decode"
