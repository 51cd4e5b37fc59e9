"""Models of images, videos and text: several of each in a row, positions, windows, parts, and what is refused."""

from __future__ import annotations

import importlib

import pytest
import torch
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

import easytorch
from easytorch.layers.packed_tower import segments_of
from tests.models.families import FAMILIES, LANGUAGE
from tests.models.image_text_families import FRAMES_APART, IMAGE_TOKEN, OF_GRIDS, VIDEO_TOKEN, image_text_inputs
from tests.models.test_parity import assert_same

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(params=OF_GRIDS)
def family(request):
    return request.param


def models(make_pair, family, **changes):
    return make_pair(LANGUAGE[family], FAMILIES[family].config(**changes))


def images_and_videos(family: str) -> dict[str, torch.Tensor]:
    """Padding before an image and a video; and a video, an image, a video. Patches of no whole number of windows."""
    generator = torch.Generator().manual_seed(4)
    between = [11] if family in FRAMES_APART else []
    image, wide = [IMAGE_TOKEN] * 15, [IMAGE_TOKEN] * 4
    long = [*[VIDEO_TOKEN] * 6, *between, *[VIDEO_TOKEN] * 6]
    short = [VIDEO_TOKEN] * 2
    first = [5, *image, 8, *long, 6]
    second = [*long, 7, *wide, 3, 4, *short, 9, 12, 14]
    width = max(len(first), len(second))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in (first, second)])
    types = torch.where(ids == IMAGE_TOKEN, 1, torch.where(ids == VIDEO_TOKEN, 2, 0))
    grids = {"image_grid_thw": torch.tensor([[1, 10, 6], [1, 2, 8]])}
    grids["video_grid_thw"] = torch.tensor([[2, 4, 6], [2, 4, 6], [1, 4, 2]])
    pixels = {
        name: torch.randn(int(grids[grid].prod(-1).sum()), 24, generator=generator)
        for name, grid in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
    }
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "mm_token_type_ids": types} | grids | pixels


def test_images_and_videos_in_a_row_logits_loss_and_gradients(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    inputs = images_and_videos(family)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    if family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = [1.0, 2.6, 0.5]
    outputs = [model(**inputs, labels=labels, output_hidden_states=True) for model in (ours, theirs)]
    assert_same(*outputs, inputs["attention_mask"].bool())
    for output in outputs:
        output.loss.backward()
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (weight.grad is None) == (other.grad is None), name
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, other.grad, **TOLERANCE, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("settings", [
    {}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"use_cache": False},
    {"cache_implementation": "static", "disable_compile": True},
], ids=str)  # fmt: skip
def test_generate_of_images_and_videos(settings, family, make_pair) -> None:
    tokens = []
    for model in models(make_pair, family):
        torch.manual_seed(7)
        given = {"do_sample": False, "max_new_tokens": 7, "min_new_tokens": 7} | settings
        given["suppress_tokens"] = [IMAGE_TOKEN, VIDEO_TOKEN]
        tokens.append(model.generate(**images_and_videos(family), **given))
    assert torch.equal(*tokens)


def test_the_first_tokens_after_a_prompt_are_placed_behind_its_images(family, make_pair) -> None:
    """Steps after a prompt, with a mask and without, by what the model keeps of the prompt; then text alone."""
    ours, theirs = models(make_pair, family)
    inputs = images_and_videos(family)
    more = torch.tensor([[21, 33], [40, 58]])
    zeros = torch.zeros_like(more)
    whole = inputs | {
        "input_ids": torch.cat((inputs["input_ids"], more), 1),
        "attention_mask": torch.cat((inputs["attention_mask"], zeros + 1), 1),
        "mm_token_type_ids": torch.cat((inputs["mm_token_type_ids"], zeros), 1),
    }
    with torch.no_grad():
        expected = theirs(**whole).logits[:, -2:]
        cache = ours(**inputs, use_cache=True).past_key_values
        given = ours(more, attention_mask=whole["attention_mask"], past_key_values=cache).logits
        torch.testing.assert_close(given, expected, **TOLERANCE)
        plain = torch.arange(3, 12)[None]
        assert_same(ours(plain), theirs(plain))


def test_generation_goes_on_from_a_cache(family, make_pair) -> None:
    """One token and then more, from the cache it left, are the tokens of one call."""
    given, settings = image_text_inputs(LANGUAGE[family]), {"do_sample": False, "min_new_tokens": 1}
    settings |= {"return_dict_in_generate": True, "suppress_tokens": [IMAGE_TOKEN, VIDEO_TOKEN]}
    tokens = []
    for model in models(make_pair, family):
        whole = model.generate(**given, **settings | {"min_new_tokens": 5}, max_new_tokens=5).sequences
        first = model.generate(**given, **settings, max_new_tokens=1)
        mask = torch.nn.functional.pad(given["attention_mask"], (0, 1), value=1)
        more = {"attention_mask": mask, "past_key_values": first.past_key_values, "max_new_tokens": 4}
        rest = model.generate(first.sequences, **settings | {"min_new_tokens": 4}, **more).sequences
        assert torch.equal(rest, whole)
        tokens.append(whole)
    assert torch.equal(*tokens)


def test_positions_are_those_of_transformers(family, make_pair) -> None:
    ours, theirs = (model.model for model in models(make_pair, family))
    inputs = images_and_videos(family)
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    given = {name: inputs[name] for name in names}
    for more in ({}, {"attention_mask": inputs["attention_mask"]}):
        if not more:  # without a mask padding is text
            given = {name: one[1:] if name in names[:2] else one for name, one in given.items()}
            given["image_grid_thw"], given["video_grid_thw"] = (
                inputs["image_grid_thw"][1:],
                inputs["video_grid_thw"][1:],
            )
        for one, other in zip(
            ours.get_rope_index(**given, **more), theirs.get_rope_index(**given, **more), strict=True
        ):
            assert torch.equal(one, other)
        given = {name: inputs[name] for name in names}
    where = (5, torch.tensor([3, 4, 6]), 1, 2, 2.5)
    assert torch.equal(ours.get_vision_position_ids(*where), theirs.get_vision_position_ids(*where))


def test_a_video_longer_than_it_is_wide(family, make_pair) -> None:
    """Text begins behind the longer side of a frame, not behind the last one; frames at fractions are rounded down."""
    ours, theirs = (model.model for model in models(make_pair, family))
    between = [11] if family in FRAMES_APART else []
    ids = torch.tensor([[5, *[VIDEO_TOKEN, VIDEO_TOKEN, *between] * 6, 7, 8]])
    given = {"mm_token_type_ids": (ids == VIDEO_TOKEN) * 2, "video_grid_thw": torch.tensor([[6, 2, 4]])}
    if family == "qwen2_5_vl":
        given["second_per_grid_ts"] = [0.9 / ours.config.vision_config.tokens_per_second]
    for one, other in zip(*(model.get_rope_index(ids, **given) for model in (ours, theirs)), strict=True):
        assert torch.equal(one, other)


def test_images_of_a_later_turn_are_placed_where_they_stand(family, make_pair) -> None:
    """What a cache holds is text, and what is kept of positions is of another prompt: not so in transformers."""
    ours, _ = models(make_pair, family)
    ids = torch.tensor([[5, 9, 33, *[IMAGE_TOKEN] * 4, 12]])
    grids = torch.tensor([[1, 2, 8]])
    with torch.no_grad():
        ours(**images_and_videos(family))
        cache = ours(ids[:, :3], use_cache=True).past_key_values
    given = {"mm_token_type_ids": (ids == IMAGE_TOKEN).long(), "image_grid_thw": grids, "past_key_values": cache}
    found = ours._prepare_position_ids_for_generation(ids, {"attention_mask": torch.ones_like(ids), **given})
    expected, _ = ours.model.get_rope_index(ids, given["mm_token_type_ids"], image_grid_thw=grids)
    assert torch.equal(found[1:], expected)


def test_the_base_of_a_tower_s_positions_is_the_config_s(family, make_pair) -> None:
    vision = FAMILIES[family].sizes["vision_config"] | {"rope_parameters": {"rope_type": "axial", "rope_theta": 30.0}}
    pair = models(make_pair, family, vision_config=vision)
    inputs = images_and_videos(family)
    with torch.no_grad():
        assert_same(*(one.model.visual(inputs["pixel_values"], inputs["image_grid_thw"]) for one in pair))


def test_given_positions_of_every_shape(family, make_pair) -> None:
    """Of text, of three axes, and those of the text before them, which pack sequences where they start again."""
    ours, theirs = models(make_pair, family)
    ids = torch.tensor([[5, 9, 33, 71, 8, 12]])
    plain = torch.tensor([[0, 1, 2, 0, 1, 2]])
    axes = torch.stack((plain, plain + 1, plain * 2))
    for positions in (plain, axes, torch.cat((plain[None], axes))):
        with torch.no_grad():
            given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
            torch.testing.assert_close(ours(**given).logits, theirs(**given).logits, **TOLERANCE)


def test_the_tower_and_the_decoder_by_themselves(family, make_pair, tmp_path) -> None:
    ours, theirs = (model.model for model in models(make_pair, family))
    inputs = images_and_videos(family)
    given = (inputs["pixel_values"], inputs["image_grid_thw"])
    with torch.no_grad():
        assert_same(*(one.visual(*given, output_hidden_states=True) for one in (ours, theirs)))
        ids = torch.arange(3, 12)[None]
        assert_same(*(one.language_model(ids, output_hidden_states=True) for one in (ours, theirs)))
    theirs.language_model.save_pretrained(tmp_path)
    loaded = easytorch.AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is type(ours.language_model) and loaded.easytorch_report.native
    for name, one in loaded.state_dict().items():
        assert torch.equal(one, theirs.language_model.state_dict()[name]), name


def test_what_was_computed_before_is_taken(family, make_pair) -> None:
    """The positions and boundaries that transformers lets a caller compute before a graph is traced."""
    ours, _ = models(make_pair, family)
    inputs = image_text_inputs(LANGUAGE[family])
    grids = inputs["image_grid_thw"]
    positions, bounds = get_vision_position_ids(grids, 2), get_vision_cu_seqlens(grids)
    with torch.no_grad():
        expected = ours(**inputs).logits
        given = ours(**inputs, image_position_ids=positions, image_cu_seqlens=bounds, video_position_ids=None).logits
        assert torch.equal(given, expected)
        moved = ours(**inputs, image_position_ids=positions.flip(0)).logits
    assert not torch.allclose(moved, expected)


def test_one_call_of_attention_for_neighbours_of_a_length() -> None:
    assert segments_of(torch.tensor([0, 16, 32, 40, 40, 56])) == [(2, 16), (1, 8), (1, 16)]


def test_what_does_not_fit(family, make_pair) -> None:
    ours, _ = models(make_pair, family)
    inputs = image_text_inputs(LANGUAGE[family])
    pixels, grids, types = inputs["pixel_values"], inputs["image_grid_thw"], inputs["mm_token_type_ids"]
    lone = torch.zeros_like(types, dtype=torch.bool)
    lone[tuple((inputs["input_ids"] == IMAGE_TOKEN).nonzero()[0])] = True
    cases = [
        ({"image_grid_thw": None}, "images need image_grid_thw"),
        ({"pixel_values": pixels[:-1]}, r"\(71, 24\) have 71 patches; grids .* have 72"),
        ({"pixel_values": pixels[:, :-1]}, r"must be \(patches, 24\): 3 channels of 2 frames of 2 x 2 pixels"),
        ({"image_grid_thw": grids * torch.tensor([4, 1, 1]) // torch.tensor([1, 2, 2])}, "multiples of spatial_merge"),
        ({"input_ids": inputs["input_ids"].masked_fill(lone, 9)}, "Image features and image tokens do not match"),
        ({"mm_token_type_ids": types * 2}, "more runs of video tokens than video_grid_thw"),
        ({"mm_token_type_ids": types.roll(1, 1) * types}, "each must"),
        ({"mm_encoder_outputs": {}}, "both pixel_values/pixel_values_videos and mm_encoder_outputs"),
    ]  # fmt: skip
    if family != "qwen2_5_vl":  # where transformers takes the positions of text
        cases.append(({"mm_token_type_ids": None}, "need mm_token_type_ids"))
    for changes, words in cases:
        with pytest.raises(ValueError, match=words):
            ours(**inputs | changes)


def test_seconds_of_fewer_videos_than_there_are(make_pair) -> None:
    ours, _ = models(make_pair, "qwen2_5_vl")
    with pytest.raises(ValueError, match="second_per_grid_ts has 2 entries for 3 videos"):
        ours(**images_and_videos("qwen2_5_vl"), second_per_grid_ts=torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("entry, value, words", [
    ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "rope type 'linear'; a tower has"),
    ("num_heads", 3, "not a multiple of the number of attention heads"),
    ("hidden_act", "nosuch", "no activation is called 'nosuch'"),
])  # fmt: skip
def test_towers_that_cannot_be_built(entry, value, words, family) -> None:
    vision = FAMILIES[family].sizes["vision_config"] | {entry: value}
    native = importlib.import_module(f"easytorch.models.{family}")
    with pytest.raises(ValueError, match=words):
        getattr(native, FAMILIES[family].heads[0])(FAMILIES[family].config(vision_config=vision))


def test_heads_of_a_tower_that_cannot_turn(family, make_pair) -> None:
    """As in transformers, such a model still carries text."""
    vision = FAMILIES[family].sizes["vision_config"] | {"num_heads": 8}
    ours, theirs = models(make_pair, family, vision_config=vision)
    with pytest.raises(ValueError, match=r"config.num_heads=8 gives heads of 2, which must be a multiple of 4"):
        ours(**image_text_inputs(LANGUAGE[family]))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert_same(ours(ids), theirs(ids))


@pytest.mark.parametrize("section", [None, [16, 8, 8], [1, 1, 1]])
def test_interleaved_sections_take_what_pairs_there_are(section, make_pair) -> None:
    """transformers' tiny configs have more than a head has."""
    text = FAMILIES["qwen3_vl"].sizes["text_config"]
    rope = {name: value for name, value in text["rope_parameters"].items() if name != "mrope_section"}
    rope |= {"mrope_interleaved": False} | ({} if section is None else {"mrope_section": section})
    ours, theirs = models(make_pair, "qwen3_vl", text_config=text | {"rope_parameters": rope})
    with torch.no_grad():
        assert_same(*(model(**image_text_inputs(LANGUAGE["qwen3_vl"])) for model in (ours, theirs)))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("section", [[1, 1, 1], [4, 4, 4]])
def test_sections_that_are_not_the_pairs_of_a_head(section, family) -> None:
    """transformers builds such a model too, whose tower runs."""
    text = FAMILIES[family].sizes["text_config"]
    text = text | {"rope_parameters": text["rope_parameters"] | {"mrope_section": section}}
    native = importlib.import_module(f"easytorch.models.{family}")
    model = getattr(native, LANGUAGE[family])(FAMILIES[family].config(text_config=text))
    with pytest.raises(ValueError, match=r"mrope_section .* must add up to the 4 pairs"):
        model(**image_text_inputs(LANGUAGE[family]))
