"""compressed-tensors' checkpoints of integers and fp8, in a folder or under a name of the Hub: the same numbers."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import easytorch
from easytorch import protocol
from easytorch.bridge.errors import CheckpointError
from easytorch.layers.quantized import QuantizedLinear

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60]])
LAYER = "model.layers.0.self_attn.q_proj"


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed codes (R, C) -> int32, plus half their range, from the lowest bits along the last dimension."""
    each = 32 // bits
    words = []
    for row in (codes.long() + 2 ** (bits - 1)).tolist():
        row = row + [0] * (-len(row) % each)
        numbers = [sum(row[at + i] << bits * i for i in range(each)) for at in range(0, len(row), each)]
        words.append([one - 2**32 if one >= 2**31 else one for one in numbers])
    return torch.tensor(words, dtype=torch.int32)


def layer_of(kind: str, shape: torch.Size, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(what the checkpoint holds, the weight that it stands for)."""
    rows, columns = shape
    bits, size = (4, 16) if "int4" in kind else (8, columns)
    groups = columns // size
    half = 2 ** (bits - 1)
    scale = torch.rand(rows, groups, generator=generator) * 0.02 / half + 0.01 / half
    if "fp8" in kind:
        codes = (torch.randn(shape, generator=generator) * 20).to(torch.float8_e4m3fn)
        scale = {
            "fp8_tensor": scale[:1, 0],
            "fp8_rows": scale,
            "fp8_blocks": scale[: rows // 16].repeat(1, columns // 16),
        }[kind]
        grid = scale.reshape(-1, 1) if scale.dim() == 1 else scale
        grid = grid.repeat_interleave(rows // len(grid), 0).repeat_interleave(columns // grid.shape[1], 1)
        return {"weight": codes, "weight_scale": scale}, codes.float() * grid
    codes = torch.randint(-half, half, shape, generator=generator).to(torch.int8)
    order = torch.arange(columns) // size
    zero = torch.zeros(rows, groups, dtype=torch.int32)
    tensors = {"weight_packed": packed(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor(shape)}
    if kind == "int8_plain":
        tensors = {"weight": codes, "weight_scale": scale}
    if kind == "int4_zeros":
        zero = torch.randint(-half, half, (rows, groups), generator=generator).to(torch.int32)
        tensors["weight_zero_point"] = packed(zero.t(), bits).t().contiguous()
    if kind == "int4_order":
        order = order[torch.randperm(columns, generator=generator)]
        tensors["weight_g_idx"] = order.to(torch.int32)
    return tensors, (codes.float() - zero[:, order]) * scale[:, order]


FORMATS = {
    "int4": "pack-quantized", "int4_zeros": "pack-quantized", "int4_order": "pack-quantized", "int8": "pack-quantized",
    "int8_plain": "int-quantized", "fp8_tensor": "float-quantized", "fp8_rows": "float-quantized",
    "fp8_blocks": "naive-quantized",
}  # fmt: skip
KEPT = {"int4": "int4", "int4_zeros": "affine", "int8": "int8", "int8_plain": "int8"} | dict.fromkeys(
    ("fp8_tensor", "fp8_rows", "fp8_blocks"), "fp8"
)


def written(kind: str, folder: Path) -> Any:
    """A folder as compressed-tensors writes it, and a model of the weights that it stands for."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, dtype="float32")).eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [one for one in tensors if one.endswith("_proj.weight")]:
        parts, weight = layer_of(kind, tensors.pop(name).shape, generator)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": one for part, one in parts.items()}
        model.get_parameter(name).data.copy_(weight)
    tensors[f"{LAYER}.input_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": FORMATS[kind]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_layers_compute_with_the_numbers_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    expected = written(kind, tmp_path / "theirs")
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)
    kinds = [one.settings.format for one in model.modules() if isinstance(one, QuantizedLinear)]
    assert kinds == ([KEPT[kind]] * 7 if kind in KEPT else []), "the order of columns alone is decoded"
    model.save_pretrained(tmp_path / "ours")
    assert torch.equal(logits(easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()), logits(model))
    if kinds:
        torch.testing.assert_close(logits(protocol.dequantize(model)), logits(expected), rtol=1e-4, atol=1e-5)


WRONG: dict[str, tuple[str, str, Any, str]] = {
    "no scale": ("int4", "weight_scale", None, "is missing beside its codes"),
    "scales of other rows": ("int4", "weight_scale", torch.ones(5, 2), "no grid over 32 rows"),
    "scales of other columns": ("int4", "weight_scale", torch.ones(32, 3), "groups of 32 columns"),
    "another shape": ("int4", "weight_shape", torch.tensor([32, 31 * 8]), "4 and 8 bits are read"),
    "no shape": ("int4", "weight_shape", None, "weight_shape of two numbers"),
    "zeros of other rows": ("int4", "weight_zero_point", torch.zeros(3, 2, dtype=torch.int32), "for 32 rows in 4 bits"),
    "a group beyond": ("int4", "weight_g_idx", torch.full((32,), 2), "2 groups for each of 32 columns"),
    "numbers of another kind": ("int8_plain", "weight", torch.ones(32, 32, dtype=torch.int16), "int16"),
    "zeros beside fp8": ("fp8_rows", "weight_zero_point", torch.ones(32, 1), "not 0 beside numbers of fp8"),
    "a fraction": ("int8_plain", "weight_zero_point", torch.full((32, 1), 0.5), "is no integer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(case: str, tmp_path: Path) -> None:
    kind, part, tensor, message = WRONG[case]
    written(kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(f"{LAYER}.{part}", None)
    if tensor is not None:
        tensors[f"{LAYER}.{part}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as error:
        easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert LAYER in str(error.value)


def hub(folder: Path, cache: Path, inside: str = "") -> None:
    """`folder` as the repository me/packed in the Hub's cache."""
    commit = "0123456789012345678901234567890123456789"
    repository = cache / "models--me--packed"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit / inside)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("inside", ["", "four_bits"])
def test_a_name_on_the_hub_loads_as_a_folder_does(inside: str, native: bool, tmp_path: Path) -> None:
    written("int4", tmp_path / "theirs")
    if not native:
        config = transformers.MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=97, dtype="float32")
        torch.manual_seed(0)
        transformers.MptForCausalLM(config).save_pretrained(tmp_path / "mpt")
        tensors = load_file(tmp_path / "mpt" / "model.safetensors")
        for name in [one for one in tensors if one.endswith(("up_proj.weight", "down_proj.weight"))]:
            parts, _ = layer_of("int4", tensors.pop(name).shape, torch.Generator().manual_seed(1))
            tensors |= {f"{name.removesuffix('.weight')}.{part}": one for part, one in parts.items()}
        save_file(tensors, tmp_path / "mpt" / "model.safetensors", metadata={"format": "pt"})
        content = json.loads((tmp_path / "mpt" / "config.json").read_text())
        content["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        (tmp_path / "mpt" / "config.json").write_text(json.dumps(content))
    folder = tmp_path / ("theirs" if native else "mpt")
    hub(folder, tmp_path / "cache", inside)
    expected = easytorch.AutoModelForCausalLM.from_pretrained(folder).eval()
    where: dict[str, Any] = {"cache_dir": tmp_path / "cache", "local_files_only": True, "subfolder": inside}
    for config in (None, copy.deepcopy(expected.config)):
        if config is not None:
            config.quantization_config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        model = easytorch.AutoModelForCausalLM.from_pretrained("me/packed", config=config, **where).eval()
        assert any(isinstance(one, QuantizedLinear) for one in model.modules())
        assert torch.equal(logits(model), logits(expected)) and model.name_or_path == "me/packed"
    with pytest.raises(OSError, match="couldn't find them in the cached files"):
        easytorch.AutoModelForCausalLM.from_pretrained("me/absent", **where)


def test_a_download_is_of_config_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is another folder: what is asked of it is what a load needs."""
    from easytorch.protocol import checkpoint_files

    written("int4", tmp_path / "theirs")
    asked: list[Any] = []
    listed = ["config.json", "model.safetensors", "pytorch_model.bin", "original/model.safetensors", "README.md"]

    def snapshot(name: str, allow_patterns: list[str], **kwargs: Any) -> str:
        asked.append((name, allow_patterns, kwargs))
        return str(tmp_path / "theirs")

    monkeypatch.setattr(checkpoint_files, "is_offline_mode", lambda: False)
    monkeypatch.setattr(checkpoint_files, "hf_hub_download", lambda name, file, **_: str(tmp_path / "theirs" / file))
    monkeypatch.setattr(checkpoint_files.HfApi, "list_repo_files", lambda *_, **__: listed)
    monkeypatch.setattr(checkpoint_files, "snapshot_download", snapshot)
    found = checkpoint_files.hub_snapshot("me/packed", {"revision": "v1", "token": "t"}, lambda settings: True)
    assert found == tmp_path / "theirs"
    assert asked == [("me/packed", ["model.safetensors", "config.json"], {"revision": "v1", "token": "t"})]
    assert checkpoint_files.hub_snapshot("me/packed", {}, lambda settings: False) is None and len(asked) == 1
