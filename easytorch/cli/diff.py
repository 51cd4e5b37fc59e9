"""Compare two checkpoints, tensor by tensor, across formats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from easytorch.bridge.core.printable import printable

if TYPE_CHECKING:
    from easytorch.bridge.diff import Difference, TensorDifference


def command(
    first: Annotated[str, typer.Argument(metavar="A", help="Folder, weight file, name on the Hub, or URL.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare with.")],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Absolute differences up to this are ignored; 0 compares bits.")
    ] = 0.0,
    config: Annotated[
        str | None, typer.Option(help="config.json, or its folder, for a checkpoint without one.")
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Python file with the RULES of your own model (docs/bridge.md)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, and the largest difference of every tensor.

    Where their naming schemes differ, they are compared under torch's names. Exits with 1 when they differ.

    \b
    Examples:
      easytorch diff ./bert-base ./bert-base-flax
      easytorch diff ./llama ./llama-finetuned --json
      easytorch diff ./mine.msgpack ./mine-torch --rules table.py
      easytorch diff ./llama-fp32 ./llama-gguf/model.gguf --tolerance 0.01
    """
    from easytorch.bridge.diff import diff

    found = diff(first, second, tolerance=tolerance, config=config, rules=rules)
    if as_json:
        typer.echo(json.dumps(_without_infinities(found.to_dict()), indent=2, allow_nan=False))
    else:
        _print(found)
    if not found.same:
        raise typer.Exit(1)


def _without_infinities(value: Any) -> Any:
    """JSON has no infinities: they become the string "Infinity"."""
    if isinstance(value, dict):
        return {key: _without_infinities(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(one) for one in value]
    return "Infinity" if value == float("inf") else value


def _print(found: Difference) -> None:
    for sign, names in (("-", found.only_first), ("+", found.only_second)):
        for name in names:
            typer.echo(f"{sign} {printable(name)}")
    for difference in found.differing:
        typer.echo(f"~ {printable(difference.name)}  {_line(difference)}")
    for note in found.notes:
        typer.echo(printable(f"note: {note}"))
    if found.same:
        typer.echo(f"the same: {found.compared} tensors")
    else:
        typer.echo(
            f"{found.compared} tensors in both, {len(found.differing)} differ; "
            f"{len(found.only_first)} only in {printable(found.first)}, "
            f"{len(found.only_second)} only in {printable(found.second)}"
        )


def _line(difference: TensorDifference) -> str:
    first, second = difference.first, difference.second
    parts = []
    if first.shape != second.shape:
        parts.append(f"shape {first.shape} against {second.shape}")
    if first.dtype != second.dtype:
        parts.append(f"{first.dtype} against {second.dtype}")
    if difference.max_abs is not None:
        parts.append(f"max abs {difference.max_abs:.3g}, max relative {difference.max_rel:.3g}")
    return ", ".join(parts)
