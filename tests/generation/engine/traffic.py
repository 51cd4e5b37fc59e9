"""Random requests for an engine, and what each gives on its own.

scripts/check_engine.py runs 200 of them for each family, the tests a few.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import easytorch
from easytorch.generation import generate_tokens
from easytorch.generation.engine import Engine, SamplingParams
from easytorch.generation.engine.pages import PagePool
from tests.models.families import CAUSAL, FAMILIES

VOCABULARY = 97
PAGE_SIZE = 4
# Of the logits' spread: how far the reference's likeliest token may lie above another one that is taken for it.
TIE = 1e-4


@dataclass
class Arrival:
    step: int
    prompt: list[int]
    params: SamplingParams
    aborted_at: int | None = None
    found: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def model_of(family: str, **settings: Any) -> Any:
    """A small model of a family, with weights large enough that its tokens vary. settings: of its config."""
    config = FAMILIES[family].config(**settings)
    if hasattr(config, "initializer_range"):
        config.initializer_range = 0.3
    torch.manual_seed(0)
    return easytorch.AutoModelForCausalLM.from_config(config).eval()


def families() -> list[str]:
    """The native families with a causal language model and no encoder, but BLOOM, whose bias pages do not carry."""
    return [name for name in CAUSAL if name in FAMILIES and name != "bloom"]


def arrivals(count: int, seed: int, /, *, aborts: bool = True, **params: Any) -> list[Arrival]:
    """`count` requests over some steps; half of them begin with one of three prefixes, a tenth are aborted."""
    draw = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(length)]

    prefixes = [tokens(draw.randrange(5, 20)) for _ in range(3)]
    made = []
    for _ in range(count):
        prompt = draw.choice(prefixes) if draw.random() < 0.5 else []
        prompt = prompt + tokens(draw.randrange(1, 14))
        most = draw.randrange(1, 18)
        step = draw.randrange(count)
        one = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | params | {"max_tokens": most}))
        aborted = step + draw.randrange(12) if aborts and draw.random() < 0.1 else None
        made.append(Arrival(step, prompt, one, aborted))
    return made


def small_engine(model: Any, requests: Sequence[Arrival], at_once: int, **settings: Any) -> Engine:
    """One with pages for a third of the tokens that `at_once` of the longest requests have, and for one of them.

    Of a model without keys and values, whose requests take one page each, as it is.
    """
    chunk = getattr(model.config.get_text_config(decoder=True), "attention_chunk_size", None) or PAGE_SIZE
    page_size = math.gcd(PAGE_SIZE, chunk)
    engine = Engine(model, max_memory=1 << 24, page_size=page_size, max_requests=at_once, **settings)
    sizes = sorted((len(one.prompt) + (one.params.max_tokens or 0) for one in requests), reverse=True)
    pages = max(-(-sizes[0] // page_size), sum(sizes[:at_once]) // (3 * page_size))
    if engine.page_bytes:
        engine._pool = engine._scheduler.pool = PagePool(pages)
    return engine


def run(engine: Engine, requests: Sequence[Arrival]) -> None:
    """Adds, steps and aborts as the arrivals say, until all have ended; every page is free then."""
    by_id = {}
    last = max(one.step for one in requests)
    step = 0
    while step <= last or engine.has_unfinished_requests:
        for one in requests:
            if one.step == step:
                by_id[engine.add_request(one.prompt, one.params)] = one
        for request_id, one in by_id.items():
            if one.aborted_at == step and engine.abort(request_id):
                one.finish_reason = "abort"
        for output in engine.step():
            completion = output.outputs[0]
            by_id[output.request_id].found = completion.token_ids
            by_id[output.request_id].finish_reason = completion.finish_reason
        step += 1
    stats = engine.stats()
    assert stats.free_pages == stats.num_pages and not stats.running and not stats.waiting, stats


def difference(model: Any, one: Arrival) -> str | None:
    """How the tokens of a request differ from those of the model by itself; None: they are equal."""
    found = one.found
    if one.finish_reason == "abort" and not found:
        return None
    settings = {"max_new_tokens": len(found), "eos_token_id": []}
    expected = [int(token) for token in generate_tokens(model, torch.tensor([one.prompt]), **settings)]
    for place, (token, right) in enumerate(zip(found, expected, strict=True)):
        if token == right:
            continue
        with torch.no_grad():
            logits = model(torch.tensor([one.prompt + found[:place]])).logits[0, -1].double()
        gap = float((logits[right] - logits[token]) / logits.std())
        if abs(gap) < TIE:
            return None  # rounding decides: from here on they are two continuations
        return (
            f"token {place} of {len(found)} is {token}, not {right} (by {gap:.2g} of the spread); prompt {one.prompt}"
        )
    if one.finish_reason == "length" and len(found) != one.params.max_tokens:
        return f"{len(found)} tokens, not {one.params.max_tokens}"
    return None
