"""What models of images and text share: files, caches, generate, precision, Flax, and what is refused."""

from __future__ import annotations

import copy
import importlib
import inspect

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import easytorch
from easytorch.distributed.declared import expanded_plan
from easytorch.generation import generate_tokens
from easytorch.layers.model_snapshot import capture_refusal
from easytorch.protocol.native import NativeModel
from tests.models.families import FAMILIES, HEADS, IMAGE_TEXT, LANGUAGE
from tests.models.image_text_families import (
    FRAMES_APART,
    IMAGE_TOKEN,
    OF_GRIDS,
    first_row,
    image_text_inputs,
    image_text_labels,
    images,
)
from tests.models.test_parity import assert_same
from tests.models.test_towers import equal

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
CLASSES = [(family, head) for family, head in HEADS if family in IMAGE_TEXT]


@pytest.fixture(params=IMAGE_TEXT)
def family(request):
    return request.param


def models(make_pair, family, head=None, reference=None, **changes):
    row = FAMILIES[family]
    return make_pair(head or LANGUAGE[family], row.config(**changes), reference or row.reference)


def inputs_of(family):
    return image_text_inputs(LANGUAGE[family])


def test_the_image_reaches_the_logits_of_what_follows(family, make_pair) -> None:
    ours, _ = models(make_pair, family)
    inputs = inputs_of(family)
    with torch.no_grad():
        plain = ours(**inputs).logits
        changed = ours(**inputs | {"pixel_values": inputs["pixel_values"].flip(-1)}).logits
    assert torch.equal(plain[0, :2], changed[0, :2]) and not torch.allclose(plain[:, -1], changed[:, -1])


def test_every_part_is_native(family) -> None:
    row = FAMILIES[family]
    made = easytorch.AutoModelForImageTextToText.from_config(row.config())
    assert type(made).__name__ == LANGUAGE[family] and made.easytorch_report.native
    parts = [part for part in made.modules() if isinstance(part, transformers.PreTrainedModel)]
    assert len(parts) == 2 + len(row.config().sub_configs) and all(isinstance(part, NativeModel) for part in parts)
    assert {part.config._attn_implementation for part in parts} == {"easytorch"}


def test_a_part_of_a_family_that_is_not_native_is_transformers_own(make_pair) -> None:
    """MLCD's tower: CLIP's, with rotary positions."""
    tower = transformers.MLCDVisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=12, patch_size=4
    )
    ours, theirs = models(make_pair, "llava", vision_config=tower.to_dict())
    assert type(ours.model.vision_tower) is transformers.MLCDVisionModel
    assert type(ours.model.language_model).__module__ == "easytorch.models.llama"
    assert ours.config.vision_config._attn_implementation == "sdpa"
    ids = torch.tensor([[5, *[IMAGE_TOKEN] * 9, 7, 8], [6, 4, *[IMAGE_TOKEN] * 9, 3]])
    pixels = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_same(*(model(input_ids=ids, pixel_values=pixels) for model in (ours, theirs)))


@pytest.mark.parametrize("family, head", CLASSES)
def test_files_go_both_ways(family, head, make_pair, tmp_path) -> None:
    ours, theirs = models(make_pair, family, head)
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert equal(type(theirs).from_pretrained(tmp_path / "ours"), theirs)
    loaded = type(ours).from_pretrained(tmp_path / "theirs")
    assert equal(loaded, ours)
    inputs = image_text_inputs(head)
    with torch.no_grad():  # what is in no file is made anew on the meta device
        assert_same(loaded.eval()(**inputs), ours(**inputs))
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()


def test_checkpoints_with_the_names_of_the_modules(family, make_pair, tmp_path) -> None:
    """Files have the names of before (`language_model.model.layers`), as those on the Hub; some have the modules'."""
    ours, theirs = models(make_pair, family)
    theirs.save_pretrained(tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    weights = {name: one.contiguous() for name, one in theirs.state_dict().items()}
    as_modules = (*FRAMES_APART, "llama4", "gemma4")  # whose files have their modules' names already
    assert "model.language_model.norm.weight" in weights or family == "llama4"
    assert family in as_modules or before.keys() != weights.keys()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert equal(type(ours).from_pretrained(tmp_path), ours)


@pytest.mark.parametrize("family, head", CLASSES)
def test_initial_weights_names_and_plans_are_those_of_transformers(family, head) -> None:
    made = []
    for source in (transformers, importlib.import_module(f"easytorch.models.{family}")):
        torch.manual_seed(3)
        made.append(getattr(source, head)(FAMILIES[family].config()))
    theirs, ours = (dict(model.named_parameters()) for model in made)
    assert list(ours) == list(theirs)
    for name, weight in theirs.items():
        given, expected = (one.std(correction=0).item() for one in (ours[name], weight))
        assert (given == 0) == (expected == 0), name
        assert given == pytest.approx(expected, rel=max(0.4, 2 / weight.numel() ** 0.5), abs=0.01), name
    if family == "llama4":  # which has the plan of its decoder under a name that is none, too
        for plan in ("_tp_plan", "_fsdp_plan"):
            given = getattr(made[0], plan)
            twice = {name.replace(".model.", ".", 1) for name in given if name.startswith("language_model.model.")}
            setattr(made[0], plan, {name: how for name, how in given.items() if name not in twice})
    plans = ("_tp_plan", "_pp_plan", "_fsdp_plan", "_no_split_modules", "all_tied_weights_keys", "base_model_prefix")
    for plan in (*plans, "main_input_name", "input_modalities", "accepts_loss_kwargs"):
        assert getattr(made[1], plan, None) == getattr(made[0], plan, None), plan
    for plan in ("tp_plan", "ep_plan"):
        declared, expected = (expanded_plan(model, plan) for model in reversed(made))
        # transformers' experts of Llama 4 take no routing, and have no plan
        assert declared == expected or (family, plan) == ("llama4", "ep_plan"), plan


@pytest.mark.parametrize("family, head", CLASSES)
def test_arguments_stand_in_the_order_of_transformers(family, head) -> None:
    ours = getattr(importlib.import_module(f"easytorch.models.{family}"), head)
    given, expected = (list(inspect.signature(one.forward).parameters) for one in (ours, getattr(transformers, head)))
    assert given == expected


def test_every_head_that_transformers_has_is_native(family) -> None:
    row = FAMILIES[family]
    module = importlib.import_module(getattr(transformers, row.heads[0]).__module__)
    theirs = {
        name
        for name, one in vars(module).items()
        if isinstance(one, type)
        and issubclass(one, transformers.PreTrainedModel)
        and one.config_class is row.config_class
        and one.forward is not transformers.PreTrainedModel.forward
    }
    assert theirs == set(row.heads)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_steps_through_a_cache_equal_one_pass(cache, family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    inputs = first_row(inputs_of(family))
    del inputs["attention_mask"]
    more = torch.tensor([[17, 4, 88, 23]])
    whole = inputs | {"input_ids": torch.cat((inputs["input_ids"], more), dim=1)}
    for types in {"token_type_ids", "mm_token_type_ids"} & inputs.keys():
        whole[types] = torch.cat((inputs[types], torch.zeros_like(more)), dim=1)
    held = transformers.DynamicCache(config=ours.config)
    if cache == "static":
        held = transformers.StaticCache(config=ours.config, max_cache_len=24)
    with torch.no_grad():
        expected = theirs(**whole).logits
        steps = [ours(**inputs, past_key_values=held).logits]
        steps += [ours(more[:, at : at + 1], past_key_values=held).logits for at in range(4)]
    torch.testing.assert_close(torch.cat(steps, 1), expected, **TOLERANCE)


@pytest.mark.parametrize("settings", [
    {"do_sample": False},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": True, "top_k": 20},
    {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    {"do_sample": False, "use_cache": False},
], ids=str)  # fmt: skip
def test_generate_gives_transformers_tokens(settings, family, make_pair) -> None:
    tokens = []
    ours, theirs = models(make_pair, family)
    for model in (ours, theirs):
        torch.manual_seed(7)
        bounds = {"max_new_tokens": 9, "min_new_tokens": 9, "suppress_tokens": [IMAGE_TOKEN]}
        inputs = inputs_of(family)
        if family == "llama4" and "num_beams" in settings and tokens:  # transformers' repeats no image for the beams
            features = ours.get_image_features(inputs.pop("pixel_values")).pooler_output.flatten(0, 1)
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"]).detach()
            inputs["inputs_embeds"][inputs["input_ids"] == IMAGE_TOKEN] = features.detach()
        tokens.append(model.generate(**inputs, **bounds, **settings))
    assert torch.equal(*tokens) and tokens[0].shape == (2, 23)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_our_loop_gives_the_same_tokens_of_text(cache, family, make_pair) -> None:
    ours, _ = models(make_pair, family)
    ids = torch.tensor([[5, 9, 33, 71, 8, 12], [4, 4, 90, 12, 60, 7]])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    wanted = ours.generate(ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    settings = {"max_new_tokens": 8, "eos_token_id": [], "cache": cache}
    given = torch.stack(list(generate_tokens(ours, ids, mask, **settings)), dim=1)
    first = (wanted[:, -8:] == given).long().cumprod(1).sum(1)  # min_new_tokens keeps the end token away
    ended = [row.tolist().index(2) if 2 in row else 8 for row in given]
    assert all(found >= end for found, end in zip(first.tolist(), ended, strict=True))


def test_images_by_their_features_and_by_embeddings(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    inputs = inputs_of(family)
    pixels = inputs.pop("pixel_values")
    named = ("image_grid_thw", "image_sizes", "image_position_ids")
    grids = {name: inputs[name] for name in named if name in inputs}
    with torch.no_grad():
        features = [
            model.get_image_features(pixel_values=pixels, **grids, return_dict=True) for model in (ours, theirs)
        ]
        name = "last_hidden_state" if family == "llama4" else "pooler_output"
        assert_same(*({"pooled": torch.cat(list(one[name]))} for one in features))
        expected = theirs(**inputs, pixel_values=pixels)
        assert_same(ours(**inputs, mm_encoder_outputs={"image": features[0]}), expected)
        ids = inputs.pop("input_ids")
        embeds = theirs.get_input_embeddings()(ids)
        if family == "gemma4":  # transformers' does not find the padding in the place of an image
            text = ids.masked_fill(ids == IMAGE_TOKEN, 0)
            inputs["per_layer_inputs"] = theirs.model.language_model.get_per_layer_inputs(text)
        if family in OF_GRIDS:  # whose positions are not told by embeddings
            expected = theirs(**inputs, inputs_embeds=embeds, pixel_values=pixels)
        assert_same(ours(**inputs, inputs_embeds=embeds, pixel_values=pixels), expected)
        assert_same(ours(**inputs, inputs_embeds=embeds), theirs(**inputs, inputs_embeds=embeds))


@pytest.mark.parametrize("beyond", [0, 1, 23])
def test_an_image_token_beyond_the_vocabulary(beyond, make_pair) -> None:
    token = FAMILIES["gemma3"].config().text_config.vocab_size + beyond
    ours, theirs = models(make_pair, "gemma3", image_token_index=token)
    inputs = inputs_of("gemma3")
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE_TOKEN, token)
    with torch.no_grad():
        assert_same(ours(**inputs), theirs(**inputs))


def test_embeddings_that_are_partly_an_images_are_none(family, make_pair) -> None:
    """An image token is known by its whole embedding."""
    ours, theirs = models(make_pair, family)
    inputs = inputs_of(family)
    table = theirs.get_input_embeddings()
    ids = inputs.pop("input_ids")
    if family == "gemma4":  # which tells the second embedding of a token by its first
        text = ids.masked_fill(ids == IMAGE_TOKEN, 0)
        inputs["per_layer_inputs"] = theirs.model.language_model.get_per_layer_inputs(text)
    embeds = table(ids).detach()
    others = (embeds != table(torch.tensor(IMAGE_TOKEN))).any(-1)
    embeds[..., :5] = torch.where(others[..., None], table.weight[IMAGE_TOKEN, :5], embeds[..., :5])
    with torch.no_grad():
        if family == "llama4":  # transformers' takes no pixels beside embeddings
            inputs["mm_encoder_outputs"] = {"image": ours.get_image_features(inputs.pop("pixel_values"))}
        assert_same(ours(**inputs, inputs_embeds=embeds), theirs(**inputs, inputs_embeds=embeds))


def test_a_tower_may_be_of_another_dtype(family, make_pair) -> None:
    """Kept in float32, as some programs do: its features become those of the decoder's dtype."""
    outputs = []
    for model in models(make_pair, family):
        model.get_decoder().bfloat16()
        model.get_output_embeddings().bfloat16()
        with torch.no_grad():
            outputs.append(model(**inputs_of(family)).logits.float())
    torch.testing.assert_close(*outputs, rtol=0.05, atol=0.05)


def test_two_images_in_a_row_and_none(family, make_pair) -> None:
    """In Gemma 3 each sees itself whole, and the second sees the first; rows without token_type_ids are causal."""
    ours, theirs = models(make_pair, family)
    image = [IMAGE_TOKEN] * 9
    ids = torch.tensor([[3, *image, 8, *image, 6]])
    inputs = {"input_ids": ids} | images(family, seed=2)
    if family in OF_GRIDS:
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    outputs = []
    for more in ({}, {"token_type_ids": (ids == IMAGE_TOKEN).long()}) if family == "gemma3" else ({},):
        with torch.no_grad():
            outputs.append(ours(**inputs, **more))
            assert_same(outputs[-1], theirs(**inputs, **more))
    if family == "gemma3":
        assert not torch.allclose(outputs[0].logits, outputs[1].logits)
    with torch.no_grad():
        assert_same(ours(ids[:, :1]), theirs(ids[:, :1]))


def test_flax_and_back(family, make_pair) -> None:
    ours, _ = models(make_pair, family)
    assert equal(type(ours).from_flax(ours.config, ours.to_flax()), ours)


def test_bfloat16_is_as_exact_as_transformers(family, make_pair) -> None:
    """Logits and gradients."""
    ours, theirs = models(make_pair, family)
    if theirs._can_set_experts_implementation():
        theirs.set_experts_implementation("eager")  # the others have no float64
    exact = _computed(theirs.double(), family)
    errors = [(_computed(model.bfloat16(), family) - exact).norm() for model in (ours, theirs)]
    assert errors[0] <= 1.3 * errors[1]


def _computed(model, family) -> torch.Tensor:
    model.zero_grad()
    inputs = inputs_of(family)
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    output = model(**inputs, **image_text_labels(LANGUAGE[family]))
    output.loss.backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    seen = output.logits[inputs_of(family)["attention_mask"].bool()].detach().double()
    return torch.cat([seen.flatten(), *gradients])


def test_attention_is_named_for_each_part(family) -> None:
    load = easytorch.AutoModelForImageTextToText.from_config
    asked = {"text_config": "vanilla", "vision_config": "eager"}
    model = load(FAMILIES[family].config(), attn_implementation=asked)
    parts = (model.config.text_config, model.config.vision_config)
    assert [part._attn_implementation for part in parts] == ["vanilla", "eager"]
    model.set_attn_implementation("flash")
    assert {part._attn_implementation for part in (model.config, *parts)} == {"flash"}
    with pytest.raises(ValueError, match=r"names \['sound_config'\]"):
        load(FAMILIES[family].config(), attn_implementation={"sound_config": "vanilla"})


def test_what_does_not_fit(family, make_pair) -> None:
    ours, _ = models(make_pair, family)
    inputs = inputs_of(family)
    with pytest.raises(ValueError, match="tokens: 18, features: 9; input_ids must have the image token 96 once"):
        ours(**inputs | images(family, 1))
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        ours(pixel_values=inputs["pixel_values"])
    with pytest.raises(ValueError, match=r"both pixel_values.* and mm_encoder_outputs"):
        ours(**inputs, mm_encoder_outputs={"image": None})


def _made(family: str, **changes):
    native = importlib.import_module(f"easytorch.models.{family}")
    return getattr(native, FAMILIES[family].heads[0])(copy.deepcopy(FAMILIES[family].config(**changes)))


def test_what_a_family_does_not_carry() -> None:
    with pytest.raises(ValueError, match="no activation is called 'nosuch'"):
        _made("llava", projector_hidden_act="nosuch")


def test_images_that_cannot_be_pooled(make_pair) -> None:
    """As in transformers, such a model still carries text."""
    model, inputs = _made("gemma3", mm_tokens_per_image=16), inputs_of("gemma3")
    with pytest.raises(ValueError, match="mm_tokens_per_image=16 is more tokens than the 3 x 3 patches"):
        model(**inputs)
    model(input_ids=torch.arange(8)[None])
    with torch.no_grad():  # of no square the largest side is taken that fits: 2 of 3 patches, which leaves each its own
        assert_same(*(model(**inputs) for model in models(make_pair, "gemma3", mm_tokens_per_image=5)))


def test_the_config_of_transformers_model_makes_ours(family) -> None:
    """In which transformers has named an implementation of the experts, for the tower too."""
    head = FAMILIES[family].heads[0]
    with torch.device("meta"):
        theirs = getattr(transformers, head)(FAMILIES[family].config())
        ours = getattr(importlib.import_module(f"easytorch.models.{family}"), head)._from_config(theirs.config)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_towers_that_are_offloaded_to_disk(make_pair, tmp_path) -> None:
    ours, _ = models(make_pair, "llava")
    ours.save_pretrained(tmp_path)
    places = {"model.vision_tower": "disk", "model.multi_modal_projector": "cpu", "model.language_model": "disk"}
    places["lm_head"] = "cpu"
    loaded = type(ours).from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs_of("llava")).logits, ours(**inputs_of("llava")).logits)


def test_features_of_hidden_states_are_compiled_as_one_graph() -> None:
    """Those that transformers records by hooks, which the model has before its first call."""
    model = importlib.import_module("easytorch.models.llava").LlavaModel(FAMILIES["llava"].config()).eval()
    assert capture_refusal(model) is None
    pixels = inputs_of("llava")["pixel_values"]
    torch._dynamo.reset()

    def features(pixels: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(model.get_image_features(pixels).pooler_output))

    with torch.no_grad():
        compiled = torch.compile(features, fullgraph=True, backend="eager")(pixels)
        torch.testing.assert_close(compiled, features(pixels), **TOLERANCE)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_words_are_compiled_as_one_graph(family: str) -> None:
    (head,) = (one for one in FAMILIES[family].heads if one.endswith("ForConditionalGeneration"))
    model = getattr(importlib.import_module(f"easytorch.models.{family}"), head)(FAMILIES[family].config()).eval()
    ids = torch.arange(3, 11)[None]
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(input_ids=ids).logits
        torch.testing.assert_close(compiled, model(input_ids=ids).logits, **TOLERANCE)
