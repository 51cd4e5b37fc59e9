"""Helpers of the demo's stages: folders, printing, and the comparisons that must hold."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from easytorch.training.launch import child_environment


@dataclass
class Demo:
    """One run of the demo.

    checks: (stage, what was compared, its figure, whether it holds). seconds: of each stage. artefacts: what was made.
    """

    quick: bool
    output: Path
    console: Console
    checks: list[tuple[str, str, str, bool]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    artefacts: list[tuple[str, Path]] = field(default_factory=list)
    _stage: str = ""

    @contextmanager
    def stage(self, number: int, title: str) -> Iterator[None]:
        """Prints a header, and measures the time of the block."""
        self._stage = f"{number}. {title}"
        self.console.print()
        self.console.print(Rule(f"[bold]{number} of 5[/bold]  {title}", align="left"))
        start = time.perf_counter()
        yield
        self.seconds[self._stage] = time.perf_counter() - start

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def check(self, what: str, figure: str, holds: bool) -> None:
        """Record and print a comparison; one that does not hold makes the demo exit with 1."""
        self.checks.append((self._stage, what, figure, holds))
        mark = "[green]ok[/green]" if holds else "[bold red]FAILED[/bold red]"
        self.console.print(f"{mark}  {what}: [bold]{figure}[/bold]", highlight=False, soft_wrap=True)

    def made(self, what: str, path: Path) -> None:
        self.artefacts.append((what, path))

    def easytorch(self, *arguments: str) -> None:
        """Show and run an `easytorch` command in a process of its own; `ChildProcessError` when it fails."""
        self.console.print(f"[dim]$[/dim] easytorch {' '.join(arguments)}", highlight=False, soft_wrap=True)
        done = subprocess.run([sys.executable, "-m", "easytorch", *arguments], env=os.environ | child_environment())
        if done.returncode:
            raise ChildProcessError(f"easytorch {arguments[0]} ended with exit code {done.returncode}")
