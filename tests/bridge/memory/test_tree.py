"""Trees of jax's world and torch tensors over the same memory, or copied once, and their placement over devices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from easytorch.bridge.core.nested import flat
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.memory import dtensors, jax_arrays
from easytorch.bridge.memory.tree import MemoryTree
from easytorch.bridge.rules.transforms import Transform
from easytorch.bridge.state import state_dict_to_tree, tree_to_state_dict

jax = pytest.importorskip("jax")
jnp = jax.numpy
ROOT = Path(__file__).resolve().parents[3]
RULES = (
    ("norm.weight", "norm/scale", "identity"),
    ("dense.weight", "dense/kernel", "linear"),
    ("conv.weight", "conv/kernel", "conv2d"),
)
# Every dtype torch and jax both have without x64.
DTYPES = ["float32", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "bool", "complex64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


def values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Random bits that are numbers of `dtype`."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, shape).astype(kind)


def arrays(dtype: str = "float32") -> dict[str, np.ndarray]:
    shapes = {"norm/scale": (16,), "dense/kernel": (8, 24), "conv/kernel": (3, 5, 16, 4)}
    return {path: values(shape, dtype, seed) for seed, (path, shape) in enumerate(shapes.items())}


def tree(convert=lambda array: array, dtype: str = "float32") -> dict:
    return {path.split("/")[0]: {path.split("/")[1]: convert(array)} for path, array in arrays(dtype).items()}


def bits(tensor: torch.Tensor | np.ndarray) -> bytes:
    if isinstance(tensor, torch.Tensor):
        return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else b""
    return np.ascontiguousarray(tensor).tobytes()


def expected(dtype: str = "float32") -> dict[str, np.ndarray]:
    given = arrays(dtype)
    return {
        "norm.weight": given["norm/scale"],
        "dense.weight": given["dense/kernel"].transpose(1, 0),
        "conv.weight": given["conv/kernel"].transpose(3, 2, 0, 1),
    }


def same(state: dict[str, torch.Tensor], dtype: str = "float32") -> None:
    assert state.keys() == expected(dtype).keys()
    for name, array in expected(dtype).items():
        assert state[name].dtype == getattr(torch, dtype) and tuple(state[name].shape) == array.shape
        assert bits(state[name]) == bits(array), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copy", [None, True, False])
def test_jax_arrays_become_tensors_bit_for_bit(dtype, copy) -> None:
    given = tree(jnp.asarray, dtype)
    state = tree_to_state_dict(given, RULES, copy=copy)
    same(state, dtype)
    pointers = {"norm.weight": given["norm"]["scale"], "dense.weight": given["dense"]["kernel"]}
    pointers["conv.weight"] = given["conv"]["kernel"]
    for name, array in pointers.items():
        # a transposed leaf too: the tensor is a strided view
        assert (state[name].data_ptr() == array.unsafe_buffer_pointer()) == (copy is False), name
    assert state["dense.weight"].is_contiguous() == (copy is not False)


def test_only_copies_are_trained_without_harm_to_jax() -> None:
    given = tree(jnp.asarray)
    before = np.array(given["dense"]["kernel"])
    weight = tree_to_state_dict(given, RULES)["dense.weight"]
    weight.zero_()
    np.testing.assert_array_equal(given["dense"]["kernel"], before)


def test_a_shared_tensor_outlives_the_jax_array() -> None:
    state = tree_to_state_dict(tree(jnp.asarray), RULES, copy=False)
    for _ in range(8):  # memory that was let go of would be used again
        jnp.full((8, 24), 7.0).block_until_ready()
    same(state)


@pytest.mark.parametrize("copy, shared", [(None, ["norm.weight"]), (True, []), (False, sorted(expected()))])
def test_numpy_arrays_are_shared_where_that_can_do_no_harm(copy, shared) -> None:
    leaves = tree()
    state = tree_to_state_dict(leaves, RULES, copy=copy)
    pointers = {"norm.weight": leaves["norm"]["scale"], "dense.weight": leaves["dense"]["kernel"]}
    pointers["conv.weight"] = leaves["conv"]["kernel"]
    assert sorted(name for name, leaf in pointers.items() if state[name].data_ptr() == leaf.ctypes.data) == shared
    same(state)


def test_a_read_only_array_is_never_shared() -> None:
    """A map of a file, for one: writing into the tensor would end the process."""
    leaves = tree()
    leaves["norm"]["scale"].setflags(write=False)
    weight = tree_to_state_dict(leaves, RULES, copy=False)["norm.weight"]
    assert weight.data_ptr() != leaves["norm"]["scale"].ctypes.data
    weight.zero_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copy", [None, False])
def test_tensors_become_jax_arrays_bit_for_bit(dtype, copy) -> None:
    state = tree_to_state_dict(tree(dtype=dtype), RULES, copy=True)
    made = flat(state_dict_to_tree(state, RULES, framework="jax", copy=copy))
    for path, array in arrays(dtype).items():
        assert isinstance(made[path], jax.Array) and made[path].dtype == array.dtype
        assert bits(np.asarray(made[path])) == bits(array), path
    same_memory = made["dense/kernel"].unsafe_buffer_pointer() == state["dense.weight"].data_ptr()
    assert same_memory == (copy is False)


@pytest.mark.parametrize(
    "cut",
    [lambda t: t[:, 1:9], lambda t: t[:1].expand(8, -1), lambda t: t.flatten()[1:]],
    ids=["sliced", "expanded", "off"],
)
def test_what_dlpack_refuses_is_copied(cut) -> None:
    tensor = cut(torch.arange(240.0).reshape(10, 24))
    made = state_dict_to_tree({"norm.weight": tensor}, RULES, framework="jax", copy=False, complete=False)
    np.testing.assert_array_equal(made["norm"]["scale"], tensor.numpy())


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_a_dtype_that_jax_would_narrow_is_refused(dtype) -> None:
    tensor = torch.arange(4).to(getattr(torch, dtype))
    with pytest.raises(CheckpointError, match=rf"norm/scale.*narrow {dtype}.*jax_enable_x64"):
        state_dict_to_tree({"norm.weight": tensor}, RULES, framework="jax", complete=False)
    with jax.enable_x64(True):
        made = state_dict_to_tree({"norm.weight": tensor}, RULES, framework="jax", complete=False)["norm"]["scale"]
    assert made.dtype == dtype


def test_a_parameter_and_a_scalar_go_along() -> None:
    rules = (("scale", "logit_scale", "identity"),)
    for copy in (None, True, False):
        made = state_dict_to_tree({"scale": torch.nn.Parameter(torch.tensor(2.5))}, rules, framework="jax", copy=copy)
        assert made["logit_scale"].shape == () and made["logit_scale"] == 2.5
        assert tree_to_state_dict(made, rules, copy=copy)["scale"] == 2.5


def test_a_layout_that_is_no_view_is_copied_whatever_is_asked() -> None:
    negated = Transform(
        name="negated",
        to_flax=lambda parts: -parts[0],
        to_torch=lambda leaf: (-leaf,),
        flax_shape=lambda shapes: shapes[0],
        torch_shapes=lambda shape: (shape,),
    )
    leaf = jnp.arange(6.0)
    for copy in (None, True, False):
        made = tree_to_state_dict({"a": leaf}, (("a", "a", negated),), copy=copy)["a"]
        assert made.tolist() == (-leaf).tolist()


def test_a_dtype_torch_does_not_have_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"norm\.weight.*float8_e3m4, with which torch cannot compute"):
        tree_to_state_dict({"norm": {"scale": values((4,), "float8_e3m4")}}, RULES, complete=False)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"framework='tf'.*numpy.*jax"):
        state_dict_to_tree({}, RULES, framework="tf", complete=False)
    with pytest.raises(ValueError, match="framework='jax'"):
        state_dict_to_tree({}, RULES, shardings=object(), complete=False)
    with pytest.raises(TypeError, match="int is no tree"):
        MemoryTree(3)
    with pytest.raises(CheckpointError, match=r"'a'.*object.*not an array of numbers"):
        MemoryTree({"a": np.array([None])})


class TestFlaxObjects:
    """Whatever flax wraps a tree in."""

    def names(self, given) -> list[str]:
        return sorted(MemoryTree(given).leaves)

    def test_linen(self) -> None:
        linen = pytest.importorskip("flax.linen")
        from flax.core import freeze

        class Net(linen.Module):
            @linen.compact
            def __call__(self, x):
                init = linen.with_partitioning(linen.initializers.ones, ("data", None))
                x = linen.Dense(4, name="dense", kernel_init=init)(x)
                return linen.BatchNorm(name="norm", use_running_average=True)(x)

        variables = Net().init(jax.random.key(0), jnp.ones((2, 3)))
        wanted = ["batch_stats/norm/mean", "batch_stats/norm/var"]
        wanted += ["params/dense/bias", "params/dense/kernel", "params/norm/bias", "params/norm/scale"]
        assert self.names(variables) == self.names(freeze(variables)) == wanted
        inner = ["dense/bias", "dense/kernel", "norm/bias", "norm/scale"]
        assert self.names({"params": variables["params"]}) == self.names(variables["params"]) == inner
        np.testing.assert_array_equal(MemoryTree(variables).read("params/dense/kernel"), np.ones((3, 4)))

    def test_nnx(self) -> None:
        nnx = pytest.importorskip("flax.nnx")

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)])
                self.drop = nnx.Dropout(0.5, rngs=rngs)

        class Normed(Net):
            def __init__(self, rngs):
                super().__init__(rngs)
                self.norm = nnx.BatchNorm(4, rngs=rngs)

        net = Net(nnx.Rngs(0))
        state = nnx.state(net)
        wanted = [f"layers/{place}/{leaf}" for place in "01" for leaf in ("bias", "kernel")]
        with_value = {"layers": {"0": {"kernel": {"value": np.ones((3, 4))}, "bias": {"value": np.ones(4)}}}}
        assert self.names(net) == self.names(state) == self.names(nnx.state(net, nnx.Param)) == wanted
        assert self.names(nnx.to_pure_dict(nnx.state(net, nnx.Param))) == wanted
        assert self.names(with_value) == wanted[:2]
        np.testing.assert_array_equal(MemoryTree(net).read("layers/1/kernel"), net.layers[1].kernel[...])
        assert {"batch_stats/norm/mean", "params/norm/scale", *(f"params/{path}" for path in wanted)} <= {
            *self.names(Normed(nnx.Rngs(0)))
        }


DEVICES = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np, torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from easytorch.bridge.memory import jax_arrays
from easytorch.bridge.state import state_dict_to_tree, tree_to_dtensors, tree_to_state_dict
from easytorch.bridge.core.nested import flat
RULES = (("norm.weight", "norm/scale", "identity"), ("dense.weight", "dense/kernel", "linear"),
         ("conv.weight", "conv/kernel", "conv2d"))
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
specs = {"norm/scale": P(), "dense/kernel": P("model", "data"), "conv/kernel": P(None, None, None, ("data", "model"))}
shapes = {"norm/scale": (16,), "dense/kernel": (8, 24), "conv/kernel": (3, 5, 16, 4)}
whole = {path: np.random.default_rng(1).random(shape, np.float32) for path, shape in shapes.items()}
leaves = {path: jax.device_put(whole[path], NamedSharding(mesh, specs[path])) for path in shapes}
tree = {"norm": {"scale": leaves["norm/scale"]}, "dense": {"kernel": leaves["dense/kernel"]},
        "conv": {"kernel": leaves["conv/kernel"]}}
wanted = {"norm.weight": whole["norm/scale"], "dense.weight": whole["dense/kernel"].T,
          "conv.weight": whole["conv/kernel"].transpose(3, 2, 0, 1)}
"""


def run(code: str, *arguments: object, processes: int = 1) -> list[str]:
    """What `code` prints in new interpreters: jax takes its number of devices once."""
    command = [sys.executable, "-c", DEVICES + code, *map(str, arguments)]
    started = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    ended = [process.communicate(timeout=600) for process in started]
    assert all(process.returncode == 0 for process in started), ended
    return [out for out, _ in ended]


def test_sharded_arrays_both_ways() -> None:
    """Each shard is read once, into the tensor; never is a leaf assembled in its own layout before."""
    code = """
from easytorch.bridge.memory import tree as memory
assemble = memory.host
memory.host = lambda leaf, path: 1 / 0 if jax_arrays.is_sharded(leaf) else assemble(leaf, path)
for copy in (None, True, False):
    state = tree_to_state_dict(tree, RULES, copy=copy)
    for name, array in wanted.items():
        assert state[name].shape == array.shape and np.array_equal(state[name].numpy(), array), name
assert all(leaf._npy_value is None for leaf in leaves.values() if jax_arrays.is_sharded(leaf)), "a second copy is kept"

places = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
nest = {"norm": {"scale": places["norm/scale"]}, "dense": {"kernel": places["dense/kernel"]},
        "conv": {"kernel": places["conv/kernel"]}}
for shardings in (nest, places.get):
    back = flat(state_dict_to_tree(state, RULES, framework="jax", shardings=shardings))
    for path, leaf in leaves.items():
        assert back[path].sharding == leaf.sharding and np.array_equal(back[path], whole[path]), path
one = flat(state_dict_to_tree(state, RULES, framework="jax", shardings=NamedSharding(mesh, P())))
assert all(leaf.is_fully_replicated for leaf in one.values())
try:
    state_dict_to_tree(state, RULES, framework="jax", shardings={"norm": nest["norm"]})
except ValueError as error:
    print(error)
"""
    assert "'dense/kernel': has no place in `shardings`" in run(code)[0] or "conv/kernel" in run(code)[0]


def test_dtensors_stand_where_jax_had_the_leaves(tmp_path) -> None:
    """Two processes of gloo, each with its part; torch then gathers what jax had."""
    code = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tests.processes import leave_group
rank = int(sys.argv[-1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
torch_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
state = tree_to_dtensors(tree, RULES, torch_mesh)
report = {}
for name, array in wanted.items():
    full = state[name].full_tensor()
    assert np.array_equal(full.numpy(), array), name
    report[name] = [str(state[name].placements), list(state[name].to_local().shape), list(state[name].shape)]
print(json.dumps(report))
for names in (None, ("model", "data")):
    try:
        tree_to_dtensors(tree, RULES, init_device_mesh("cpu", (2, 1), mesh_dim_names=names))
    except ValueError as error:
        print(error)
leave_group()
"""
    for out in run(code, tmp_path, processes=2):
        placed, unnamed, turned = out.strip().splitlines()
        report = json.loads(placed)
        assert report["norm.weight"] == ["(Replicate(), Replicate())", [16], [16]]
        assert report["dense.weight"] == ["(Shard(dim=0), Shard(dim=1))", [24, 4], [24, 8]]
        assert report["conv.weight"] == ["(Shard(dim=0), Shard(dim=0))", [2, 16, 3, 5], [4, 16, 3, 5]]
        assert "mesh_dim_names" in unnamed and "conv/kernel: dimension 3 is split over ('data', 'model')" in turned


def test_checkpoints_are_read_onto_devices_and_written_from_them(tmp_path) -> None:
    code = """
from easytorch import bridge
bridge.save_tree({"params": tree}, sys.argv[1] + "/new")
stored = bridge.load_tree(sys.argv[1] + "/new")
assert all(np.array_equal(flat(stored)[path], array) for path, array in whole.items()), list(flat(stored))
places = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
made = flat(bridge.load_tree(sys.argv[1] + "/new", framework="jax", shardings=lambda path: places[path]))
assert all(made[path].sharding == leaf.sharding and np.array_equal(made[path], leaf) for path, leaf in leaves.items())
"""
    run(code, tmp_path)


def test_a_dimension_that_does_not_divide_is_split_as_torch_splits_it() -> None:
    """Of any size over any number of processes: the last have less, or nothing."""
    for size in range(14):
        for parts in range(1, 7):
            expected = list(torch.arange(size).chunk(parts)) if size else []
            expected += [torch.arange(0)] * (parts - len(expected))
            for place in range(parts):
                found = torch.arange(size)[dtensors._chunk(slice(0, size), parts, place)]
                assert torch.equal(found, expected[place]), (size, parts, place)
                moved = dtensors._chunk(slice(5, 5 + size), parts, place)  # split over another axis before
                assert torch.equal(torch.arange(5 + size)[moved], expected[place] + 5)


def test_parts_that_are_elsewhere_are_an_error(monkeypatch) -> None:
    """An array of which this process holds a part: nothing is left to what memory held."""
    whole = np.arange(12.0).reshape(4, 3)
    parts = [((slice(0, 2), slice(0, 3)), whole[:2]), ((slice(3, 4), slice(0, 3)), whole[3:])]
    monkeypatch.setattr(jax_arrays, "_shards", lambda leaf: iter(parts))
    rows, columns = slice(0, 4), slice(0, 3)
    for region, left in (((rows, columns), 3), ((slice(1, 3), slice(1, 3)), 2), ((slice(2, 3), columns), 3)):
        target = np.empty([part.stop - part.start for part in region])
        said = f"{left} of its {target.size} elements are on the devices of other processes"
        with pytest.raises(CheckpointError, match=said):
            jax_arrays.fill(target, region, whole, "a/kernel")
    target = np.empty((2, 2))
    jax_arrays.fill(target, (slice(0, 2), slice(1, 3)), whole, "a/kernel")
    assert np.array_equal(target, whole[:2, 1:])


def test_memory_outside_of_an_array_is_not_shared() -> None:
    """A view of other memory, or one that reaches over the end, makes no tensor."""
    import jax.numpy as jnp

    leaf = jnp.arange(64, dtype=jnp.float32)
    own = jax_arrays.host(leaf)
    assert jax_arrays.share(leaf, own[8:16]) is not None
    beyond = np.lib.stride_tricks.as_strided(own[60:], (8,), own.strides, writeable=False)
    for view in (np.ones(64, np.float32), jax_arrays.host(jnp.ones(64)), beyond):
        assert jax_arrays.share(leaf, view) is None
