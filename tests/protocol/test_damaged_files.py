"""Adapter folders and train states with a damaged or edited file: one clear error, and the model as it was."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from easytorch import protocol
from easytorch.bridge.errors import CheckpointError
from tests.protocol.shared_models import IDS, shared

pytest.importorskip("peft")


def new():
    return copy.deepcopy(shared("llama"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    new().apply_lora_to_layers(4, "q_proj|v_proj", rngs=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A state with an adapter and AdamW's slots."""
    folder = tmp_path_factory.mktemp("state") / "state"
    model = new().apply_lora_to_layers(4, "q_proj", rngs=0)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    protocol.compute_loss(model, input_ids=IDS)[1].loss.backward()
    optimizer.step()
    model.to_state(optimizer, step=3).save(folder)
    return folder


CONFIGS = {
    "{": "is not valid JSON",
    "[]": "holds a JSON list",
    "\udcff": "is not valid JSON",
    "peft_type": "has no peft_type",
    "no targets of a type": ({"target_modules": 3}, "target_modules=3 must be a list of str"),
    "targets in the list": ({"target_modules": [3]}, r"target_modules=\[3\] must be"),
    "a broken pattern": ({"target_modules": "("}, "is no regular expression"),
    "an unknown kind": ({"peft_type": "LORRA"}, "peft_type='LORRA' is none that PEFT .* has .*'LORA'"),
    "prompts": ({"peft_type": "PROMPT_TUNING"}, "whose prompts stand in no layer"),
    "a rank of text": ({"r": "4"}, "r='4' must be int"),
    "a rank of nothing": ({"r": 0}, "r=0 must be an integer of at least 1"),
    "a layer's rank": ({"rank_pattern": {"q_proj": "a"}}, "rank_pattern=.* must give layers an integer"),
    "a scale that is no number": ({"lora_alpha": float("nan")}, "lora_alpha=nan must be a finite number"),
    "a scale of nothing": ({"lora_alpha": None}, "lora_alpha=None must be"),
    "scales of nothing": ({"alpha_pattern": None}, "alpha_pattern=None must give layers a finite number"),
    "a word": ({"bias": "some"}, "bias='some' must be 'none' or 'all'"),
    "a flag": ({"use_dora": "yes"}, "use_dora='yes' must be bool"),
    "another rank": ({"r": 8}, r"lora_A.* has the shape \(4, 32\), and \(8, 32\) in the model"),
}
WEIGHTS = {
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-100]), "is truncated or corrupt"),
    "empty": (lambda file: file.write_bytes(b""), "is truncated or corrupt"),
    "missing": (lambda file: file.unlink(), "has neither adapter_model.safetensors nor adapter_model.bin"),
    "pickle": (
        lambda file: (file.with_suffix(".bin").write_bytes(b"\x80\x02garbage"), file.unlink()),
        r"adapter_model\.bin",
    ),
    "a shape": (
        lambda file: save_file({key: one[:2].clone() for key, one in load_file(file).items()}, file),
        r"has the shape \(2, 32\), and \(4, 32\) in the model",
    ),
    "one more": (lambda file: save_file(load_file(file) | {"more": torch.ones(2)}, file), "'more' is no part of it"),
}


@pytest.mark.parametrize("case", [*CONFIGS, *WEIGHTS])
def test_a_damaged_adapter_is_one_clear_error(case, adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "copy")
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text())
    if case in WEIGHTS:
        change, match = WEIGHTS[case]
        change(folder / "adapter_model.safetensors")
    elif isinstance(CONFIGS[case], str):
        match = CONFIGS[case]
        text = json.dumps({key: one for key, one in content.items() if key != case}) if case in content else case
        file.write_bytes(text.encode(errors="surrogateescape"))
    else:
        edits, match = CONFIGS[case]
        file.write_text(json.dumps(content | edits))
    model = new()
    before = {name: (one.clone(), one.requires_grad) for name, one in model.named_parameters()}
    with pytest.raises(ValueError, match=match):
        model.load_adapter(folder)
    after = {name: (one, one.requires_grad) for name, one in model.named_parameters()}
    assert after.keys() == before.keys()
    assert all(torch.equal(one, before[name][0]) and kept == before[name][1] for name, (one, kept) in after.items())


def test_what_peft_takes_is_taken(adapter, tmp_path):
    """Fractions as alpha, settings of a later PEFT, which it warns of, and targets that it knows itself."""
    folder = shutil.copytree(adapter, tmp_path / "copy")
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text()) | {"lora_alpha": 0.5, "of_tomorrow": 1, "target_modules": None}
    file.write_text(json.dumps(content | {"init_lora_weights": "pissa_niter_4"}))
    model = new()
    with pytest.warns(UserWarning, match="of_tomorrow"):
        model.load_adapter(folder)
    assert model.model.layers[0].self_attn.q_proj.scaling["default"] == 0.125
    with pytest.raises(CheckpointError, match="is no folder"):
        new().load_adapter(tmp_path / "none")


NAME = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
# The place of a value in train_state.json, what is put there, the error.
STATES = [
    ("step", -1, "step must be an integer of at least 0, and is -1"),
    ("step", 1.5, "step must be an integer"),
    ("step", "3", "step must be an integer"),
    ("params", 3, "params must be a dict of tensors"),
    ("buffers", {"list": []}, "buffers must be a dict of tensors"),
    ("params", {"dict": [["a", {"tensor": "b"}]]}, "params/a must be the name of a tensor"),
    ("optimizer", 3, "optimizer must be an object"),
    ("optimizer kind", None, "optimizer.kind must be the name of a class"),
    ("optimizer slots", 3, "optimizer.slots must be a dict by parameter name"),
    ("optimizer slots", {"dict": [["a", 3]]}, "slots of 'a' must be a dict"),
    ("optimizer slots", {"dict": [["a"]]}, "must be a list of pairs"),
    ("optimizer slots", {"dict": [["a", {"dict": []}]]}, "'a' has slots, and is no parameter"),
    ("optimizer slots", {"dict": [[NAME, {"dict": [["exp_avg", 3]]}]]}, "'exp_avg' of .* must be a tensor of floats"),
    ("optimizer slots", {"dict": [[NAME, {"dict": [["step", 3]]}]]}, "lack 'exp_avg', and AdamW needs step"),
    ("optimizer groups", {"list": [{"dict": []}]}, r"groups\[0\].params must be a list of parameter names"),
    ("optimizer groups", {"list": [{"dict": [["params", {"list": ["a"]}]]}]}, "'a' is in a group, and is no parameter"),
    ("adapters", [["default"]], "adapters must be pairs of a name"),
    ("adapters", [["default", {"peft_type": "NONE"}]], "peft_type='NONE' is none"),
    ("active_adapters", ["other"], r"must be names of the adapters \['default'\]"),
    ("frozen", 3, "frozen must be a list of names"),
]


@pytest.mark.parametrize(("place", "value", "match"), STATES, ids=range(len(STATES)))
def test_an_edited_state_is_one_clear_error(place, value, match, state, tmp_path):
    folder = shutil.copytree(state, tmp_path / "copy")
    file = folder / "train_state.json"
    content = json.loads(file.read_text())
    *above, key = place.split()
    (content[above[0]] if above else content)[key] = value
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=match):
        protocol.load_state(folder, model_class=type(shared("llama")))


@pytest.mark.parametrize(
    ("place", "change", "match"),
    [
        (r"/exp_avg$", lambda one: one.int(), "must be a tensor of floats, and is torch.int32"),
        (r"/step$", lambda one: one - 9, "'step' of .* must be a tensor of one float of at least 0"),
        (r"/step$", lambda one: one.int(), "'step' of .* must be a tensor of one float"),
        (r"^params/", lambda one: one.int(), "is torch.int32, and torch.float32 in the model"),
    ],
)
def test_tensors_of_another_dtype(place, change, match, state, tmp_path):
    import re

    folder = shutil.copytree(state, tmp_path / "copy")
    file = folder / "train_state.safetensors"
    save_file({key: change(one) if re.search(place, key) else one for key, one in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match=match):
        protocol.load_state(folder, model_class=type(shared("llama")))


@pytest.mark.parametrize(
    ("setting", "value", "fits"),
    [("lr", "x", False), ("lr", None, False), ("lr", torch.tensor(0.1), True), ("betas", 3, False),
     ("betas", (0.9,), False), ("betas", [0.9, 0.5], True), ("foreach", False, True), ("foreach", "x", False),
     ("initial_lr", 0.5, True)],
)  # fmt: skip
def test_settings_of_a_group_fit_the_optimizer(setting, value, fits):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    given = protocol.OptimizerState.of(optimizer, model)
    given.groups[0][setting] = value
    if fits:
        given.restore(optimizer, model)
        assert optimizer.param_groups[0][setting] is value or optimizer.param_groups[0][setting] == value
        return
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=f"{setting}=.* of group 0 does not fit the optimizer"):
        given.restore(optimizer, model)
    assert optimizer.state_dict() == before


@pytest.mark.parametrize("kind", [int, torch.nn.Linear, dict[str, int]])
def test_a_class_that_makes_no_model(kind, state):
    with pytest.raises(TypeError, match=r"model_class=\w+ must be a model class of transformers or an auto class"):
        protocol.load_state(state, model_class=kind)
    with pytest.raises(TypeError, match=r"model_class=\w+ must be"):
        protocol.lazy_init(kind, shared("llama").config)
