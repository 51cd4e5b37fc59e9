"""CUDA graphs themselves: what tests/generation/test_captured.py does on a CPU, on a GPU."""

from __future__ import annotations

import gc

import pytest
import torch

from easytorch.generation import generate_tokens
from easytorch.generation.engine import Engine, SamplingParams
from easytorch.layers.captured_step import CapturedStep
from easytorch.layers.cuda_graph import CudaGraph, GraphPool
from tests.generation.engine.traffic import arrivals, difference, model_of, run, small_engine
from tests.generation.test_captured import BLOCKS, IDS, MASK, SAMPLED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
DEVICE = torch.device("cuda")


def test_replays_read_static_tensors_and_share_a_pool():
    pool, x = GraphPool(), torch.arange(4.0, device=DEVICE)
    steps = [CapturedStep(lambda factor=factor: x * factor + 1, DEVICE, pool) for factor in (2, 3)]
    for value in range(5):
        x.fill_(value)
        for step, factor in zip(steps, (2, 3), strict=True):
            assert step().tolist() == [value * factor + 1] * 4
    assert all(step.captured and step.refusal is None for step in steps)


def test_a_capture_that_fails_leaves_an_eager_step():
    x = torch.ones(3, device=DEVICE)
    graph = CudaGraph(DEVICE, GraphPool())
    with pytest.raises(RuntimeError):
        graph.capture(lambda: x * float(x.sum()))
    step = CapturedStep(lambda: x * float(x.sum()), DEVICE)
    assert [step().tolist() for _ in range(3)] == [[3.0] * 3] * 3
    assert not step.captured and "waits for the device" in step.refusal


@pytest.mark.parametrize("family", BLOCKS)
def test_tokens(family):
    model = model_of(family).to(DEVICE)
    model.generation_config.eos_token_id = None
    ids, mask = IDS.to(DEVICE), MASK.to(DEVICE)
    for settings in ({}, SAMPLED):
        given = {"max_new_tokens": 9, "eos_token_id": []} | settings
        want = torch.stack(list(generate_tokens(model, ids, mask, cache="dynamic", **given)), 1)
        assert torch.equal(torch.stack(list(generate_tokens(model, ids, mask, cache="static", **given)), 1), want)
    given = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **given), model.generate(ids, disable_compile=True, **given))


@pytest.mark.parametrize("family", BLOCKS)
def test_engine(family):
    model = model_of(family).to(DEVICE)
    requests = arrivals(10, 3)
    engine = small_engine(model, requests, at_once=6, max_batch_tokens=24)
    run(engine, requests)
    assert engine.stats().captured_steps > 10 and engine.eager_reason is None
    assert [found for one in requests if (found := difference(model, one)) is not None] == []


def test_the_memory_of_graphs_goes_with_the_engine():
    model = model_of("llama").to(DEVICE)

    def used():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before = used()
    engine = Engine(model, max_memory=1 << 20)
    for _ in range(20):
        engine.add_request([5, 9, 33], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.stats().captured_steps > 0
    del engine
    assert used() <= before
