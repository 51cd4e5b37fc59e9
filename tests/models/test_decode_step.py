"""What one token of the native Llama costs beside its arithmetic, against transformers' class, counted, not timed."""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import easytorch

FEW, MANY = 1, 5


class _Count(TorchDispatchMode):
    """The calls that reach ATen's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _step(model: nn.Module) -> tuple[collections.Counter[str], int]:
    """The ATen calls and the Python calls of the token after a prompt."""
    ids = torch.arange(2, 10)[None]
    with torch.inference_mode():
        for _ in range(2):  # what is done once is not a token's
            cache = DynamicCache(config=model.config)
            model(ids, past_key_values=cache, use_cache=True)
            model(ids[:, -1:], past_key_values=cache, use_cache=True)
            with _Count():  # under which the modules run, and keep what they found
                model(ids[:, -1:], past_key_values=cache, use_cache=True)
        with _Count() as count:
            model(ids[:, -1:], past_key_values=cache, use_cache=True)
        python = 0

        def called(frame: Any, event: str, argument: Any) -> None:
            nonlocal python
            python += event == "call"

        before = sys.getprofile()
        sys.setprofile(called)
        try:
            model(ids[:, -1:], past_key_values=cache, use_cache=True)
        finally:
            sys.setprofile(before)
    return count.calls, python


def _models(layers: int) -> tuple[nn.Module, nn.Module]:
    """Ours and transformers', large enough for projections to be fused."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        vocab_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return easytorch.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval(), theirs


def check_calls() -> None:
    """What `MANY` layers take beyond `FEW`: what a model does once hides what its layers do."""
    few, many = ([_step(model) for model in _models(layers)] for layers in (FEW, MANY))
    (aten, python), (aten_of_theirs, python_of_theirs) = (
        (more[0] - less[0], more[1] - less[1]) for less, more in zip(few, many, strict=True)
    )
    assert aten.total() <= 0.8 * aten_of_theirs.total(), (
        aten - aten_of_theirs
    )  # 0.75 of the modules, which run under the count
    assert python <= 0.25 * python_of_theirs  # 0.16: the layers are one call of C++, and each is asked for its memory


def test_a_layer_of_a_token_takes_few_calls() -> None:
    """In a process of its own: after other tests a layer's step was once not the operator in C++, and 1.96."""
    done = subprocess.run(
        [sys.executable, "-c", "from tests.models.test_decode_step import check_calls; check_calls()"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
