"""A source that somebody truncates, writes or replaces while it is converted: one error, and nothing is left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from easytorch.bridge.convert import convert
from easytorch.bridge.core.mapped import MappedFile, ReadFile
from easytorch.bridge.diff import diff
from easytorch.bridge.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[3]
SEED = 20260716
CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 64,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 3000,
    "max_position_embeddings": 64,
}
# The sources, and what each is converted to: transposed, cast and as it is.
SOURCES = ("torch", "bin", "flax", "flax-safetensors", "dcp", "gguf-llama", "npz")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A model of a few MB in every format that is read by position: its name -> the path and its largest file."""
    import torch
    import transformers

    torch.manual_seed(SEED)
    folder = tmp_path_factory.mktemp("sources")
    model = transformers.BertModel(transformers.BertConfig.from_dict(CONFIG))
    model.save_pretrained(folder / "torch")
    (folder / "bin").mkdir()
    torch.save(model.state_dict(), folder / "bin" / "pytorch_model.bin")
    (folder / "bin" / "config.json").write_text(json.dumps(CONFIG))
    for to in ("flax", "flax-safetensors", "dcp"):
        convert(folder / "torch", folder / to, to=to)
    llama = transformers.LlamaConfig(
        vocab_size=2000, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    convert(folder / "llama", folder / "gguf-llama", to="gguf", dtype="f16")
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**size, image_size=32, num_labels=500))
    vit.save_pretrained(folder / "vit")
    convert(folder / "vit", folder / "npz", to="big_vision")
    return folder


def largest(path):
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def truncate(file):
    os.truncate(file, 5000)


def change(file):
    with file.open("r+b") as stream:
        stream.seek(-100, os.SEEK_END)
        stream.write(b"changed")


def replace(file):
    copy = file.with_name(".other")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)


@pytest.mark.parametrize("harm", [truncate, change, replace])
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_changes_is_one_error(sources, tmp_path, name, harm):
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", sources / name, source], check=True)
    file = largest(source)
    to = "torch" if name not in ("torch", "bin", "dcp") else "flax"
    for dtype in (None, "bf16"):
        # Whatever the clock's steps are, another time is another time.
        os.utime(file, (1, 1))
        harmed = []

        def progress(tensor, done, total, harmed=harmed):
            if not harmed and done < total:
                harmed.append(tensor)
                harm(file)

        with pytest.raises(CheckpointError, match=r"changed while it was being|truncated"):
            convert(source, tmp_path / "new", to=to, dtype=dtype, progress=progress)
        assert harmed and sorted(path.name for path in tmp_path.iterdir()) == ["source"]
        subprocess.run(["cp", "-r", "-T", sources / name, source], check=True)


def test_a_change_after_the_last_tensor_is_noticed_too(sources, tmp_path):
    subprocess.run(["cp", "-r", sources / "torch", tmp_path / "source"], check=True)
    config = tmp_path / "source" / "config.json"
    os.utime(config, (1, 1))

    def progress(tensor, done, total):
        if done == total:
            config.write_text(config.read_text() + " ")

    with pytest.raises(CheckpointError, match="changed while it was being converted"):
        convert(tmp_path / "source", tmp_path / "new", to="flax", progress=progress)
    assert not (tmp_path / "new").exists()


def test_a_truncated_file_is_no_bus_error(tmp_path):
    # In a process of its own, which a map of the file would end.
    code = """
import os, sys
from pathlib import Path
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.core.mapped import MappedFile
mapped = MappedFile(Path(sys.argv[1]))
elements = mapped.elements(0, (1 << 20,), "uint8")
os.truncate(sys.argv[1], 4096)
for read in (elements.read, lambda: mapped.array(8192, (100,), "uint8"), lambda: mapped.bytes[70000:70010]):
    try:
        read()
    except CheckpointError as error:
        assert "was changed while it was being read" in str(error), error
    else:
        sys.exit("nothing was said")
"""
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, tmp_path / "file"], cwd=ROOT, env=environment, timeout=600, check=True)


def test_a_pickle_truncated_while_it_is_checked_is_no_bus_error(tmp_path):
    code = """
import os, pickletools, sys
from pathlib import Path
from easytorch.bridge.formats.torch_files.pickle_check import check_pickle
genops = pickletools.genops
def cut(stream):
    os.truncate(sys.argv[1], 0)
    return genops(stream)
pickletools.genops = cut
check_pickle(Path(sys.argv[1]))
"""
    torch.save({"a": torch.ones(3)}, tmp_path / "file.bin", _use_new_zipfile_serialization=False)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "file.bin"], cwd=ROOT, env=environment, timeout=600, check=True
    )


def test_a_read_between_two_looks_is_held_against_both(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    file = ReadFile(tmp_path / "file")
    read = os.preadv

    def meanwhile(*arguments):
        count = read(*arguments)
        os.utime(tmp_path / "file", (1, 1))
        return count

    monkeypatch.setattr(os, "preadv", meanwhile)
    with pytest.raises(CheckpointError, match="was changed while it was being read"):
        file.read_into(0, memoryview(bytearray(10)))


def test_an_end_that_comes_early_is_an_error_by_itself(tmp_path, monkeypatch):
    """Sizes and times may say nothing: some network file systems answer from what they remember."""
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    file = ReadFile(tmp_path / "file")
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, start: 0)
    with pytest.raises(CheckpointError, match="was changed while it was being read"):
        file.read_into(0, memoryview(bytearray(10)))


def test_what_changed_before_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    file = ReadFile(tmp_path / "file")
    os.utime(tmp_path / "file", (1, 1))
    monkeypatch.delattr(os, "preadv")
    with pytest.raises(CheckpointError, match="was changed while it was being read"):
        file.read_into(0, memoryview(bytearray(10)))


def test_a_file_is_read_in_any_pieces(tmp_path):
    rng = np.random.default_rng(SEED)
    content = rng.integers(0, 256, 200_001, dtype=np.uint8).tobytes()
    (tmp_path / "file").write_bytes(content)
    mapped = MappedFile(tmp_path / "file")
    for _ in range(300):
        start, end = sorted(int(number) for number in rng.integers(0, 210_000, 2))
        end = int(rng.choice([end, start + 5]))
        assert mapped.bytes[start:end] == content[start:end], f"seed {SEED}: [{start}:{end}]"
    assert mapped.bytes[:8] == content[:8] and mapped.bytes[199_990:] == content[199_990:]
    assert len(mapped.bytes) == mapped.size == len(content)
    assert mapped.elements(1, (50_000, 4), "uint8").read().tobytes() == content[1:200_001]


def test_what_is_mapped_for_its_owner_stays_as_it_is(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100))
    mapped = MappedFile(tmp_path / "file", writable=True).array(0, (100,), "uint8")
    mapped[:] = 1
    assert (tmp_path / "file").read_bytes() == bytes(100)


def test_diff_reads_it_likewise(sources, tmp_path):
    subprocess.run(["cp", "-r", sources / "torch", tmp_path / "source"], check=True)
    assert diff(sources / "torch", tmp_path / "source").same
    assert diff(sources / "bin", tmp_path / "source").same
