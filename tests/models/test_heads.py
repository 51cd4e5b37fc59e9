"""Every head that transformers' auto classes have for a native type is native, or named here with the reason."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

import easytorch
from easytorch.protocol.native_classes import families
from tests.models.families import FAMILIES, HEADS

# class -> why it stays transformers'
STOCK = {"JevForDecision": "a model with code of its own over the decoders of several types"}


def test_every_head_of_a_native_type_is_native() -> None:
    types, stock, native = families(), set(), Counter[str]()
    for auto in set(easytorch.__all__).intersection(dir(modeling_auto)):
        mapping: Any = getattr(easytorch, auto)._model_mapping
        for config_class in (one for one in mapping if one.model_type.replace("-", "_") in types):
            found = mapping[config_class]
            for one in found if isinstance(found, tuple) else (found,):
                if one.__module__.startswith("easytorch.models."):
                    native[auto] += 1
                elif one.__name__ not in STOCK:
                    stock.add((auto, config_class.model_type, one.__name__))
    assert not stock
    assert native["AutoModel"] > 80 and native["AutoModelForCausalLM"] > 50 and len(native) > 15, native


def test_generation_is_a_base_of_the_classes_that_generate() -> None:
    """Directly, which transformers tests of its own classes."""
    for family, head in HEADS:
        ours = getattr(importlib.import_module(f"easytorch.models.{family}"), head)
        theirs = getattr(transformers, head)
        mixin = transformers.GenerationMixin
        assert (mixin in ours.__bases__) >= (mixin in theirs.__bases__), head


def by_position(kind: Any) -> list[str]:
    parameters = inspect.signature(kind.forward).parameters.values()
    return [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def test_arguments_by_position_are_those_of_transformers() -> None:
    """Ours may take fewer, or some more after them: none means another."""
    for family, head in HEADS:
        ours = by_position(getattr(importlib.import_module(f"easytorch.models.{family}"), head))
        theirs = by_position(getattr(transformers, head))
        common = min(len(ours), len(theirs))
        assert ours[:common] == theirs[:common], head


@pytest.mark.parametrize("family, head", [
    ("opt", "OPTForCausalLM"),
    ("gpt_neox", "GPTNeoXForTokenClassification"),
    ("gpt2", "GPT2ForSequenceClassification"),
    ("mamba2", "Mamba2ForCausalLM"),
    ("granitemoe", "GraniteMoeForCausalLM"),
])  # fmt: skip
def test_calls_by_position_compute_the_same(family: str, head: str, make_pair: Any) -> None:
    ours, theirs = make_pair(head, FAMILIES[family].config(), FAMILIES[family].reference)
    ids = torch.tensor([[5, 9, 33, 71, 8]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    if head.endswith("Classification"):
        given["labels"] = torch.ones_like(ids if "Token" in head else ids[:, 0])
    names = by_position(type(theirs))[1:]
    names = names[: 1 + names.index("labels")]
    with torch.no_grad():
        output, expected = (model(*map(given.get, names)) for model in (ours, theirs))
    for name in ("loss", "logits"):
        torch.testing.assert_close(output[name], expected[name], rtol=1e-5, atol=1e-5)
