"""The five stages in order, and the summary."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import shutil
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

import easytorch
from easytorch.cli.demo import generation, operations, round_trip, sentences, training
from easytorch.cli.demo.stage import Demo

NEEDED = {"jax": "jax", "matplotlib": "train", "tokenizers": "train"}
MARK = ".easytorch-demo"


def run(*, quick: bool, output: Path) -> bool:
    """Run the demo; True when every comparison holds."""
    _require_packages()
    weights = sentences.find_weights()
    demo = Demo(quick, _fresh(output), Console())
    _quiet()
    demo.console.print(Panel.fit(f"[bold]EasyTorch {easytorch.__version__}[/bold]\n{_setting(demo)}"))
    with demo.stage(1, "Real weights: all-MiniLM-L6-v2 in EasyTorch's own BERT"):
        encoded = sentences.run(demo, weights)
    with demo.stage(2, "To Flax and back, and through plain jax"):
        round_trip.run(demo, weights, encoded)
    with demo.stage(3, "Train a small Llama on two processes"):
        checkpoint = training.run(demo)
    with demo.stage(4, "Generate with a KV cache"):
        generation.run(demo, checkpoint)
    with demo.stage(5, "What runs where, and why"):
        operations.run(demo)
    return _summary(demo)


def _setting(demo: Demo) -> str:
    """One line: versions, threads and the output folder."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "jax"))
    return f"{versions}; {torch.get_num_threads()} CPU threads; writing to {demo.output}"


def _require_packages() -> None:
    missing = {extra for package, extra in NEEDED.items() if importlib.util.find_spec(package) is None}
    if missing:
        extras = ",".join(sorted(missing))
        raise ImportError(f'the demo needs packages of the extras {extras}: pip install "easytorch[{extras}]"')


def _fresh(output: Path) -> Path:
    """An empty folder at `output`; a previous demo's folder is removed, any other is an error."""
    if output.exists() and not (output / MARK).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists and was not made by this demo; give another folder with --output")
    if output.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True)
    (output / MARK).touch()
    return output


def _quiet() -> None:
    """Leave the terminal to the demo: transformers' loading bars and advice are not part of it."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("jax").setLevel(logging.ERROR)


def _summary(demo: Demo) -> bool:
    table = Table(title="Summary", box=box.SIMPLE, title_justify="left")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("comparisons that hold", justify="right")
    for stage, seconds in demo.seconds.items():
        holds = [held for name, _, _, held in demo.checks if name == stage]
        table.add_row(stage, f"{seconds:.1f}", f"{sum(holds)} of {len(holds)}" if holds else "")
    table.add_section()
    table.add_row("all", f"{sum(demo.seconds.values()):.1f}", "")
    demo.console.print(table)
    for what, path in demo.artefacts:
        demo.say(f"{what}: {path}")
    figures = {
        "seconds": demo.seconds,
        "checks": [dict(zip(("stage", "what", "figure", "holds"), check, strict=True)) for check in demo.checks],
    }
    (demo.output / "summary.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    failed = [what for _, what, _, holds in demo.checks if not holds]
    if failed:
        demo.console.print(f"[bold red]{len(failed)} of {len(demo.checks)} comparisons failed[/bold red]")
    else:
        demo.console.print(f"[green]All {len(demo.checks)} comparisons hold.[/green]")
    return not failed
