"""What losses and caches refuse, by message."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import LlamaConfig

import easytorch
from easytorch import protocol
from easytorch.cache import RaggedPagesCache
from easytorch.cache_names import CACHE, cache_keyword
from easytorch.protocol import LossConfig, MaskInfo, compute_loss
from easytorch.protocol.attention_inputs import check_cache
from easytorch.protocol.loss_terms import answers
from tests.protocol.shared_models import IDS, ONE, SIZES, shared


def loss(name: str, **batch):
    return lambda: compute_loss(shared(name), **batch)


def with_loss(name: str, settings: dict, **batch):
    return lambda: compute_loss(shared(name), loss_config=LossConfig(**settings), **batch)


PAIRS = {
    "input_ids": IDS,
    "start_positions": ONE,
    "end_positions": ONE,
}
SEGMENTS = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
PIXELS = {"pixel_values": torch.zeros(2, 3, 8, 8)}
REFUSED_LOSSES = {
    "settings of a type": (with_loss("t5", {}, input_ids=IDS), ValueError, "T5ForConditionalGeneration needs labels"),
    "tokens of an image": (lambda: compute_loss(shared("vit"), IDS), TypeError, "takes no input_ids; .* pixel_values="),
    "too many words": (
        lambda: compute_loss(shared("llama"), IDS, IDS, None, None, None, None, None, None),
        TypeError,
        "too many positional",
    ),
    "no answers": (loss("answers", input_ids=IDS), ValueError, "needs start_positions and end_positions"),
    "half an answer": (loss("answers", input_ids=IDS, start_positions=ONE), ValueError, "needs start_positions"),
    "answers of a shape": (
        loss("answers", **PAIRS | {"end_positions": ONE[:1]}),
        ValueError,
        r"positions must be \(2,\)",
    ),
    "answers of floats": (
        loss("answers", **PAIRS | {"end_positions": ONE / 2}),
        ValueError,
        r"integers, got .*float32",
    ),
    "answers' shift": (loss("answers", **PAIRS, loss_kwargs={"shift_labels": IDS}), ValueError, "shift_labels are for"),
    "answers' settings": (
        with_loss("answers", {"class_weights": [1.0]}, **PAIRS),
        ValueError,
        "takes no class_weights",
    ),
    "no classes": (loss("classes", input_ids=IDS), ValueError, "needs labels"),
    "classes of a number": (
        loss("classes", input_ids=IDS, labels=ONE[:1]),
        ValueError,
        "labels must be 2 class indices",
    ),
    "classes named": (
        with_loss("classes", {"problem_type": "single_label_classification"}, input_ids=IDS, labels=ONE / 2),
        ValueError,
        "labels must be 2 class indices, got .*float32",
    ),
    "number of classes": (
        with_loss("vit", {"num_labels": 4}, **PIXELS, labels=torch.zeros(2, 3)),
        ValueError,
        "num_labels=4, and .* has 3",
    ),
    "number of tokens' classes": (
        with_loss("llama", {"num_labels": 96}, input_ids=IDS),
        ValueError,
        "num_labels=96.*97",
    ),
    "weights of classes": (
        with_loss("vit", {"class_weights": [1.0, 2.0]}, **PIXELS, labels=torch.zeros(2, 3)),
        ValueError,
        "class_weights has 2 numbers for 3 labels",
    ),
    "regression's weights": (
        with_loss(
            "vit", {"problem_type": "regression", "class_weights": [1.0] * 3}, **PIXELS, labels=torch.zeros(2, 3)
        ),
        ValueError,
        "regression takes no class_weights",
    ),
    "labels of floats": (loss("llama", input_ids=IDS, labels=IDS / 2), ValueError, "token or class indices"),
    "labels of no dimension": (
        loss("llama", input_ids=IDS, loss_kwargs={"shift_labels": torch.tensor(3)}),
        ValueError,
        "token or class indices",
    ),
    "no tokens": (loss("llama", inputs_embeds=torch.zeros(1, 2, 32)), ValueError, "LlamaForCausalLM needs labels"),
    "segments of nothing": (
        lambda: compute_loss(shared("llama"), segment_ids=SEGMENTS, labels=IDS),
        ValueError,
        "give input_ids or inputs_embeds",
    ),
    "segments of floats": (loss("llama", input_ids=IDS, segment_ids=SEGMENTS / 2), ValueError, "must be integers"),
    "segments beside a mask of scores": (
        loss("llama", input_ids=IDS, segment_ids=SEGMENTS, attention_mask=torch.ones(2, 1, 4, 4)),
        ValueError,
        r"may be \(B, T\) alone",
    ),
    "segments beside positions": (
        loss("llama", input_ids=IDS, segment_ids=SEGMENTS, position_ids=IDS),
        ValueError,
        "take the place of position_ids",
    ),
    "segments twice": (
        loss("llama", input_ids=IDS, segment_ids=SEGMENTS, mask_info=MaskInfo.from_segments(SEGMENTS)),
        ValueError,
        "segment_ids is given twice",
    ),
    "a mask twice": (
        loss("llama", input_ids=IDS, attention_mask=IDS, mask_info=MaskInfo(attention_mask=IDS)),
        ValueError,
        "attention_mask is given twice",
    ),
    "labels without a head": (
        lambda: compute_loss(shared("mixtral").model, input_ids=IDS, labels=IDS),
        ValueError,
        "has no head: no loss of labels",
    ),
    "experts' settings": (
        lambda: compute_loss(shared("mixtral").model, input_ids=IDS, loss_config=LossConfig(z_loss=1.0)),
        ValueError,
        "a base model with experts takes no z_loss",
    ),
    "experts one a token": (
        with_loss("mixtral", {"reduction": "none", "router_aux_loss_coef": 0.1}, input_ids=IDS),
        ValueError,
        'reduction="none" asks for one a token',
    ),
    "two divisors": (
        lambda: LossConfig(reduction="mean", loss_normalizing_factor=3.0),
        ValueError,
        "reduction and loss_normalizing_factor",
    ),
    "a sum divided": (
        lambda: LossConfig(loss_normalizing_factor=3.0, num_items_in_batch=2),
        ValueError,
        "give no other factor",
    ),
    "a divisor that is none": (lambda: LossConfig(num_items_in_batch=True), TypeError, "num_items_in_batch=True"),
    "an unlimited number": (lambda: LossConfig(z_loss=float("inf")), ValueError, "z_loss=inf must be at least 0"),
    "smoothing above 1": (
        lambda: LossConfig(label_smoothing=1.01),
        ValueError,
        "label_smoothing=1.01 must be from 0 to 1",
    ),
    "chunks of True": (lambda: LossConfig(chunk_token_size=True), ValueError, "chunk_token_size=True"),
    "weights of two dimensions": (
        lambda: LossConfig(class_weights=[[1.0]]),
        ValueError,
        "class_weights must be one finite",
    ),
    "answers without logits": (
        lambda: answers(
            SimpleNamespace(start_logits=torch.zeros(2, 4), end_logits=torch.zeros(2, 4)),
            ONE,
            ONE[:, None, None],
            LossConfig(),
        ),
        ValueError,
        "positions must be",
    ),
}


def prompt(**more):
    return lambda: protocol.prepare_inputs_for_generation(
        shared("llama"), **{"input_ids": IDS, "max_length": 8, **more}
    )


def metadata():
    return protocol.create_cache_metadata(shared("llama"), 2, 8)


def cache_of(name: str):
    return protocol.init_cache(shared(name), 2, 8)


def filled(kind: str):
    cache = protocol.init_cache(shared("llama"), 2, 8, kind=kind)
    shared("llama")(IDS, past_key_values=cache)
    return cache


REFUSED_CACHES = {
    "no rank": (prompt(input_ids=IDS[0]), ValueError, r"input_ids \(4,\) must be \(batch, length\)"),
    "empty": (prompt(input_ids=IDS[:, :0]), ValueError, r"input_ids \(2, 0\)"),
    "no batch": (prompt(input_ids=IDS[:0]), ValueError, r"input_ids \(0, 4\)"),
    "one too long": (prompt(max_length=3), ValueError, "max_length=3 is below the 4 tokens"),
    "mask of a shape": (prompt(attention_mask=IDS[:, :3]), ValueError, r"attention_mask \(2, 3\) must have the shape"),
    "two masks": (prompt(attention_mask=IDS, mask_info=MaskInfo(attention_mask=IDS)), ValueError, "one mask"),
    "segments": (prompt(mask_info=MaskInfo.from_segments(SEGMENTS)), ValueError, "no segments"),
    "no cache": (lambda: check_cache(metadata(), None), ValueError, "and none is given"),
    "a cache of tuples": (lambda: check_cache(metadata(), ((IDS,),)), ValueError, "not tuple"),
    "other layers": (
        lambda: check_cache(metadata(), transformers.DynamicCache(config=LlamaConfig(num_hidden_layers=3))),
        ValueError,
        "has 3 layers, and cache_metadata 2",
    ),
    "other rows": (
        lambda: check_cache(metadata(), protocol.init_cache(shared("llama"), 3, 8)),
        ValueError,
        "batch_size=3",
    ),
    "a static cache's rows": (
        lambda: cache_of("llama").batch_select_indices(ONE),
        ValueError,
        "batch_select_indices: a static cache has 2 rows from the start",
    ),
    "a static cache's beams": (
        lambda: cache_of("llama").batch_repeat_interleave(2),
        ValueError,
        "batch_repeat_interleave: a static cache",
    ),
    "rows that are not there": (lambda: filled("int8").reorder_cache(ONE), ValueError, r"rows \[1, 2\] .* holds 2"),
    "rows that are not there, of a growing one": (
        lambda: filled("dynamic").batch_select_indices(ONE),
        ValueError,
        r"rows \[1, 2\] .* holds 2",
    ),
    "more rows": (
        lambda: shared("llama")(IDS.repeat(2, 1)[:3], past_key_values=filled("int8")),
        ValueError,
        "the cache holds 2 rows, and 3 are given",
    ),
    "pages of a cache": (
        lambda: check_cache(protocol.create_paged_metadata(shared("llama"), 1.0, 4, 8), cache_of("llama")),
        ValueError,
        "no RaggedPagesCache of this metadata, but TransformerCache",
    ),
    "a share of text": (
        lambda: protocol.create_paged_metadata(shared("llama"), "0.5", 4, 8),
        TypeError,
        "must be a number",
    ),
    "a share of True": (
        lambda: protocol.create_paged_metadata(shared("llama"), True, 4, 8),
        TypeError,
        "must be a number",
    ),
    "a share of nothing": (
        lambda: protocol.create_paged_metadata(shared("llama"), 0, 4, 8),
        ValueError,
        "must be above 0",
    ),
}


@pytest.mark.parametrize("case", [*REFUSED_LOSSES, *REFUSED_CACHES])
def test_a_loss_or_cache_that_does_not_fit_is_named(case):
    call, error, match = (REFUSED_LOSSES | REFUSED_CACHES)[case]
    with pytest.raises(error, match=match):
        call()


def test_the_ends_of_a_cache_and_of_settings_are_taken():
    """One less or more is refused above."""
    kwargs = protocol.prepare_inputs_for_generation(shared("llama"), IDS, 4)
    assert kwargs[CACHE].longest == 4
    check_cache(metadata(), cache_of("llama"))
    metadata().check(transformers.DynamicCache())
    LossConfig(label_smoothing=1.0, z_loss=0.0, router_aux_loss_coef=0.0, chunk_token_size=1, num_labels=1)
    LossConfig(loss_normalizing_factor=1e-9)
    assert protocol.create_paged_metadata(shared("llama"), 1, 4, 8).hbm_utilization == 1


OTHERS = {
    "layers": (LlamaConfig(**SIZES | {"num_hidden_layers": 3}, num_key_value_heads=2), "has 3 layers, and .* has 2"),
    "a layer": (LlamaConfig(**SIZES | {"num_hidden_layers": 1}, num_key_value_heads=2), "1 layers, and .* has 2"),
    "heads": (LlamaConfig(**SIZES), r"\(4, 8, 8\), and .* has \(2, 8, 8\)"),
    "head_dim": (LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=16), r"\(2, 16, 16\), and .* has \(2, 8, 8\)"),
    "kinds": (
        transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4),
        "layers of linear_attention, and LlamaForCausalLM of full_attention",
    ),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [*((kind, case) for kind in ("static", "dynamic") for case in OTHERS), ("pages", "layers"), ("pages", "a layer")],
)
def test_a_cache_of_another_model_is_refused(case, kind):
    """By every way that a cache comes in; both numbers are named, and nothing is written to it."""
    config, match = OTHERS[case]
    if kind == "pages":
        pages = protocol.create_paged_metadata(easytorch.AutoModelForCausalLM.from_config(config), 1.0, 4, 8)
        cache = RaggedPagesCache(dataclasses.replace(pages, num_pages=4))
        match = match.replace("has", "(has|are for)", 1)
    else:
        cache = protocol.init_cache(easytorch.AutoModelForCausalLM.from_config(config), 2, 8, kind=kind)
    model = shared("llama")
    output = SimpleNamespace(**cache_keyword(cache))
    calls = [
        lambda: model(IDS, past_key_values=cache),
        lambda: compute_loss(model, input_ids=IDS, past_key_values=cache),
        lambda: protocol.prepare_inputs_for_call(model, input_ids=IDS, past_key_values=cache),
        lambda: protocol.update_inputs_for_generation(model, output, {}),
    ]
    if case != "kinds":  # there transformers asks the cache for its length first, and refuses it
        calls.append(lambda: model.generate(IDS, past_key_values=cache, max_new_tokens=1, do_sample=False))
    for call in calls:
        with pytest.raises(ValueError, match=match):
            call()
    assert not any(getattr(layer, "is_initialized", False) for layer in getattr(cache, "layers", ()) if kind != "pages")


WINDOW = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=3)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_class_of_transformers_takes_no_cache_of_another_model(kind):
    """Not even of the same sizes: a window would forget tokens that the model attends to."""
    cache = protocol.init_cache(easytorch.AutoModelForCausalLM.from_config(WINDOW), 2, 12, kind=kind)
    stock = transformers.LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).eval()
    mpt = easytorch.AutoModelForCausalLM.from_config(
        transformers.MptConfig(vocab_size=97, d_model=32, n_layers=2, n_heads=4)
    )
    settings = {"past_key_values": cache, "max_new_tokens": 2, "do_sample": False}
    for call in (
        lambda: protocol.generate(stock, IDS, **settings),
        lambda: protocol.generate(mpt, IDS, **settings),
        lambda: mpt.generate(IDS, **settings),
        lambda: mpt(IDS, past_key_values=cache),
    ):
        with pytest.raises(ValueError, match=r"layers of sliding_attention, and .* of full_attention"):
            call()
    own = protocol.init_cache(stock, 2, 12, kind=kind)
    given = {**settings, "past_key_values": own, "pad_token_id": 0, "eos_token_id": None}
    expected = stock.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(protocol.generate(stock, IDS, **given), expected)


def test_a_cache_of_an_encoder_decoder_is_refused_by_a_decoder():
    with pytest.raises(ValueError, match="the cache is of a model with an encoder, and LlamaForCausalLM has none"):
        shared("llama")(IDS, past_key_values=cache_of("t5"))


def test_arguments_in_the_documented_order():
    mask = torch.ones_like(IDS)
    named = compute_loss(shared("llama"), input_ids=IDS, labels=IDS, attention_mask=mask, segment_ids=SEGMENTS)
    for placed in (
        compute_loss(shared("llama"), IDS, IDS, None, mask, None, None, SEGMENTS),
        shared("llama").compute_loss(IDS, IDS, None, mask, None, None, SEGMENTS),
    ):
        assert torch.equal(placed[1].loss, named[1].loss)


def test_arguments_that_only_a_later_call_would_refuse():
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    metadata = dataclasses.replace(protocol.create_paged_metadata(model, 1.0, 4, 16), num_pages=8)
    for call, words in (
        (
            lambda: protocol.init_ragged_pages(model, dataclasses.replace(metadata, dtype=torch.int8)),
            "dtype is torch.int8",
        ),
        (lambda: protocol.init_ragged_pages(model, metadata).batch_repeat_interleave(0), "repeats=0 must be an int"),
        (lambda: protocol.push_to_hub(model, ""), "Repo id must use"),
        (lambda: protocol.apply_lora_to_layers(model, 2, "q_proj", init="loftq"), "needs settings of PEFT's own"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert not hasattr(model, "peft_config")
