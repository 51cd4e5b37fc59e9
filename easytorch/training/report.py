"""Progress and metrics, which only the first process prints and writes."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from easytorch.training.config import TrainingConfig, flag
from easytorch.training.metrics import MetricsFile
from easytorch.training.usage import Usage


def check_tensorboard(config: TrainingConfig) -> None:
    """`ValueError` where TensorBoard is asked for and not installed."""
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(f"{flag('tensorboard')} needs the package tensorboard: pip install tensorboard")


def _tensorboard(folder: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # what a run that was stopped later has written is taken back
    return SummaryWriter(str(folder), purge_step=first_step + 1)


class ProgressReport:
    """A progress bar on a terminal, occasional lines elsewhere, and `metrics.jsonl`."""

    def __init__(
        self, output: Path, first_step: int, steps: int, log_every: int, usage: Usage, tensorboard: bool = False
    ) -> None:
        self.usage = usage
        self._tensorboard = _tensorboard(output / "tensorboard", first_step) if tensorboard else None
        self.metrics = MetricsFile(output / "metrics.jsonl", first_step)
        self.console = Console(file=sys.stdout)
        self.steps, self.log_every = steps, log_every
        self._start = time.perf_counter()
        self._first_step = first_step
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=first_step, figures="")

    def __enter__(self) -> ProgressReport:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
        self.metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def step(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float,
        gradient_norm: float,
        rate: float,
        logged: Mapping[str, float],
    ) -> None:
        """`step` optimizer steps are done; `loss` is that of the last one, `rate` in tokens per second, `logged` what
        the task logs beside its loss."""
        used = self.usage.figures(rate)
        values = {
            "loss": loss, "learning_rate": learning_rate, "gradient_norm": gradient_norm, "tokens_per_second": rate,
            **used, **logged,
        }  # fmt: skip
        self._write(step, values)
        figures = f"loss {loss:.3f}  {rate:,.0f} tokens/s" + self.usage.words(used)
        self._bar.update(self._task, completed=step, figures=figures)
        if not self.console.is_terminal and (step % self.log_every == 0 or step == self.steps):
            elapsed = time.perf_counter() - self._start
            left = elapsed / (step - self._first_step) * (self.steps - step)
            self.say(f"step {step}/{self.steps}  {figures}  ETA {timedelta(seconds=round(left))}")

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self.metrics.write(step=step, **values)
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)

    def skipped(self, step: int, *, loss: float, gradient_norm: float, reason: str, rows: list[int]) -> None:
        """Step `step` was skipped, for `reason`. rows: of the data, whose loss was not finite."""
        self.metrics.write(step=step, loss=loss, gradient_norm=gradient_norm, skipped=reason, rows=rows)
        self._bar.update(self._task, completed=step)
        self.say(f"step {step}/{self.steps}  skipped: {reason}")

    def evaluation(self, step: int, eval_loss: float) -> None:
        self._write(step, {"eval_loss": eval_loss})
        self.say(f"step {step}/{self.steps}  held-out loss {eval_loss:.3f}")
