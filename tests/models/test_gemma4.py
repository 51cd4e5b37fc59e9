"""What Gemma 4 alone has: a second embedding of each token, layers that read keys of earlier ones, videos and sound."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from easytorch.models import gemma4, gemma4_vision
from easytorch.models.gemma4_text import Gemma4ForCausalLM, Gemma4TextDecoderLayer
from tests.models.families import FAMILIES
from tests.models.image_text_families import GEMMA4_VISION, IMAGE_TOKEN, VIDEO_TOKEN, gemma4_images, image_text_inputs
from tests.models.test_decoders import IDS
from tests.models.test_parity import assert_same
from tests.models.tower_families import sound

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
ROW = FAMILIES["gemma4_text"]
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 16}


@pytest.fixture
def both(make_pair):
    return make_pair("Gemma4ForCausalLM", ROW.config())


@torch.no_grad()
def test_tokens_are_found_by_their_embeddings(both) -> None:
    ours, theirs = both
    embeds = ours.get_input_embeddings()(IDS)
    expected = theirs(inputs_embeds=theirs.get_input_embeddings()(IDS)).logits
    torch.testing.assert_close(ours(inputs_embeds=embeds).logits, expected, **TOLERANCE)
    parts = ours.model.get_per_layer_inputs(IDS)
    torch.testing.assert_close(ours(inputs_embeds=embeds, per_layer_inputs=parts).logits, expected, **TOLERANCE)
    with pytest.raises(ValueError, match=r"each of inputs_embeds must be the embedding of one token.*per_layer_inputs"):
        ours(inputs_embeds=embeds + 0.1)
    with pytest.raises(ValueError, match="per_layer_inputs if input_ids"):
        ours(IDS, per_layer_inputs=parts)


def rows_of_layers(model) -> list[int]:
    """How many positions each layer of the last call ran at; the handles are of one test's model."""
    seen: list[int] = []
    for layer in model.modules():
        if isinstance(layer, Gemma4TextDecoderLayer):
            layer.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    return seen


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["easytorch", "vanilla", "flash"])
def test_layers_without_keys_run_at_the_positions_whose_logits_are_wanted(padded, implementation, both) -> None:
    ours, _ = both
    ours.set_attn_implementation(implementation)
    mask = torch.ones_like(IDS)
    mask[0, : 3 * padded] = 0
    every = ours(IDS, attention_mask=mask).logits
    seen = rows_of_layers(ours)
    for keep, static in ((1, False), (3, False), (1, True), (torch.tensor([2, 5]), False)):
        cache = ours.init_cache(2, 16) if static else None
        given = ours(IDS, attention_mask=mask, logits_to_keep=keep, past_key_values=cache, use_cache=static).logits
        expected = every[:, -keep:] if isinstance(keep, int) else every[:, keep]
        torch.testing.assert_close(given, expected, **TOLERANCE)
    whole = [10, 10, 10, 10]
    few = [[10, 10, 1, 1], [10, 10, 3, 3] if padded else whole, [10, 10, 1, 1] if padded else whole, whole]
    assert seen == [rows for one in few for rows in one]


@torch.no_grad()
def test_what_is_recorded_is_of_every_position(both) -> None:
    ours, theirs = both
    for name in ("output_hidden_states", "output_attentions"):
        theirs.set_attn_implementation("eager")
        outputs = [model(IDS, logits_to_keep=1, **{name: True}) for model in (ours, theirs)]
        key = name.removeprefix("output_")
        assert [one.shape for one in outputs[0][key]] == [one.shape for one in outputs[1][key]]
    kept = ours(IDS, return_shared_kv_states=True).shared_kv_states
    expected = theirs(IDS, return_shared_kv_states=True).shared_kv_states
    assert kept.keys() == expected.keys() == {"sliding_attention", "full_attention"}
    for name, tensors in expected.items():
        for one, other in zip(kept[name], tensors, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)


def test_both_embeddings_grow(both) -> None:
    ours, theirs = both
    for model in both:
        model.resize_token_embeddings(101, mean_resizing=False)
        assert model.model.embed_tokens_per_layer.weight.shape == (101, 4 * 6)
        assert model.config.vocab_size_per_layer_input == model.config.vocab_size == 101
    assert ours(IDS % 3 + 98).logits.shape == theirs(IDS % 3 + 98).logits.shape


@pytest.mark.parametrize("shared", [0, 2])
def test_reentrant_checkpoints_keep_the_gradients_of_shared_keys(shared) -> None:
    model, gradients = Gemma4ForCausalLM(ROW.config(num_kv_shared_layers=shared)).train(), []
    for reentrant in (False, True):
        if reentrant:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.gradient_checkpointing_enable({"use_reentrant": True})
            said = [str(one.message) for one in caught if "reentrant checkpoint would lose" in str(one.message)]
            assert len(said) == bool(shared)
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        gradients.append(
            {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("changes, words", [
    ({"num_kv_shared_layers": 3}, "leaves no full_attention layer with keys of its own among the first 1"),
    ({"num_kv_shared_layers": 5}, "config.num_kv_shared_layers=5 must be an integer from 0 to num_hidden_layers=4"),
    (EXPERTS | {"top_k_experts": 6}, "config.top_k_experts=6 must be 1 to num_experts=5"),
    (EXPERTS | {"num_experts": None}, "config.enable_moe_block needs the numbers num_experts"),
    ({"global_head_dim": 0}, "config.head_dim=0 must be"),
    ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "must be a multiple of config.num_key_value_heads=3"),
])  # fmt: skip
def test_configs_that_cannot_be_carried(changes, words) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Gemma4ForCausalLM(ROW.config(**changes))


def everything() -> dict[str, torch.Tensor]:
    """A row of an image, two videos of two frames and one, and sound; a frame and 4 of its 6 tokens are padding."""
    frames, said = gemma4_images(3, seed=2), torch.arange(37) < torch.tensor([[37]])
    parts = [[5], [IMAGE_TOKEN] * 9, [7], [VIDEO_TOKEN] * 18, [8], [VIDEO_TOKEN] * 9, [9], [94] * 10, [4, 3]]
    ids = torch.tensor([[token for part in parts for token in part]])
    return gemma4_images(1) | {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int(),
        "pixel_values_videos": frames["pixel_values"],
        "video_position_ids": frames["image_position_ids"],
        "num_frames_per_video": torch.tensor([2, 1]),
        "input_features": sound(8, 37).transpose(1, 2)[:1],
        "input_features_mask": said,
    }


@pytest.fixture
def whole(make_pair):
    row = FAMILIES["gemma4"]
    return make_pair("Gemma4ForConditionalGeneration", row.config(), row.reference)


@torch.no_grad()
def test_images_videos_and_sound_in_one_prompt(whole) -> None:
    ours, theirs = whole
    inputs = everything()
    given, expected = ours(**inputs), theirs(**inputs)
    if "audio_outputs" in given and expected.audio_outputs is None:  # 5.24.0 has the field and leaves it empty
        sound = inputs["input_features"], inputs["input_features_mask"]
        expected["audio_outputs"] = theirs.model.get_audio_features(*sound, return_dict=True)
    assert_same(given, expected)
    assert [len(one) for one in ours.model.get_video_features(*_of_videos(inputs)).pooler_output] == [18, 9]
    for name in ("pixel_values_videos", "input_features"):
        other = ours(**inputs | {name: inputs[name].flip(-1)}).logits
        assert not torch.allclose(other[:, -1], ours(**inputs).logits[:, -1])
    tokens = [
        model.generate(**inputs, max_new_tokens=5, do_sample=False, suppress_tokens=[94, 95, 96]) for model in whole
    ]
    assert torch.equal(*tokens)


def _of_videos(inputs):
    return [inputs[name] for name in ("pixel_values_videos", "video_position_ids", "num_frames_per_video")]


@torch.no_grad()
def test_what_is_padded_does_not_reach_the_tokens(whole) -> None:
    """Patches without a place, and sound that the mask leaves out."""
    ours, _ = whole
    inputs = image_text_inputs("Gemma4Model")
    pixels = inputs["pixel_values"].clone()
    pixels[:, 36:] = 0.9
    torch.testing.assert_close(ours(**inputs | {"pixel_values": pixels}).logits, ours(**inputs).logits, **TOLERANCE)
    tower, said = ours.model.audio_tower, sound(8, 37).transpose(1, 2)
    mask = torch.arange(37) < torch.tensor([[37], [20]])
    rows = tower(said, mask)
    other = tower(torch.where(mask[..., None], said, 3.0), mask)
    kept = rows.attention_mask
    assert kept.sum(1).tolist() == [10, 5]
    torch.testing.assert_close(other.last_hidden_state[kept], rows.last_hidden_state[kept], **TOLERANCE)
    assert not torch.allclose(tower(said).last_hidden_state[1, :5], rows.last_hidden_state[1, :5])


def test_inputs_that_do_not_fit(whole) -> None:
    ours, _ = whole
    given = everything()
    for changes, words in (
        ({"num_frames_per_video": None}, "pass num_frames_per_video"),
        ({"num_frames_per_video": torch.tensor([2, 2])}, "num_frames_per_video=[2, 2] is 4 in all"),
        ({"image_position_ids": None}, "images need pixel_position_ids"),
        ({"image_position_ids": given["image_position_ids"][:, 1:]}, "(1, 43, 2) must be (1, 44, 2)"),
        ({"image_position_ids": given["image_position_ids"] + 15}, "image_position_ids reach 20"),
        ({"pixel_values": given["pixel_values"][:, 1:]}, "a multiple of config.pooling_kernel_size**2=4"),
        ({"input_features": given["input_features"][..., 1:3]}, "(1, 37, 2) must be (recordings, frames, mels)"),
        ({"input_ids": given["input_ids"].masked_fill(given["input_ids"] == 94, 5)}, "tokens: 0, features: 10"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            ours(**given | changes)
    text = gemma4.Gemma4Model(FAMILIES["gemma4"].config(vision_config=None, audio_config=None))
    for name, value in (("pixel_values", "images"), ("input_features", "sound")):
        with pytest.raises(ValueError, match=f"it takes no {value}"):
            text(
                **given | dict.fromkeys(("pixel_values", "pixel_values_videos", "input_features")) | {name: given[name]}
            )


@pytest.mark.parametrize("changes, words", [
    ({"pooling_kernel_size": 1}, "config.pooling_kernel_size=1 must be 2 or more"),
    ({"head_dim": 6}, "config.head_dim=6 must be a multiple of 4"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope type 'linear'"),
])  # fmt: skip
def test_towers_that_cannot_be_carried(changes, words) -> None:
    config = FAMILIES["gemma4_vision"].config(**GEMMA4_VISION | changes)
    with pytest.raises(ValueError, match=words):
        gemma4_vision.Gemma4VisionModel(config)


@torch.no_grad()
def test_an_image_of_fewer_patches_than_two_squares_is_one(make_pair) -> None:
    """16 patches, pooled by 3: one square of 4 by 4, as transformers makes of them; and patches that are no squares."""
    config = FAMILIES["gemma4_vision"].config(**GEMMA4_VISION | {"pooling_kernel_size": 3})
    ours, theirs = make_pair("Gemma4VisionModel", config)
    patches = torch.arange(16)
    pixels = torch.rand(2, 16, 12, generator=torch.Generator().manual_seed(0))
    places = torch.stack((patches % 4, patches // 4), -1).expand(2, -1, -1)
    expected = theirs(pixels, places).last_hidden_state
    assert expected.shape == (2, 24)
    torch.testing.assert_close(ours(pixels, places).last_hidden_state, expected, **TOLERANCE)
    with pytest.raises(ValueError, match="do not divide into squares of 4 by 4 patches"):
        ours(pixels, torch.stack((patches % 8, patches // 8), -1).expand(2, -1, -1))
    with pytest.raises(ValueError, match=re.escape("a multiple of config.pooling_kernel_size**2=9")):
        ours(pixels[:, 1:], places[:, 1:])
