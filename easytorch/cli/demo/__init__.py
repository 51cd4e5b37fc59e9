"""Show EasyTorch at work on a real model, in five stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OUTPUT = Path("easytorch-demo")


def command(
    quick: Annotated[bool, typer.Option("--quick", help="The same five stages at test size, under a minute.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for everything the demo makes.")] = OUTPUT,
) -> None:
    """Show EasyTorch at work on a real model, in five stages; under 5 minutes on 2 CPU cores.

    Compares real MiniLM weights with transformers, takes them to Flax and back, trains a small Llama with torchrun,
    generates text with it, and lists the operations. Exits with 1 when a comparison fails.
    """
    from easytorch.cli.demo.run import run

    if not run(quick=quick, output=output):
        raise typer.Exit(1)
