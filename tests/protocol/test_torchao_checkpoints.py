"""torchao's checkpoints, with the tensors that its 0.18 writes: the layers compute with the same numbers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import easytorch
from easytorch.bridge.errors import CheckpointError
from easytorch.layers.quantized import QuantizedLinear

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, dtype="float32"),
    "mpt": transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=97, dtype="float32"),  # not native
}
IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60]])
# kind: codes, the least and largest of them, columns a scale, whether zero points are other than 0
KINDS: dict[str, tuple[torch.dtype, int, int, int | None, bool]] = {
    "int8": (torch.int8, -128, 127, None, False),
    "int8 groups": (torch.int8, -128, 127, 16, False),
    "int8 zeros": (torch.int8, -128, 127, 16, True),
    "int4": (torch.int8, -8, 7, 16, False),
    "int4 zeros": (torch.int8, -8, 7, 16, True),
    "fp8": (torch.float8_e4m3fn, -100, 100, None, False),
}
FORMATS = {"int8": "int8", "int8 groups": "int8", "int4": "int4", "int4 zeros": "affine", "fp8": "fp8"}


def checkpoint(folder: Path, name: str, kind: str) -> transformers.PreTrainedModel:
    """A folder of the checkpoint, and transformers' own model with the weights that it stands for."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    dtype, least, largest, size, zeros = KINDS[kind]
    plain = dict(tensors)
    for layer, module in theirs.named_modules():
        if not isinstance(module, nn.Linear) or layer.endswith("lm_head"):
            continue
        rows, columns = module.weight.shape
        width = size or columns
        shape = (rows, columns // width)
        codes = torch.randint(least, largest + 1, (rows, columns), generator=generator)
        codes = codes.float().to(dtype) if dtype.is_floating_point else codes.to(dtype)
        scale = (torch.rand(shape, generator=generator) + 0.5) * 0.05 / largest
        scale = scale.bfloat16() if kind.startswith("int4") else scale
        zero = torch.randint(least, largest + 1, shape, generator=generator) if zeros else torch.zeros(shape)
        numbers = codes.float().unflatten(1, (-1, width)) - zero.float()[..., None]
        plain[f"{layer}.weight"] = (numbers * scale.float()[..., None]).flatten(1)
        del tensors[f"{layer}.weight"]
        tensors |= {f"{layer}._weight_qdata": codes, f"{layer}._weight_scale": scale}
        if not dtype.is_floating_point:
            tensors[f"{layer}._weight_zero_point"] = zero.to(torch.int8)
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    expected = type(theirs).from_pretrained(folder).eval()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": {"default": {"_type": "any"}}}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_have_the_codes_of_the_checkpoint(name: str, kind: str, tmp_path: Path) -> None:
    expected = checkpoint(tmp_path / "theirs", name, kind)
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    found = {one.settings.format for one in model.modules() if isinstance(one, QuantizedLinear)}
    assert found == ({FORMATS[kind]} if kind in FORMATS else set())  # int8 has no zero points here: decoded
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-5)
        model.save_pretrained(tmp_path / "ours")
        again = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_stacks_of_experts_are_decoded(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    config = transformers.Qwen3MoeConfig(**SIZES, **sizes, num_key_value_heads=2, dtype="float32")
    expected = transformers.AutoModelForCausalLM.from_config(config).eval()
    expected.save_pretrained(tmp_path / "plain")
    tensors = {name: one.clone() for name, one in expected.state_dict().items()}
    for name in [name for name in tensors if ".experts." in name]:
        weight, (module, _, leaf) = tensors.pop(name), name.rpartition(".")
        scale = weight.abs().amax(-1, keepdim=True) / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        tensors |= {f"{module}._{leaf}_qdata": codes, f"{module}._{leaf}_scale": scale}
        expected.get_parameter(name).data = codes.float() * scale
    folder = tmp_path / "torchao"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((tmp_path / "plain/config.json").read_text())
    content["quantization_config"] = {"quant_method": "torchao", "quant_type": {"default": {"_type": "any"}}}
    (folder / "config.json").write_text(json.dumps(content))
    model = easytorch.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-5)
    save_file(tensors | {f"{module}._{leaf}_scale": scale[:, :3].contiguous()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="no grid over"):
        easytorch.AutoModelForCausalLM.from_pretrained(folder)


def test_a_layer_of_another_format_is_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = checkpoint(tmp_path, "llama", "int4")
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.1.mlp.down_proj"
    scale = tensors[f"{layer}._weight_scale"].float()
    per_tensor = {"_weight_scale": torch.tensor(0.01), "_weight_zero_point": torch.tensor(0, dtype=torch.int8)}
    codes = tensors[f"{layer}._weight_qdata"]
    save_file(tensors | {f"{layer}.{key}": one for key, one in per_tensor.items()}, tmp_path / "model.safetensors")
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert scale.shape[1] == 4 and "1 torchao layers are decoded" in caplog.text
    with torch.no_grad():
        expected.model.layers[1].mlp.down_proj.weight.copy_(codes.float() * 0.01)
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-5)


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama", "int8 groups")
    tensors, layer = load_file(tmp_path / "model.safetensors"), "model.layers.0.self_attn.q_proj"
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"_weight_act_pre_scale": torch.ones(1)}, "act_pre_scale beside it, which is not read"),
        ({"_weight_scale": None}, "is missing beside"),
        ({"_weight_qdata": torch.zeros(32, 16, dtype=torch.uint8)}, r"\(32, 16\) torch.uint8; int8"),
        ({"_weight_scale": torch.ones(3, 2)}, r"\(3, 2\), which is no grid"),
        ({"_weight_scale": torch.ones(32, 3)}, r"\(32, 3\), which is no grid"),
        ({"_weight_zero_point": torch.zeros(32, 1)}, "beside scales"),
        ({"_weight_zero_point": torch.full((32, 2), 0.5)}, "has a fraction"),
    )
    for change, match in changes:
        changed: dict[str, Any] = tensors | {f"{layer}.{key}": one for key, one in change.items()}
        save_file({key: one for key, one in changed.items() if one is not None}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=match):
            easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)
    save_file({key: one for key, one in tensors.items() if "_weight_" not in key}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds no quantized weight"):
        easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("zeros", [False, True])
def test_an_int4_tensor_is_read(zeros: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """FBGEMM's layout: two codes a byte, the first in the lower bits; numbers are code * scale + zero."""
    expected = checkpoint(tmp_path, "llama", "int4")
    tensors = load_file(tmp_path / "model.safetensors")
    metadata = {"format": "pt"}
    for name in [one for one in tensors if one.endswith("_weight_qdata")]:
        layer = name.removesuffix("._weight_qdata")
        codes, scale = tensors[name], tensors[f"{layer}._weight_scale"]
        zero = torch.randn(scale.shape).bfloat16() * 0.01 if zeros else torch.zeros_like(scale)
        tensors[name] = (codes[:, ::2] & 15) | codes[:, 1::2] << 4
        tensors[f"{layer}._weight_scale"] = scale.t().contiguous()
        tensors[f"{layer}._weight_zero_point"] = zero.t().contiguous()
        if zeros:  # else the config says it
            metadata[f"{layer}.weight"] = json.dumps({"_type": "Int4Tensor", "_data": {"block_size": [1, 16]}})
        with torch.no_grad():
            expected.get_submodule(layer).weight += zero.float().repeat_interleave(16, 1)
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    config = json.loads((tmp_path / "config.json").read_text())
    kind = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 16, "int4_packing_format": {"_data": "PLAIN"}}}
    config["quantization_config"]["quant_type"] = {"default": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    found = {one.settings.format for one in model.modules() if isinstance(one, QuantizedLinear)}
    assert found == (set() if zeros else {"int4"}) and ("14 torchao layers are decoded" in caplog.text) == zeros
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-5)
    layer = "model.layers.0.self_attn.q_proj._weight_scale"
    save_file(tensors | {layer: torch.ones(3, 2)}, tmp_path / "model.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError, match="an Int4Tensor has"):
        easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)
