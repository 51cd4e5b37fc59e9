"""Architectures without a native class: transformers' own with our attention, and a report of what was replaced."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import transformers as t

import easytorch
from easytorch.auto.report import attention_layers
from easytorch.layers.attention import OBSERVERS

pytestmark = pytest.mark.usefixtures("without_native_families")

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
IDS = torch.tensor([[5, 9, 33, 71, 8, 20, 21], [4, 4, 90, 12, 60, 3, 3]])
MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])

DECODERS = {
    "gpt2": t.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
    "mistral": t.MistralConfig(**GQA, sliding_window=3),
    "vaultgemma": t.VaultGemmaConfig(**GQA, sliding_window=3, attn_logit_softcapping=2.0, query_pre_attn_scalar=8),
    "gpt_oss": t.GptOssConfig(**GQA, sliding_window=3, num_local_experts=2, num_experts_per_tok=1, eos_token_id=2),
    "smollm3": t.SmolLM3Config(**GQA),
    "opt": t.OPTConfig(
        vocab_size=97, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip
ENCODERS = {
    "roberta": t.RobertaConfig(**SIZES, max_position_embeddings=40, pad_token_id=1, bos_token_id=0, eos_token_id=2),
    "modernbert": t.ModernBertConfig(**SIZES, local_attention=4, pad_token_id=0, cls_token_id=1, sep_token_id=2,
                                     bos_token_id=1, eos_token_id=2),
}  # fmt: skip
# No attention layer of these calls transformers' AttentionInterface.
BY_THEMSELVES = {
    "mpt": t.MptConfig(vocab_size=97, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    "deberta": t.DebertaConfig(**SIZES, relative_attention=True, max_position_embeddings=40, type_vocab_size=0),
    "falcon": t.FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1, eos_token_id=2
    ),
}  # fmt: skip


def ours_and_theirs(config, tmp_path, auto: str, **kwargs):
    """The same random weights, loaded by our auto class, and by transformers' with eager attention."""
    torch.manual_seed(0)
    model = getattr(t, auto).from_config(copy.deepcopy(config))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    model.save_pretrained(tmp_path)
    theirs = getattr(t, auto).from_pretrained(tmp_path, attn_implementation="eager")
    return getattr(easytorch, auto).from_pretrained(tmp_path, **kwargs), theirs


def assert_plugged(model, layers: int) -> None:
    report = model.easytorch_report
    assert not report.native and report.reason is None and report.not_replaced == ()
    assert report.called == report.layers and len(report.layers) == layers
    assert f"{layers} of {layers} attention layers call the EasyTorch attention" in str(report)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("attention", [None, "vanilla", "flash"])
def test_decoders_equal_eager(name, attention, tmp_path) -> None:
    kwargs = {} if attention is None else {"attn_implementation": attention}
    ours, theirs = ours_and_theirs(DECODERS[name], tmp_path, "AutoModelForCausalLM", **kwargs)
    assert type(ours) is type(theirs)
    with torch.no_grad():
        given, expected = (model(IDS, attention_mask=MASK).logits for model in (ours, theirs))
        torch.testing.assert_close(given[MASK.bool()], expected[MASK.bool()], rtol=1e-5, atol=1e-5)
        # one row without padding: no mask is built, causality and window are told by name
        given, expected = (model(IDS[:1]).logits for model in (ours, theirs))
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    assert_plugged(ours, 2)


@pytest.mark.parametrize("name", ["mistral", "vaultgemma", "gpt_oss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decoders_generate_what_eager_does(name, cache, tmp_path) -> None:
    ours, theirs = ours_and_theirs(DECODERS[name], tmp_path, "AutoModelForCausalLM")
    inputs = {
        "input_ids": IDS,
        "attention_mask": MASK.flip(1),
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
    }
    inputs |= {"cache_implementation": cache, "disable_compile": True}
    assert torch.equal(ours.generate(**inputs), theirs.generate(**inputs))


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_equal_eager(name, tmp_path) -> None:
    ours, theirs = ours_and_theirs(ENCODERS[name], tmp_path, "AutoModel")
    with torch.no_grad():
        for inputs in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": MASK}):
            given, expected = (model(**inputs).last_hidden_state for model in (ours, theirs))
            torch.testing.assert_close(given[MASK.bool()], expected[MASK.bool()], rtol=1e-5, atol=1e-5)
    assert_plugged(ours, 2)


def test_the_position_bias_of_umt5_and_whisper(tmp_path) -> None:
    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = t.UMT5Config(**sizes, decoder_start_token_id=0)
    ours, theirs = ours_and_theirs(config, tmp_path / "umt5", "AutoModel")
    inputs = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS.flip(1)}
    with torch.no_grad():
        given, expected = (model(**inputs).last_hidden_state for model in (ours, theirs))
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    assert_plugged(ours, 6)

    config = t.WhisperConfig(
        vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=8, max_target_positions=16, num_mel_bins=6,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
    )  # fmt: skip
    ours, theirs = ours_and_theirs(config, tmp_path / "whisper", "AutoModel")
    inputs = {"input_features": torch.randn(2, 6, 16), "decoder_input_ids": IDS}
    with torch.no_grad():
        given, expected = (model(**inputs).last_hidden_state for model in (ours, theirs))
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    assert_plugged(ours, 3)


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_what_was_not_replaced_is_reported(name, tmp_path, caplog) -> None:
    auto = "AutoModel" if name == "deberta" else "AutoModelForCausalLM"
    with caplog.at_level(logging.INFO, logger="easytorch"):
        ours, theirs = ours_and_theirs(BY_THEMSELVES[name], tmp_path, auto)
        with torch.no_grad():
            for inputs in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": MASK}):
                torch.testing.assert_close(ours(**inputs)[0], theirs(**inputs)[0], rtol=1e-5, atol=1e-5)
    report = ours.easytorch_report
    assert report.called == () and len(report.not_replaced) == 2 and "never calls" in report.reason
    counted = [record for record in caplog.records if "0 of 2 attention layers" in record.message]
    assert len(counted) == 1 and counted[0].levelno == logging.WARNING and counted[0].message.startswith(f"{name}: ")


def test_an_attention_that_cannot_be_obeyed_is_refused() -> None:
    with pytest.raises(ValueError, match="MptForCausalLM computes attention by itself"):
        easytorch.AutoModelForCausalLM.from_config(copy.deepcopy(BY_THEMSELVES["mpt"]), attn_implementation="flash")


def test_a_model_without_attention_says_so() -> None:
    model = easytorch.AutoModel.from_config(t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]))
    assert model.easytorch_report.layers == () and "has no attention" in str(model.easytorch_report)


def test_transformers_own_attention_on_request() -> None:
    model = easytorch.AutoModelForCausalLM.from_config(copy.deepcopy(DECODERS["mistral"]), attn_implementation="sdpa")
    model(IDS)
    assert model.config._attn_implementation == "sdpa" and model.easytorch_report.called == ()
    assert "was asked for" in model.easytorch_report.reason


def test_models_inside_a_model_are_asked_one_by_one() -> None:
    text, vision = t.LlamaConfig(**GQA), t.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
    )  # fmt: skip
    config = t.LlavaConfig(text_config=text, vision_config=vision, image_token_index=96, vision_feature_layer=-1)
    model = easytorch.AutoModel.from_config(config)
    assert (
        model.config.text_config._attn_implementation == model.config.vision_config._attn_implementation == "easytorch"
    )
    with torch.no_grad():
        model(input_ids=IDS)
    assert all(name.startswith("language_model") for name in model.easytorch_report.called)


def test_the_count_survives_copies_failures_and_compilation() -> None:
    make, others = easytorch.AutoModelForCausalLM.from_config, list(OBSERVERS)
    model = make(copy.deepcopy(DECODERS["gpt2"])).eval()
    model.transformer.h[1].mlp.act, act = None, model.transformer.h[1].mlp.act
    with pytest.raises(TypeError):
        model(IDS)
    assert model.easytorch_report.called is None and others == OBSERVERS
    model.transformer.h[1].mlp.act = act
    twin = copy.deepcopy(model)
    for one in (twin, model):
        one(IDS)
        assert len(one.easytorch_report.called) == 2
    assert twin.easytorch_report is not model.easytorch_report
    compiled = torch.compile(make(copy.deepcopy(DECODERS["gpt2"])).eval(), backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(IDS, use_cache=False)


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_a_layer_called_by_itself_leaves_nothing_behind(kind: str) -> None:
    model, before = easytorch.AutoModelForCausalLM.from_config(copy.deepcopy(DECODERS[kind])).eval(), list(OBSERVERS)
    layer = model.get_submodule(next(iter(attention_layers(model))))
    with pytest.raises(TypeError):
        layer()
    assert before == OBSERVERS and model.easytorch_report.called is None
    model(IDS)
    assert before == OBSERVERS and len(model.easytorch_report.called) == 2


def test_lora_on_a_plugged_model(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    model = easytorch.AutoModelForCausalLM.from_config(copy.deepcopy(DECODERS["mistral"]))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    expected = adapted.eval()(IDS).logits
    assert len(model.easytorch_report.called) == 2
    adapted.save_pretrained(tmp_path / "adapter")
    base = adapted.unload()
    base.save_pretrained(tmp_path / "base")
    loaded = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded.load_adapter(str(tmp_path / "adapter"))
    torch.testing.assert_close(loaded(IDS).logits, expected)
