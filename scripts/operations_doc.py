"""Write docs/operations.md from the code: every operation, what runs where, the features that each attention supports.

    python scripts/operations_doc.py --write | --check

Answers are those of a machine with every optional library: which are installed here does not matter.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/operations.md"
sys.path.insert(0, str(ROOT))

from easytorch.kernels.cpu import library  # noqa: E402 - a script of the checkout
from easytorch.kernels.interop import installed  # noqa: E402 - a script of the checkout
from easytorch.operations import OperationImpl, OperationRegistry, UnsupportedOperationError  # noqa: E402
from easytorch.operations.attention.impl import AttentionFeatures, AttentionImpl  # noqa: E402
from easytorch.operations.dispatch.platform import PLATFORMS  # noqa: E402

HEAD = """\
# Operations

Written by `python scripts/operations_doc.py --write`, from the code; `tests/scripts/test_operations_doc.py` fails
when this page is not what it would write. Where a cell names no backend, the definition (`native`) runs there. `cpu` is
the operator in C++: it runs the calls that it takes and was measured faster for, the backend beside it the others.

| Operation | Other names | Arguments | CPU | CUDA | ROCm | TPU |
|---|---|---|---|---|---|---|
"""
MATRICES = """
## Features that each attention supports

The columns are the backends of an operation and the platforms they run on; `native` is its definition, on any device.
A number is the reason why a backend refuses: forced, the call raises with it; chosen automatically, another runs.
Asked with the shapes of the operation's typical call, in bfloat16 unless the row says otherwise.
"""
CHOSEN = """
## What `attention` chooses

For B1 T1024 H16 D64 on the GPU and the TPU; on the CPU the choice depends on the sizes too
(`easytorch/operations/attention/cpu_order.py`).
"""

CALLERS = """
## Who calls them

Each is called by the code below when a model runs; `tests/operations/test_callers.py` runs one for each.

| Operation | Called by |
|---|---|
"""
# The folders whose code calls an operation for a model, a cache or the engine.
CALLING = ("layers", "cache", "generation", "protocol")
CHOOSER = "attention"
IN_CPP = "cpp"  # beside the platforms in an operation's `paths`

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Feature:
    """A row of the matrix: what it makes of an operation's typical call."""

    name: str
    apply: Callable[[Call], Call]
    heads_only: bool = False  # asks for other heads, which only operations on (..., heads, head_dim) have


def keywords(**given: Any) -> Callable[[Call], Call]:
    """The call with keywords, each a value or a function of the call."""
    return lambda call: (call[0], {**call[1], **{n: v(call[0]) if callable(v) else v for n, v in given.items()}})


def heads(heads: int, kv_heads: int, dim: int, value_dim: int | None = None) -> Callable[[Call], Call]:
    def resize(call: Call) -> Call:
        (query, key, value, *rest), named = call
        sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim or dim))
        made = [t.new_empty((*t.shape[:-2], *size)) for t, size in zip((query, key, value), sizes, strict=True)]
        return (*made, *rest), named

    return resize


def cast(dtype: torch.dtype) -> Callable[[Call], Call]:
    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return lambda call: (tuple(map(convert, call[0])), call[1])


def with_gradients(call: Call) -> Call:
    def leaf(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().requires_grad_() if floating else value

    return tuple(map(leaf, call[0])), call[1]


def scores(args: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
    """A mask or bias for every score; the third argument has as many rows as there are keys."""
    query, keys = args[0], args[2]
    return torch.empty(query.shape[0], query.shape[-2], query.shape[1], keys.shape[1], dtype=dtype, device="meta")


def ids(args: tuple[Any, ...], which: int) -> torch.Tensor:
    return torch.empty(args[which].shape[:2], dtype=torch.int64, device="meta")


FEATURES = (
    Feature("softmax_scale", keywords(softmax_scale=0.5)),
    Feature("causal", keywords(causal=True)),
    Feature("not causal", keywords(causal=False)),
    Feature("boolean mask", keywords(mask=lambda args: scores(args, torch.bool))),
    Feature("additive bias", keywords(bias=lambda args: scores(args, args[0].dtype))),
    Feature("segment ids", keywords(query_segment_ids=lambda a: ids(a, 0), key_segment_ids=lambda a: ids(a, 2))),
    Feature("sliding window, left", keywords(sliding_window=(128, None))),
    Feature("sliding window, right", keywords(sliding_window=(None, 128), causal=False)),
    Feature("sliding window, both", keywords(sliding_window=(128, 128), causal=False)),
    Feature("softcap", keywords(softcap=30.0)),
    Feature("sinks", keywords(sinks=lambda args: args[0].new_empty(args[0].shape[-2]))),
    Feature("dropout", keywords(dropout_prob=0.1)),
    Feature("dropout, seeded", keywords(dropout_prob=0.1, seed=1)),
    Feature("gradients", with_gradients),
    Feature("GQA, 16 heads over 4", heads(16, 4, 64), heads_only=True),
    Feature("MQA, 16 heads over 1", heads(16, 1, 64), heads_only=True),
    Feature("value head_dim of its own, 192 and 128", heads(16, 16, 192, 128), heads_only=True),
    *(Feature(f"head_dim {dim}", heads(16, 16, dim), heads_only=True) for dim in (32, 60, 64, 96, 128, 192, 256)),
    Feature("head_dim 576, value 512 (MLA)", heads(16, 1, 576, 512), heads_only=True),
    *(
        Feature(str(dtype).removeprefix("torch."), cast(dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ),
)


def operations() -> Iterator[OperationImpl]:
    """One of each, in the order of their names."""
    for name in OperationRegistry.names():
        operation = OperationRegistry.create(name)
        if name == operation.primary_name():
            yield operation


def arguments(operation: OperationImpl) -> str:
    """The parameters of the definition; of an attention, what it takes beyond the contract of all of them."""
    method = operation.forward_native
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in inspect.signature(method).parameters.values()):
        method = definition(operation)
    shown = []
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            contract = AttentionFeatures.__annotations__ if isinstance(operation, AttentionImpl) else {}
            shown += [f"*{name}*" for name in keyword_names(operation) if name not in contract]
            shown += ["[contract](../kernels/attention/contract.py)"] if contract else []
        else:
            default = parameter.default
            shown.append(f"{parameter.name}" + ("" if default is inspect.Parameter.empty else f"={default!r}"))
    return ", ".join(shown)


def definition(operation: OperationImpl) -> Callable[..., Any]:
    """The function that an operation passes its arguments on to: `easytorch.kernels.<name>.native.<name>`."""
    name = operation.primary_name()
    return getattr(importlib.import_module(f"easytorch.kernels.{name}.native"), name)


def backends(operation: OperationImpl) -> dict[str, str]:
    """Platform -> the backend of its path; "" where that is the definition."""
    paths = {platform: operation.path(platform) for platform in PLATFORMS}
    return {platform: "" if method == "forward_native" else backend for platform, (method, backend) in paths.items()}


def refusal(operation: OperationImpl, platform: str, call: Call) -> str | None:
    """Why the path of `platform` does not run the call; None where it does."""
    if platform == IN_CPP:
        return operation.supports("cpu", *call[0], **call[1])
    method, backend = operation.path(platform)
    try:
        choice = operation.choose_on(platform, *call)
    except UnsupportedOperationError as refused:
        reason = str(refused).removeprefix(f"{operation.primary_name()} on {platform}: ")
    else:
        if choice.method == method:
            return None
        reason = choice.reason
    return reason.removeprefix(f"{backend}: ")


def typical(operation: OperationImpl) -> Call | None:
    """The operation's typical call in bfloat16, without features."""
    call = operation.typical_call()
    return None if call is None else cast(torch.bfloat16)((call[0], {}))


def is_attention(operation: OperationImpl) -> bool:
    """Takes the features of attention, all or some: its keywords name the scale of a softmax."""
    return "causal" in {*keyword_names(operation), *inspect.signature(operation.forward_native).parameters}


def keyword_names(operation: OperationImpl) -> tuple[str, ...]:
    """The fields of the `**features: Unpack[...]` of the definition."""
    hints = typing.get_type_hints(operation.forward_native, include_extras=True).values()
    fields = [typing.get_args(hint)[0] for hint in hints if typing.get_origin(hint) is typing.Unpack]
    return tuple(fields[0].__annotations__) if fields else ()


def matrix(operation: OperationImpl, call: Call) -> str:
    """The features of one operation by backend, with the reasons below."""
    columns: dict[str, list[str]] = {"native": ["native"]}
    for platform, backend in backends(operation).items():
        if backend:
            columns.setdefault(f"{backend} ({_column(operation, platform)})", []).append(platform)
    if IN_CPP in operation.paths:
        columns["cpu (C++)"] = [IN_CPP]
    rows, reasons = [], list[str]()
    for feature in FEATURES:
        if feature.heads_only and not _resizes(call):
            continue
        asked = feature.apply(call)
        cells = []
        for platforms in columns.values():
            with torch.set_grad_enabled(feature.apply is with_gradients):
                reason = refusal(operation, platforms[0], asked)
            if reason is None:
                cells.append("yes")
                continue
            if reason not in reasons:
                reasons.append(reason)
            cells.append(f"no ({reasons.index(reason) + 1})")
        rows.append(f"| {feature.name} | " + " | ".join(cells) + " |")
    names = " / ".join(operation.all_names())
    lines = [f"\n### {names}\n", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|", *rows]
    if reasons:
        lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
    return "\n".join(lines) + "\n"


def _column(operation: OperationImpl, platform: str) -> str:
    """The platforms that share a method, as in "cuda, rocm"."""
    method = operation.path(platform)[0]
    return ", ".join(other for other in PLATFORMS if operation.path(other)[0] == method)


def _resizes(call: Call) -> bool:
    """The first three arguments are query, key and value, the last dimensions of which are heads and head_dim."""
    return call[0][1].shape == call[0][2].shape


def chosen(operation: OperationImpl) -> str:
    """The implementation chosen for each feature."""
    call = typical(operation)
    assert call is not None
    platforms = [platform for platform in PLATFORMS if platform != "cpu"]
    lines = ["| | " + " | ".join(platforms) + " |", "|---" * (len(platforms) + 1) + "|"]
    for feature in FEATURES:
        asked = feature.apply(call)
        with torch.set_grad_enabled(feature.apply is with_gradients):
            choices = [operation.choose_on(platform, *asked) for platform in platforms]
        lines.append(f"| {feature.name} | " + " | ".join(f"{c.implementation} ({c.backend})" for c in choices) + " |")
    return "\n".join(lines) + "\n"


def callers(every: Iterable[OperationImpl]) -> str:
    """The modules that create each operation; `attention` calls those that it chooses from."""
    calls: dict[str, list[str]] = {}
    for folder in CALLING:
        for path in sorted((ROOT / "easytorch" / folder).rglob("*.py")):
            for name in set(re.findall(r'OperationRegistry\.create\(\s*"(\w+)"', path.read_text())):
                calls.setdefault(OperationRegistry.get(name).primary_name(), []).append(f"`{folder}/{path.name}`")
    chosen_from = vars(OperationRegistry.create(CHOOSER))["implementations"]
    rows = []
    for operation in every:
        name = operation.primary_name()
        found = [*(["`attention`"] if name in chosen_from else []), *calls.get(name, [])]
        if not found:
            raise ValueError(f"no model calls {name}: use it, or take it out of the registry")
        rows.append(f"| `{name}` | {', '.join(found)} |\n")
    return CALLERS + "".join(rows)


def page() -> str:
    os.environ.pop("EASYTORCH_OPS", None)  # the choices of the code, not of this shell
    there, missing = dict(installed.INSTALLED), library.missing
    installed.INSTALLED.update(dict.fromkeys(there, True))
    library.missing = lambda: None
    try:
        return _page()
    finally:
        installed.INSTALLED.update(there)
        library.missing = missing


def _page() -> str:
    every = list(operations())
    rows = []
    for operation in every:
        aliases = ", ".join(f"`{name}`" for name in operation.all_names()[1:])
        chooses = operation.primary_name() == CHOOSER
        paths = backends(operation)
        if IN_CPP in operation.paths:
            paths["cpu"] = ", ".join(filter(None, (paths["cpu"], "cpu")))
        where = " | ".join(["[chooses](#what-attention-chooses)"] * 4 if chooses else paths.values())
        rows.append(f"| `{operation.primary_name()}` | {aliases} | {arguments(operation)} | {where} |\n")
    matrices = []
    for operation in every:
        call = typical(operation)
        if call is not None and is_attention(operation) and operation.primary_name() != CHOOSER:
            matrices.append(matrix(operation, call))
    return (
        HEAD
        + "".join(rows)
        + callers(every)
        + MATRICES
        + "".join(matrices)
        + CHOSEN
        + "\n"
        + chosen(OperationRegistry.create(CHOOSER))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true", help="exit 1 where docs/operations.md is out of date")
    text = page()
    if parser.parse_args().write:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE.relative_to(ROOT)} is out of date: python scripts/operations_doc.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
