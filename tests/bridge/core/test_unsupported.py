"""Adapters and quantized weights are refused by name, wherever they stand."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from easytorch.bridge.convert import convert
from easytorch.bridge.diff import diff
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.inspect import inspect
from easytorch.bridge.load_tree import load_tree
from easytorch.protocol import conversion

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path / "model")
    return model


def write_adapter(folder):
    folder.mkdir(exist_ok=True)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.ones(2, 8)}, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))


@pytest.mark.parametrize("to", ["torch", "flax", "dcp"])
def test_an_adapter_beside_its_model(llama, tmp_path, to):
    write_adapter(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"holds an adapter.*adapter_config\.json.*merge_and_unload"):
        convert(tmp_path / "model", tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "model/model.safetensors", tmp_path / "alone", to=to)
    assert not list((tmp_path / "alone").rglob("adapter*"))
    assert (tmp_path / "alone/config.json").is_file()


def test_an_adapter_beside_its_model_is_said_to_those_who_look(llama, tmp_path):
    (tmp_path / "run").mkdir()
    llama.save_pretrained(tmp_path / "run/checkpoint-3")
    for folder, path in ((tmp_path / "model",) * 2, (tmp_path / "run/checkpoint-3", tmp_path / "run")):
        assert inspect(path).notes == diff(path, path).notes == ()
        write_adapter(folder)
        (note,) = inspect(path).notes
        assert note.startswith(f"{folder} holds an adapter (PEFT, adapter_config.json)")
        assert diff(path, path).notes == (note, note)
        with pytest.raises(CheckpointError, match="holds an adapter"):
            convert(path, tmp_path / "out", to="flax")


@pytest.mark.parametrize("to", ["torch", "flax"])
def test_an_adapter_in_other_arrangements(llama, tmp_path, to):
    """In a folder of its own in that of the model; without its config; in the state dict itself."""
    write_adapter(tmp_path / "model/adapter")
    (tmp_path / "model/adapter/README.md").write_text("of the adapter")
    report = convert(tmp_path / "model", tmp_path / "out", to=to)
    assert any("adapter is left out: it is an adapter" in note for note in report.notes)
    assert not list((tmp_path / "out").rglob("adapter*"))
    (tmp_path / "model/adapter/adapter_model.safetensors").rename(tmp_path / "model/adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds an adapter.*adapter_model\.safetensors.*merge_and_unload"):
        convert(tmp_path / "model", tmp_path / "none", to=to)


@pytest.mark.parametrize("name", ["base_model.model.{}", "{}.lora_A.default.weight", "{}.base_layer.weight"])
def test_a_state_dict_with_an_adapter(llama, tmp_path, name):
    file = tmp_path / "model/model.safetensors"
    extra = {name.format("model.layers.0.self_attn.q_proj"): torch.ones(3)}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"adapter.*merge_and_unload"):
        convert(tmp_path / "model", tmp_path / "out", to="flax")


def test_an_adapter_alone(tmp_path):
    write_adapter(tmp_path / "adapter")
    (tmp_path / "moved").mkdir()
    (tmp_path / "adapter/adapter_model.safetensors").rename(tmp_path / "moved/adapter_model.safetensors")
    places = (tmp_path / "adapter", tmp_path / "moved/adapter_model.safetensors")
    for place in places:
        for call in (lambda p: convert(p, tmp_path / "out", to="flax"), inspect, load_tree):
            with pytest.raises(CheckpointError, match="is an adapter"):
                call(place)


def test_models_with_adapters(llama):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(llama, peft.LoraConfig(target_modules=["q_proj"], r=2))
    for call in (conversion.to_flax, conversion.transform_fn, conversion.to_torch):
        for model in (adapted, adapted.base_model):
            with pytest.raises(TypeError, match=r"has an adapter.*merge_and_unload"):
                call(model)
    conversion.to_flax(adapted.merge_and_unload())
    with pytest.raises(TypeError, match="Linear is no model of transformers"):
        conversion.to_flax(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes", "gptq", "awq"])
def test_quantized_weights(llama, tmp_path, method):
    config = tmp_path / "model/config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(CheckpointError, match=rf"config\.json.*`quantization_config`.*\({method}\).*dequantize"):
        convert(tmp_path / "model", tmp_path / "out", to="flax")
    convert(tmp_path / "model", tmp_path / "same-names", to="dcp")


@pytest.mark.parametrize(
    "end",
    [
        *("weight.absmax", "qweight", "weight_scale_inv", "SCB", "weight_packed"),
        *("biases", "k_scale", "weight_scale_2", "input_global_scale", "weight_scales", "W_q", "weight._data"),
        *("_weight_qdata", "gate_up_proj_blocks"),
    ],
)
def test_parts_of_quantized_weights_without_a_word_in_the_config(llama, tmp_path, end):
    file = tmp_path / "model/model.safetensors"
    extra = {f"model.layers.0.mlp.up_proj.{end}": torch.ones(3)}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"quantized weights.*`quantization_config`"):
        convert(tmp_path / "model", tmp_path / "out", to="flax")


def test_fp8_without_scales_is_said(llama, tmp_path):
    file = tmp_path / "model/model.safetensors"
    state = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})
    cast = convert(tmp_path / "model", tmp_path / "cast", to="torch", dtype="bf16")
    for report in (cast, convert(tmp_path / "model", tmp_path / "out", to="flax", verify=True)):
        assert any("float8_e4m3fn" in note and "quantization_config" in note for note in report.notes)


@pytest.mark.parametrize("key", ["compression_config", "quantization"])
def test_other_keys_say_quantized(llama, tmp_path, key):
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: {"bits": 4}}))
    with pytest.raises(CheckpointError, match=rf"`{key}` says that the weights are quantized"):
        convert(tmp_path / "model", tmp_path / "out", to="flax")


def test_integers_in_the_place_of_weights_are_said(llama, tmp_path):
    file = tmp_path / "model/model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    state = load_file(file)
    save_file(state | {name: torch.ones(12, 8, dtype=torch.int8)}, file, metadata={"format": "pt"})
    report = convert(tmp_path / "model", tmp_path / "out", to="flax", verify=True)
    assert any("1 tensors are int8" in note for note in report.notes)


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("parts", [("weight", "weight_scale_inv"), ("qweight", "scales"), ("weight", "weight.absmax")])
def test_quantized_weights_are_not_cast(llama, tmp_path, stated, parts):
    """Scales and fp8 in bfloat16 are no weights any more, whatever config.json goes on to say of them."""
    folder, module = tmp_path / "model", "model.layers.0.mlp.up_proj"
    state = load_file(folder / "model.safetensors")
    whole = state.pop(f"{module}.weight")
    narrow = whole.to(torch.float8_e4m3fn) if parts[1].endswith("inv") else whole.to(torch.int8)
    state |= {f"{module}.{parts[0]}": narrow, f"{module}.{parts[1]}": torch.ones(1)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    if stated:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | {"quantization_config": {"quant_method": "x"}}))
    for to in ("torch", "dcp"):
        with pytest.raises(CheckpointError, match=r"quantized"):
            convert(folder, tmp_path / "out", to=to, dtype="bf16")
        convert(folder, tmp_path / f"as-it-is-{to}", to=to, verify=True)


def test_a_weight_called_like_scales_is_cast(llama, tmp_path):
    file = tmp_path / "model/model.safetensors"
    save_file(load_file(file) | {"adapter.scales": torch.ones(3)}, file, metadata={"format": "pt"})
    convert(tmp_path / "model", tmp_path / "out", to="torch", dtype="bf16")
