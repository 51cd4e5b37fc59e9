"""blocksparse on xla tensors: one node forward, one backward, equal to the definition on the CPU."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.blocksparse import native
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error

IDS = torch.arange(40)[None] // 15
CASES = {
    "window": {"causal": True, "sliding_window": 9},
    "chunks": {"causal": True, "chunk_size": 16, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "prefix of each batch": {"causal": True, "prefix_length": torch.tensor([3, 20])},
    "everything": {
        "mask": torch.arange(40) % 7 != 3, "bias": torch.linspace(-2, 2, 160).sin().reshape(1, 4, 1, 40),
        "causal": True, "sliding_window": (30, 5), "query_segment_ids": IDS.repeat(2, 1),
        "key_segment_ids": IDS.repeat(2, 1), "softcap": 3.0, "softmax_scale": 0.3, "dropout_prob": 0.2, "seed": 7,
        "chunk_size": 25, "prefix_length": 12,
    },
}  # fmt: skip


def _run(function, device, dtype, features):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 40, 4, 16), (2, 40, 2, 16), (2, 40, 2, 12))
    leaves = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in features.items()}
    for name in ("bias", "sinks"):
        if name in given:
            given[name] = given[name].to(dtype).requires_grad_()
            leaves.append(given[name])
    output = function(*leaves[:3], **given)
    output = output[0] if isinstance(output, tuple) else output.attention_outputs
    weight = torch.linspace(-1, 1, output.numel()).sin().reshape(output.shape).to(device, dtype)
    return [x.detach().cpu() for x in (output, *torch.autograd.grad((output * weight).sum(), leaves))]


@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case):
    operation = OperationRegistry.create("blocksparse")
    got = _run(operation, "xla", torch.float32, CASES[case])
    expected = _run(native.attention, "cpu", torch.float64, CASES[case])
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert relative_rms_error(a, b) < 1e-5, f"output or gradient {index}"


def test_it_takes_the_kernel_and_one_program_serves_every_seed(count_programs):
    operation = OperationRegistry.create("blocksparse")
    query = torch.randn(1, 8, 2, 8).to("xla")
    assert operation.choose(query, query, query, chunk_size=4).backend == "pallas"

    def step(seed):
        features = {"chunk_size": 4, "dropout_prob": 0.5, "seed": seed, "prefix_length": torch.tensor([seed])}
        return operation(query, query, query, **features).attention_outputs.cpu()

    first = step(5)  # torch_xla makes constants of 0 and 1
    assert count_programs(lambda: step(6)) == 0
    assert not torch.equal(first, step(6))
