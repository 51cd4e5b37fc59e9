"""`AttentionCall`: what a feature of attention touches, and that a record survives operators, jax and cutting."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.attention import native
from easytorch.kernels.attention.call import (
    COMMON,
    DIFFERENTIABLE,
    TENSORS,
    AttentionCall,
    flatten,
    gradients_by_field,
    schema,
    unflatten,
)
from easytorch.kernels.attention.contract import resolve
from easytorch.operations import OperationRegistry
from easytorch.operations.attention import impl
from easytorch.operations.attention.impl import AttentionFeatures, AttentionImpl

ROOT = Path(__file__).parents[3]
FEATURES = {"softcap", "sinks"}  # two that nothing else is called
ROOMS = ("kernels/attention", "kernels/blocksparse", "kernels/decode", "kernels/multi_latent", "kernels/ragged_page",
         "kernels/ring", "easytorch/operations", "easytorch/operations/attention", "easytorch/layers")  # fmt: skip

# The functions that take these two one by one, and why the record does not do.
ONE_BY_ONE = {
    "kernels/attention/contract.py": "resolve makes the record of them; each is checked",
    "kernels/attention/aten.py": "most calls of it make no record, which takes as long as a small product",
    "kernels/decode/aten.py": "most calls of it make no record, which takes as long as a short cache",
    "kernels/blocksparse/aten_tile.py": "arithmetic of a part of a call: the sinks of some heads",
    "kernels/blocksparse/torch_tile.py": "arithmetic of a part of a call: the sinks of some heads",
    "kernels/decode/triton_op.py": "supports is asked before there is a record",
    "kernels/decode/torch_xla_op.py": "supports is asked before there is a record",
    "kernels/attention/jax_flash.py": "arithmetic of a part of a call: what the sinks take of a row",
    "kernels/decode/triton_kernels.py": "a Triton kernel takes its arguments one by one",
    "kernels/attention/triton_flash_forward.py": "a Triton kernel takes its arguments one by one",
    "kernels/blocksparse/triton_forward.py": "a Triton kernel takes its arguments one by one",
    "kernels/ragged_page/triton_kernels.py": "a Triton kernel takes its arguments one by one",
    "kernels/ragged_page/contract.py": "resolve_features makes the record of them",
    "kernels/ring/aten_blocks.py": "supports is asked before there is a record",
    "easytorch/operations/attention/flash.py": "varlen: the signature of flash_attn_varlen_func",
    "easytorch/layers/causal_loss.py": "the softcap of logits, not of scores",
    "easytorch/layers/attention.py": "the signature that transformers calls",
    "easytorch/layers/grouped_attention.py": "a model's setting, made once with the layer",
}


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    given = function.args
    return {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def test_a_feature_is_a_field_of_the_record_and_not_a_parameter_of_everything() -> None:
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).glob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text()))
            functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.Lambda))
            taking = [getattr(n, "name", "lambda") for n in functions if _parameters(n) & FEATURES]
            if taking:
                found[str(path.relative_to(ROOT))] = taking
    assert found.keys() == ONE_BY_ONE.keys(), found


def test_every_operator_of_attention_takes_the_record() -> None:
    names = (
        "attention.aten_op", "attention.jax_op", "attention.triton_flash", "blocksparse.aten_op",
        "blocksparse.triton_op", "decode.triton_op", "ragged_page.opaque", "ragged_page.triton_op", "ring.operators",
    )  # fmt: skip
    for module in (importlib.import_module(f"easytorch.kernels.{name}") for name in names):
        operators = [x for x in vars(module).values() if isinstance(x, torch.library.CustomOpDef)]
        assert operators, module
        for operator in operators:
            arguments = [argument.name for argument in operator._opoverload._schema.arguments]
            first = arguments.index(AttentionCall._fields[0])
            assert tuple(arguments[first : first + len(AttentionCall._fields)]) == AttentionCall._fields, operator


def test_a_feature_that_a_kernel_does_not_name_is_refused_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new field does at first: only the definitions take it."""
    monkeypatch.setattr(impl, "BEYOND_COMMON", ("temperature",))
    asked = 0
    for name in OperationRegistry.names():
        operation = OperationRegistry.create(name)
        if not isinstance(operation, AttentionImpl) or name == "attention":
            continue
        arguments, keywords = operation.typical_call() or ((), {})
        for backend in operation.backends():
            keywords = {**keywords, "temperature": 2.0}
            reason = operation.supports(backend, *arguments, **keywords)
            if backend == "native" and name != "ring":  # whose blocks are not the definition's code
                assert reason is None
            else:
                assert reason is not None and "temperature" in reason, (name, backend)
                asked += 1
    assert asked >= 10


def _full() -> AttentionCall:
    tensors = (torch.randn(1) for _ in range(TENSORS))
    return AttentionCall(*tensors, 0.5, 3, 0, 2.0, 0.1)


def test_a_record_is_the_flat_arguments_of_an_operator() -> None:
    call = _full()
    assert all(a is b for a, b in zip(unflatten(flatten(call)), call, strict=True))
    assert [type(x) for x in flatten(call._replace(scale=2, softcap=3))[TENSORS:]] == [float, int, int, float, float]
    assert schema().count(",") == len(AttentionCall._fields) - 1
    fields = dict(zip(AttentionCall._fields, gradients_by_field({"bias": 1, "sinks": 2}), strict=True))
    assert {name for name, x in fields.items() if x is not None} == set(DIFFERENTIABLE)
    assert AttentionFeatures.__annotations__.keys() == COMMON  # until one comes that not every kernel has


def test_plain_is_said_of_no_call_with_a_feature() -> None:
    full = _full()
    assert AttentionCall().plain
    for name in AttentionCall._fields:
        if name not in ("key_segment_ids", "seed", "scale", "left", "right"):  # go with another, or are no feature
            assert not AttentionCall()._replace(**{name: getattr(full, name)}).plain, name


@pytest.mark.parametrize(
    "features",
    [
        {"causal": True, "mask": "dense", "softcap": 2.0},
        {"sliding_window": (3, 1), "bias": "rows"},
        {"bias": "columns", "segments": True, "sinks": True},
    ],
    ids=str,
)
def test_the_parts_of_a_call_are_the_call(features: dict[str, Any]) -> None:
    torch.manual_seed(0)
    heads = [torch.randn(2, 9, 2, 4, dtype=torch.float64) for _ in range(3)]
    features = dict(features)
    kinds = {"dense": (2, 1, 9, 9), "rows": (9, 1), "columns": (1, 2, 1, 9)}
    for name in ("mask", "bias"):
        if name in features:
            matrix = torch.randn(kinds[features[name]], dtype=torch.float64)
            features[name] = matrix > -1 if name == "mask" else matrix
    if features.pop("segments", False):
        features |= dict.fromkeys(("query_segment_ids", "key_segment_ids"), torch.arange(9).repeat(2, 1) // 4)
    if features.pop("sinks", False):
        features["sinks"] = torch.randn(2, dtype=torch.float64)
    call = resolve(*heads, **features)
    whole = native.define(*heads, call)[0]
    query, key, value = heads
    last = call.part(slice(5, 9), slice(None))  # the last rows stay aligned with the last key
    torch.testing.assert_close(native.define(query[:, 5:], key, value, last)[0], whole[:, 5:])
    hidden = (torch.arange(9) >= 3).expand(9, 9)
    wanted = native.define(*heads, call._replace(mask=hidden if call.mask is None else call.mask & hidden))[0]
    columns = call.part(slice(None), slice(3, None))
    torch.testing.assert_close(native.define(query, key[:, 3:], value[:, 3:], columns)[0], wanted)


def test_in_jax_tensors_are_traced_and_numbers_are_constants() -> None:
    jax = pytest.importorskip("jax")
    from easytorch.kernels.attention.jax_call import AttentionCall

    traced = []

    @jax.jit
    def scaled(call: Any) -> Any:
        traced.append(call.scale)
        return call.sinks * call.scale if call.softcap is None else call.sinks

    sinks = jax.numpy.ones(3)
    assert scaled(AttentionCall(sinks=sinks, scale=2.0)).tolist() == [2.0] * 3
    assert scaled(AttentionCall(sinks=sinks * 5, scale=2.0)).tolist() == [10.0] * 3
    assert scaled(AttentionCall(sinks=sinks, scale=2.0, softcap=1.0)).tolist() == [1.0] * 3
    assert traced == [2.0, 2.0]
