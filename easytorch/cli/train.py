"""Train a causal language model on text files, with torchrun."""

from __future__ import annotations

from typing import Annotated

import typer

# The other flags, --help included, are those of easytorch.training.arguments.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def command(
    context: typer.Context,
    processes: Annotated[int, typer.Option(min=1, help="Training processes, each with its share of the cores.")] = 1,
) -> None:
    """Train a causal language model on text files; every setting of `TrainingConfig` is a flag."""
    from easytorch.training import TrainingFailedError, arguments, launch

    config = arguments.parse(context.args, "easytorch train [--processes N]")
    try:
        launch(config, processes)
    except TrainingFailedError as error:
        # The processes have reported the error.
        raise typer.Exit(error.code) from error
