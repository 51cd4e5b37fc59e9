"""Checkpoints of four-bit floats: gpt-oss' blocks and compressed-tensors' layers compute with the numbers they hold."""

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
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import easytorch
from easytorch.bridge.errors import CheckpointError
from easytorch.layers.packed_weights import fp4_weight
from easytorch.layers.quantized import QuantizedLinear, QuantizedStacks

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MOE = {"num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, dtype="float32"),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES | MOE, num_experts=4, moe_intermediate_size=32, dtype="float32"),
    "gpt_oss": transformers.GptOssConfig(**SIZES | MOE, num_local_experts=4, dtype="float32"),
}
IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60]])
NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def theirs(name: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


def write(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if quantization is not None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config))


def compressed(name: str, kind: str, folder: Path) -> Any:
    """A folder as compressed-tensors writes it, and transformers' own model with the weights that it stands for."""
    generator = torch.Generator().manual_seed(1)
    model, tensors = theirs(name, folder)
    plain = dict(tensors)
    size = 16 if kind == "nvfp4" else 32
    for weight in [one for one in tensors if one.endswith("_proj.weight")]:
        layer, (rows, columns) = weight.removesuffix(".weight"), tensors.pop(weight).shape
        codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
        shape = (rows, columns // size)
        tensors[f"{layer}.weight_packed"] = codes[:, 1::2] << 4 | codes[:, ::2]
        if kind == "nvfp4":
            scale = (torch.rand(shape, generator=generator) * 200 + 20).to(torch.float8_e4m3fn)
            factor = torch.rand(1, generator=generator) * 9000 + 9000
            tensors |= {f"{layer}.weight_scale": scale, f"{layer}.weight_global_scale": factor}
            tensors[f"{layer}.input_global_scale"] = torch.ones(1)
            numbers = scale.float() / factor
        else:
            exponents = torch.randint(119, 123, shape, generator=generator, dtype=torch.uint8)
            tensors[f"{layer}.weight_scale"] = exponents
            numbers = 2.0 ** (exponents.float() - 127)
        plain[weight] = NUMBERS[codes.long()] * numbers.repeat_interleave(size, 1)
    write(folder, plain)
    expected = type(model).from_pretrained(folder).eval()
    activations = {"num_bits": 4} if kind == "nvfp4" else None
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "float"}, "input_activations": activations}}
    stated = {"quant_method": "compressed-tensors", "format": f"{kind}-pack-quantized", "config_groups": groups}
    write(folder, tensors, stated)
    return expected


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize(("name", "kind"), [("llama", "nvfp4"), ("llama", "mxfp4"), ("qwen3_moe", "mxfp4")])
def test_layers_and_experts_keep_the_codes_of_compressed_tensors(name: str, kind: str, tmp_path: Path) -> None:
    expected = compressed(name, kind, tmp_path / "theirs")
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    kinds = {one.settings.format for one in model.modules() if isinstance(one, QuantizedLinear)}
    stacks = [one for one in model.modules() if isinstance(one, QuantizedStacks)]
    assert kinds == {kind} and len(stacks) == (2 if name == "qwen3_moe" else 0)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "ours")
    again = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(logits(again), logits(model))


def blocks(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """(E, K, N) -> random blocks and scales (E, N, K / 32), as OpenAI's file has them."""
    experts, columns, rows = weight.shape
    packed = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    return {"blocks": packed, "scales": torch.randint(119, 124, packed.shape[:3], dtype=torch.uint8)}


def test_experts_of_gpt_oss_stay_in_four_bits(tmp_path: Path) -> None:
    _, tensors = theirs("gpt_oss", tmp_path)
    plain = dict(tensors)
    for name in [one for one in tensors if one.endswith(("gate_up_proj", "down_proj"))]:
        parts = blocks(tensors.pop(name))
        tensors |= {f"{name}_{part}": one for part, one in parts.items()}
        plain[name] = convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=torch.float32).contiguous()
    write(tmp_path, plain)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    write(tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(model).__module__ == "easytorch.models.gpt_oss"
    assert [one.settings["down_proj"].format for one in model.modules() if isinstance(one, QuantizedStacks)] == [
        "mxfp4"
    ] * 2
    assert not any(isinstance(one, QuantizedLinear) for one in model.modules())
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "ours")
    assert torch.equal(logits(easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()), logits(model))
    plain_again = easytorch.protocol.dequantize(model)
    torch.testing.assert_close(logits(plain_again), logits(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors, layer: tensors.pop(f"{layer}.weight_scale"), "missing beside its codes"),
        (
            lambda tensors, layer: tensors.update({f"{layer}.weight_scale": torch.ones(32, 3)}),
            "32 columns a uint8 scale",
        ),
        (lambda tensors, layer: tensors.update({f"{layer}.weight_global_scale": torch.ones(2)}), "beside scales of"),
        (
            lambda tensors, layer: tensors.update(
                {f"{layer}.weight_scale": tensors[f"{layer}.weight_scale"].float().to(torch.uint8)}
            ),
            "32 columns a uint8 scale",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: Any, reason: str, tmp_path: Path) -> None:
    compressed("llama", "nvfp4", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = next(one for one in tensors if one.endswith("weight_packed")).removesuffix(".weight_packed")
    change(tensors, layer)
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=reason) as error:
        easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert layer in str(error.value)


def test_a_head_in_four_bits_is_decoded(tmp_path: Path) -> None:
    expected = compressed("llama", "mxfp4", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    packed = torch.randint(0, 256, (97, 16), dtype=torch.uint8)
    scale = torch.full((97, 1), 122, dtype=torch.uint8)
    del tensors["lm_head.weight"]
    write(tmp_path, tensors | {"lm_head.weight_packed": packed, "lm_head.weight_scale": scale})
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    assert type(model.lm_head) is nn.Linear
    assert torch.equal(model.lm_head.weight, NUMBERS[codes] * 2.0**-5)
    with torch.no_grad():
        expected.lm_head.weight.copy_(model.lm_head.weight)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)


def test_a_layer_of_the_rarer_format_is_decoded(tmp_path: Path) -> None:
    compressed("llama", "mxfp4", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = min(one for one in tensors if one.endswith("weight_packed")).removesuffix(".weight_packed")
    packed = tensors[f"{layer}.weight_packed"]
    tensors[f"{layer}.weight_scale"] = torch.ones(len(packed), packed.shape[1] // 8).to(torch.float8_e4m3fn)
    write(tmp_path, tensors)
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    assert torch.equal(model.get_submodule(layer).weight, NUMBERS[codes])
    kinds = {one.settings.format for one in model.modules() if isinstance(one, QuantizedLinear)}
    assert kinds == {"mxfp4"}


@pytest.mark.parametrize("part", ["blocks", "one stack"])
def test_experts_of_gpt_oss_that_do_not_fit(part: str, tmp_path: Path) -> None:
    _, tensors = theirs("gpt_oss", tmp_path)
    name = next(one for one in tensors if one.endswith("gate_up_proj"))
    parts = blocks(tensors.pop(name))
    if part == "blocks":
        parts["blocks"] = parts["blocks"].flatten(2)
    write(tmp_path, tensors | {f"{name}_{key}": one for key, one in parts.items()}, {"quant_method": "mxfp4"})
    words = {"blocks": r"not \(experts, N, K / 32, 16\)", "one stack": "are quantized together"}[part]
    with pytest.raises(CheckpointError, match=words):
        easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_exponent_that_is_no_number() -> None:
    ones = torch.full((1, 16), 0x22, dtype=torch.uint8)
    scale = torch.tensor([[255]], dtype=torch.uint8)
    assert bool(fp4_weight(ones, scale).dequantized().isnan().all())
    assert torch.equal(fp4_weight(ones, scale - 128).dequantized(), torch.ones(1, 32))
