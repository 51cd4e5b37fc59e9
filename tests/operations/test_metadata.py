"""`OperationMetadata`: fields an operation does not read are refused by name, and `runtime_dtype` is the output's."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.impl import OperationImpl, UnsupportedOperationError

ATTENTION = {"attention", "blocksparse", "decode", "flash", "multi_latent_attention", "ring", "sdpa", "vanilla"}
PAGES = {"ragged_page_attention", "ragged_page_multi_latent_attention"}
# field -> another value than its default, and the operations that use it; None: all of them
FIELDS: dict[str, tuple[Any, set[str] | None]] = {
    "runtime_dtype": (torch.bfloat16, None),
    "runtime_softmax_dtype": (torch.float32, ATTENTION | PAGES),
    "softmax_scale": (0.5, ATTENTION | PAGES | {"gated_delta_rule"}),
    "dropout_prob": (0.5, ATTENTION | PAGES),  # pages refuse a call that does not set it to 0
    "mesh": ("a mesh", None),
    "sequence_axis": ("sp", {"ring"}),
    "sequence_layout": ("zigzag", {"ring"}),
    "backend": ("native", None),
    "mode": ("__train__", None),
}
# those of other tests in the same process are registered too
OPERATIONS = sorted(
    name
    for name, cls in OperationRegistry._classes.items()
    if cls.primary_name() == name and cls.__module__.startswith("easytorch.")
)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_with_every_field(name: str) -> None:
    assert set(FIELDS) == {field.name for field in dataclasses.fields(OperationMetadata)}
    for field, (value, users) in FIELDS.items():
        metadata = OperationMetadata(**{field: value})
        if users is None or name in users:
            assert getattr(OperationRegistry.create(name, metadata).metadata, field) == value
            continue
        with pytest.raises(UnsupportedOperationError, match=f"^{name} does not use OperationMetadata.{field}, got "):
            OperationRegistry.create(name, metadata)


def test_defaults_given_by_name_are_not_settings() -> None:
    metadata = OperationMetadata(softmax_scale=None, dropout_prob=0, sequence_layout="contiguous")
    assert metadata.given() == {}
    OperationRegistry.create("rms_norm", metadata)


def test_an_operation_of_ones_own_names_what_it_reads() -> None:
    class Scaled(OperationImpl):
        settings = ("softmax_scale",)

        @classmethod
        def get_impl_name(cls) -> str:
            return "scaled"

        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.metadata.softmax_scale

    class Twice(Scaled):
        settings = ("dropout_prob",)

    assert Scaled(OperationMetadata(softmax_scale=2))(torch.ones(1)).item() == 2
    Twice(OperationMetadata(softmax_scale=2, dropout_prob=0.5))  # its own and those of what it extends
    with pytest.raises(UnsupportedOperationError, match=r"scaled does not use OperationMetadata.dropout_prob"):
        Scaled(OperationMetadata(dropout_prob=0.5))


def test_numbers_are_pythons() -> None:
    metadata = OperationMetadata(softmax_scale=np.float16(0.5), dropout_prob=np.float32(0.25))
    assert type(metadata.softmax_scale) is type(metadata.dropout_prob) is float
    assert (metadata.softmax_scale, metadata.dropout_prob) == (0.5, 0.25)


def test_ring_refuses_an_axis_that_nothing_has_the_names_of(tmp_path: Any) -> None:
    from torch import distributed

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        query = torch.zeros(1, 4, 1, 8)
        for mesh in (distributed.group.WORLD, distributed.init_device_mesh("cpu", (1,))):
            OperationRegistry.create("ring", OperationMetadata(mesh=mesh))(query, query, query)
            with pytest.raises(UnsupportedOperationError, match=r"sequence_axis='sp'.* no names"):
                OperationRegistry.create("ring", OperationMetadata(mesh=mesh, sequence_axis="sp"))(query, query, query)
    finally:
        distributed.destroy_process_group()


def calls() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """A small call of each operation whose result is of `runtime_dtype`, with everything else in float32."""
    draw = torch.Generator().manual_seed(5)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    heads, vector, table = made(1, 4, 2, 8), made(8), made(1, 4, 8)
    page, tables = made(2, 4, 2, 8), (torch.tensor([4]), torch.tensor([[1, 0]]), torch.tensor([0, 4]))
    one = (made(1, 1, 2, 8), heads, heads)
    state = (made(1, 4, 6), made(1, 4, 6), -made(6, 3).abs(), made(1, 4, 3), made(1, 4, 3))
    return {
        **{
            name: ((heads, heads, heads), {"sinks": vector[:2], "bias": made(4, 4)})
            for name in ATTENTION - {"decode", "sdpa", "multi_latent_attention"}
        },
        "sdpa": ((heads, heads, heads), {"bias": made(4, 4)}),
        "decode": (one, {"bias": made(1, 4)}),
        "ragged_page_attention": ((heads[0], page, page, *tables), {"sinks": vector[:2]}),
        "rms_norm": ((made(3, 8), vector), {}),
        "layer_norm": ((made(3, 8), vector, vector), {}),
        "swiglu": ((made(3, 8), made(3, 8)), {}),
        "geglu": ((made(3, 8), made(3, 8)), {}),
        "rotary": ((heads, heads, table, table), {}),
        "linear": ((made(3, 8), made(4, 8), made(4)), {}),
        "grouped_matmul": ((made(3, 8), made(2, 8, 4), torch.tensor([1, 2]), made(2, 4)), {}),
        "causal_conv1d": ((made(1, 4, 6), made(6, 3), made(6)), {}),
        "ssm1": (state, {"D": made(6), "z": made(1, 4, 6)}),
        "gated_delta_rule": ((heads, heads, heads, -made(1, 4, 2).abs(), made(1, 4, 2).sigmoid()), {}),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", [None, "native"])
def test_runtime_dtype_is_that_of_the_output(backend: str | None, dtype: torch.dtype) -> None:
    for name, (tensors, options) in calls().items():
        run = OperationRegistry.create(name, OperationMetadata(runtime_dtype=dtype, backend=backend))
        result = run(*tensors, **options)
        for attribute in ("attention_outputs", "outputs"):
            result = getattr(result, attribute, result)
        for output in result if isinstance(result, tuple) else (result,):
            assert output.dtype == dtype, name
