"""GGUF files whose layers keep their blocks: the numbers of the unpacked model, saved and loaded again."""

from __future__ import annotations

import copy
import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import easytorch
from easytorch.bridge import convert
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.rules.plan import Step
from easytorch.bridge.rules.transforms import get_transform
from easytorch.layers.quantized import QuantizedLinear, QuantizedStacks
from easytorch.protocol import dequantize
from easytorch.protocol.gguf_loading import _Blocks

gguf = pytest.importorskip("gguf")
SIZES = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 256, "head_dim": 64}
MPT = {"d_model": 256, "n_heads": 4, "n_layers": 2, "vocab_size": 97}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, **HEADS, dtype="float32"),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **HEADS, **MOE, dtype="float32"),
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=256, n_layer=2, n_head=4, dtype="float32"),
    "bloom": transformers.BloomConfig(vocab_size=97, hidden_size=256, n_layer=2, n_head=4, dtype="float32"),
}
IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60]])
# Blocks by the tensors of llama.cpp's names; the first that is found in the name.
MIXED = {"attn_q.": "Q4_K", "attn_qkv": "Q4_K", "attn_k": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_": "Q4_K"}
MIXED |= {"attn_output": "Q4_0", "token_embd": "Q8_0", "output.": "Q6_K"}


def random_blocks(kind: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Bytes of blocks with small scales, (rows.., bytes of a row): gguf packs no K-quants."""
    block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = draw.integers(0, 256, (*shape[:-1], shape[-1] // block, width), dtype=np.uint8)
    for at in {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}[kind]:
        scales = draw.uniform(2e-5, 6e-5, (*raw.shape[:-1], 1)).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def rewritten(source: Path, target: Path, kinds: dict[str, str]) -> None:
    """The GGUF file with matrices in other blocks of random codes."""
    reader, draw = gguf.GGUFReader(source), np.random.default_rng(0)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        kind = next((kind for part, kind in kinds.items() if part in tensor.name), None)
        if kind is None or tensor.data.ndim < 2 or "gate_inp" in tensor.name or "norm" in tensor.name:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        raw = random_blocks(kind, tuple(int(size) for size in reversed(tensor.shape)), draw)
        writer.add_tensor(tensor.name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def file_of(folder: Path, name: str, kinds: dict[str, str]) -> Path:
    """A folder with `model.gguf`, without a config.json beside it."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).save_pretrained(folder / "torch")
    convert(folder / "torch", folder / "plain", to="gguf", dtype="f32")
    (folder / "blocks").mkdir()
    rewritten(folder / "plain" / "model.gguf", folder / "blocks" / "model.gguf", kinds)
    return folder / "blocks"


def unpacked(folder: Path) -> transformers.PreTrainedModel:
    """The same numbers in plain layers: the bridge reads a folder's GGUF file so."""
    return easytorch.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def blocks_of(model: torch.nn.Module) -> list[str]:
    return sorted({one.settings.format for one in model.modules() if isinstance(one, QuantizedLinear)})


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_keep_the_blocks_of_the_file(name: str, tmp_path: Path) -> None:
    folder = file_of(tmp_path, name, MIXED)
    plain = unpacked(folder)
    model = easytorch.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
    assert set(blocks_of(model)) == {"q4_0", "q4_k", "q6_k"}
    linear = [one for one in plain.modules() if isinstance(one, torch.nn.Linear | transformers.pytorch_utils.Conv1D)]
    found = [one for one in model.modules() if isinstance(one, QuantizedLinear)]
    tied = model.config.tie_word_embeddings  # a head that is the embedding too
    assert len(found) == len(linear) - tied and (model.get_output_embeddings() in found) != tied
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
    for layer in found:
        assert layer.weight_codes.dtype == torch.uint8
        assert layer.weight_codes.numel() < layer.in_features * layer.out_features
    model.save_pretrained(tmp_path / "ours")
    again = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(logits(again), logits(model)) and blocks_of(again) == blocks_of(model)
    torch.testing.assert_close(logits(dequantize(model)), logits(plain), rtol=1e-4, atol=1e-5)


def test_a_weight_whose_rows_are_not_the_file_s_is_decoded() -> None:
    """Conv1D's is turned in a file, and no other's: blocks go along rows."""
    packed = np.zeros((4, 144), np.uint8)
    file: Any = SimpleNamespace(tensors={"w": SimpleNamespace(shape=(4, 256))}, read_packed=lambda _: packed)
    blocks = _Blocks(transformers.GPT2LMHeadModel(CONFIGS["gpt2"]), file)
    for conv1d, name in itertools.product((True, False), ("linear", "identity")):
        rows = blocks._rows(Step(("w",), (), get_transform(name), reverse=False), conv1d)
        assert (rows is not None) == (conv1d == (name == "linear")), (conv1d, name)


def test_experts_keep_theirs(tmp_path: Path) -> None:
    folder = file_of(tmp_path, "qwen3_moe", MIXED)
    load = easytorch.AutoModelForCausalLM.from_pretrained
    model = load(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
    stacks = [one for one in model.modules() if isinstance(one, QuantizedStacks)]
    assert len(stacks) == 2
    assert {name: one.format for name, one in stacks[0].settings.items()} == {
        "gate_up_proj": "q4_k", "down_proj": "q6_k"
    }  # fmt: skip
    # a gate in other blocks than its up is decoded with it
    kinds = {"ffn_gate_exps": "Q8_0", "ffn_down_exps": "Q5_0"} | MIXED
    rewritten(folder / "model.gguf", folder / "other.gguf", kinds)
    model = load(folder, gguf_file="other.gguf", dtype=torch.float32).eval()  # beside the first, as on the Hub
    (folder / "model.gguf").unlink()
    assert not any(isinstance(one, QuantizedStacks) for one in model.modules()) and len(blocks_of(model)) == 3
    torch.testing.assert_close(logits(model), logits(unpacked(folder)), rtol=1e-4, atol=1e-5)


def test_which_blocks_are_kept_and_when(tmp_path: Path) -> None:
    folder = file_of(tmp_path, "llama", {"attn_q": "Q8_0", "attn_k": "Q5_0"})
    load = easytorch.AutoModelForCausalLM.from_pretrained
    for settings in ({"gguf_file": "model.gguf"}, {"quantization_config": {"quant_method": "gguf"}}):
        model = load(folder, **settings)
        assert blocks_of(model) == ["q8_0"]  # Q5_0 is decoded, other tensors are float32
        names = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, QuantizedLinear)}
        assert names == {"q_proj"}
        torch.testing.assert_close(logits(model.float().eval()), logits(unpacked(folder)), rtol=1e-4, atol=1e-5)
    given = {"quant_method": "gguf", "dequantize": True}
    assert blocks_of(load(folder, gguf_file="model.gguf", quantization_config=given)) == []
    if hasattr(transformers, "GgufConfig"):
        kept = load(folder, gguf_file="model.gguf", quantization_config=transformers.GgufConfig())
        assert blocks_of(kept) == ["q8_0"]
        plain = transformers.GgufConfig(dequantize=True)
        assert blocks_of(load(folder, gguf_file="model.gguf", quantization_config=plain)) == []
    half = load(folder, gguf_file="model.gguf", dtype=torch.bfloat16).eval()
    assert half.dtype == torch.bfloat16 and blocks_of(half) == ["q8_0"]
    torch.testing.assert_close(logits(half).float(), logits(unpacked(folder)), rtol=0, atol=0.05)
    with pytest.raises(ValueError, match=r"gguf_file=\.\.\.\) reads such a model"):
        easytorch.protocol.quantize(unpacked(folder), "gguf")
    with pytest.raises(ValueError, match="unknown blocks q3_k"):
        easytorch.protocol.QuantizationConfig("gguf", blocks={"q3_k": "q_proj"})
    empty = tmp_path / "empty"
    shutil.copytree(tmp_path / "torch", empty)
    with pytest.raises(CheckpointError, match="holds no GGUF file"):
        load(empty, quantization_config={"quant_method": "gguf"})


def test_a_family_that_transformers_does_not_read(tmp_path: Path) -> None:
    """BERT's file, beside a config.json too, and by its path alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=97, max_position_embeddings=32, **sizes, dtype="float32")
    theirs = transformers.BertModel(config, add_pooling_layer=False).eval()
    theirs.save_pretrained(tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "gguf", to="gguf", dtype="q8_0")
    file = tmp_path / "gguf" / "model.gguf"
    with torch.no_grad():
        plain = easytorch.AutoModel.from_pretrained(tmp_path / "gguf", dtype=torch.float32).eval()
        expected = plain(IDS).last_hidden_state
        for folder, name in ((tmp_path / "torch", str(file)), (tmp_path / "gguf", "model.gguf")):
            model = easytorch.AutoModel.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
            assert blocks_of(model) == ["q8_0"]
            torch.testing.assert_close(model(IDS).last_hidden_state, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(expected, theirs(IDS).last_hidden_state, rtol=0, atol=0.05)
