"""GPTQ and AWQ checkpoints, packed as AutoGPTQ and AutoAWQ pack them: the layers compute with the same numbers."""

from __future__ import annotations

import copy
import json
import random
import re

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import easytorch
from easytorch.bridge.errors import CheckpointError
from easytorch.layers.quantized import QuantizedLinear
from easytorch.protocol.packed_loading import pattern_of

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "head_dim": 8, "num_key_value_heads": 4}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, dtype="float32"),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **MOE, dtype="float32"),
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, dtype="float32"),
    "deepseek_v3": transformers.DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=8,
        first_k_dense_replace=2,
        dtype="float32",
    ),
    "mamba2": transformers.Mamba2Config(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=16,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        dtype="float32",
    ),
    "qwen3_5_text": transformers.Qwen3_5TextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        dtype="float32",
    ),
    "mpt": transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=97, dtype="float32"),  # not native
}
IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60]])
GROUP = 16


def packed_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """AutoGPTQ's loops: codes (K, N) -> int32 (K * bits / 32, N), packed along the first dimension."""
    codes = codes.astype(np.uint32)
    packed = np.zeros((codes.shape[0] * bits // 32, codes.shape[1]), dtype=np.uint32)
    if bits != 3:
        for row in range(packed.shape[0]):
            for number in range(32 // bits):
                packed[row] |= codes[row * (32 // bits) + number] << np.uint32(bits * number)
        return packed.astype(np.int32)
    i = 0
    for row in range(0, packed.shape[0], 3):
        for j in range(10):
            packed[row] |= codes[i + j] << np.uint32(3 * j)
        packed[row] |= codes[i + 10] << np.uint32(30)
        packed[row + 1] |= codes[i + 10] >> np.uint32(2) & np.uint32(1)
        for j in range(10):
            packed[row + 1] |= codes[i + 11 + j] << np.uint32(3 * j + 1)
        packed[row + 1] |= codes[i + 21] << np.uint32(31)
        packed[row + 2] |= codes[i + 21] >> np.uint32(1) & np.uint32(3)
        for j in range(10):
            packed[row + 2] |= codes[i + 22 + j] << np.uint32(3 * j + 2)
        i += 32
    return packed.astype(np.int32)


def packed_awq(codes: np.ndarray) -> np.ndarray:
    """AutoAWQ's loops: codes (K, N) -> int32 (K, N / 8)."""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for column in range(packed.shape[1]):
        for place, number in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            packed[:, column] |= codes[:, column * 8 + number].astype(np.uint32) << np.uint32(4 * place)
    return packed.astype(np.int32)


def layer_parts(shape, method, bits, size, draw, *, act_order=False, zeros_minus_one=True, middle=128):
    """(tensors of the checkpoint, the weight (N, K) they stand for)."""
    rows, columns = shape
    groups = -(-columns // size)
    codes = draw.integers(0, 2**bits, (columns, rows))
    zero = np.full((groups, rows), middle) if bits == 8 else draw.integers(0, 2**bits, (groups, rows))
    scales = draw.uniform(0.5, 1.5, (groups, rows)).astype(np.float16) * np.float16(0.1 / 2**bits)
    g_idx = np.arange(columns) // size
    if act_order:
        g_idx = draw.permutation(g_idx)
    weight = ((codes - zero[g_idx]) * scales.astype(np.float32)[g_idx]).T
    stored = (zero - 1) % 2**bits if zeros_minus_one else zero
    if method == "awq":
        parts = {"qweight": packed_awq(codes), "qzeros": packed_awq(zero)}
    else:
        parts = {"qweight": packed_rows(codes, bits), "qzeros": packed_rows(stored.T, bits).T.copy()}
        parts["g_idx"] = g_idx.astype(np.int32)
    tensors = {name: torch.from_numpy(one).contiguous() for name, one in {**parts, "scales": scales}.items()}
    return tensors, torch.from_numpy(weight.astype(np.float32))


def checkpoint(folder, name="llama", method="gptq", bits=4, size=GROUP, *, layout=None, act_order=False, middle=128):
    """A folder of the checkpoint, and transformers' own model with the weights that it stands for."""
    draw = np.random.default_rng(0)
    torch.manual_seed(0)
    # transformers' classes before their experts are stacked: what a checkpoint on the Hub holds
    theirs = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    linear = {key for key, one in theirs.named_modules() if isinstance(one, nn.Linear | Conv1D)}
    plain = dict(tensors)
    for key in list(tensors):
        layer = key.removesuffix(".weight")
        if (layer not in linear and ".experts." not in key) or "lm_head" in key or layer.endswith("gate"):
            continue
        transposed = isinstance(theirs.get_submodule(layer), Conv1D) if layer in linear else False
        shape = tuple(reversed(tensors[key].shape)) if transposed else tuple(tensors[key].shape)
        width = shape[1] if size == -1 else size
        settings = {"act_order": act_order, "zeros_minus_one": layout != "gptq_v2", "middle": middle}
        parts, weight = layer_parts(shape, method, bits, width, draw, **settings)
        plain[key] = (weight.t() if transposed else weight).contiguous()
        del tensors[key]
        tensors |= {f"{layer}.{part}": one for part, one in parts.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    expected = type(theirs).from_pretrained(folder).eval()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": method, "bits": bits, "group_size": size, "desc_act": act_order}
    if layout is not None:
        settings["version" if method == "awq" else "checkpoint_format"] = layout
    rewrite(folder, quantization_config=settings)
    return expected


def rewrite(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def assert_as(model, expected):
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-5)


CASES = {
    "gptq": {},
    "2 bits": {"bits": 2},
    "3 bits": {"bits": 3},
    "8 bits": {"bits": 8},
    "columns": {"size": -1},
    "act-order": {"act_order": True},
    "act-order, 3 bits": {"act_order": True, "bits": 3},
    "act-order, 8 bits": {"act_order": True, "bits": 8},
    "act-order gpt2": {"act_order": True, "name": "gpt2"},
    "v2": {"layout": "gptq_v2"},
    "awq": {"method": "awq"},
    "awq columns": {"method": "awq", "size": -1, "layout": "GEMM"},
    "gpt2": {"name": "gpt2"},
    "latent": {"name": "deepseek_v3"},
    "awq latent": {"name": "deepseek_v3", "method": "awq"},
    "recurrent": {"name": "mamba2"},
    "awq recurrent": {"name": "mamba2", "method": "awq"},
    "hybrid": {"name": "qwen3_5_text"},
    "awq hybrid": {"name": "qwen3_5_text", "method": "awq"},
    "mpt": {"name": "mpt"},
    "awq mpt": {"name": "mpt", "method": "awq"},
}


@pytest.mark.parametrize("case", CASES)
def test_layers_have_the_codes_of_the_checkpoint(case, tmp_path):
    expected = checkpoint(tmp_path / "packed", **CASES[case])
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    quantized = [one for one in model.modules() if isinstance(one, QuantizedLinear)]
    assert len(quantized) == sum(isinstance(one, nn.Linear | Conv1D) for one in expected.modules()) - 1
    assert_as(model, expected)
    model.save_pretrained(tmp_path / "ours")
    again = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_what_no_layer_holds_is_decoded(tmp_path):
    for number, settings in enumerate(({"act_order": True, "bits": 8, "middle": 120}, {"bits": 8, "middle": 120})):
        expected = checkpoint(tmp_path / str(number), **settings)
        model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
        assert not any(isinstance(one, QuantizedLinear) for one in model.modules())
        assert_as(model, expected)
    # columns in an order that the config does not state
    expected = checkpoint(tmp_path / "order", act_order=True)
    rewrite(tmp_path / "order", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": GROUP})
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "order")
    assert not any(isinstance(one, QuantizedLinear) for one in model.modules())
    assert_as(model, expected)
    expected = checkpoint(tmp_path / "experts", name="qwen3_moe")
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "experts")
    names = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, QuantizedLinear)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert_as(model, expected)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_settings_beside_the_config(method, tmp_path):
    """As AutoGPTQ and AutoAWQ wrote them first, AutoGPTQ with a name of its own for the weights."""
    expected = checkpoint(tmp_path, method=method)
    rewrite(tmp_path, quantization_config=None)
    if method == "gptq":
        settings = {"bits": 4, "group_size": GROUP, "damp_percent": 0.01, "desc_act": False, "sym": True}
        (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
        (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-16g.safetensors")
    else:
        settings = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
        (tmp_path / "quant_config.json").write_text(json.dumps(settings))
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert any(isinstance(one, QuantizedLinear) for one in model.modules())
    assert_as(model, expected)


def test_an_order_of_columns_is_the_checkpoints(tmp_path):
    expected = checkpoint(tmp_path, act_order=True)
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)
    layer, right = (one.model.layers[1].mlp.down_proj for one in (model, expected))
    torch.testing.assert_close(layer.decoded().weight, right.weight)
    assert not torch.equal(layer.weight_order, layer.weight_order.sort().values)
    assert_as(easytorch.protocol.dequantize(model), expected)
    plain = easytorch.AutoModelForCausalLM.from_config(CONFIGS["llama"])
    for settings in ({"desc_act": True}, {"desc_act": True, "simulate": True}):
        with pytest.raises(ValueError, match="desc_act is of GPTQ checkpoints"):
            easytorch.protocol.quantize(plain, "affine", **settings)


def test_other_classes_and_dtypes(tmp_path):
    expected = checkpoint(tmp_path)
    base = easytorch.AutoModel.from_pretrained(tmp_path).eval()
    assert any(isinstance(one, QuantizedLinear) for one in base.modules())
    with torch.no_grad():
        right = expected.model(IDS).last_hidden_state
        torch.testing.assert_close(base(IDS).last_hidden_state, right, rtol=1e-4, atol=1e-5)
        half = type(expected).from_pretrained(None, config=expected.config, state_dict=expected.state_dict())
        model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        assert model.dtype == torch.bfloat16
        torch.testing.assert_close(model(IDS).logits.float(), half(IDS).logits, rtol=0, atol=0.05)


def test_what_is_not_read_is_named(tmp_path):
    checkpoint(tmp_path)
    load = easytorch.AutoModelForCausalLM.from_pretrained
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"

    def saved(**changes):
        changed = {key: one for key, one in (tensors | changes).items() if one is not None}
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})

    for changes, match in (
        ({f"{name}.scales": None}, "is missing beside"),
        ({f"{name}.qzeros": None}, "is missing beside"),
        ({f"{name}.scales": torch.ones(3, 32)}, r"has the shape \(3, 32\), and \(2, 32\)"),
        ({f"{name}.g_idx": torch.full((32,), 2, dtype=torch.int32)}, "beyond the 2 there are"),
        ({f"{name}.qweight": tensors[f"{name}.qweight"].float()}, "int32 is read"),
        ({f"{name}.qweight": None}, "is missing from the checkpoint"),
    ):
        saved(**changes)
        with pytest.raises(CheckpointError, match=match):
            load(tmp_path)
    saved()
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    for changes, match in (
        ({"bits": 5}, "bits=5; 2, 3, 4, 8 are read"),
        ({"quant_method": "awq", "bits": 8}, "bits=8; 4 are read"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": 32}, "has the shape"),
        ({"checkpoint_format": "marlin"}, "layout 'marlin'; gptq, gptq_v2 are read"),
        ({"quant_method": "awq", "version": "gemv"}, "layout 'gemv'; gemm are read"),
    ):
        rewrite(tmp_path, quantization_config=settings | changes)
        with pytest.raises(CheckpointError, match=match):
            load(tmp_path)


def test_patterns_find_their_names_alone():
    draw = random.Random(0)
    known = [f"model.layers.{layer}.mlp.{name}" for layer in range(12) for name in ("up_proj", "down_proj")]
    assert pattern_of(known, known) == r"^(model\.layers\.\d+\.mlp\.down_proj|model\.layers\.\d+\.mlp\.up_proj)$"
    for _ in range(20):
        names = draw.sample(known, draw.randrange(1, len(known)))
        assert {name for name in known if re.search(pattern_of(names, known), name)} == set(names)
