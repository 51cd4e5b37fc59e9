"""Every head that transformers' auto classes have for a native type is native, or named here with the reason."""

from __future__ import annotations

import copy
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
from tests.models.families import CAUSAL, FAMILIES, HEADS
from tests.models.image_text_families import image_text_inputs
from tests.models.tower_families import tower_inputs

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


def test_opt_takes_one_row_of_tokens(make_pair: Any) -> None:
    row = FAMILIES["opt"]
    ours, theirs = make_pair("OPTForCausalLM", row.config(), row.reference)
    output, expected = (model(torch.tensor([5, 9, 33, 71, 8])).logits for model in (ours, theirs))
    assert output.shape == expected.shape == (1, 5, 97)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family, head", [
    ("llama", "LlamaForCausalLM"),
    ("llama", "LlamaForTokenClassification"),
    ("opt", "OPTForSequenceClassification"),
    ("gpt2", "GPT2DoubleHeadsModel"),
    ("mamba2", "Mamba2ForCausalLM"),
    ("t5", "T5ForTokenClassification"),
    ("mbart", "MBartForConditionalGeneration"),
    ("gemma3", "Gemma3ForConditionalGeneration"),
    ("gemma4", "Gemma4ForConditionalGeneration"),
    ("whisper", "WhisperForConditionalGeneration"),
])  # fmt: skip
def test_a_config_may_ask_for_tuples(family: str, head: str) -> None:
    """Of the model that is called: the parts inside it still answer each other by name."""
    torch.manual_seed(0)
    model = getattr(importlib.import_module(f"easytorch.models.{family}"), head)(FAMILIES[family].config()).eval()
    given = tower_inputs(head) or image_text_inputs(head) or {"input_ids": torch.tensor([[5, 9, 33, 71, 8]])}
    with torch.no_grad():
        expected = model(**given).to_tuple()
        model.config.return_dict = False
        output = model(**given)
    assert isinstance(output, tuple) and len(output) == len(expected)
    assert torch.equal(output[0], expected[0])


@pytest.mark.parametrize("family, head", [
    ("mixtral", "MixtralForCausalLM"),
    ("deepseek_v3", "DeepseekV3Model"),
    ("llama4_text", "Llama4TextModel"),
    ("gpt2", "GPT2Model"),
    ("mamba2", "Mamba2Model"),
    ("mamba2", "Mamba2ForCausalLM"),
    ("qwen3_vl_moe", "Qwen3VLMoeModel"),
    ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
])  # fmt: skip
def test_an_output_is_of_transformers_class_with_its_fields_in_order(family: str, head: str, make_pair: Any) -> None:
    """So that places in a tuple mean the same, and properties of the class are there: features of images, say."""
    ours, theirs = make_pair(head, FAMILIES[family].config(), "eager")
    ours.set_attn_implementation("eager")
    given = image_text_inputs(head) or {"input_ids": torch.tensor([[5, 9, 33, 71, 8]])}
    asked: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}
    if head == "Qwen3VLMoeModel" and not hasattr(transformers.modeling_outputs, "MultimodalModelOutput"):
        pytest.skip("transformers 5.23 gives the fields in the order in which it recorded them")
    if family == "mamba2":
        del asked["output_attentions"]
    elif family != "gpt2":
        asked["output_router_logits"] = True
    with torch.no_grad():
        output, expected = (model(**given, **asked) for model in (ours, theirs))
    assert type(output) is type(expected) and list(output) == list(expected)
    if hasattr(type(expected), "image_hidden_states"):
        torch.testing.assert_close(output.image_hidden_states, expected.image_hidden_states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", sorted(CAUSAL))
def test_what_stays_in_float32_is_transformers(family: str) -> None:
    """In a model of 16 bits: the names that loading keeps, and the parameters as they are made."""
    ours = getattr(importlib.import_module(f"easytorch.models.{family}"), CAUSAL[family])
    config, made = FAMILIES[family].config(), []
    for kind in (ours, getattr(transformers, CAUSAL[family])):
        with torch.device("meta"):
            made.append(kind._from_config(copy.deepcopy(config), dtype=torch.bfloat16))
    for kept in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        assert set(getattr(made[0], kept)) == set(getattr(made[1], kept)), kept
    given, expected = ({name: one.dtype for name, one in model.named_parameters()} for model in made)
    assert given == expected


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "mixtral", "qwen3_next", "gpt_oss", "granitemoe"])
def test_numbers_that_code_reads_from_the_modules(family: str) -> None:
    ours = getattr(importlib.import_module(f"easytorch.models.{family}"), CAUSAL[family])
    with torch.device("meta"):
        given, expected = (kind(FAMILIES[family].config()) for kind in (ours, getattr(transformers, CAUSAL[family])))
    for one, other in ((given, expected), (given.base_model, expected.base_model)):
        for name in ("vocab_size", "padding_idx", "num_experts", "num_experts_per_tok", "router_aux_loss_coef"):
            assert not hasattr(other, name) or getattr(one, name) == getattr(other, name), name


def test_routers_loaded_in_16_bits_choose_as_transformers_do(tmp_path: Any, make_pair: Any) -> None:
    """Kimi Linear, whose files hold its routers and time steps in float32."""
    if not transformers.KimiLinearPreTrainedModel._keep_in_fp32_modules_strict:
        pytest.skip("transformers 5.23 rounds the bias that balances experts, which ours keeps in float32 as 5.24 does")
    ours, theirs = make_pair("KimiLinearForCausalLM", FAMILIES["kimi_linear"].config())
    theirs.save_pretrained(tmp_path)
    loaded = [type(one).from_pretrained(tmp_path, dtype=torch.bfloat16).eval() for one in (ours, theirs)]
    given, expected = (one.state_dict() for one in loaded)
    assert given.keys() == expected.keys()
    for name, one in expected.items():
        assert given[name].dtype is one.dtype and torch.equal(given[name], one), name
    ids = torch.tensor([[5, 9, 33, 71, 8]])
    with torch.no_grad():
        given, expected = (one(ids, output_router_logits=True).router_logits for one in loaded)
    torch.testing.assert_close(given[0], expected[0], rtol=2e-2, atol=2e-2)
    loaded[0].save_pretrained(tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again", dtype="auto").state_dict()
    assert all(torch.equal(again[name], one) for name, one in loaded[1].state_dict().items())
