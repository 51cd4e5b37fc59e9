"""A model as text: its modules, one a line, with shapes, dtypes and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn

from easytorch.argument_types import check_types
from easytorch.bridge.core.sizes import human_size
from easytorch.layers.quantized import separate_codes

_T = TypeVar("_T")


@check_types("module")
def get_module_repr(module: nn.Module) -> str:
    """A module's own parameters and buffers in words: `weight: float32 (64, 32), bias: float32 (64,)`."""
    _check_module(module)
    separate_codes(module)
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return ", ".join(f"{name}: {_tensor_repr(tensor)}" for name, tensor in own)


@check_types("module")
def prettify_nnx(
    module: nn.Module,
    indent: str = "",
    depth: int = 0,
    max_depth: int | None = None,
    module_param: dict[str, torch.Tensor] | None = None,
) -> str:
    """The tree of `module`: classes, parameters with dtype and shape, and how much memory each part takes.

    Runs of equal children are one line, `(0-11): 12 x LlamaDecoderLayer`. indent: what each line begins with.
    depth: that of `module` itself. max_depth: the depth below which modules are only summed up. module_param: other
    tensors by name, whose shapes are shown instead of the module's own.
    """
    _check_module(module)
    separate_codes(module)
    return "\n".join(_lines(module, "", indent, depth, max_depth, module_param, ""))


@check_types("model")
def printify_nnx(model: nn.Module) -> str:
    """The whole tree of `model`, with the sum of its parameters below."""
    _check_module(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{prettify_nnx(model)}\n{count:,} parameters, {_size(model)}"


@check_types()
def return_type_adjuster(original_return_type: type[_T]) -> Callable[[Callable[..., Any]], Callable[..., _T]]:
    """A decorator that tells type checkers that a function returns `original_return_type`; calls are unchanged."""

    def adjust(function: Callable[..., Any]) -> Callable[..., _T]:
        return cast("Callable[..., _T]", function)

    return adjust


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"a torch.nn.Module is shown, not {type(module).__name__}")


def _lines(
    module: nn.Module,
    label: str,
    indent: str,
    depth: int,
    max_depth: int | None,
    tensors: dict[str, torch.Tensor] | None,
    prefix: str,
) -> Iterator[str]:
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    shown = [f"{name}: {_tensor_repr((tensors or {}).get(f'{prefix}{name}', one))}" for name, one in own.items()]
    extra = [text for text in (module.extra_repr(),) if text and "\n" not in text]
    head = f"{indent}{label}{type(module).__name__}({', '.join(extra)})"
    head += f"  {_size(module)}" if any(True for _ in module.parameters()) else ""
    yield head
    inner = indent + "  "
    yield from (f"{inner}{line}" for line in shown)
    if max_depth is not None and depth >= max_depth:
        if any(True for _ in module.children()):
            yield f"{inner}..."
        return
    for names, child in _runs(module):
        name = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        times = f"{len(names)} x " if len(names) > 1 else ""
        yield from _lines(child, f"({name}): {times}", inner, depth + 1, max_depth, tensors, f"{prefix}{names[0]}.")


def _runs(module: nn.Module) -> list[tuple[list[str], nn.Module]]:
    """Children, and runs of numbered ones that print alike as one: their names, and the first of them."""
    runs: list[tuple[list[str], nn.Module, tuple[Any, ...]]] = []
    for name, child in module.named_children():
        shapes = tuple((key, tuple(one.shape), one.dtype) for key, one in child.state_dict(keep_vars=True).items())
        alike = (str(child), shapes)
        if runs and name.isdigit() and runs[-1][0][-1].isdigit() and runs[-1][2] == alike:
            runs[-1][0].append(name)
        else:
            runs.append(([name], child, alike))
    return [(names, child) for names, child, _ in runs]


def _tensor_repr(tensor: torch.Tensor) -> str:
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{device}"


def _size(module: nn.Module) -> str:
    return human_size(sum(parameter.nbytes for parameter in module.parameters()))
