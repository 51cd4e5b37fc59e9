"""safetensors and pickles: the library's own bytes, every dtype, and files that lie."""

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from easytorch.bridge.dtypes import SAFETENSORS_CODES, to_numpy, to_torch
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.safetensors_files.torch_safetensors import SafetensorsFile, TorchSafetensors
from easytorch.bridge.jobs.sources import ReaderSource
from easytorch.bridge.save_tree import save_tree


def every_dtype():
    bytes_of = torch.arange(96, dtype=torch.uint8)
    tensors = {}
    for name in SAFETENSORS_CODES:
        dtype = getattr(torch, name)
        raw = (bytes_of % 2).to(torch.bool) if dtype is torch.bool else bytes_of.view(dtype)
        # Two each, of odd names, so that the order in the file is put to the test.
        tensors |= {f"z.{name}": raw.clone(), f"a.{name}": raw.clone().reshape(2, -1)}
    return tensors


def rewrite(source, folder, **options):
    format_ = TorchSafetensors()
    with format_.open(format_.detect(source)) as reader:
        layout = format_.layout(list(reader.tensors.values()), options.get("max_shard_size", 10**9))
        source = ReaderSource(reader, None)
        for file, infos in layout.items():
            format_.write(folder, file, infos, source)
        format_.finish(folder, layout, source)


def test_every_dtype_and_the_librarys_own_bytes(tmp_path):
    tensors = every_dtype()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    rewrite(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    for name, tensor in tensors.items():
        assert to_numpy(tensor).dtype.name == name[2:]
        back = to_torch(to_numpy(tensor))
        assert back.dtype == tensor.dtype
        assert back.data_ptr() == tensor.data_ptr(), f"{name} was copied"


def test_shards_and_their_index(tmp_path):
    tensors = {f"layer.{i}.weight": torch.full((10, 10), float(i)) for i in range(5)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    rewrite(tmp_path, tmp_path / "out", max_shard_size=800)
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + ["model.safetensors.index.json"]
    index = json.loads((tmp_path / "out" / names[-1]).read_text())
    assert index["metadata"] == {"total_size": 2000}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], tensors[name])
    _, reader = registry.open_reader(tmp_path / "out")
    with reader:
        assert {name: reader.read(name)[0, 0] for name in reader.tensors} == {f"layer.{i}.weight": i for i in range(5)}


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"\x08\0\0\0\0\0\0", "truncated"),
        (safetensors({}, length=2**63), "header of"),
        (safetensors(b"{" * 100), "not valid JSON"),
        (safetensors(b"[" * 200_000), "not valid JSON"),
        (safetensors(b"[]"), "not an object"),
        (safetensors(b'{"a": {}, "a": {}}'), "twice"),
        (safetensors({"a": 3}), "'a'.*header entry"),
        (safetensors({"a": entry(dtype="F99")}, b"1234"), "'F99' is not known"),
        (safetensors({"a": entry(shape=[-1])}, b"1234"), "sizes"),
        (safetensors({"a": entry(shape=[True])}, b"1234"), "sizes"),
        (safetensors({"a": entry(shape=[2])}, b"1234"), "takes 8 bytes, data_offsets give 4"),
        (safetensors({"a": entry(shape=[2**62, 2**62])}, b"1234"), "takes"),
        (safetensors({"a": entry(shape=[1] * 100)}, b"1234"), "sizes"),
        (safetensors({"a": entry()}, b"123"), "truncated"),
        (safetensors({"a": entry()}, b"12345"), "padded"),
        (safetensors({"a": entry(), "b": entry()}, b"12345678"), "starts at 0, the one before ends at 4"),
        (safetensors({"a": entry(offsets=(4, 8))}, b"12345678"), "starts at 4"),
        (safetensors({"__metadata__": {"a": 1}}), "__metadata__"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        registry.open_reader(tmp_path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "a\\b", "a\0b", 7]
)
def test_an_index_cannot_leave_its_folder(tmp_path, name):
    (tmp_path / "model").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        registry.open_reader(tmp_path / "model")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not an object"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors' is missing"),
        ('{"weight_map": {"b": "there.safetensors"}}', "does not hold it"),
        ('{"weight_map": {"a": "there.safetensors", "b": "again.safetensors"}}', "again in"),
    ],
)
def test_a_bad_index(tmp_path, index, message):
    for file in ("there", "again"):
        save_file({"a": torch.zeros(1)}, tmp_path / f"{file}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        registry.open_reader(tmp_path)


class Explosive:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code from a pickle ran')",))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_pickles_of_tensors(tmp_path, zipped):
    state = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.ones(2, dtype=torch.bfloat16)}
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    format_, reader = registry.open_reader(tmp_path)
    assert format_.name == "torch pickle"
    with reader:
        np.testing.assert_array_equal(reader.read("a"), state["a"].numpy())
        assert reader.tensors["b"].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda file: torch.save({"a": Explosive()}, file), "can run code"),
        (lambda file: file.write_bytes(pickle.dumps({"a": Explosive()})), "can run code|does not read"),
        (lambda file: file.write_bytes(pickle.dumps({"a": Explosive()}, protocol=4)), "can run code|does not read"),
        (lambda file: torch.save({"weights": {"a": torch.ones(1)}}, file), "'weights'.*not a tensor"),
        (lambda file: torch.save([1], file), "not a state dict"),
        (lambda file: file.write_bytes(b""), "truncated"),
        (lambda file: file.write_bytes(b"PK\x03\x04 nothing"), "truncated"),
        (lambda file: file.write_bytes(b"\x80"), "cannot be read"),
    ],
)
def test_other_pickles_are_refused(tmp_path, write, message, recwarn):
    write(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        registry.open_reader(tmp_path)
    assert not recwarn, "the error is the one thing to read"


def test_several_formats_must_be_told_apart(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert registry.find(tmp_path)[1].name == "model.safetensors", "the one transformers takes"
    save_tree({"a": np.zeros(1, np.float32)}, tmp_path / "flax")
    (tmp_path / "flax" / "flax_model.msgpack").rename(tmp_path / "flax_model.msgpack")
    with pytest.raises(CheckpointError, match=r"several checkpoints \(model.safetensors, flax_model.msgpack\)"):
        registry.open_reader(tmp_path)
    assert registry.find(tmp_path, prefer="torch")[1].name == "model.safetensors"
    assert registry.find(tmp_path, prefer="tree")[1].name == "flax_model.msgpack"
    with registry.open_reader(tmp_path / "pytorch_model.bin")[1] as reader:
        assert list(reader.tensors) == ["a"]
    with pytest.raises(CheckpointError, match="no weights found"):
        registry.open_reader(tmp_path.parent / tmp_path.name / "..")
    with pytest.raises(CheckpointError, match="does not exist"):
        registry.open_reader(tmp_path / "nothing")
    with pytest.raises(ValueError, match="registered already"):
        registry.register(TorchSafetensors())


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path):
    for length, message in ((100_000_001, "more than the format's 100000000"), (100_000_000, "not valid JSON")):
        with (tmp_path / "x.safetensors").open("wb") as stream:
            stream.write(length.to_bytes(8, "little"))
            stream.truncate(length + 8)
        with pytest.raises(CheckpointError, match=message):
            SafetensorsFile(tmp_path / "x.safetensors")
