"""Models over meshes of two and four processes, saved by all of them (`saving_rank.py`)."""

from __future__ import annotations

import filecmp
import subprocess
from pathlib import Path

import numpy as np
import orbax.checkpoint
import pytest
import torch
import transformers
from safetensors.torch import load_file

import easytorch
from easytorch import protocol
from easytorch.bridge.convert import convert
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.load_tree import load_tree
from tests.distributed.saving_rank import MESHES, SIZE
from tests.models.families import FAMILIES
from tests.processes import run_ranks

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def make(folder: Path, family: str) -> None:
    """A checkpoint of one process; vocabularies that do not divide, where the mesh can be uneven."""
    if family == "olmo":
        config = transformers.OlmoConfig(vocab_size=97, eos_token_id=1, pad_token_id=0, **SIZES)
        transformers.OlmoForCausalLM(config).save_pretrained(folder)
        return
    tied = {"tie_word_embeddings": True} if family == "llama" else {}
    config = FAMILIES[family].config(vocab_size=97 if family == "deepseek_v3" else 96, **tied)
    easytorch.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def assert_same_files(one: Path, other: Path) -> None:
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) for root in (one, other)]
    assert names[0] == names[1]
    differing = [name for name in names[0] if not filecmp.cmp(one / name, other / name, shallow=False)]
    assert not differing


@pytest.mark.parametrize("processes", [2, 4])
def test_the_ranks_write_together_what_one_process_writes(processes: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    families = {family for family, _ in MESHES[processes]}
    for family in families:
        make(tmp_path / family, family)
    if processes == 2:
        wide = FAMILIES["llama"].config(
            vocab_size=512, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8
        )
        easytorch.AutoModelForCausalLM.from_config(wide).save_pretrained(tmp_path / "wide")
    done = run(processes, tmp_path)
    assert done.stdout.count(" ok\n") == processes, done.stdout + done.stderr[-6000:]
    if processes == 2:  # of which one was killed
        assert done.stdout.count("survived") == 1, done.stdout + done.stderr[-6000:]
    for family, axes in MESHES[processes]:
        check_files(tmp_path, family, axes)


def run(processes: int, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_ranks(Path(__file__).with_name("saving_rank.py"), folder, processes=processes, timeout=900)


def check_files(folder: Path, family: str, axes: str) -> None:
    """Byte for byte those of one process; Orbax's, which state when they were written, by orbax itself."""
    alone = easytorch.AutoModelForCausalLM.from_pretrained(folder / family)
    one, saved = folder / f"{family}-{axes}-one", folder / f"{family}-{axes}"
    alone.save_pretrained(one, max_shard_size=SIZE)
    assert (one / "model.safetensors.index.json").is_file()
    assert_same_files(one, saved.with_name(f"{saved.name}-torch"))
    shards = saved.with_name(f"{saved.name}-shards")
    assert list(shards.glob("shard-*.safetensors")) and not list(shards.glob("model*"))
    read = easytorch.AutoModelForCausalLM.from_pretrained(shards).state_dict()
    assert read.keys() == alone.state_dict().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in alone.state_dict().items())
    convert(one, flax := one.with_name(f"{one.name}-flax"), to="flax", max_shard_size=SIZE)
    assert_same_files(flax, saved.with_name(f"{saved.name}-flax"))
    half = one.with_name(f"{one.name}-half")
    type(alone).save_pretrained(alone.to(torch.bfloat16), half)
    assert_same_files(half, saved.with_name(f"{saved.name}-bfloat16") / "checkpoint-3")
    restored = orbax.checkpoint.StandardCheckpointer().restore(saved.with_name(f"{saved.name}-orbax").absolute())
    assert_same_tree(load_tree(flax), restored)


def assert_same_tree(expected: object, found: object) -> None:
    if isinstance(expected, dict):
        assert isinstance(found, dict) and expected.keys() == found.keys()
        for key, child in expected.items():
            assert_same_tree(child, found[key])
        return
    assert np.array_equal(np.asarray(expected), np.asarray(found))


def test_a_folder_that_cannot_be_exchanged_gets_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = easytorch.AutoModelForCausalLM.from_config(FAMILIES["llama"].config())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    model.save_pretrained(".", to="flax", max_shard_size=SIZE)
    assert Path("flax_model.msgpack.index.json").is_file() and Path("notes.txt").is_file()
    protocol.save_pretrained(model.to_torch(), ".", to="flax", step=None)
    assert {one.name for one in Path().iterdir()} == {
        "config.json", "generation_config.json", "flax_model.msgpack", "notes.txt",
    }  # fmt: skip
    again = easytorch.AutoModelForCausalLM.from_pretrained(".").state_dict()
    assert all(torch.equal(again[name], one) for name, one in model.state_dict().items())


@pytest.mark.parametrize("stays", [False, True])
def test_an_earlier_save_of_another_layout_is_gone(
    stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was left of it was read in the place of the new weights: pytorch_model.bin, and a store of Orbax."""
    old = easytorch.AutoModelForCausalLM.from_config(FAMILIES["llama"].config())
    model = easytorch.AutoModelForCausalLM.from_config(FAMILIES["llama"].config())
    folder = tmp_path / "folder"
    old.save_pretrained(folder, to="orbax")
    torch.save(old.state_dict(), folder / "pytorch_model.bin")
    kept = (folder / "data" / ".zarray", folder / "notes.txt")
    for one in kept:
        one.parent.mkdir(exist_ok=True)
        one.touch()
    if stays:
        monkeypatch.chdir(folder)
    for to in ("orbax-zarr", "flax", "orbax-zarr", "flax-safetensors"):
        model.save_pretrained(folder, to=to)
        again = easytorch.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(again[name], one) for name, one in model.state_dict().items())
        assert all(one.is_file() for one in kept)
    assert {one.name for one in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "data", "notes.txt",
    }  # fmt: skip


@pytest.mark.parametrize("stays", [False, True])
def test_what_lies_in_the_folder_does_not_end_a_save(
    stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that leads nowhere or back, and a folder with the name of a file that is written."""
    model = easytorch.AutoModelForCausalLM.from_config(FAMILIES["llama"].config())
    (tmp_path / "nowhere").symlink_to("missing")
    (tmp_path / "back").symlink_to(".")
    (tmp_path / "flax_model.msgpack").mkdir()
    (tmp_path / "config.json").mkdir()
    if stays:
        monkeypatch.chdir(tmp_path)
    model.save_pretrained(tmp_path, to="flax")
    assert {one.name for one in tmp_path.iterdir()} == {
        "config.json", "generation_config.json", "flax_model.msgpack", "nowhere", "back",
    }  # fmt: skip
    easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_of_replicas_one_writes(tmp_path: Path) -> None:
    model = easytorch.AutoModelForCausalLM.from_config(FAMILIES["llama"].config())
    model.save_pretrained(tmp_path / "other", to="flax", is_main_process=False)
    assert not (tmp_path / "other").exists()
    model.save_pretrained(tmp_path / "main", to="flax", is_main_process=True)
    assert (tmp_path / "main" / "flax_model.msgpack").is_file()


def test_without_a_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the way of relative paths alone, and an error of all ranks, which would wait for this one."""
    model = easytorch.AutoModelForCausalLM.from_config(FAMILIES["llama"].config())
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    model.save_pretrained(tmp_path / "folder", to="flax")
    model.save_pretrained(tmp_path / "folder", to="flax")
    with pytest.raises(CheckpointError, match="folder: cannot be written: No such file"):
        model.save_pretrained("folder", to="flax")


def test_a_process_alone_writes_trees_too(tmp_path: Path) -> None:
    model = easytorch.AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"].config())
    model.save_pretrained(tmp_path / "torch")
    for to in ("flax", "flax-safetensors"):
        model.save_pretrained(tmp_path / to, to=to)
        convert(tmp_path / "torch", tmp_path / f"{to}-converted", to=to)
        assert_same_files(tmp_path / f"{to}-converted", tmp_path / to)
    model.save_pretrained(tmp_path / "orbax", to="orbax-zarr")
    again = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "orbax").state_dict()
    assert all(torch.equal(again[name], one) for name, one in model.state_dict().items())
    with pytest.raises(ValueError, match="to='gguf' must be one of torch, flax"):
        model.save_pretrained(tmp_path / "gguf", to="gguf")
    with pytest.raises(ValueError, match="does not go with variant"):
        model.save_pretrained(tmp_path / "variant", to="flax", variant="fp16")
    with pytest.raises(ValueError, match="names of its own"):
        model.save_pretrained(tmp_path / "variant", to="flax", save_original_format=False)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written: File exists"):
        model.save_pretrained(tmp_path / "file" / "below", to="flax")


@pytest.mark.parametrize("bits", ["int8", "nf4"])
def test_float_dtype_of_a_quantized_model_is_that_of_its_files(bits: str, tmp_path: Path) -> None:
    """It was that of config.json alone, also in one process: the quantizer's tensors took the place of those cast."""
    model = easytorch.AutoModelForCausalLM.from_config(FAMILIES["llama"].config()).eval()
    model.quantize(bits)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(ids).logits
        for number, save in enumerate((type(model).save_pretrained, protocol.save_pretrained)):
            save(model, folder := tmp_path / str(number), float_dtype="bfloat16")
            dtypes = {one.dtype for one in load_file(folder / "model.safetensors").values()}
            assert torch.bfloat16 in dtypes and torch.float32 not in dtypes
            again = easytorch.AutoModelForCausalLM.from_pretrained(folder)
            assert again.dtype == torch.bfloat16
            torch.testing.assert_close(again(ids).logits.float(), expected, atol=2e-2, rtol=0)
