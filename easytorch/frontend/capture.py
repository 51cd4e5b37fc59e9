"""A module as a functional ATen graph, with only those operations decomposed that have no lowering.

A tensor with several names is one input: the default decompositions of torch.export fail on such modules (a static
key-value cache with two names, in torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from easytorch.frontend.decompositions import decompositions_in
from easytorch.frontend.errors import DataDependentError

# Decompositions may need further rounds; no known one is this deep.
_ROUNDS = 8


def capture(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """The module's forward for such inputs. Writes to buffers and inputs become further outputs of the graph.

    `DataDependentError` where sizes or the path through the module depend on values.
    """
    try:
        program = export(module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False)
    except GuardOnDataDependentSymNode as error:
        raise DataDependentError(_reason(error)) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        size = "" if isinstance(error, DataDependentOutputException) else "the size of "
        reason = f"{error.func}: {size}its result depends on the data and is not known when the program is compiled"
        raise DataDependentError(reason) from error
    return functionalize(program)


def _reason(error: GuardOnDataDependentSymNode) -> str:
    """The error's reason, with the line of code that needs a value if torch reports it."""
    lines = str(error).splitlines()
    frames = [number for number, line in enumerate(lines) if line.lstrip().startswith("File ")]
    places = [line.strip() for line in lines[frames[-1] : frames[-1] + 2]] if frames else []
    places += [line.strip() for line in lines if not frames and line.startswith("Caused by")]
    what = "a size or a branch depends on the data, and a compiled program has its sizes and its path fixed"
    return f"{what}; use torch.where, or sizes that do not depend on it: {' '.join(places) or lines[0]}"


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """`program` without in-place writes, decomposed into operations that can be lowered, as far as possible."""
    _merge_aliases(program)
    table = decompositions_in(program.graph_module.modules())
    program = program.run_decompositions(table)
    for _ in range(_ROUNDS):
        more = decompositions_in(program.graph_module.modules())
        if not more.keys() - table.keys():
            break
        table |= more
        program = program.run_decompositions(dict(table))
    return program


def _merge_aliases(program: ExportedProgram) -> None:
    """One tensor held under several names becomes one input: writes through one name are seen under the others."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    first: dict[Any, Any] = {}
    specs = program.graph_signature.input_specs
    for spec in list(specs):
        if spec.kind is InputKind.USER_INPUT or not isinstance(spec.arg, TensorArgument):
            continue
        tensor = tensor_of(program, spec.target)
        if tensor.numel() == 0:
            continue
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        node = placeholders[spec.arg.name]
        if key not in first:
            first[key] = node
            continue
        node.replace_all_uses_with(first[key])
        program.graph.erase_node(node)
        specs.remove(spec)
    program.graph_module.recompile()


def tensor_of(program: ExportedProgram, name: str | None) -> torch.Tensor:
    """The parameter, buffer or constant of that name."""
    assert name is not None
    held = program.state_dict[name] if name in program.state_dict else program.constants[name]
    assert isinstance(held, torch.Tensor)
    return held
