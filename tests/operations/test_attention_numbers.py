"""Numbers of NumPy, of every width, and odd ones of Python: every attention computes what the definition does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.impl import UnsupportedOperationError

NAMES = {
    "vanilla": None, "attention": None, "sdpa": None, "sdpa:native": "native", "flash": None, "flash:native": "native",
    "blocksparse": None, "blocksparse:native": "native", "ring": None, "ring:native": "native", "decode": None,
    "decode:native": "native",
}  # fmt: skip


def run(name: str, *tensors: torch.Tensor, **features: Any) -> torch.Tensor:
    operation = OperationRegistry.create(name.split(":")[0], OperationMetadata(backend=NAMES[name]))
    output: torch.Tensor = operation(*tensors, **features).attention_outputs
    return output


def tensors(name: str, length: int = 9) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    rows = 1 if name.startswith("decode") else length
    query = torch.randn(2, rows, 2, 8, generator=draw)
    return query, *(torch.randn(2, length, 2, 8, generator=draw) for _ in range(2))


ODD = [
    *({"sliding_window": (kind(3), kind(0))} for kind in (np.int8, np.uint8, np.int32, np.uint64)),
    *({"sliding_window": kind(4)} for kind in (np.int8, np.uint8, np.uint16)),
    {"sliding_window": np.int32(2**31 - 1)},
    {"sliding_window": np.uint64(2**64 - 1)},
    {"sliding_window": (2**70, np.int64(2**40))},
    *({"softmax_scale": number} for number in (np.float16(-0.25), np.int8(-2), np.uint8(2), np.array(0.25), 10**30)),
    *({"softcap": number} for number in (np.float32(0.5), np.float16(0.5), np.uint8(2), np.array(2.0), 2)),
    {"dropout_prob": np.float32(0.0)},
    {"dropout_prob": 0},
]


def plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(plain(one) for one in value)
    return value.item() if hasattr(value, "dtype") else value


@pytest.mark.parametrize("name", NAMES)
def test_are_pythons_numbers(name: str) -> None:
    query, key, value = tensors(name)
    query.requires_grad_()  # NumPy's arrays take the product with a tensor over, and refuse one with a gradient
    for features in ODD:
        if name == "sdpa" and "softcap" in features:
            continue
        said = {keyword: plain(x) for keyword, x in features.items()}
        said = {keyword: float(x) if keyword != "sliding_window" else x for keyword, x in said.items()}
        output = run(name, query, key, value, **features)
        expected = run("vanilla", query, key, value, **said)
        torch.testing.assert_close(output, expected, rtol=2e-5, atol=2e-5, msg=lambda m, f=features: f"{f}: {m}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "features",
    [
        {"softmax_scale": 10**400}, {"softmax_scale": 1e300}, {"softmax_scale": np.bool_(True)}, {"softcap": 1e-300},
        {"softcap": 1e300}, {"softcap": 0}, {"softcap": np.int64(-1)}, {"softcap": True}, {"softcap": "2"},
        {"dropout_prob": 1}, {"dropout_prob": None}, {"dropout_prob": np.bool_(False)}, {"sliding_window": np.uint8(0)},
        {"sliding_window": np.array([2, 3])}, {"sliding_window": np.array(4.0)}, {"sliding_window": np.bool_(True)},
        {"sliding_window": (np.int8(-2), 1)}, {"seed": np.array([3])},
    ],
    ids=repr,
)  # fmt: skip
def test_are_refused_alike(name: str, features: dict[str, Any]) -> None:
    (keyword,) = features
    with pytest.raises((ValueError, TypeError), match=keyword):
        try:
            run(name, *tensors(name), **features)
        except UnsupportedOperationError:
            pytest.skip("it does not carry the feature at all")


@pytest.mark.parametrize("name", NAMES)
def test_segments_of_two_dtypes(name: str) -> None:
    for length in (9, 65):
        query, key, value = tensors(name, length)
        draw = torch.Generator().manual_seed(length)
        query_ids, key_ids = (torch.randint(0, 3, x.shape[:2], generator=draw) for x in (query, key))
        expected = run("vanilla", query, key, value, query_segment_ids=query_ids, key_segment_ids=key_ids)
        for kinds in (
            (torch.int8, torch.uint8), (torch.uint8, torch.int32), (torch.int16, torch.int64), (torch.uint8,) * 2,
            (torch.uint16, torch.uint16), (torch.uint32, torch.int8),
        ):  # fmt: skip
            given = {"query_segment_ids": query_ids.to(kinds[0]), "key_segment_ids": key_ids.to(kinds[1])}
            output = run(name, query, key, value, **given)
            torch.testing.assert_close(output, expected, rtol=2e-5, atol=2e-5, msg=lambda m, k=kinds: f"{k}: {m}")


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("decode")])
def test_no_query_still_gives_gradients(name: str) -> None:
    query, key, value = tensors(name)
    inputs = [x.requires_grad_() for x in (query[:, :0].clone(), key, value)]
    run(name, *inputs).sum().backward()
    for tensor in inputs:
        assert tensor.grad is not None and not tensor.grad.any()


IMPLEMENTATIONS = ["attention", "sdpa", "flash", "blocksparse", "ring", "vanilla", "decode"]


def with_nan(name: str, keys: int, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value, one row of the query NaN, and where the output has to be NaN."""
    generator = torch.Generator().manual_seed(0)
    length = 1 if name == "decode" else keys
    tensors = [torch.randn(1, rows, 4, 16, generator=generator).to(dtype) for rows in (length, keys, keys)]
    tensors[0][0, -1, 1] = torch.nan
    tensors[1:] = (tensor[:, :, :2] for tensor in tensors[1:])
    wanted = torch.zeros_like(tensors[0], dtype=torch.bool)
    wanted[0, -1, 1] = True
    return tensors, wanted


class Causal(torch.nn.Module):
    def __init__(self, name: str, causal: bool) -> None:
        super().__init__()
        self.operation, self.causal = OperationRegistry.create(name), causal

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.operation(query, key, value, causal=self.causal).attention_outputs
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_query_of_nan_gives_nan_in_its_row_alone(name: str, causal: bool, dtype: torch.dtype) -> None:
    """Beside few keys the maximum of ATen's kernel skips it, and its row would be zeros."""
    for keys in (1, 6, 15, 16, 17, 40):
        tensors, wanted = with_nan(name, keys, dtype)
        assert torch.equal(Causal(name, causal)(*tensors).isnan(), wanted), keys


@pytest.mark.parametrize("way", ["compile", "export", "trace", "vmap", "make_fx"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_query_of_nan_gives_nan_in_a_graph(name: str, way: str) -> None:
    for keys, causal in ((6, True), (15, False)):
        tensors, wanted = with_nan(name, keys)
        module: Any = Causal(name, causal)
        if way == "vmap":
            found = torch.vmap(module)(*(tensor[None] for tensor in tensors))[0]
        elif way == "compile":
            torch._dynamo.reset()
            found = torch.compile(module, backend="aot_eager")(*tensors)
        elif way == "export":
            found = torch.export.export(module, tuple(tensors)).module()(*tensors)
        elif way == "trace":
            found = torch.jit.trace(module, tuple(tensors), check_trace=False)(*tensors)
        else:
            found = make_fx(module)(*tensors)(*tensors)
        assert torch.equal(found.isnan(), wanted), (keys, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "decode"])
def test_a_query_of_nan_gives_nan_in_a_graph_of_any_length(name: str, causal: bool) -> None:
    """Made for many keys and run on few."""
    module, (tensors, _) = Causal(name, causal), with_nan(name, 24)
    length = torch.export.Dim("length", min=2, max=64)
    rows = {} if name == "decode" else {1: length}
    torch._dynamo.reset()
    graphs = {
        "export": torch.export.export(module, tuple(tensors), dynamic_shapes=(rows, {1: length}, {1: length})).module(),
        "compile": torch.compile(module, backend="aot_eager", dynamic=True, fullgraph=True),
        "trace": torch.jit.trace(module, tuple(tensors), check_trace=False),
    }
    for keys in (24, 40, 15, 2):
        tensors, wanted = with_nan(name, keys)
        plain_query = tensors[0].nan_to_num()
        for way, graph in graphs.items():
            assert torch.equal(graph(*tensors).isnan(), wanted), (way, keys)
            torch.testing.assert_close(graph(plain_query, *tensors[1:]), module(plain_query, *tensors[1:]))
