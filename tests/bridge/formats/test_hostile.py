"""Files made to harm: each is one CheckpointError that names it, in no time and no memory.

The fuzzers (test_fuzz.py) damage at random; these are what an attacker, or a careless program, would make.
"""

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import msgpack
import pytest
import torch
from safetensors.torch import save_file

from easytorch.bridge.core.config import Config
from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.torch_files import pickle_check
from easytorch.bridge.names.architecture import architecture_of

ROOT = Path(__file__).resolve().parents[3]


def refused(path, match):
    with pytest.raises(CheckpointError, match=match) as raised:
        registry.open_reader(path)
    assert len(str(raised.value)) < 5000
    return raised.value


def archive(path, content, name="data.pkl", compression=zipfile.ZIP_STORED):
    """A torch archive with one storage, but with `content` in place of its entry `name`."""
    whole = io.BytesIO()
    torch.save({"a": torch.ones(3)}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as new:
        for entry in source.infolist():
            ours = entry.filename.endswith(name)
            new.writestr(
                entry.filename, content if ours else source.read(entry), compression if ours else zipfile.ZIP_STORED
            )


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm was done",)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_code_is_not_run(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Harm()}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    refused(tmp_path / "pytorch_model.bin", r"calls posix\.mkdir.*can run code")
    assert [file.name for file in tmp_path.iterdir()] == ["pytorch_model.bin"]


# Protocol 2: an empty dict, an empty tuple, what wraps it, 1, set as key and value, the end.
NESTED = b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s."
DOUBLED = b"\x80\x02})" + b"".join(bytes([0x71, i, 0x68, i, 0x86]) for i in range(60)) + b"K\x01s."


@pytest.mark.parametrize("content", [NESTED, DOUBLED], ids=["nested", "doubled"])
def test_pickled_keys_that_crash_or_hang_whoever_hashes_them(tmp_path, content):
    archive(tmp_path / "x.bin", content)
    refused(tmp_path / "x.bin", "tuple of .* values")
    # The magic number and the protocol of the format before zip, then the same.
    old = b"".join(b"\x80\x02" + number + b"." for number in (b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19", b"M\xe9\x03", b"}"))
    (tmp_path / "old.bin").write_bytes(old + content)
    refused(tmp_path / "old.bin", "tuple of .* values")


def test_a_pickle_too_long_to_be_checked_is_not_loaded(tmp_path, monkeypatch):
    torch.save({"a" * 2000: torch.ones(3)}, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    monkeypatch.setattr(pickle_check, "_PICKLE_LIMIT", 1000)
    refused(tmp_path / "x.bin", "pickles of more than 1000 bytes")


def test_a_pickle_of_too_many_operations_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(pickle_check, "_OPERATION_LIMIT", 30)
    for zipped in (False, True):
        torch.save({"a": torch.ones(3)}, tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
        refused(tmp_path / "x.bin", "a pickle too long for names of tensors")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_names_each_entry_once(tmp_path):
    """Of two of one name torch would take one, and the check the other."""
    torch.save({"a": torch.ones(3)}, tmp_path / "x.bin")
    with zipfile.ZipFile(tmp_path / "x.bin") as given:
        name = next(name for name in given.namelist() if name.endswith("data.pkl"))
        content = given.read(name)
    with zipfile.ZipFile(tmp_path / "x.bin", "a") as given:
        given.writestr(name, content)
    refused(tmp_path / "x.bin", "twice or not whole")


def test_a_compressed_archive_is_not_inflated(tmp_path):
    archive(tmp_path / "x.bin", b"\x80\x02}" + b"}0" * (50 << 20) + b".", compression=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "x.bin").stat().st_size < 1 << 20
    refused(tmp_path / "x.bin", "compressed entry")


def test_one_value_repeated_is_not_a_weight(tmp_path):
    torch.save({"a": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "x.bin")
    assert refused(tmp_path / "x.bin", "one value repeated").tensor == "a"


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "a\\b",
        "C:x",
        "a\0b",
        "a" * 300,
        "\ud800",
        3,
    ],
)
def test_an_index_names_plain_files(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert refused(tmp_path, "not a plain file name").tensor == "a"


def shards(folder, *numbers, count=2):
    for number in numbers:
        save_file({f"w{number}": torch.ones(number)}, folder / f"model-{number:05d}-of-{count:05d}.safetensors")


def index(folder, **weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_what_an_index_leaves_out(tmp_path):
    shards(tmp_path, 1, 2)
    index(tmp_path, w1="model-00001-of-00002.safetensors")
    refused(tmp_path, r"model-00002-of-00002\.safetensors: is a part of this checkpoint by its name")
    # Of another set: left alone. Links: as in the Hub's cache.
    (tmp_path / "model-00002-of-00002.safetensors").rename(tmp_path / "blob")
    (tmp_path / "model-00002-of-00002.safetensors").symlink_to("blob")
    shards(tmp_path, 3, count=3)
    index(tmp_path, w1="model-00001-of-00002.safetensors", w2="model-00002-of-00002.safetensors")
    with registry.open_reader(tmp_path)[1] as reader:
        assert {name: reader.read(name).shape for name in reader.tensors} == {"w1": (1,), "w2": (2,)}
    # A tensor the index does not list is read with its shard, as by transformers.
    save_file({"w2": torch.ones(2), "more": torch.ones(1)}, tmp_path / "blob")
    with registry.open_reader(tmp_path)[1] as reader:
        assert set(reader.tensors) == {"w1", "w2", "more"}
    save_file({"w1": torch.ones(2), "w2": torch.ones(2)}, tmp_path / "blob")
    assert refused(tmp_path, "and again in").tensor == "w1"
    index(tmp_path, w1="model-00002-of-00002.safetensors", w9="model-00001-of-00002.safetensors")
    refused(tmp_path, "does not hold it|again in|by its name")
    # Both shards are read whichever way round they are named, and still the index is another checkpoint's.
    save_file({"w2": torch.ones(2)}, tmp_path / "blob")
    index(tmp_path, w1="model-00002-of-00002.safetensors", w2="model-00001-of-00002.safetensors")
    assert refused(tmp_path, "which does not hold it").tensor == "w1"


def safetensors(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]}, "takes .* bytes"),
        ({"dtype": "F32", "shape": [0, 1 << 63], "data_offsets": [0, 0]}, "not lists of sizes"),
        ({"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}, "not lists of sizes"),
        ({"dtype": "F32", "shape": [float("nan")], "data_offsets": [0, 16]}, "not lists of sizes"),
        ({"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}, "not lists of sizes"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "not lists of sizes"),
        ({"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}, "not lists of sizes"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}, "data_offsets give -16"),
        ({"dtype": "F64", "shape": [4], "data_offsets": [0, 16]}, "takes 32 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 16]}, "takes 8 bytes"),
        ({"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}, "not known here"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}, "starts at 8"),
    ],
)
def test_safetensors_that_lie(tmp_path, entry, match):
    safetensors(tmp_path / "model.safetensors", {"w": entry}, b"\0" * 16)
    assert refused(tmp_path, match).tensor == "w"


def test_safetensors_headers(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes((1 << 63).to_bytes(8, "little") + b"{}")
    refused(tmp_path, "truncated or not safetensors")
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    safetensors(file, {"a": entry, "b": entry}, b"\0" * 4)
    refused(tmp_path, "the one before ends at 4")
    for header in (b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b'{"a": 1, "a": 1}', b"3", b'{"a": 1e999}'):
        safetensors(file, header)
        refused(tmp_path, "model.safetensors")
    safetensors(file, {"a" * 100_000: {**entry, "dtype": "F99"}})
    refused(tmp_path, "a{500}.* ... .*")


ARRAY = msgpack.packb((([3]), "float32", b"\0" * 12))


@pytest.mark.parametrize(
    "content",
    [
        b"\x81\xa1a" * 100_000,
        b"\x81\xa1a" + b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff" + b"\xa1a\xc0" * 10,
        b"\x81\xa1a\xc9\xff\xff\xff\xff\x01",
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x81\xa2\xff\xfe\x01",
        msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(([1 << 40, 1 << 40], "float32", b"\0" * 12)))}),
        msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(([-3], "float32", b"\0" * 12)))}),
        msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(([3], "object", b"\0" * 24)))}),
        msgpack.packb({"a": msgpack.ExtType(1, ARRAY + b"x")}),
        msgpack.packb({"a": {"__msgpack_chunked_array__": True, "shape": {"0": 1 << 60}, "chunks": {"0": 1}}}),
    ],
)
def test_msgpack_that_lies(tmp_path, content):
    (tmp_path / "flax_model.msgpack").write_bytes(content)
    refused(tmp_path, "flax_model.msgpack")


def npz(path, header, data=b"", **entry):
    with zipfile.ZipFile(path, "w", **entry) as new:
        text = header.encode() + b"\n"
        new.writestr("kernel.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1000000)}", b"\0" * 16),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}", b"\0" * 16),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"\x80\x04cposix\nmkdir\n."),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': " + "(" * 9999 + ")" * 9999 + "}", b""),
        ("__import__('os').mkdir('harm')", b""),
        ("{'descr': [('a', '<f4', (1000000000, 1000000000))], 'fortran_order': False, 'shape': (1,)}", b"\0" * 4),
    ],
)
def test_npz_that_lies(tmp_path, monkeypatch, header, data):
    monkeypatch.chdir(tmp_path)
    npz(tmp_path / "model.npz", header, data)
    refused(tmp_path, "model.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["model.npz"]


def test_an_npz_bomb(tmp_path):
    """A thousand times its size when inflated, as its header truly says: no error, but no memory before it is read."""
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (25000000,)}"
    npz(tmp_path / "model.npz", header, b"\0" * 100_000_000, compression=zipfile.ZIP_DEFLATED)
    code = """
import resource, sys
from pathlib import Path
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.numpy_files.npz import Npz
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    Npz().open(Path(sys.argv[1]))
except CheckpointError:
    pass
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000
"""
    command = [sys.executable, "-c", code, str(tmp_path / "model.npz")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=600, check=True)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"num_labels": 10**9},
        {"hidden_size": 10**18},
        {"hidden_size": -5},
        {"hidden_size": float("nan")},
        {"num_attention_heads": 0},
        {"model_type": "../bert"},
        {"model_type": "resnet", "architectures": ["ResNetModel"], "depths": [10**9, 1]},
        {"model_type": "gpt_neo", "architectures": ["GPTNeoModel"], "attention_types": [[["global"], 10**9]]},
        {"model_type": "mixtral", "architectures": ["MixtralModel"], "num_local_experts": 10**9},
        {"architectures": ["os.system"]},
        {"architectures": [3]},
        {"architectures": ["BertTokenizer"]},
    ],
)
def test_configs_that_lie(change):
    content = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 8, "num_attention_heads": 2}
    with pytest.raises(CheckpointError, match=r"config\.json"):
        architecture_of(Config(Path("config.json"), {**content, "num_hidden_layers": 1, **change}), 40)


def test_errors_stay_short():
    error = CheckpointError(f"has the shape {list(range(100_000))}", tensor="a" * 100_000)
    assert len(str(error)) < 5000
    assert nearest("a" * 10**6, ["a" * 10**6] * 100) == ""
    assert "'abc'" in nearest("abd", ["abc", "x" * 10**6])
