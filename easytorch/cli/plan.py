"""Plan a training run: memory of each device, operations and collectives, without the devices."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from easytorch.plan import Plan


def command(
    model: Annotated[
        str,
        typer.Argument(help="llama-3-8b, llama-3-70b, qwen3-235b, deepseek-v3; a folder, a name on the Hub, or JSON."),
    ],
    mesh: Annotated[str, typer.Option(help="Axes and sizes, of dp, fsdp, pp, ep, sp and tp: fsdp=16,tp=4.")],
    device: Annotated[str, typer.Option(help="v4, v5e, v5p, v6e, a100, h100, h200 or b200.")],
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences of all devices (one a data place).")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence (4096 or less).")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Of a pipeline (its stages).")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd or momentum.")] = "adamw",
    precision: Annotated[str, typer.Option(help="mixed (float32 weights), bf16 or fp32.")] = "mixed",
    recompute: Annotated[bool, typer.Option(help="Compute layers again in the backward.")] = True,
    compiler: Annotated[str, typer.Option(help="libtpu or cpu, whose figures are larger; auto: libtpu.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what training a model takes of each device of a mesh: bytes, operations, collectives, and whether it fits.

    Only the config is read. Weights, gradients and optimizer are counted; the rest is the compiler's memory analysis of
    the train step with few layers of each kind, extrapolated. Exit code 1: it does not fit.

    \b
    Examples:
      easytorch plan llama-3-70b --mesh fsdp=16,tp=4 --device v5p
      easytorch plan deepseek-v3 --mesh fsdp=16,ep=16 --device v5p --precision bf16 --json
    """
    from easytorch.plan import make_plan
    from easytorch.plan.shapes import config_of

    logging.disable(logging.WARNING)
    try:
        found = make_plan(
            config_of(_settings(model)), mesh, device, name=_name(model), batch_size=batch_size,
            sequence_length=sequence_length, micro_batches=micro_batches, optimizer=optimizer, precision=precision,
            recompute=recompute, compiler=compiler,
        )  # fmt: skip
    except NotImplementedError as error:  # of the model or the mesh that was given
        raise ValueError(str(error)) from error
    finally:
        logging.disable(logging.NOTSET)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        _print(found)
    if not found.fits:
        raise typer.Exit(1)


def _settings(model: str) -> str | dict[str, Any]:
    """The model's name, or its config: JSON, or a JSON file of any name."""
    text = model.strip()
    if not text.startswith("{"):
        path = Path(text)
        if not path.is_file():
            return text
        text = path.read_text(encoding="utf-8")
    found = json.loads(text)
    if not isinstance(found, dict) or "model_type" not in found:
        raise ValueError("MODEL as JSON is a config with a model_type, as transformers' config.json")
    return found


def _name(model: str) -> str:
    return "" if model.strip().startswith("{") else model


def _print(plan: Plan) -> None:
    from easytorch.bridge.core.sizes import human_size

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    axes = ",".join(f"{name}={size}" for name, size in plan.mesh.items())
    console.print(f"{plan.model}: {plan.parameter_count / 1e9:,.2f} B parameters over {axes} of {plan.device}")
    table = Table(show_edge=False)
    table.add_column("of each device")
    table.add_column("", justify="right")
    for name in ("parameters", "optimizer", "gradients", "activations"):
        table.add_row(name, human_size(getattr(plan, name)))
    table.add_row("in all", human_size(plan.memory))
    table.add_row("usable", human_size(plan.capacity))
    table.add_row("operations a step", f"{plan.flops:.3g}")
    table.add_row("at its peak rate", f"{plan.step_seconds:.3g} s for {plan.tokens:,} tokens")
    for kind, (count, size) in plan.collectives.items():
        table.add_row(kind, f"{count} of {human_size(size)} in all")
    console.print(table)
    over = plan.memory - plan.capacity
    console.print("It fits." if plan.fits else f"It does not fit: {human_size(over)} too much.")
    layers = " and ".join(map(str, plan.compiled_layers))
    console.print(f"Activations, operations and collectives: {plan.compiler}, from {layers} layers.")
