"""Every registered operation computes something for a model: docs/operations.md says where, and here it is called."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.generation.engine.engine import Engine
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.record import recorded_operations
from easytorch.protocol import quantize
from tests.generation.engine.traffic import model_of

PAGE = Path(__file__).parents[2] / "docs/operations.md"
IDS = torch.tensor([[5, 9, 33, 71, 8, 2, 17, 60, 44]])
# A family whose forward calls it.
BY_FORWARD = {
    "attention": "llama",
    "causal_conv1d": "mamba",
    "gated_delta_rule": "qwen3_next",
    "geglu": "gemma",
    "grouped_matmul": "mixtral",
    "layer_norm": "gpt2",
    "rms_norm": "llama",
    "rotary": "llama",
    "ssm1": "mamba",
    "ssm2": "mamba2",
    "swiglu": "llama",
}
BY_ENGINE = {"ragged_page_attention": "llama", "ragged_page_multi_latent_attention": "deepseek_v3"}
# What `attention` chooses from, and what it falls back to.
CHOSEN, VANILLA = ("blocksparse", "decode", "flash", "sdpa"), "vanilla"


def names() -> set[str]:
    return {OperationRegistry.get(name).primary_name() for name in OperationRegistry.names()}


def test_all_are_asked_for_and_on_the_page() -> None:
    assert names() == {*BY_FORWARD, *BY_ENGINE, *OTHERWISE, *CHOSEN, VANILLA}
    table = PAGE.read_text().split("## Who calls them")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE))
    assert set(rows) == names()
    for name, callers in rows.items():
        if name in (*CHOSEN, VANILLA):
            assert callers == "`attention`"
        else:
            assert re.fullmatch(r"(`(layers|cache)/\w+\.py`(, )?)+", callers), (name, callers)


@pytest.mark.parametrize("name", BY_FORWARD)
def test_a_forward_calls_it(name: str) -> None:
    with recorded_operations() as called:
        model_of(BY_FORWARD[name])(IDS, use_cache=False)
    assert name in called


@pytest.mark.parametrize("name", BY_ENGINE)
def test_a_step_over_pages_calls_it(name: str) -> None:
    engine = Engine(model_of(BY_ENGINE[name]), max_memory=1 << 20)
    with recorded_operations() as called:
        next(iter(engine.stream([5, 6, 7])))
    assert name in called


def in_a_loss(monkeypatch: pytest.MonkeyPatch) -> Any:
    return model_of("llama").compute_loss(IDS, labels=IDS)


def without_logits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("easytorch.layers.deferred_logits.SMALLEST", 1)  # as if the vocabulary were large
    return copy.deepcopy(model_of("llama")).train()(IDS, labels=IDS)


def in_a_projection(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("EASYTORCH_OPS", "linear=native")  # which is asked for small ones too
    return model_of("llama")(IDS)


def in_decoding(monkeypatch: pytest.MonkeyPatch) -> Any:
    return model_of("deepseek_v3").generate(IDS, max_new_tokens=2, do_sample=False)


def of_few_bits(monkeypatch: pytest.MonkeyPatch) -> Any:
    return quantize(copy.deepcopy(model_of("llama")), "int8")(IDS)


def asked_for(monkeypatch: pytest.MonkeyPatch) -> Any:
    model = copy.deepcopy(model_of("llama"))
    model.set_attn_implementation("ring")
    return model(IDS)


OTHERWISE = {
    "cross_entropy": in_a_loss,
    "fused_linear_cross_entropy": without_logits,
    "linear": in_a_projection,
    "multi_latent_attention": in_decoding,
    "quantized_matmul": of_few_bits,
    "ring": asked_for,
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_something_else_calls_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_operations() as called:
        OTHERWISE[name](monkeypatch)
    assert name in called


def test_attention_chooses_each_of_its_own() -> None:
    attention: Any = OperationRegistry.create("attention")
    ordered = {choice.operation.primary_name() for order in attention._orders.values() for choice in order}
    assert ordered == set(CHOSEN)
    assert attention.definition_of({}).primary_name() == VANILLA
