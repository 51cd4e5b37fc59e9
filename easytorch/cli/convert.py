"""Convert a checkpoint between torch and JAX/Flax."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

if TYPE_CHECKING:
    from easytorch.bridge.convert import ConversionReport


def command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint folder, or one of its weight files.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make; it must not exist.")],
    to: Annotated[str, typer.Option("--to", metavar="flax|torch", help="Flax msgpack or torch safetensors.")],
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating point weights (bf16, fp16, fp32, ...); bit-exact without.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, as in 5GB or 512MiB.")] = "5GB",
    verify: Annotated[bool, typer.Option("--verify", help="Read the result back and compare every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Convert a checkpoint to Flax or to torch.

    Names, layouts, shards and tied weights change; values do not. Config, tokenizer and everything else that is not
    weights is copied. DST appears whole or not at all.

    \b
    Examples:
      easytorch convert ./bert-base ./bert-base-flax --to flax
      easytorch convert ./llama-flax ./llama --to torch --dtype bf16 --verify
      easytorch convert ./old/pytorch_model.bin ./new --to torch --json
    """
    from easytorch.bridge.convert import convert

    console = Console(stderr=True)
    with _progress_bar(console) as bar:
        task = bar.add_task("reading", total=None)

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, description=name[-40:], completed=done, total=total)

        report = convert(
            source, destination, to=to, dtype=dtype, max_shard_size=max_shard_size, verify=verify, progress=show
        )
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)


def _progress_bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:<40}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print(report: ConversionReport) -> None:
    from easytorch.bridge.sizes import human_size

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{report.destination}: {report.tensors} tensors, {human_size(report.bytes)}, {report.target_format} "
        f"in {report.seconds:.1f} s{', verified' if report.verified else ''}"
    )
    if report.kept:
        console.print(f"kept beside the Flax weights: {', '.join(report.kept)}")
    if report.tied:
        console.print(f"left out as tied: {', '.join(report.tied)}")
    for note in report.notes:
        console.print(f"note: {note}")
