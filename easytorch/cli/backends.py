"""List the backends, and the operations and element types of each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from easytorch.backends import Capabilities


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[BACKEND]", help="A backend, optionally with a configuration: xla:cpu.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the backends, or the operations and element types of one.

    \b
    Examples:
      easytorch backends
      easytorch backends xla:cpu
      easytorch backends --json
    """
    from easytorch import backends

    names = backends.list() if name is None else [name]
    found = {each: _described(each, needed=name is not None) for each in names}
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for each, facts in found.items():
        console.print(f"{each}: {facts.get('description') or facts['missing']}")
        if "missing" not in facts:
            counts = f"{len(facts['operations'])} operations, {len(facts['dtypes'])} element types"
            console.print(f"  {facts['devices']} device{'s' * (facts['devices'] != 1)}, {counts}")
    if name is not None:
        console.print(_table(found[name]))


def _described(name: str, *, needed: bool) -> dict[str, Any]:
    from easytorch import backends

    try:
        backend = backends.new_with_config(name)
    except ImportError as error:
        if needed:
            raise
        return {"missing": str(error)}
    try:
        capabilities = backend.capabilities()
        return {
            "description": backend.description,
            "devices": backend.num_devices(),
            "dtypes": sorted(capabilities.dtypes),
            "operations": _operations(capabilities),
        }
    finally:
        backend.finalize()


def _operations(capabilities: Capabilities) -> dict[str, list[str]]:
    """Operation -> its element types, in the order of `OpType`."""
    return {op_type.method: sorted(dtypes) for op_type, dtypes in sorted(capabilities.operations.items())}


def _table(facts: dict[str, Any]) -> Table:
    table = Table(show_edge=False)
    table.add_column("operation")
    table.add_column("element types")
    every = set(facts["dtypes"])
    for method, dtypes in facts["operations"].items():
        table.add_row(method, "all" if set(dtypes) == every else ", ".join(dtypes))
    return table
