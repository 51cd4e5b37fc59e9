"""OperationImpl's helpers, OperationMetadata and OperationRegistry."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from easytorch.operations import Attention, OperationImpl, OperationMetadata, OperationRegistry, RMSNorm, backend
from easytorch.operations.dispatch.check import relative_rms_error
from easytorch.operations.dispatch.paths import place_of

ROOT = Path(__file__).resolve().parents[2]


class Nothing(OperationImpl):
    @classmethod
    def get_impl_name(cls) -> tuple[str, ...]:
        return ("nothing_for_the_test", "attention")

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_taken_name_is_an_error_and_registers_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"'attention' is taken by easytorch\.operations\.attention\.selection\.Attention"
    ):
        OperationRegistry.register(Nothing)
    assert "nothing_for_the_test" not in OperationRegistry.names()


def test_a_class_that_is_registered_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is loaded again does so; the table it had stays as it was in every other name."""
    monkeypatch.setattr(OperationRegistry, "_classes", dict(OperationRegistry._classes))
    before = dict(OperationRegistry._classes)
    flash = OperationRegistry.get("flash")
    assert OperationRegistry.register(flash) is flash and OperationRegistry._classes == before
    other = type("Other", (flash,), {"get_impl_name": classmethod(lambda cls: "only_for_the_test")})
    assert OperationRegistry.register(other) is other  # one name, that is not taken for its letters
    assert OperationRegistry._classes == before | {"only_for_the_test": other}
    assert OperationRegistry.names() == sorted({*before, "only_for_the_test"})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'flsh' \(did you mean 'flash'\?\); known: .*attention.*rotary.*vanilla"):
        OperationRegistry.create("flsh")


def test_aliases_are_the_same_class() -> None:
    assert OperationRegistry.get("flash_attn2") is OperationRegistry.get("flash")
    assert OperationRegistry.get("eager") is OperationRegistry.get("vanilla")
    metadata = OperationMetadata(softmax_scale=2.0)
    assert OperationRegistry.create("flash", metadata).get_impl_metadata() is metadata


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runtime_dtype": torch.int8}, "runtime_dtype must be a floating"),
        ({"runtime_softmax_dtype": "float32"}, "runtime_softmax_dtype must be a floating"),
        ({"dropout_prob": 1.0}, r"dropout_prob must be in \[0, 1\)"),
        ({"mode": "train"}, "mode must be one of __autoregressive__"),
    ],
)
def test_metadata_is_validated(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OperationMetadata(**settings)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda operation: pickle.loads(pickle.dumps(operation))])
@pytest.mark.parametrize("name", ["attention", "linear", "rms_norm"])
def test_a_copy_chooses_itself(name: str, duplicate: Callable[[OperationImpl], OperationImpl]) -> None:
    operation = OperationRegistry.create(name)
    call = operation.typical_call()
    assert call is not None
    found = duplicate(operation)
    choice = found.choose_on("cpu", *call)
    own = found.implementations.values() if isinstance(found, Attention) else [found]
    assert any(choice.operation is one for one in own)
    assert choice[1:] == operation.choose_on("cpu", *call)[1:]


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("got", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.2 / 5**0.5),
        ([0.0, 0.5], [0.0, 0.0], 0.125**0.5),
        ([1.0, NAN], [1.0, 2.0], INFINITY),
        ([1.0, INFINITY], [1.0, 2.0], INFINITY),
        ([1.0, 2.0], [1.0, NAN], INFINITY),
        ([1.0, 0.0], [1.0, NAN], INFINITY),
        ([NAN, NAN], [1.0, 2.0], INFINITY),
        ([1.0, -INFINITY], [1.0, INFINITY], INFINITY),
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.0, INFINITY, -INFINITY], [1.0, INFINITY, -INFINITY], 0.0),
        ([NAN], [NAN], 0.0),
        ([], [], 0.0),
    ],
)
def test_the_error_of_a_result(got: list[float], expected: list[float], error: float) -> None:
    found = relative_rms_error(torch.tensor(got), torch.tensor(expected))
    assert found == pytest.approx(error, rel=1e-6)  # NaN, which no comparison with a tolerance finds, is not equal


def test_get_mode() -> None:
    operation = OperationRegistry.create("attention")
    one, many = torch.empty(2, 1, 4, 16), torch.empty(2, 7, 4, 16)
    assert operation.get_mode(one) == "__autoregressive__"
    assert operation.get_mode(many) == "__train__"
    with torch.no_grad():
        assert operation.get_mode(many) == "__prefill__"
    assert operation.get_mode(one.transpose(1, 2), BTHD=False) == "__autoregressive__"
    assert Nothing(OperationMetadata(mode="__insert__")).get_mode(many) == "__insert__"


def test_repeat_kv_heads() -> None:
    k, v = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 4)
    repeated_k, repeated_v = OperationImpl.repeat_kv_heads(k, v, 2)
    assert repeated_k.shape == (2, 5, 6, 8)
    assert repeated_v.shape == (2, 5, 6, 4)
    for head in range(6):
        assert torch.equal(repeated_k[:, :, head], k[:, :, head // 2])
    assert OperationImpl.repeat_kv_heads(k, v, 1)[0] is k
    assert torch.equal(OperationImpl.repeat_kv(k, v, 2)[1], repeated_v)
    with pytest.raises(ValueError, match="at least 1"):
        OperationImpl.repeat_kv_heads(k, v, 0)


def test_create_stable_sharding() -> None:
    mesh = SimpleNamespace(axis_names=("dp", "tp"), mesh_shape=(2, 4))
    shard = Nothing(OperationMetadata(mesh=mesh)).create_stable_sharding
    spec = ("dp", None, "tp", None)
    assert shard(spec) == spec
    assert shard(spec, preserved_indices=[0]) == ("dp", None, None, None)
    assert shard(spec, preserved_indices=[-2]) == (None, None, "tp", None)
    assert shard(spec, preserved_indices=[0, 2], clone_ps=("tp", None, "dp", None)) == ("tp", None, "dp", None)
    assert shard(spec, dep=None) is None and shard(spec, dep=False) is None
    assert shard(spec, dep=("dp",)) == spec
    assert shard(None) is None and shard(None, preserved_indices=[0]) is None
    clone = ("tp", None, "dp")
    assert shard(None, preserved_indices=[0], clone_ps=clone) == ("tp", None, None)
    assert shard(None, preserved_indices=[-1], clone_ps=clone) == (None, None, "dp")
    assert shard(None, clone_ps=clone) is None  # nothing is said to be preserved
    assert shard(spec, tensor=torch.empty(4, 7, 6, 8)) == ("dp", None, None, None)
    assert shard((("dp", "tp"),), tensor=torch.empty(16, 3)) == (("dp", "tp"), None)
    with pytest.raises(ValueError, match="outside"):
        shard(spec, preserved_indices=[4])


def test_a_sharding_is_fitted_to_its_tensor() -> None:
    mesh = SimpleNamespace(axis_names=("dp", "tp"), mesh_shape=(2, 4))
    shard = Nothing(OperationMetadata(mesh=mesh)).create_stable_sharding
    spec = ("dp", None, "tp", None)
    assert shard(spec, tensor=torch.empty(4, 7)) == ("dp", None)
    assert shard(spec, preserved_indices=[2], tensor=torch.empty(4, 7)) == ()
    assert shard(spec, tensor=torch.empty(3)) == () and shard(spec, tensor=torch.empty(())) == ()
    assert shard(spec, tensor=torch.empty(4, 7, 8, 8, 8)) == ("dp", None, "tp", None, None)
    assert shard(("pp", "tp"), tensor=torch.empty(4, 4)) == (None, "tp")  # the mesh has no such axis
    assert shard((("dp", "tp"), None), tensor=torch.empty(4, 4)) == ()
    free = Nothing().create_stable_sharding
    assert free(spec, tensor=torch.empty(3, 7, 5, 8)) == spec


def test_a_table_of_paths_makes_methods_that_a_class_overrides() -> None:
    class Doubled(RMSNorm):
        paths: ClassVar = {"cpu": "aten", "gpu": "triton", "tpu": "xla"}

        @classmethod
        def get_impl_name(cls) -> str:
            return "rms_norm"

        @backend("mine")
        def forward_gpu(self, x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
            return x

    assert {platform: Doubled.path(platform)[1] for platform in ("cpu", "cuda", "rocm", "tpu")} == {
        "cpu": "aten", "cuda": "mine", "rocm": "mine", "tpu": "xla",
    }  # fmt: skip
    x = torch.randn(2, 8)
    assert Doubled().forward_gpu(x) is x
    assert torch.equal(Doubled().forward_cpu(x, eps=0.5), RMSNorm().forward_native(x, eps=0.5))
    assert RMSNorm.forward_gpu.__name__ == "forward_gpu" and "triton_op" in inspect.getsource(RMSNorm.forward_gpu)


def test_a_path_by_an_unknown_backend_is_refused_where_it_is_written() -> None:
    with pytest.raises(
        ValueError, match="cpu has the backend 'atem'; known are aten, cpu, onednn, triton, xla, pallas"
    ):
        type("Wrong", (RMSNorm,), {"paths": {"cpu": "atem"}})
    with pytest.raises(ValueError, match="gpus is no platform; known are cpu, cuda, rocm, tpu, gpu"):
        type("Wrong", (RMSNorm,), {"paths": {"gpus": "aten"}})


@pytest.mark.parametrize("name", [name for name in OperationRegistry.names() if OperationRegistry.get(name).paths])
def test_every_path_of_a_table_finds_its_kernel(name: str) -> None:
    """A file or function that is not there would show on an accelerator only."""
    operation = OperationRegistry.get(name)
    for backend_of_path in operation.paths.values():
        module, function = place_of(backend_of_path, operation.primary_name(), operation.functions)
        file = ROOT / "kernels" / (operation.folder or operation.primary_name()) / f"{module}.py"
        functions = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert function in functions, file
