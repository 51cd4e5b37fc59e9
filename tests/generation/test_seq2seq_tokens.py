"""The decode loop of encoder-decoders against `generate` of transformers."""

from __future__ import annotations

import importlib

import pytest
import torch
import transformers

from easytorch.generation import generate_tokens
from tests.models.families import FAMILIES

HEADS = {
    "t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration", "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration", "whisper": "WhisperForConditionalGeneration",
}  # fmt: skip
CACHES = ["dynamic", "static"]
IDS = torch.randint(4, 90, (2, 9), generator=torch.Generator().manual_seed(3))


def made(family, stock=False, **changes):
    torch.manual_seed(0)
    module = transformers if stock else importlib.import_module(f"easytorch.models.{family}")
    model = getattr(module, HEADS[family])(FAMILIES[family].config(**changes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5 * torch.randn_like(weight))
    return model


def inputs(model, padded="right"):
    if model.config.model_type == "whisper":
        shape = (2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return torch.randn(shape, generator=torch.Generator().manual_seed(3)), None
    mask = torch.ones_like(IDS)
    mask[1, slice(6, None) if padded == "right" else slice(3)] = 0
    return IDS, mask


def tokens(model, *given, new=12, **settings):
    found = generate_tokens(model, *given, max_new_tokens=new, **{"eos_token_id": []} | settings)
    return torch.stack(list(found), dim=1)


def expected(model, source, mask, **settings):
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None} | settings
    return transformers.GenerationMixin.generate(model, source, **given)  # without Whisper's segments of 30 s


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("stock", [False, True], ids=["native", "transformers"])
@pytest.mark.parametrize("family", HEADS)
def test_greedy_equals_transformers(family, stock, cache):
    model = made(family, stock)
    begin = torch.full((2, 1), model.config.decoder_start_token_id)
    want = expected(model, *inputs(model), decoder_input_ids=begin)[:, 1:]
    assert len(want.unique()) > 2
    assert torch.equal(tokens(model, *inputs(model), cache=cache, decoder_input_ids=begin), want)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_padding_on_the_left_and_beginnings(family, cache):
    model = made(family)
    given = inputs(model, "left")
    assert torch.equal(tokens(model, *given, cache=cache), expected(model, *given)[:, 1:])
    start = model.config.decoder_start_token_id
    begin = torch.tensor([[start, 31, 7], [start, 8, 60]])
    want = expected(model, *given, decoder_input_ids=begin)[:, 3:]
    assert torch.equal(tokens(model, *given, cache=cache, decoder_input_ids=begin), want)
    model.generation_config.forced_bos_token_id = 17  # a language's, of mBART
    assert torch.equal(tokens(model, *given, cache=cache, new=11), expected(model, *given)[:, 2:])
    model.generation_config.forced_bos_token_id = None
    model.generation_config.decoder_start_token_id = [5, 9]
    want = expected(model, *given, decoder_input_ids=torch.tensor([[5], [9]]))[:, 1:]
    assert torch.equal(tokens(model, *given, cache=cache), want)


def test_fewer_layers_of_the_decoder_and_texts_as_long_as_the_positions():
    model = made("t5", num_decoder_layers=1)
    assert len(model.decoder.block) < len(model.encoder.block)
    assert torch.equal(tokens(model, *inputs(model), cache="static"), expected(model, *inputs(model))[:, 1:])
    bart = made("bart", max_position_embeddings=20)
    ids = torch.randint(4, 90, (1, 18), generator=torch.Generator().manual_seed(4))
    want = expected(bart, ids, torch.ones_like(ids))[:, 1:]
    assert torch.equal(tokens(bart, ids, cache="static"), want)


SIZES = {"vocab_size": 97, "d_model": 32, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
for half in ("encoder", "decoder"):
    SIZES |= {f"{half}_layers": 2, f"{half}_attention_heads": 4, f"{half}_ffn_dim": 48}
MOONSHINE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "decoder_start_token_id": 1}
for half in ("encoder", "decoder"):
    MOONSHINE |= {f"{half}_num_hidden_layers": 2, f"{half}_num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "config", "caches"),
    [
        ("Moonshine", MOONSHINE, CACHES),  # the decoder reads the mask that its encoder gives
        ("NllbMoe", SIZES | {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2}, CACHES[:1]),
        (
            "FSMT",
            SIZES | {"src_vocab_size": 97, "tgt_vocab_size": 97, "langs": ["a", "b"], "forced_eos_token_id": None},
            CACHES[:1],
        ),
    ],
    ids=["moonshine", "nllb_moe", "fsmt"],
)
def test_what_else_an_encoder_gives_and_halves_without_configs(kind, config, caches):
    torch.manual_seed(0)
    settings = {name: value for name, value in config.items() if kind != "FSMT" or name != "vocab_size"}
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**settings))
    with torch.no_grad():
        for weight in model.eval().parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    source, mask = inputs(model)
    if kind == "Moonshine":
        source, mask = torch.randn(2, 4000), torch.ones(2, 4000, dtype=torch.int64)
        mask[1, 2500:] = 0
    want = expected(model, source, mask)[:, 1:]
    for cache in caches:
        assert torch.equal(tokens(model, source, mask, cache=cache), want)


def test_samples_and_ends_are_those_of_a_growing_cache():
    model = made("bart")
    settings = {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 4}
    found = [tokens(model, *inputs(model), cache=cache, **settings) for cache in CACHES]
    assert torch.equal(*found) and len(found[0].unique()) > 5
    end = int(found[0][0, 3])
    ended = [tokens(model, *inputs(model), cache=cache, eos_token_id=end, **settings) for cache in CACHES]
    assert torch.equal(*ended) and (ended[0][0, 4:] == model.generation_config.pad_token_id).all()


def test_the_encoder_runs_once():
    model, calls = made("t5"), []
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    tokens(model, *inputs(model), cache="static")
    assert calls == [1]


def test_refusals():
    model = made("t5")
    for given, settings, match in [
        ((IDS.float(),), {}, "input_ids must be integers"),
        ((IDS, torch.ones(2, 4)), {}, "attention_mask"),
        ((IDS, torch.zeros_like(IDS)), {}, "without any token"),
        ((IDS * 0 + 97,), {}, "token 97 is outside the 97 of T5ForConditionalGeneration"),
        ((IDS * 0 - 1,), {}, "token -1 is outside the 97"),
        ((IDS,), {"decoder_input_ids": torch.tensor([[1, -100], [1, 2]])}, "token -100 is outside"),
        ((IDS,), {"decoder_input_ids": torch.tensor([[1, 97], [1, 2]])}, "token 97 is outside"),
        ((IDS,), {"decoder_input_ids": torch.tensor([[1]])}, "decoder_input_ids have 1 rows, the encoder 2"),
        ((IDS,), {"decoder_input_ids": torch.tensor([1, 2])}, "decoder_input_ids must be integers"),
        ((IDS,), {"cache": "paged"}, "'dynamic' or 'static'"),
    ]:
        with pytest.raises(ValueError, match=match):
            generate_tokens(model, *given, **settings)
    model.generation_config.decoder_start_token_id = [1, 2, 3]
    with pytest.raises(ValueError, match="has 3 tokens for 2 rows"):
        generate_tokens(model, IDS)
    model.generation_config.decoder_start_token_id = model.generation_config.bos_token_id = None
    with pytest.raises(ValueError, match="has no decoder_start_token_id; set it, or give decoder_input_ids"):
        generate_tokens(model, IDS)
    with pytest.raises(ValueError, match="the encoder's input must not be empty"):
        generate_tokens(made("whisper"), torch.zeros(0, 2, 3))
    type(model)._can_compile_fullgraph = False
    try:
        with pytest.raises(ValueError, match="cannot use a static cache: transformers says"):
            generate_tokens(model, IDS, cache="static", decoder_input_ids=IDS)
    finally:
        del type(model)._can_compile_fullgraph


def test_padding_of_a_decoder_may_be_below_zero() -> None:
    """As of labels, -100: it is replaced before the model reads it."""
    torch.manual_seed(0)
    model = importlib.import_module("easytorch.models.llama").LlamaForCausalLM(FAMILIES["llama"].config()).eval()
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    found = tokens(model, IDS.masked_fill(mask == 0, -100), mask)
    assert torch.equal(found, tokens(model, IDS, mask))
    with pytest.raises(ValueError, match="token -100 is outside"):
        generate_tokens(model, IDS.masked_fill(mask == 0, -100))
