"""Show how EasyTorch runs an architecture: native or not, layers, operations, and replaced modules."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Annotated

import typer

from easytorch.bridge.core.printable import printable

if TYPE_CHECKING:
    from easytorch.auto.overview import Overview


def command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Model type (llama), checkpoint folder, name on the Hub.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the classes of an architecture, native or transformers' own, and what runs in the one its config names.

    Only the config of a checkpoint is read: a small model of the class runs once, with the attention that loading
    would choose.

    \b
    Examples:
      easytorch models vit
      easytorch models ./bert-base --json
    """
    from easytorch.auto.overview import overview
    from easytorch.operations.dispatch.record import recorded_operations

    logging.disable(logging.WARNING)  # a report for each model that is tried
    try:
        found = overview(name, recorded_operations)
    finally:
        logging.disable(logging.NOTSET)
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else text(found))


def text(found: Overview) -> str:
    """The output of `easytorch models` for one model type."""
    run = found.run
    lines = [f"{found.model_type}: {_kind(found)}"]
    width = max(len(one.name) for one in found.classes)
    for one in found.classes:
        owner = "native" if one.native else "transformers' own"
        lines.append(f"  {one.name:{width}}  {owner:17}  {', '.join(one.autos)}")
    lines.append(f"{run.model_class}, run with a small config:")
    lines.append(f"  layers of EasyTorch  {', '.join(run.blocks) or 'none'}")
    lines.append(f"  operations called    {', '.join(run.operations) or 'none'}")
    count = f"{len(run.replaced)} of {len(run.attention_layers)}"
    lines.append(f"  attention            {count} layers call EasyTorch's")
    lines += [f"                       not {layer}" for layer in run.attention_layers if layer not in run.replaced]
    lines += [f"  {'other modules' if not place else '':21}{one}" for place, one in enumerate(run.modules)]
    if run.reason is not None:
        lines.append(f"  reason               {run.reason}")
    return "\n".join(printable(line) for line in lines)


def _kind(found: Overview) -> str:
    native = sum(one.native for one in found.classes)
    if native == len(found.classes):
        return "native"
    return f"{native} of {len(found.classes)} classes native" if native else "transformers' own classes"
