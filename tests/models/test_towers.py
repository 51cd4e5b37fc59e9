"""What towers share: files, other sizes of images, patches that are masked, precision, Flax, and what is refused."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import easytorch
from easytorch.layers import fused_linear
from easytorch.protocol.conversion import to_flax
from easytorch.protocol.native import NativeModel
from tests.models.families import FAMILIES, HEADS, LANGUAGE, TOWERS
from tests.models.test_parity import assert_same
from tests.models.tower_families import TWO_TOWERS, image, tensors, tower_inputs, tower_labels

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
TOWER_CLASSES = [(family, head) for family, head in HEADS if family in TOWERS]


@pytest.fixture(params=TOWERS)
def family(request):
    return request.param


def models(make_pair, family, head=None, reference=None, **changes):
    row = FAMILIES[family]
    return make_pair(head or LANGUAGE[family], row.config(**changes), reference or row.reference)


def equal(one, other) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(second[name], first[name]) for name in first)


@pytest.mark.parametrize("family, head", TOWER_CLASSES)
def test_files_go_both_ways(family, head, make_pair, tmp_path) -> None:
    ours, theirs = models(make_pair, family, head)
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert equal(type(theirs).from_pretrained(tmp_path / "ours"), theirs)
    loaded = type(ours).from_pretrained(tmp_path / "theirs")
    assert equal(loaded, ours)
    inputs = tower_inputs(head)
    with torch.no_grad():  # what is in no file is made anew on the meta device
        assert_same(loaded.eval()(**inputs), ours(**inputs))


def test_auto_classes_make_native_towers(family) -> None:
    row = FAMILIES[family]
    if row.config_class not in transformers.AutoModel._model_mapping:
        assert family in ("siglip_text_model", "siglip2_text_model")  # which transformers' auto classes lack
        return
    made = easytorch.AutoModel.from_config(row.config())
    assert isinstance(made, NativeModel) and type(made).__name__ == row.heads[0]
    assert made.easytorch_report.native
    named = {"ForImageClassification": "AutoModelForImageClassification", "Backbone": "AutoBackbone"}
    named["ForMaskedImageModeling"] = "AutoModelForMaskedImageModeling"
    for head in row.heads:
        for ending, auto in named.items():
            if head.endswith(ending):
                assert type(getattr(easytorch, auto).from_config(row.config())).__name__ == head
    for part in made.modules() if family in TWO_TOWERS else ():
        if isinstance(part, PreTrainedModel):
            assert isinstance(part, NativeModel)


@pytest.mark.parametrize("family", TWO_TOWERS)
def test_a_checkpoint_of_two_towers_has_each_of_them(family, make_pair, tmp_path) -> None:
    ours, theirs = models(make_pair, family)
    for model in (ours, theirs):
        model.save_pretrained(tmp_path / "joint")
        for part, tower in (("text_model", ours.text_model), ("vision_model", ours.vision_model)):
            native = importlib.import_module(f"easytorch.models.{family}_{part}")
            loaded = getattr(native, type(tower).__name__).from_pretrained(tmp_path / "joint")
            assert equal(loaded, tower)
        native = importlib.import_module(f"easytorch.models.{family}")
        classifier = getattr(native, FAMILIES[family].heads[1]).from_pretrained(tmp_path / "joint")
        assert equal(classifier.vision_model, ours.vision_model)


@pytest.mark.parametrize("family, head", TOWER_CLASSES)
def test_initial_weights_names_and_plans_are_those_of_transformers(family, head) -> None:
    made = []
    for source in (transformers, importlib.import_module(f"easytorch.models.{family}")):
        torch.manual_seed(3)
        made.append(getattr(source, head)(FAMILIES[family].config()))
    theirs, ours = (dict(model.named_parameters()) for model in made)
    assert list(ours) == list(theirs)
    # the parts that are models, as a base_model that is saved by itself
    parts = [[name for name, part in model.named_modules() if isinstance(part, PreTrainedModel)] for model in made]
    assert parts[0] == parts[1]
    for name, weight in theirs.items():
        given, expected = (one.std(correction=0).item() for one in (ours[name], weight))
        assert (given == 0) == (expected == 0), name
        assert given == pytest.approx(expected, rel=0.4, abs=0.01), name
    buffers = [dict(model.named_buffers()) for model in made]
    assert all(torch.equal(buffers[1][name], one) for name, one in buffers[0].items())
    plans = ("_tp_plan", "_pp_plan", "_no_split_modules", "all_tied_weights_keys", "base_model_prefix")
    for plan in (*plans, "main_input_name", "input_modalities"):
        assert getattr(made[1], plan) == getattr(made[0], plan), plan
    if family not in ("clip", "gemma4_vision", "gemma4_audio"):  # which lack it in transformers
        shapes = [[one.shape for one in model.get_input_embeddings().parameters()] for model in made]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("family, head", TOWER_CLASSES)
def test_arguments_stand_in_the_order_of_transformers(family, head) -> None:
    ours = getattr(importlib.import_module(f"easytorch.models.{family}"), head)
    switches = {"kwargs", "output_attentions", "output_hidden_states", "return_dict"}
    given, expected = (
        [name for name in inspect.signature(one.forward).parameters if name not in switches]
        for one in (ours, getattr(transformers, head))
    )
    assert [name for name in given if name in expected] == expected


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
        and hasattr(transformers, name)
    }
    assert theirs == set(row.heads)


@pytest.mark.parametrize("family, head", TOWER_CLASSES)
def test_attentions_of_every_head(family, head, make_pair) -> None:
    ours, theirs = models(make_pair, family, head, "eager")
    inputs = tower_inputs(head)
    asked = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        assert_same(ours(**inputs, **asked), theirs(**inputs, **asked))
        assert isinstance(ours(**inputs, return_dict=False), tuple)


def test_flax_and_back(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    tree = ours.to_flax()
    assert equal(type(ours).from_flax(ours.config, tree), ours)
    assert _paths(tree) == _paths(to_flax(theirs))


def _paths(tree, prefix=()) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for name, value in tree.items():
        found |= _paths(value, (*prefix, name)) if hasattr(value, "items") else {(*prefix, name, value.shape)}
    return found


def test_bfloat16_is_as_exact_as_transformers(family, make_pair) -> None:
    """Outputs and gradients."""
    ours, theirs = models(make_pair, family)
    exact = computed((ours if family == "gemma4_audio" else theirs).double(), family)  # transformers' is half float32
    errors = [
        (torch.cat([one.float().flatten() for one in computed(model.bfloat16(), family)]) - _flat(exact)).norm()
        for model in (ours, theirs)
    ]
    assert errors[0] <= 1.3 * errors[1]


def _flat(parts) -> torch.Tensor:
    return torch.cat([one.float().flatten() for one in parts])


def computed(model, family) -> list[torch.Tensor]:
    """Every tensor of an output, and every gradient of their mean square."""
    model.zero_grad()
    inputs = {
        name: one.to(model.dtype) if one.is_floating_point() else one
        for name, one in tower_inputs(LANGUAGE[family]).items()
    }
    output = tensors(model(**inputs))
    sum(one.double().square().mean() for one in output).backward()
    return [one.detach() for one in output] + [p.grad for p in model.parameters() if p.grad is not None]


SIZES = [(20, 16), (12, 12), (8, 24), (13, 18)]
RESIZED = [
    (family, head)
    for family, head in TOWER_CLASSES
    if "interpolate_pos_encoding" in inspect.signature(getattr(transformers, head).forward).parameters
    and head != "ViTForMaskedImageModeling"  # whose reconstruction is square in transformers
]


@pytest.mark.parametrize("family, head", RESIZED)
def test_images_of_another_size_resize_the_positions(family, head, make_pair) -> None:
    ours, theirs = models(make_pair, family, head)
    inputs = tower_inputs(head)
    with torch.no_grad():
        for size in SIZES:
            given = inputs | {"pixel_values": image(*size), "interpolate_pos_encoding": True}
            assert_same(ours(**given), theirs(**given))
    with pytest.raises(ValueError, match=r"image size \(20\*16\) doesn't match model \(12\*12\); pass interpolate_pos"):
        ours(**inputs | {"pixel_values": image(20, 16)})


@pytest.mark.parametrize("family", ["vit", "dinov2"])
def test_patches_that_are_no_squares(family) -> None:
    """(height, width), of images and patches: transformers takes squares alone."""
    config = FAMILIES[family].config(image_size=(12, 24), patch_size=(2, 4))
    embeddings = easytorch.AutoModel.from_config(config).embeddings
    assert embeddings.patch_embeddings.grid == (6, 6)
    tokens = torch.zeros(1, 37, 32)
    for height, width in ((12, 24), (24, 24), (12, 48), (6, 40)):
        found = embeddings.interpolate_pos_encoding(tokens, height, width)
        assert found.shape[1] == 1 + (height // 2) * (width // 4)
    assert torch.equal(embeddings.interpolate_pos_encoding(tokens, 12, 24), embeddings.position_embeddings)


@pytest.mark.parametrize("family", ["dinov2", "dinov3_vit"])
def test_dino_takes_any_size(family, make_pair) -> None:
    for head in FAMILIES[family].heads:
        ours, theirs = models(make_pair, family, head)
        with torch.no_grad():
            for size in SIZES:
                assert_same(ours(image(*size)), theirs(image(*size)))


@pytest.mark.parametrize("family", ["dinov2", "dinov3_vit"])
def test_feature_maps_as_the_config_says(family, make_pair) -> None:
    """Without the final norm, and as tokens."""
    head = next(head for head in FAMILIES[family].heads if head.endswith("Backbone"))
    for setting in ("apply_layernorm", "reshape_hidden_states"):
        pair = models(make_pair, family, head, out_indices=[1, 2], **{setting: False})
        for name in ("num_features", "channels", "out_feature_channels", "stage_names", "out_features", "out_indices"):
            assert getattr(pair[0], name) == getattr(pair[1], name), name
        with torch.no_grad():
            maps, expected = (model(image()).feature_maps for model in pair)
        assert len(maps) == len(expected) == 2
        for one, other in zip(maps, expected, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)


def test_dino_resizes_its_positions_in_float32(make_pair) -> None:
    """Of half precision too: they have the bits of transformers'."""
    ours, theirs = (model.bfloat16().base_model.embeddings for model in models(make_pair, "dinov2"))
    for height, width in SIZES:
        tokens = torch.zeros(1, 1 + height // 4 * (width // 4), 32, dtype=torch.bfloat16)
        found, expected = (one.interpolate_pos_encoding(tokens, height, width) for one in (ours, theirs))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["vit", "dinov2", "dinov3_vit"])
def test_masked_patches(family, make_pair) -> None:
    head = "ViTForMaskedImageModeling" if family == "vit" else FAMILIES[family].heads[0]
    ours, theirs = models(make_pair, family, head)
    marked = torch.tensor([[True, False, False] * 3, [False, True, True] * 3])
    with torch.no_grad():
        assert_same(ours(image(), bool_masked_pos=marked), theirs(image(), bool_masked_pos=marked))
        assert not torch.allclose(tensors(ours(image(), bool_masked_pos=marked))[0], tensors(ours(image()))[0])


def test_a_masked_image_of_another_size_is_reconstructed_in_its_own(make_pair) -> None:
    ours, _ = models(make_pair, "vit", "ViTForMaskedImageModeling")
    marked = torch.arange(20).expand(2, -1) % 3 == 0
    output = ours(image(20, 16), bool_masked_pos=marked, interpolate_pos_encoding=True)
    assert output.reconstruction.shape == (2, 3, 20, 16)
    rows = marked.view(2, 1, 5, 4).repeat_interleave(4, 2).repeat_interleave(4, 3).expand(2, 3, 20, 16)
    expected = (output.reconstruction - image(20, 16)).abs()[rows].mean()
    torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["vit", "dinov2"])
def test_tokens_that_are_not_attended_to(family, make_pair) -> None:
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, 3:6], mask[1, 8:] = 0, 0
    for head in FAMILIES[family].heads:
        ours, theirs = models(make_pair, family, head)
        with torch.no_grad():
            assert_same(ours(image(), attention_mask=mask), theirs(image(), attention_mask=mask))


def test_dino_draws_the_same_positions_and_paths_in_training(make_pair) -> None:
    changes = {"pos_embed_shift": 0.3, "pos_embed_jitter": 1.5, "pos_embed_rescale": 2.0, "drop_path_rate": 0.5}
    outputs = []
    for model in models(make_pair, "dinov3_vit", **changes):
        torch.manual_seed(5)
        outputs.append(model.train()(image()))
    assert_same(*outputs)
    assert not torch.equal(outputs[0].last_hidden_state, model.eval()(image()).last_hidden_state)


@pytest.mark.parametrize(
    "family, rate", [(family, rate) for family in TOWERS for rate in FAMILIES[family].dropouts], ids=str
)
def test_each_dropout_acts_and_only_in_training(family, rate, make_pair) -> None:
    inputs = tower_inputs(LANGUAGE[family])
    for changes, random in (({}, False), ({rate: 0.5}, True)):
        model, _ = models(make_pair, family, **changes)
        with torch.no_grad():
            assert torch.equal(tensors(model(**inputs))[0], tensors(model(**inputs))[0])
            model.train()
            assert torch.equal(tensors(model(**inputs))[0], tensors(model(**inputs))[0]) != random


def test_query_key_and_value_are_one_product(family, make_pair, monkeypatch) -> None:
    monkeypatch.setattr(fused_linear, "SMALLEST_WEIGHT", 0)
    ours, theirs = models(make_pair, family)
    inputs, found = tower_inputs(LANGUAGE[family]), []
    together = fused_linear._by_runs
    monkeypatch.setattr(fused_linear, "_by_runs", lambda *args: (found.append(args[1]), together(*args))[1])
    with torch.no_grad():
        assert_same(ours(**inputs), theirs(**inputs))
    if family.startswith("gemma4"):  # whose projections may clip, each its own input
        return
    # the keys of these two have no bias
    assert found and (family in ("dinov3_vit", "whisper") or all(len(runs) == 1 for runs in found))


@pytest.mark.parametrize("family", TWO_TOWERS)
def test_features_of_one_tower(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    inputs = tower_inputs(LANGUAGE[family])
    text = {name: inputs.pop(name) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        assert_same(ours.get_text_features(**text), theirs.get_text_features(**text))
        assert_same(ours.get_image_features(**inputs), theirs.get_image_features(**inputs))
        three = {name: one.repeat(3, *[1] * (one.dim() - 1))[:5] for name, one in inputs.items()}
        assert_same(ours(**text, **three), theirs(**text, **three))
        assert ours(**text, **three).logits_per_text.shape == (2, 5)


@pytest.mark.parametrize("problem, labels", [
    ("regression", torch.tensor([0.3, -1.0])),
    ("multi_label_classification", torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])),
    ("single_label_classification", torch.tensor([2, 0])),
])  # fmt: skip
@pytest.mark.parametrize("family, head", [one for one in TOWER_CLASSES if "ForImageClassification" in one[1]])
def test_every_problem_type(problem, labels, family, head, make_pair) -> None:
    ours, theirs = models(make_pair, family, head, num_labels=1 if problem == "regression" else 3)
    inputs = tower_inputs(head)
    output, expected = ours(**inputs, labels=labels), theirs(**inputs, labels=labels)
    torch.testing.assert_close(output.loss, expected.loss, **TOLERANCE)
    assert ours.config.problem_type == theirs.config.problem_type


@pytest.mark.parametrize("family, changes, words", [
    ("vit", {"hidden_act": "nosuch"}, "no activation is called 'nosuch'; known: .*gelu"),
    ("vit", {"patch_size": 16}, r"vit: config.image_size=12 holds no patch of config.patch_size=16"),
    ("dinov2", {"patch_size": 0}, "patch_size=0"),
    ("dinov3_vit", {"num_attention_heads": 16}, "dinov3_vit: heads of 2 numbers"),
    ("clip_vision_model", {"num_hidden_layers": -1}, "num_hidden_layers=-1 must be an integer"),
    ("clip_text_model", {"eos_token_id": [3, 7]}, r"clip_text_model: config.eos_token_id=\[3, 7\] must be one token"),
    ("siglip_text_model", {"num_attention_heads": 5}, r"hidden size \(32\) is not a multiple of .* heads \(5\)"),
    ("siglip_vision_model", {"num_attention_heads": 5}, r"hidden size \(24\) is not a multiple of .* heads \(5\)"),
    ("siglip2_vision_model", {"num_patches": 15}, "num_patches=15 is no square"),
])  # fmt: skip
def test_what_a_family_does_not_carry(family, changes, words) -> None:
    native = importlib.import_module(f"easytorch.models.{family}")
    with pytest.raises(ValueError, match=words):
        getattr(native, FAMILIES[family].heads[0])(FAMILIES[family].config(**changes))


def test_inputs_that_do_not_fit(make_pair) -> None:
    vit, _ = models(make_pair, "vit")
    for wrong in (torch.randn(2, 1, 12, 12), torch.randn(3, 12, 12)):
        with pytest.raises(ValueError, match=r"must be \(batch, 3, height, width\): the config has num_channels=3"):
            vit(wrong)
    for size in ((12, 16), (16, 12), (12, 8)):
        with pytest.raises(ValueError, match=rf"image size \({size[0]}\*{size[1]}\) doesn't match model \(12\*12\)"):
            vit(image(*size))
    with pytest.raises(ValueError, match="You have to specify pixel_values"):
        vit()
    with pytest.raises(ValueError, match="bool_masked_pos needs a mask token"):
        vit(image(), bool_masked_pos=torch.zeros(2, 9, dtype=torch.bool))
    text, _ = models(make_pair, "clip_text_model")
    with pytest.raises(ValueError, match=r"got `sequence length`: 21 and max_position_embeddings: 20"):
        text(torch.ones(1, 21, dtype=torch.long))
    with pytest.raises(ValueError, match="You have to specify input_ids"):
        text()
    images, _ = models(make_pair, "siglip2_vision_model")
    inputs = tower_inputs("Siglip2VisionModel")
    with pytest.raises(ValueError, match="spatial_shapes has 4 x 5 patches; pixel_values has room for 12"):
        images(**inputs | {"spatial_shapes": torch.tensor([[4, 5], [2, 3]])})


def test_labels_of_a_tower_reach_its_loss(make_pair) -> None:
    """Each row that has a loss is compared by it in test_parity.py."""
    for family, head in TOWER_CLASSES:
        ours, _ = models(make_pair, family, head)
        output = ours(**tower_inputs(head), **tower_labels(head))
        assert ("loss" in output) == bool(tower_labels(head))
