"""Orbax checkpoints against orbax's own writer and reader: every handler, container and element type."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.serialization import msgpack_serialize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from easytorch.bridge import convert
from easytorch.bridge.checkpoint import open_checkpoint
from easytorch.bridge.core.array_source import ArraySource
from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import array_chunks, pending_writes
from easytorch.bridge.formats.orbax_trees.index import CHECKPOINT_METADATA, find_tree
from easytorch.bridge.formats.orbax_trees.tree import OrbaxTree, OrbaxZarr
from easytorch.bridge.formats.zarr_metadata import parse
from easytorch.bridge.load_tree import load_tree
from easytorch.bridge.names.unwrap import unwrapped
from easytorch.bridge.save_tree import save_tree

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint32", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "complex64"),
]
CONTAINERS = [(True, False), (True, True), (False, False), (False, True)]


def leaves() -> dict[str, np.ndarray]:
    """A leaf of random bits of every element type, a scalar, a list, a key with a dot."""
    rng = np.random.default_rng(0)
    made = {}
    for name in DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        bits = rng.integers(0, 2 if name == "bool" else 256, (3, 5 * dtype.itemsize), np.uint8)
        made[f"of/{name}"] = bits.view(dtype)
    made["scalar"] = np.array(7, np.int32)
    made["list/0"], made["list/1"] = np.ones(2, np.float32), np.zeros((2, 2), np.float16)
    made["with.dot"] = np.arange(6, dtype=np.float32).reshape(2, 3)
    return made


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def read_all(folder: Path) -> dict[str, np.ndarray]:
    format_ = OrbaxTree()
    with format_.open(format_.detect(folder)) as reader:
        found = {name: reader.read(name) for name in reader.tensors}
        assert all((found[n].shape, found[n].dtype.name) == (i.shape, i.dtype) for n, i in reader.tensors.items())
        return found


def write(format_: OrbaxTree, folder: Path, arrays: dict[str, np.ndarray], shard: int = 1 << 30) -> None:
    folder.mkdir()
    infos = [TensorInfo(name, array.shape, array.dtype.name) for name, array in arrays.items()]
    layout = format_.layout(infos, shard)
    source = ArraySource(arrays)
    for file, tensors in layout.items():
        format_.write(folder, file, tensors, source)
    format_.finish(folder, layout, source)


def save_pytree(folder: Path, tree: dict, *, ocdbt: bool = True, zarr3: bool = False) -> None:
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)).save(folder, tree)


@pytest.mark.parametrize(("ocdbt", "zarr3"), CONTAINERS)
def test_reads_what_orbax_writes(tmp_path, ocdbt, zarr3):
    arrays = leaves()
    tree = nested(arrays) | {"nothing": None, "hollow": {}, "text": "hello", "number": 5}
    tree["list"] = [arrays["list/0"], arrays["list/1"]]
    save_pytree(tmp_path / "c", tree, ocdbt=ocdbt, zarr3=zarr3)
    found = read_all(tmp_path / "c")
    assert found.pop("number") == 5
    assert set(found) == set(arrays)
    assert all(same(found[name], arrays[name]) for name in arrays)
    with OrbaxTree().open(tmp_path / "c") as reader:
        assert reader.metadata == {"text": "hello"}


@pytest.mark.parametrize("format_", [OrbaxTree(), OrbaxZarr()], ids=lambda format_: format_.name)
@pytest.mark.parametrize("restore", [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer])
def test_orbax_restores_what_is_written(tmp_path, format_, restore):
    arrays = leaves() | {"empty": np.zeros((0, 3), np.float32)}
    write(format_, tmp_path / "c", arrays, shard=100)
    restored = flat(restore().restore(tmp_path / "c"))
    assert set(restored) == set(arrays)
    assert all(same(np.asarray(restored[name]), arrays[name]) for name in arrays)
    assert all(same(array, arrays[name]) for name, array in read_all(tmp_path / "c").items())


@pytest.mark.parametrize("format_", [OrbaxTree(), OrbaxZarr()], ids=lambda format_: format_.name)
def test_large_arrays_go_chunk_by_chunk(tmp_path, format_, monkeypatch):
    monkeypatch.setattr(array_chunks, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(pending_writes, "_PENDING_BYTES", 3000)
    monkeypatch.setattr(array_chunks, "_WINDOW_BYTES", 5000)
    rng = np.random.default_rng(0)
    arrays = {
        "strided": rng.normal(size=(40, 30, 7)).astype(np.float32).transpose(2, 0, 1),
        "row": rng.normal(size=(1, 5000)).astype(ml_dtypes.bfloat16),
        "prime": rng.normal(size=(97, 13)),
    }
    write(format_, tmp_path / "c", arrays)
    description = json.loads((tmp_path / "c/prime/.zarray").read_text()) if format_.name == "Orbax zarr" else None
    assert description is None or np.prod(description["chunks"]) * 8 <= 1000
    assert all(same(array, arrays[name]) for name, array in read_all(tmp_path / "c").items())
    restored = ocp.StandardCheckpointer().restore(tmp_path / "c")
    assert all(same(np.asarray(restored[name]), arrays[name]) for name in arrays)


def test_parts_can_be_written_again(tmp_path):
    """What a killed run left of a part is replaced, and merging twice gives the same."""
    format_, arrays = OrbaxTree(), {f"leaf/{n}": np.full((4, 4), n, np.float32) for n in range(6)}
    infos = [TensorInfo(name, array.shape, array.dtype.name) for name, array in arrays.items()]
    layout, source = format_.layout(infos, 128), ArraySource(arrays)
    wrong = ArraySource({name: array + 1 for name, array in arrays.items()})
    (tmp_path / "c").mkdir()
    for turn in (wrong, source):
        for file, tensors in layout.items():
            format_.write(tmp_path / "c", file, tensors, turn)
        format_.finish(tmp_path / "c", layout, turn)
    assert len(layout) == 3
    assert all(same(array, arrays[name]) for name, array in read_all(tmp_path / "c").items())


def test_standard_handler_and_manager(tmp_path):
    """The last whole step is taken, and in it the item that holds the model."""
    old, new = {"w": np.zeros(3, np.float32)}, {"w": np.arange(3, dtype=np.float32)}
    with ocp.CheckpointManager(tmp_path / "plain") as manager:
        for step, tree in ((9, old), (10, new)):
            manager.save(step, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    (tmp_path / "plain/11.orbax-checkpoint-tmp-1").mkdir()
    assert same(read_all(tmp_path / "plain")["w"], new["w"])
    assert OrbaxTree().detect(tmp_path / "plain") == tmp_path / "plain/10/default"
    with ocp.CheckpointManager(tmp_path / "items") as manager:
        items = {"items": ocp.args.PyTreeSave(new), "metrics": ocp.args.JsonSave({"loss": 1})}
        manager.save(0, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    assert same(read_all(tmp_path / "items")["w"], new["w"])
    assert same(read_all(tmp_path / "items/0/items/_METADATA")["w"], new["w"])


def test_several_items_are_told_apart(tmp_path):
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        items = {name: ocp.args.StandardSave({"w": np.ones(1)}) for name in ("encoder_tree", "decoder_tree")}
        manager.save(0, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    with pytest.raises(CheckpointError, match="several items"):
        OrbaxTree().detect(tmp_path / "c")


def test_msgpack_file_of_early_orbax(tmp_path):
    """Leaves stand in `checkpoint` or, by name, in folders of their own."""
    far, near = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int32)
    save_pytree(tmp_path / "c", {"params": {"far": far}}, ocdbt=False)
    (tmp_path / "c/_METADATA").unlink()
    tree = {"params": {"far": "PLACEHOLDER://params.far", "near": near}, "step": 3}
    (tmp_path / "c/checkpoint").write_bytes(msgpack_serialize(tree))
    found = read_all(tmp_path / "c")
    assert same(found["params/far"], far)
    assert same(found["params/near"], near)


def test_a_store_without_metadata(tmp_path):
    write(OrbaxTree(), tmp_path / "c", {"a/b": np.ones(2, np.float32)})
    for name in ("_METADATA", "_CHECKPOINT_METADATA"):
        (tmp_path / "c" / name).unlink()
    assert same(read_all(tmp_path / "c")["a/b"], np.ones(2, np.float32))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
        self.norm = nnx.LayerNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


@pytest.mark.parametrize("pure", [False, True])
def test_nnx(tmp_path, pure):
    """A state with `value` at its leaves, and the pure dict of it, are the same parameters."""
    model = Model(nnx.Rngs(0))
    state = nnx.state(model, nnx.Param) if pure else nnx.state(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", nnx.to_pure_dict(state) if pure else state)
    with open_checkpoint(tmp_path / "c") as checkpoint:
        weights = checkpoint.in_scheme("flax").reader
        assert set(weights.tensors) == {
            *(f"layers/{number}/{leaf}" for number in (0, 1) for leaf in ("kernel", "bias")),
            *("norm/scale", "norm/bias"),
        }
        assert same(weights.read("layers/1/kernel"), np.asarray(model.layers[1].kernel.get_value()))


def test_sharded_over_several_devices(tmp_path):
    program = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
place = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
array = np.arange(96, dtype=np.float32).reshape(8, 12)
tree = {"both": place(array, "x", "y"), "rows": place(array, "y"), "whole": place(array), "one": place(array[0], "x")}
for ocdbt in (True, False):
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)).save(f"{sys.argv[1]}/{ocdbt}", tree)
"""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env=env, timeout=600)
    array = np.arange(96, dtype=np.float32).reshape(8, 12)
    for ocdbt in ("True", "False"):
        found = read_all(tmp_path / ocdbt)
        assert same(found.pop("one"), array[0])
        assert all(same(one, array) for one in found.values())
        assert len(found) == 3


def test_training_states_give_their_parameters():
    def paths(*names):
        found = unwrapped(names)
        return list(found.names), found.left_out

    assert paths("params/a/kernel", "opt_state/0/mu/a/kernel", "step") == (
        ["a/kernel"],
        ("opt_state/0/mu/a/kernel", "step"),
    )
    assert paths("params/params/a", "opt_state/x/y")[0] == ["a"]
    assert paths("state/params/a", "state/step")[0] == ["a"]
    assert paths("model/a/value", "model/dropout/rngs/count/value", "optimizer/step/value")[0] == ["a"]
    assert paths("optimizer/target/a", "optimizer/state/step", "version")[0] == ["a"]
    assert paths("model/a/kernel", "lm_head/kernel") == (["model/a/kernel", "lm_head/kernel"], ())
    assert paths("params/a", "batch_stats/a/mean")[0] == ["params/a", "batch_stats/a/mean"]
    assert paths("a/value", "b/kernel")[0] == ["a/value", "b/kernel"]
    with_statistics = ["params/a", "batch_stats/a/mean"]
    assert paths(*with_statistics, "opt_state/0", "step", "aux/b") == (
        with_statistics,
        ("opt_state/0", "step", "aux/b"),
    )
    for wrapper in ("state", "model", "train_state"):
        inside = [f"{wrapper}/{name}" for name in (*with_statistics, "opt_state/0", "step")]
        assert paths(*inside)[0] == with_statistics
    assert paths("params/params/a", "params/batch_stats/a/mean", "step")[0] == with_statistics
    assert paths("params/a", "batch_stats/batch_stats/a/mean", "step")[0] == with_statistics
    assert paths("params/params/a", "params/batch_stats/a/mean", "batch_stats/b", "step")[0] == with_statistics


def test_another_tree_of_a_training_state():
    names = ["params/a", "ema_params/a", "batch_stats/a/mean", "opt_state/0", "step"]
    found = unwrapped(names, "ema_params")
    assert found.names == {"params/a": "ema_params/a", "batch_stats/a/mean": "batch_stats/a/mean"}
    assert found.left_out == ("params/a", "opt_state/0", "step") and found.read == "ema_params"
    assert unwrapped([f"state/{name}" for name in names], "ema_params").names["params/a"] == "state/ema_params/a"
    assert unwrapped(["ema/params/a", "params/a", "step"], "ema").names == {"a": "ema/params/a"}
    assert unwrapped(names[:1] + names[1:2] + names[4:], "params").names == {"a": "params/a"}
    with pytest.raises(CheckpointError, match=r"no tree called 'ema'.*its trees are batch_stats, ema_params"):
        unwrapped(names, "ema")


def test_conversion_from_a_training_state(tmp_path, tiny_flax, tiny_leaves):
    """Parameters go to torch and back to Orbax; what is left out is said, and inspect shows it all."""
    zeros = {path: np.zeros_like(leaf) for path, leaf in tiny_leaves.items()}
    tree = {"params": nested(tiny_leaves), "opt_state": {"mu": nested(zeros)}, "step": np.int32(3)}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    config = tiny_flax / "config.json"
    report = convert(tmp_path / "run", tmp_path / "torch", to="torch", config=config)
    assert "opt_state, step" in " ".join(report.notes)
    with open_checkpoint(tmp_path / "run") as checkpoint:
        assert {"step", "params/bert/pooler/dense/bias"} <= set(checkpoint.reader.tensors)
    for target in ("orbax", "orbax-zarr"):
        convert(tmp_path / "torch", tmp_path / target, to=target, max_shard_size=2000)
        restored = flat(ocp.StandardCheckpointer().restore(tmp_path / target))
        assert set(restored) == set(tiny_leaves)
        assert all(same(np.asarray(restored[path]), tiny_leaves[path]) for path in tiny_leaves)


def test_opening_reads_no_data(tmp_path):
    write(OrbaxZarr(), tmp_path / "c", {"a": np.ones((4, 4), np.float32), "b": np.ones(3)})
    (tmp_path / "c/a/0.0").write_bytes(b"")
    with OrbaxTree().open(tmp_path / "c") as reader:
        assert reader.tensors["a"].shape == (4, 4)
        assert same(reader.read("b"), np.ones(3))
        with pytest.raises(CheckpointError, match="'a'"):
            reader.read("a")


def _edit(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def _rename_leaf(key: str):
    def change(content):
        entry = content["tree_metadata"]["('a',)"]
        entry["key_metadata"][0]["key"] = key

    return change


HOSTILE = {
    "no metadata": lambda c: (c / "_METADATA").write_text(""),
    "deep metadata": lambda c: (c / "_METADATA").write_text("[" * 100000),
    "no tree": lambda c: (c / "_METADATA").write_text("{}"),
    "path traversal": lambda c: _edit(c / "_METADATA", _rename_leaf("../../outside")),
    "absent leaf": lambda c: _edit(c / "_METADATA", _rename_leaf("gone")),
    "missing chunk": lambda c: (c / "a/0.0").unlink(),
    "no description": lambda c: (c / "a/.zarray").write_text("nonsense"),
    "huge shape": lambda c: _edit(c / "a/.zarray", lambda z: z.update(shape=[2**40, 2**40], chunks=[2**40, 2**40])),
    "negative shape": lambda c: _edit(c / "a/.zarray", lambda z: z.update(shape=[-4, 4])),
    "zero chunks": lambda c: _edit(c / "a/.zarray", lambda z: z.update(chunks=[0, 4])),
    "unknown dtype": lambda c: _edit(c / "a/.zarray", lambda z: z.update(dtype="|O8")),
    "ranks": lambda c: _edit(c / "a/.zarray", lambda z: z.update(shape=[1] * 100, chunks=[1] * 100)),
}


@pytest.mark.parametrize("damage", HOSTILE.values(), ids=HOSTILE)
def test_hostile(tmp_path, damage):
    write(OrbaxZarr(), tmp_path / "c", {"a": np.ones((4, 4), np.float32), "b": np.ones(3)})
    damage(tmp_path / "c")
    with pytest.raises(CheckpointError) as raised:
        OrbaxTree().open(tmp_path / "c")
    assert str(tmp_path / "c") in str(raised.value)


@pytest.fixture(scope="module", params=CONTAINERS, ids=str)
def original(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "c"
    save_pytree(folder, nested(leaves()), ocdbt=request.param[0], zarr3=request.param[1])
    return folder


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bits_flipped_and_files_cut(original, tmp_path, data):
    damaged = tmp_path / "damaged"
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(original, damaged)
    file = data.draw(st.sampled_from(sorted(file for file in damaged.rglob("*") if file.is_file())))
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    flips = data.draw(st.integers(0, 3))
    for _ in range(flips):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    try:
        found = read_all(damaged)
        # a chunk has no checksum: a changed byte cannot be seen, a missing one can
        expected = found if flips else read_all(original)
        assert found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)
    except CheckpointError as error:
        assert "\n" not in str(error)


def test_names_orbax_cannot_hold(tmp_path):
    def layout(*names, dtype="float32"):
        return OrbaxTree().layout([TensorInfo(name, (2,), dtype) for name in names], 100)

    for names, message in (
        (("a.b", "a/b"), "the same to Orbax"),
        (("a/../b",), "plain names"),
        (("a", "a/b"), "part of this path"),
    ):
        with pytest.raises(CheckpointError, match=message):
            layout(*names)
    with pytest.raises(CheckpointError, match="float8_e4m3"):
        layout("a", dtype="float8_e4m3")


def test_zarr_descriptions():
    assert parse(b'{"shape": [3], "chunks": [2], "dtype": ">f4"}', "zarr").dtype == "float32"
    assert parse(b'{"shape": [3], "chunks": [2], "dtype": "|b1"}', "zarr").chunk_count == 2
    for text in (b"[]", b"{}", b'{"shape": [3], "chunks": [2], "dtype": "<f3"}', b'{"shape": [1e400]}'):
        with pytest.raises(ValueError):
            parse(text, "zarr")


@pytest.mark.parametrize("target", ["orbax", "orbax-zarr"])
def test_companions_go_along_and_nothing_else(tmp_path, tiny_torch, target):
    (tiny_torch / "tokenizer.json").write_text("{}")
    convert(tiny_torch, tmp_path / "orbax", to=target)
    convert(tmp_path / "orbax", tmp_path / "back", to="torch")
    wanted = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "back").iterdir()} == wanted
    for step in (3, 4):
        items = tmp_path / f"run/{step}"
        shutil.copytree(tmp_path / "orbax", items / "default")
        (items / "metrics").mkdir()
        (items / "metrics/metrics").write_text("{}")
        (items / "_CHECKPOINT_METADATA").write_text("{}")
    shutil.copy(tiny_torch / "config.json", tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "again", to="torch", config=tiny_torch)
    assert {path.name for path in (tmp_path / "again").iterdir()} <= wanted


def test_a_killed_conversion_goes_on(tmp_path, tiny_torch, monkeypatch):
    """Parts that were finished are not written again, and what was begun is."""
    write_part, written = OrbaxTree.write, []

    def killed(self, folder, file, tensors, source):
        if len(written) == 3:
            (folder / file).mkdir()
            raise KeyboardInterrupt
        written.append(file)
        write_part(self, folder, file, tensors, source)

    monkeypatch.setattr(OrbaxTree, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(tiny_torch, tmp_path / "out", to="orbax", max_shard_size=2000, resume=True)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(OrbaxTree, "write", write_part)
    convert(tiny_torch, tmp_path / "out", to="orbax", max_shard_size=2000, resume=True)
    convert(tmp_path / "out", tmp_path / "back", to="torch")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tiny_torch / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "held"), [("x" * 300, ["orbax"]), ("a\\b", ["orbax"]), ("a\0b", []), ("a b", ["orbax", "orbax-zarr"])]
)
def test_what_is_written_under_odd_names_can_be_read(tmp_path, name, held):
    for target in ("orbax", "orbax-zarr"):
        tree = {name: np.ones((2, 3), np.float32), "other": np.zeros(3, np.float32)}
        if target not in held:
            with pytest.raises(CheckpointError, match=r"no path of plain names|backslash|File name too long"):
                save_tree(tree, tmp_path / target, to=target)
            assert not (tmp_path / target).exists()
            continue
        save_tree(tree, tmp_path / target, to=target)
        assert np.array_equal(load_tree(tmp_path / target)[name], tree[name])


def test_an_item_that_was_not_finished_is_none(tmp_path):
    """Nor is a step, whatever it is called: Orbax renames what is complete."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CHECKPOINT_METADATA).write_text("{}")
    write(OrbaxZarr(), tmp_path / "run" / "weights.orbax-checkpoint-tmp-12", {"a": np.ones(3)})
    assert find_tree(tmp_path / "run") is None
    write(OrbaxZarr(), tmp_path / "run" / "weights", {"a": np.ones(3)})
    assert find_tree(tmp_path / "run") == tmp_path / "run" / "weights"


def test_two_leaves_of_one_path_are_refused(tmp_path):
    write(OrbaxZarr(), tmp_path / "c", {"a/b": np.ones(3), "c": np.ones(3)})
    file = tmp_path / "c" / "_METADATA"
    content = json.loads(file.read_text())
    entries = content["tree_metadata"]
    label = next(one for one in entries if "b" in one)
    content["tree_metadata"] = {**entries, f"{label} again": entries[label]}
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="two leaves of the tree read the same"):
        OrbaxTree().open(tmp_path / "c")
