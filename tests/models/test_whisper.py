"""What Whisper has beside the towers: caches, `generate` of its own, a decoder alone, SpecAugment, what is refused."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import easytorch
from easytorch.bridge.errors import CheckpointError
from tests.models.families import FAMILIES
from tests.models.test_parity import assert_same
from tests.models.tower_families import SAID, sound, tensors

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
SAID_MASK = torch.tensor([[0] * 2 + [1] * 5, [1] * 7])
SPOKEN = "WhisperForConditionalGeneration"


def models(make_pair, head=SPOKEN, **changes):
    return make_pair(head, FAMILIES["whisper"].config(**changes))


@pytest.mark.parametrize("kind", ["dynamic", "static", "own"])
def test_steps_through_a_cache_equal_one_pass(kind, make_pair) -> None:
    """own: the cache that a first call makes, here of a decoder that has more layers than the encoder."""
    ours, theirs = models(make_pair, decoder_layers=3)
    decoder = ours.config.get_text_config(decoder=True)
    cache = None
    if kind == "dynamic":
        cache = EncoderDecoderCache(*(DynamicCache(config=decoder) for _ in range(2)))
    if kind == "static":
        cache = EncoderDecoderCache(*(StaticCache(config=decoder, max_cache_len=length) for length in (12, 9)))
    with torch.no_grad():
        expected = theirs(sound(), decoder_input_ids=SAID).logits
        given = {"encoder_outputs": ours.get_encoder()(sound()), "use_cache": True}
        steps = []
        for part in (SAID[:, :3], SAID[:, 3:5], *SAID[:, 5:].split(1, 1)):
            output = ours(decoder_input_ids=part, past_key_values=cache, **given)
            cache = output.past_key_values
            steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, 1), expected, **TOLERANCE)


SETTINGS = [
    {"do_sample": False},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": True, "top_k": 20},
    {"do_sample": False, "cache_implementation": "static"},
    {"do_sample": False, "use_cache": False},
    {"decoder_input_ids": SAID[:, :3]},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_generate_gives_transformers_tokens(settings, make_pair) -> None:
    ours, theirs = models(make_pair)
    tokens = []
    for model in (ours, theirs):
        torch.manual_seed(7)
        tokens.append(model.generate(sound(), max_new_tokens=12, min_new_tokens=12, **settings))
    assert torch.equal(*tokens) and tokens[0].shape[1] > 11


def timed(make_pair, **changes):
    """Models whose last tokens are timestamps, as generate needs them for segments and for times of tokens."""
    pair = models(make_pair, vocab_size=97 + 20, max_target_positions=60, **changes)
    for model in pair:
        given = model.generation_config
        given.no_timestamps_token_id, given.max_initial_timestamp_index = 96, 5
        given.is_multilingual, given.alignment_heads = False, [[0, 1], [1, 0]]
    return pair


def test_long_recordings_and_timestamps(make_pair) -> None:
    """Recordings of several windows, each read from where the text of the one before it ends."""
    results = []
    for model in timed(make_pair):
        torch.manual_seed(7)
        features, frames = sound(frames=50), torch.ones(2, 50, dtype=torch.long)
        frames[1, 40:] = 0
        settings = {"return_timestamps": True, "return_segments": True, "condition_on_prev_tokens": True}
        results.append(model.generate(features, attention_mask=frames, max_new_tokens=8, **settings))
    assert torch.equal(*(one["sequences"] for one in results))
    for given, expected in zip(*(one["segments"] for one in results), strict=True):
        assert [float(part["start"]) for part in given] == [float(part["start"]) for part in expected]
        assert len(given) > 1


def test_times_of_tokens_come_from_the_cross_attentions(make_pair) -> None:
    results = []
    for model in timed(make_pair, median_filter_width=3):
        settings = {"return_token_timestamps": True, "return_timestamps": True, "max_new_tokens": 8}
        results.append(model.generate(sound(), **settings, return_dict_in_generate=True))
    assert torch.equal(*(one["sequences"] for one in results))
    assert torch.equal(*(one["token_timestamps"] for one in results))


def test_a_smaller_decoder_drafts(make_pair) -> None:
    """The same tokens with an assistant that has the encoder's output and a decoder of its own."""
    results = []
    drafters = models(make_pair, "WhisperForCausalLM", decoder_layers=1)
    for model, drafter in zip(models(make_pair), drafters, strict=True):
        alone = model.generate(sound()[:1], max_new_tokens=12, min_new_tokens=12, do_sample=False)
        settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "assistant_model": drafter}
        results += [alone, model.generate(sound()[:1], **settings)]
    assert all(torch.equal(one, results[0]) for one in results[1:])


def test_the_decoder_alone(make_pair) -> None:
    ours, theirs = models(make_pair, "WhisperForCausalLM")
    states = sound(32, 9)
    for encoded in (None, states, (states,), transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states)):
        given = {"encoder_outputs": encoded}
        with torch.no_grad():
            expected = theirs(SAID, attention_mask=SAID_MASK, **given)
            assert_same(ours(SAID, attention_mask=SAID_MASK, **given), expected)
            whole = ours(SAID, **given).logits
            for cache in (None, DynamicCache()):
                first = ours(SAID[:, :4], **given, past_key_values=cache, use_cache=True)
                assert isinstance(first.past_key_values, EncoderDecoderCache) == (encoded is not None)
                rest = ours(SAID[:, 4:], **given, past_key_values=first.past_key_values, use_cache=True)
                torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, **TOLERANCE)
    assert torch.equal(*(one.generate(SAID, max_new_tokens=8, min_new_tokens=8) for one in (ours, theirs)))


def test_masks_positions_and_embeddings_of_the_decoder(make_pair) -> None:
    ours, theirs = models(make_pair)
    embedded = theirs.get_input_embeddings()(SAID).detach()
    positions = (SAID_MASK.cumsum(-1) - 1).clamp(min=0)
    for given in (
        {"decoder_input_ids": SAID, "decoder_attention_mask": SAID_MASK, "decoder_position_ids": positions},
        {"decoder_inputs_embeds": embedded, "decoder_attention_mask": SAID_MASK.bool()},
        {"decoder_input_ids": SAID, "attention_mask": torch.tensor([[1] * 18, [1] * 4 + [0] * 14])},
        {"labels": SAID.masked_fill(SAID == 77, -100)},
    ):
        with torch.no_grad():
            assert_same(ours(sound(), **given), theirs(sound(), **given))
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        ours(sound(), decoder_input_ids=SAID, decoder_inputs_embeds=embedded)


def test_the_loss_without_logits(make_pair, monkeypatch) -> None:
    monkeypatch.setattr("easytorch.layers.deferred_logits.SMALLEST", 0)
    ours, theirs = models(make_pair)
    labels = SAID.masked_fill(SAID_MASK == 0, -100)
    outputs = [model.train()(sound(), labels=labels) for model in (ours, theirs)]
    assert isinstance(outputs[0].__dict__["logits"], easytorch.layers.deferred_logits.DeferredLogits)
    for name in ("loss", "logits"):
        torch.testing.assert_close(outputs[0][name], outputs[1][name], **TOLERANCE)
    for output in outputs:
        output.loss.backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad == ("encoder.embed_positions" not in name)
        if one.requires_grad:
            torch.testing.assert_close(one.grad, other.grad, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def test_spec_augment_masks_what_transformers_masks(make_pair) -> None:
    """And leaves the caller's spectrogram as it was."""
    spans = {"mask_time_prob": 0.3, "mask_time_length": 3, "mask_feature_prob": 0.4, "mask_feature_length": 2}
    outputs = []
    frames = torch.tensor([[1] * 18, [1] * 11 + [0] * 7])
    for apply in (True, False):
        for model in models(make_pair, apply_spec_augment=apply, **spans):
            features = sound()
            np.random.seed(5)
            outputs.append(model.train()(features, attention_mask=frames, decoder_input_ids=SAID).logits)
            assert torch.equal(features, sound()) or not type(model).__module__.startswith("easytorch")
    torch.testing.assert_close(outputs[0], outputs[1], **TOLERANCE)
    torch.testing.assert_close(outputs[2], outputs[3], **TOLERANCE)
    assert not torch.allclose(outputs[0], outputs[2])


def test_layers_are_left_out_as_in_transformers(make_pair) -> None:
    outputs = []
    for rate in (0.5, 1.0):
        for model in models(make_pair, encoder_layerdrop=rate, decoder_layerdrop=rate):
            torch.manual_seed(3)
            with torch.no_grad():
                outputs.append([model.train()(sound(), decoder_input_ids=SAID).logits for _ in range(4)])
    for given, expected in zip(outputs[0] + outputs[2], outputs[1] + outputs[3], strict=True):
        torch.testing.assert_close(given, expected, **TOLERANCE)
    assert any(not torch.equal(*pair) for pair in zip(outputs[0], outputs[2], strict=True))


def test_no_layer_is_left_out_in_evaluation(make_pair) -> None:
    outputs = []
    for rate in (0.0, 0.9):
        model, _ = models(make_pair, encoder_layerdrop=rate, decoder_layerdrop=rate)
        with torch.no_grad():
            outputs += [model(sound(), decoder_input_ids=SAID).logits for _ in range(3)]
    assert all(torch.equal(outputs[0], one) for one in outputs)


def test_a_classifier_weighs_the_layers(make_pair) -> None:
    ours, theirs = models(make_pair, "WhisperForAudioClassification", use_weighted_layer_sum=True, num_labels=5)
    labels = torch.tensor([4, 0])
    outputs = [model(sound(), labels=labels) for model in (ours, theirs)]
    assert_same(*outputs)
    for output in outputs:
        output.loss.backward()
    torch.testing.assert_close(ours.layer_weights.grad, theirs.layer_weights.grad, **TOLERANCE)
    with torch.no_grad():
        encoded = ours.encoder(sound(), output_hidden_states=True)
        torch.testing.assert_close(ours(encoder_outputs=encoded).logits, outputs[0].logits, **TOLERANCE)
        with pytest.raises(ValueError, match="output_hidden_states=True"):
            ours(encoder_outputs=ours.encoder(sound()))


def test_files_of_one_head_load_under_every_head(make_pair, tmp_path) -> None:
    ours, theirs = models(make_pair)
    theirs.save_pretrained(tmp_path)
    module, expected = importlib.import_module("easytorch.models.whisper"), theirs.model.state_dict()
    for head in FAMILIES["whisper"].heads:
        weights = getattr(module, head).from_pretrained(tmp_path).state_dict()
        shared = {name: one for name, one in weights.items() if name.removeprefix("model.") in expected}
        assert shared and all(torch.equal(expected[name.removeprefix("model.")], one) for name, one in shared.items())
    loaded = easytorch.AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path)
    assert type(loaded) is type(ours) and loaded.easytorch_report.native
    assert loaded.proj_out.weight is loaded.model.decoder.embed_tokens.weight
    # the sinusoids of the encoder, which the constructor freezes and transformers' loading makes learn
    frozen = {name for name, parameter in loaded.named_parameters() if not parameter.requires_grad}
    assert frozen == {"model.encoder.embed_positions.weight"}
    weights = theirs.state_dict()
    name = "model.decoder.layers.1.encoder_attn.v_proj.bias"
    kept = {other: one for other, one in weights.items() if other != name}
    for state, words in ((kept, "is missing"), (weights | {f"{name}2": weights[name]}, "has no place for it")):
        with pytest.raises(CheckpointError, match=words):
            type(ours).from_pretrained(None, config=ours.config, state_dict=state)


def test_half_precision_takes_features_of_float32(make_pair) -> None:
    ours, _ = models(make_pair)
    with torch.no_grad():
        given = ours.bfloat16()(sound(), decoder_input_ids=SAID)
    assert all(one.dtype == torch.bfloat16 for one in tensors(given) if one.is_floating_point())


def test_what_is_refused(make_pair) -> None:
    ours, _ = models(make_pair)
    for features, words in (
        (sound(frames=17), "mel input features to be of length 18, but found 17"),
        (sound(mels=5), r"\(2, 5, 18\) must be \(batch, 6, 18\): the config has num_mel_bins=6"),
        (None, "specify input_features or encoder_outputs"),
    ):
        with pytest.raises(ValueError, match=words):
            ours(features, decoder_input_ids=SAID)
    assert ours(sound(), labels=SAID.repeat(1, 6)[:, :40]).logits.shape[1] == 40
    for length in (41, 42):
        with pytest.raises(ValueError, match="cannot exceed the maximum allowed length of 40"):
            ours(sound(), labels=SAID.repeat(1, 6)[:, :length])


def test_how_many_states_a_recording_has(make_pair) -> None:
    """Of any number of frames, as transformers counts them."""
    frames = torch.arange(1, 30)
    counts = [model._get_feat_extract_output_lengths(frames) for model in models(make_pair)]
    assert torch.equal(*counts)


@pytest.mark.parametrize("head", FAMILIES["whisper"].heads)
def test_positions_of_the_encoder_are_sines_that_nobody_trains(head) -> None:
    """Of new models, and of those whose encoder is frozen."""
    found = []
    for module in (importlib.import_module("easytorch.models.whisper"), transformers):
        model = getattr(module, head)(FAMILIES["whisper"].config())
        sines = {name: one for name, one in model.named_parameters() if "encoder.embed_positions" in name}
        flags = [{name: one.requires_grad for name, one in model.named_parameters()}]
        if hasattr(model, "freeze_encoder"):
            model.freeze_encoder()
            flags.append({name: one.requires_grad for name, one in model.named_parameters()})
        found.append((sines, flags))
    (ours, given), (theirs, expected) = found
    assert given == expected
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], one) for name, one in theirs.items())


def test_a_cache_of_tokens_is_gone_on_with(make_pair) -> None:
    """One without a place for the encoder's states, which an empty one makes way for one with."""
    decoder = models(make_pair, "WhisperForCausalLM")[0].model.decoder
    states = sound(mels=32, frames=9)
    cache = DynamicCache(config=decoder.config)
    with torch.no_grad():
        decoder(SAID[:, :4], past_key_values=cache, use_cache=True)
        later = decoder(SAID[:, 4:6], encoder_hidden_states=states, past_key_values=cache, use_cache=True)
        empty = decoder(
            SAID[:, :4],
            encoder_hidden_states=states,
            past_key_values=DynamicCache(config=decoder.config),
            use_cache=True,
        )
    assert later.past_key_values is cache and cache.get_seq_length() == 6
    assert isinstance(empty.past_key_values, EncoderDecoderCache) and empty.past_key_values.get_seq_length() == 4


def test_a_row_of_the_decoder_hears_all_recordings(make_pair) -> None:
    ours, theirs = models(make_pair)
    with torch.no_grad():
        given = {"input_features": sound(), "decoder_input_ids": SAID[:1]}
        found, expected = ours(**given).logits, theirs(**given).logits
    assert found.shape == expected.shape == (1, *SAID.shape[1:], 97)
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("changes, words", [
    ({"decoder_attention_heads": 5}, r"hidden size \(32\) is not a multiple of the number of .*heads \(5\)"),
    ({"num_mel_bins": 0}, "whisper: config.num_mel_bins=0 must be an integer of 1 or more"),
    ({"pad_token_id": 97}, "whisper: config.pad_token_id=97 is not among the config.vocab_size=97 tokens"),
    ({"activation_function": "nosuch"}, "no activation is called 'nosuch'"),
    ({"d_model": 33, "encoder_attention_heads": 3, "decoder_attention_heads": 3}, "config.d_model=33 must be even"),
])  # fmt: skip
def test_what_the_family_does_not_carry(changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        easytorch.AutoModelForSpeechSeq2Seq.from_config(FAMILIES["whisper"].config(**changes))
