"""Every head that transformers' auto classes have for a native type is native, or named here with the reason."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

import easytorch
from easytorch.protocol.native_classes import families
from tests.models.families import HEADS

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
