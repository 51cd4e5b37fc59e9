"""Convert a checkpoint between torch, JAX/Flax and other formats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from easytorch.bridge.core.printable import printable
from easytorch.bridge.jobs.targets import target_names
from easytorch.bridge.schemes.registry import names as scheme_names

if TYPE_CHECKING:
    from easytorch.bridge.jobs.report import ConversionReport


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, weight file, name on the Hub, or URL.")],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="Folder, file or URL to write; it must not exist yet.")
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help=f"{', '.join(target_names())}.", autocompletion=target_names)
    ],
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating-point weights (bf16, fp16, fp32, ...); bit-exact by default.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of a weight file, such as 5GB or 512MiB.")] = "5GB",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every tensor, and outputs if jax can run it.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the files that a killed run had finished.")
    ] = False,
    scheme: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SCHEME",
            help=f"Naming scheme of SRC, where its names are ambiguous: {', '.join(scheme_names())}.",
            autocompletion=scheme_names,
        ),
    ] = None,
    config: Annotated[str | None, typer.Option(help="config.json, or its folder, for a SRC without one.")] = None,
    step: Annotated[int | None, typer.Option(help="Training step to read; the last by default.")] = None,
    params_key: Annotated[
        str | None, typer.Option(help="Key of the parameters in a training state, such as ema_params.")
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Python file with the RULES of your own model (docs/bridge.md)."),
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Leave out tensors; * matches anything. Repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Convert a checkpoint: torch, JAX/Flax and the others, from any format to any.

    Names, layouts, shards and tied weights change; values do not. Config, tokenizer and all other files that are
    not weights are copied. DST is written atomically: complete or not at all.

    \b
    Examples:
      easytorch convert ./bert-base ./bert-base-flax --to flax
      easytorch convert ./llama-flax ./llama --to torch --dtype bf16 --verify
      easytorch convert google/flan-t5-small ./flan --to flax --max-shard-size 500MB
      easytorch convert gs://bucket/orbax/1000 ./llama --to torch --config ./llama/config.json
      easytorch convert ./llama ./llama.gguf --to gguf --dtype q8_0
      easytorch convert ./mine.msgpack ./mine --to torch --rules table.py --drop 'old_head/*'
      easytorch convert ./old/pytorch_model.bin ./new --to torch --json
    """
    from easytorch.bridge.convert import convert

    console = Console(stderr=True)
    with _progress_bar(console) as bar:
        task = bar.add_task("reading", total=None)

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, description=printable(name)[-40:], completed=done, total=total)

        report = convert(
            source,
            destination,
            to=to,
            dtype=dtype,
            max_shard_size=max_shard_size,
            verify=verify,
            resume=resume,
            scheme=scheme,
            config=config,
            step=step,
            params_key=params_key,
            rules=rules,
            drop=tuple(drop or ()),
            progress=show,
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
    from easytorch.bridge.core.sizes import human_size

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(
        f"{report.destination}: {report.tensors} tensors, {human_size(report.bytes)}, {report.target_format} "
        f"in {report.seconds:.1f} s{', verified' if report.verified else ''}"
    )
    if report.outputs_difference is not None:
        console.print(f"torch and jax agree: outputs differ by {report.outputs_difference:.1g} of their size")
    if report.kept:
        console.print(printable(f"kept beside the weights: {', '.join(report.kept)}"))
    if report.tied:
        console.print(printable(f"left out as tied: {', '.join(report.tied)}"))
    for note in report.notes:
        console.print(printable(f"note: {note}"))
