"""Show what a checkpoint holds, without loading it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from easytorch.bridge.core.printable import printable

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from easytorch.bridge.core.tensor_info import TensorInfo
    from easytorch.bridge.inspect import CheckpointInfo


_LONGEST_LINE = 10_000


def command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder, weight file, name on the Hub, or URL.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a tree.")] = False,
) -> None:
    """Show a checkpoint's format, architecture and tensors; tensor data is not loaded.

    \b
    Examples:
      easytorch inspect ./bert-base
      easytorch inspect ./bert-base-flax/flax_model.msgpack --json
    """
    from easytorch.bridge.inspect import inspect

    info = inspect(path)
    if as_json:
        typer.echo(json.dumps(info.to_dict(), indent=2))
    else:
        from rich.console import Console

        console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        console.print(_title(info), style="bold")
        for note in info.notes:
            console.print(printable(f"note: {note}"))
        # rich cuts the lines of a tree to the console's width, and with them the sizes at their ends.
        Console(highlight=False, markup=False, emoji=False, width=_LONGEST_LINE).print(_tree(info))


def _title(info: CheckpointInfo) -> str:
    from easytorch.bridge.core.sizes import human_size

    family = f", {info.architecture or info.model_type}" if info.architecture or info.model_type else ""
    size = human_size(info.total_bytes)
    return printable(f"{info.path}: {info.format}{family}, {len(info.tensors)} tensors, {size}")


# A branch of the tree by the part of the names it stands for, with those below it.
_Branches = dict[str, tuple["Tree", "_Branches"]]


def _tree(info: CheckpointInfo) -> Tree:
    """A tree of the tensors by the parts of their names; a name that is another's prefix is beside that branch."""
    from rich.text import Text
    from rich.tree import Tree

    separator = "." if info.scheme == "torch" else "/"
    root = Tree("", hide_root=True)
    branches: _Branches = {}
    for tensor in info.tensors:
        *parents, name = tensor.name.split(separator)
        branch, below = root, branches
        for parent in parents:
            if parent not in below:
                below[parent] = branch.add(Text(printable(parent), style="cyan")), {}
            branch, below = below[parent]
        branch.add(_line(name, tensor))
    return root


def _line(name: str, tensor: TensorInfo) -> Text:
    from rich.text import Text

    from easytorch.bridge.core.sizes import human_size

    shape = "x".join(map(str, tensor.shape)) or "scalar"
    facts = ("  " + shape, "green"), f"  {tensor.packed or tensor.dtype}  {human_size(tensor.stored_bytes)}"
    return Text.assemble(printable(name), *facts, no_wrap=True, overflow="ignore")
