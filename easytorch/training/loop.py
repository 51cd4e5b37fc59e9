"""The training loop: one process, or each of those torchrun started, runs `train`."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from easytorch.bridge.errors import CheckpointError
from easytorch.training.activations import checkpoint_and_compile
from easytorch.training.allocator import kept_memory
from easytorch.training.checkpoint import load_state
from easytorch.training.config import TrainingConfig
from easytorch.training.finite import NonFiniteError
from easytorch.training.gradients import clip
from easytorch.training.interrupt import StopOnSignal
from easytorch.training.metrics import read_metrics, series
from easytorch.training.optim import learning_rate, load_optimizer
from easytorch.training.optimizers import make_optimizer
from easytorch.training.parallel import ParallelModel, in_parallel
from easytorch.training.plot import plot_loss
from easytorch.training.prepare import (
    check_inputs,
    check_model,
    find_checkpoint,
    made_data,
    make_model,
    make_reference,
    read_task,
    write_data,
)
from easytorch.training.processes import Processes, find_device, joined
from easytorch.training.report import ProgressReport
from easytorch.training.saving import CheckpointSaver
from easytorch.training.sharded import restore
from easytorch.training.stages import state_of_stage
from easytorch.training.task import Batch, Task
from easytorch.training.usage import Usage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# With `on_nonfinite="skip"`: a few bad batches are skipped; weights for which every batch is bad end the run.
MOST_SKIPPED_IN_A_ROW = 10


@dataclass(frozen=True)
class TrainingResult:
    """checkpoint: the newest one. steps: optimizer steps done. interrupted: a signal ended the run before the last.
    skipped: steps of this run that were skipped because the loss or a gradient was NaN or infinite."""

    checkpoint: Path
    steps: int
    interrupted: bool
    skipped: int = 0


def train(config: TrainingConfig) -> TrainingResult:
    """Train, leaving checkpoints, metrics and the loss curve in `config.output`; torchrun calls it in each process.

    Raises `ValueError` for settings that do not fit together, `OSError` for text or an output that cannot be used and
    `NonFiniteError` where the loss, a gradient or a weight is NaN or infinite. Under torchrun one process raises it,
    the others `OtherProcessError`.
    """
    with joined(find_device(config.device), config.timeout) as processes:
        return train_among(processes, config)


def train_among(processes: Processes, config: TrainingConfig) -> TrainingResult:
    """`train`, in processes that have joined already."""
    with kept_memory() as keep_memory, ExitStack() as held:
        with processes.one_failure(), ExitStack() as undone:
            run = _prepare(processes, config, undone, held)
        processes.limit_waiting()  # the mesh has made groups
        return run.run(keep_memory)


def _prepare(processes: Processes, config: TrainingConfig, undone: ExitStack, held: ExitStack) -> _Run:
    """Inputs, model, optimizer and the progress of a checkpoint, in every process.

    undone: receives what an error, here or in another process, takes back; held: what lasts until the run ends.
    """
    settings: dict[str, Any] = {}
    with processes.together():
        checkpoint = find_checkpoint(config)
        if processes.first:
            settings = _make_inputs(config, processes.world, checkpoint, undone, held)
    with processes.together():
        tokenizer, task = read_task(config)
        device = processes.device_of_new_models
        model = make_model(config, tokenizer, checkpoint, device)
        check_model(model, task, config)
        task.prepare(model, make_reference(config, tokenizer, device))
        checkpoint_and_compile(model, config)
    parallel = in_parallel(model, task, processes, config)
    with processes.together():
        optimizer, state = _make_optimizer(parallel, config, checkpoint)
        parallel.place_moments(optimizer)
        if place := state.get("data"):
            task.restore(place)
    if checkpoint is not None and "optimizer_steps" in state:
        restore(checkpoint, state, model, optimizer, processes)
        parallel.place_moments(optimizer)
    saver = CheckpointSaver(config, processes, parallel, tokenizer, settings, checkpoint)
    return _Run(config, processes, tokenizer, task, parallel, optimizer, state["step"], saver)


def dropout_seed(seed: int, step: int, place: int) -> int:
    """Seed dropout by these three, so that a resumed run draws the same masks."""
    return ((seed * 1_000_003 + step) * 65_537 + place) % 2**63


def _make_inputs(
    config: TrainingConfig, processes: int, checkpoint: Path | None, undone: ExitStack, held: ExitStack
) -> dict[str, Any]:
    """Check the inputs, print notes, write tokenizer and tokens; returns the settings that a checkpoint stores."""
    inputs = check_inputs(config, processes)
    for note in inputs.notes:
        print(note, flush=True)
    undone.enter_context(made_data(config, held))
    write_data(config, inputs.texts, checkpoint)
    return inputs.settings


def _make_optimizer(
    parallel: ParallelModel, config: TrainingConfig, checkpoint: Path | None
) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """The optimizer, with the moments of a full checkpoint, and the progress that the checkpoint states."""
    optimizer = make_optimizer(parallel.model, config)
    if checkpoint is None:
        return optimizer, {"step": 0}
    state = load_state(checkpoint)
    if "optimizer" not in state:
        return optimizer, state
    try:
        moments, absent = state["optimizer"], state.get("without_moments", ())
        if parallel.pipeline is not None:
            moments, absent = state_of_stage(moments, absent, parallel, optimizer, config)
        load_optimizer(optimizer, moments, absent)
    except ValueError as error:
        raise CheckpointError(
            f"cannot be resumed from: {error}; move it away to resume from the checkpoint before it", file=checkpoint
        ) from error
    return optimizer, state


class _Run:
    """The state of one process's loop."""

    def __init__(
        self,
        config: TrainingConfig,
        processes: Processes,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        parallel: ParallelModel,
        optimizer: torch.optim.Optimizer,
        step: int,
        saver: CheckpointSaver,
    ) -> None:
        self.config, self.processes, self.tokenizer, self.task, self.model = (
            config, processes, tokenizer, task, parallel.model,
        )  # fmt: skip
        self.share, self.micro = config.share(processes.world)
        self.optimizer, self.step, self.saver = optimizer, step, saver
        self.parallel = parallel
        self.report: ProgressReport | None = None
        self.skipped = self.skipped_in_a_row = 0
        self.logged: Mapping[str, torch.Tensor] = {}  # of the last batch, beside its loss

    def run(self, keep_memory: Callable[[], None]) -> TrainingResult:
        config, interrupted = self.config, False
        with ExitStack() as stack:
            stop = stack.enter_context(StopOnSignal())
            stack.enter_context(self.processes.one_failure(stop))
            stack.callback(self.saver.close)
            if self.processes.first:
                self.report = stack.enter_context(
                    ProgressReport(
                        Path(config.output),
                        self.step,
                        config.steps,
                        config.log_every,
                        Usage(self.model, config, self.processes),
                        config.tensorboard,
                    )
                )
                self._introduce()
            while self.step < config.steps and not interrupted:
                self._train_step()
                if self.optimizer.state:  # not before, where the first steps were skipped
                    keep_memory()
                last = self.step == config.steps
                if self.task.eval_count and (last or self.step % config.eval_every == 0):
                    self._evaluate()
                interrupted = not last and self.processes.sum(float(stop.asked))[0] > 0
                if last or interrupted or (config.save_every and self.step % config.save_every == 0):
                    self._save()
            self.saver.wait() if interrupted else self.saver.finish()
            if self.skipped and self.report is not None:
                self.report.say(f"{self.skipped} step(s) were skipped: their loss or gradient was not finite")
            if interrupted and self.report is not None:
                self.report.say(f"stopped after step {self.step}; {self.saver.newest} can be resumed")
        assert self.saver.newest is not None
        if self.processes.first:
            _draw(Path(config.output))
        return TrainingResult(self.saver.newest, self.step, interrupted, self.skipped)

    def _train_step(self) -> None:
        """One optimizer step over `batch_size` rows, of which this process computes its contiguous share."""
        config, start = self.config, time.perf_counter()
        self.processes.doing = f"in step {self.step + 1}"
        self.parallel.seed(dropout_seed(config.seed, self.step, self.parallel.tokens))
        task = self.task
        indices = task.indices(self.step, config.batch_size, config.seed)
        first = self.parallel.place * self.share
        mine = indices[first : first + self.share]
        rate = learning_rate(self.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.parallel.module.train()
        pieces = np.split(mine, len(mine) // self.micro)
        # Of the batch's targets, and gradients are averaged over the places.
        targets = task.targets(indices) / self.parallel.places
        divisors = [targets / task.targets(piece) for piece in pieces]
        logged: dict[str, Any] = {}
        losses: list[tuple[np.ndarray, torch.Tensor]] = []
        left = iter(zip(pieces, divisors, strict=True))

        def loss_of(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
            loss, (piece, divisor) = self._loss(module, batch), next(left)
            if not loss.dim():  # hidden states, in a stage before the last
                losses.append((piece, loss.detach()))
            for name, value in self.logged.items():
                logged[name] = logged.get(name, 0.0) + value / divisor
            return loss

        batches = (self.parallel.place_batch(task.rows(piece)) for piece in pieces)
        total = self.parallel.step(batches, divisors, loss_of)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = self.parallel.norm(p.grad for p in parameters if p.grad is not None)
        # The same two values in every process, so that all of them take the step or none does.
        summed, norms, *others = self.processes.sum(total, norm, *logged.values())
        mean, gradient_norm = summed / self.processes.world, norms / self.processes.world
        if math.isfinite(mean) and math.isfinite(gradient_norm):
            if config.grad_clip:
                clip(parameters, config.grad_clip, norm)
            self.saver.before_update()
            self.parallel.update(self.optimizer)
            self.skipped_in_a_row = 0
        else:
            bad = [int(row) for piece, loss in losses if not torch.isfinite(loss) for row in piece]
            self._meet_nonfinite(mean, gradient_norm, bad)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.report is not None and not self.skipped_in_a_row:
            tokens = config.batch_size * config.block_size
            self.report.step(
                self.step,
                loss=mean,
                learning_rate=rate,
                gradient_norm=gradient_norm,
                rate=tokens / (time.perf_counter() - start),
                logged={name: one / self.processes.world for name, one in zip(logged, others, strict=True)},
            )

    def _meet_nonfinite(self, loss: float, norm: float, rows: list[int]) -> None:
        """Skip the step that has just been computed, or end the run. rows: those of this process's bad losses."""
        found = self.parallel.first_nonfinite(loss, norm)
        assert found is not None
        rows = sorted(map(int, self.processes.merged(dict.fromkeys(map(str, rows), 1.0))))
        self.skipped_in_a_row += 1
        bad_weight = self.processes.any(self.parallel.nonfinite_parameter() is not None)
        skipping = self.config.on_nonfinite == "skip" and not bad_weight
        if not skipping or self.skipped_in_a_row > MOST_SKIPPED_IN_A_ROW:
            if self.report is not None:
                self.report.metrics.write(step=self.step + 1, loss=loss, gradient_norm=norm, stopped=found, rows=rows)
            many = f", the {self.skipped_in_a_row}th step in a row" if self.skipped_in_a_row > 1 else ""
            self._fail(self.step + 1, found + many, rows)
        self.skipped += 1
        if self.report is not None:
            self.report.skipped(self.step + 1, loss=loss, gradient_norm=norm, reason=found, rows=rows)

    def _fail(self, step: int, found: str, rows: Sequence[int] = ()) -> NoReturn:
        """End the run in every process: the first says why."""
        kept = "no checkpoint has been written (--save-every)"
        if self.saver.newest is not None:
            kept = f"{self.saver.newest} is the last good checkpoint (--resume)"
        advice = (
            f"{kept}; try a lower --learning-rate, more --warmup-steps or a --grad-clip"
            + ("" if self.config.on_nonfinite == "skip" else ", or --on-nonfinite skip")
            + (", or --dtype float32" if self.config.dtype != "float32" else "")
        )
        with self.processes.together():
            raise NonFiniteError(step, found, advice, rows)
        raise AssertionError("together() raises in every process")

    def _loss(self, module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The mean loss of a batch of rows, a scalar."""
        autocast = torch.autocast(
            self.processes.device.type, dtype=torch.bfloat16, enabled=self.config.dtype != "float32"
        )
        with autocast:
            loss, self.logged = self.task.loss(module, batch)
        return loss

    @torch.no_grad()
    def _evaluate(self) -> None:
        """The mean loss of the held-out rows, each computed by one process."""
        self.processes.doing = f"in the evaluation after step {self.step}"
        self.model.eval()
        processes, parallel, task, total, count = self.processes, self.parallel, self.task, 0.0, 0
        first, end = task.train_count, task.train_count + task.eval_count
        mine = np.arange(first, end)[parallel.place :: parallel.places]  # there may be fewer rows than processes
        pieces = [mine[start : start + self.micro] for start in range(0, len(mine), self.micro)]
        most = math.ceil(math.ceil(task.eval_count / parallel.places) / self.micro)
        # Where a call communicates, each process makes equally many: the result of the last may be unused.
        spare = [np.arange(first, first + 1)] * (most - len(pieces) if parallel.sharded else 0)
        for indices, counted in [*((piece, task.targets(piece)) for piece in pieces), *((piece, 0) for piece in spare)]:
            batch = parallel.place_batch(task.rows(indices))
            total += float(parallel.evaluate(batch, self._loss)) * counted
            count += counted
        summed, targets = processes.sum(total, float(count))
        loss = summed / targets
        if self.report is not None:
            self.report.evaluation(self.step, loss)
        if not math.isfinite(loss):
            self._fail(self.step, self.parallel.nonfinite_parameter() or f"the held-out loss is {loss}")

    def _save(self) -> None:
        """Save a checkpoint if the weights are finite: the loss of a step is that of the weights before it, so without
        this check the last good checkpoint could be replaced by diverged weights."""
        self.processes.doing = f"while the checkpoint of step {self.step} is written"
        bad = self.parallel.nonfinite_parameter()
        if self.processes.any(bad is not None):  # in one process alone, where its memory is bad
            found: str | None = bad or "a parameter is not finite in another process"
        else:
            found = self._nonfinite_next()
        if found is not None:
            self._fail(self.step, f"{found}, with the weights after this step")
        self.saver.save(self.step, self.optimizer, self.task.state())

    def _nonfinite_next(self) -> str | None:
        """The first non-finite value in a forward and backward of one row per process, without dropout, if any."""
        self.model.eval()
        batch = self.parallel.place_batch(self.task.rows(self.task.sample(self.parallel.place)))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if self.parallel.sharded:  # FSDP2's shards are not leaves of the graph
            loss = self.parallel.step([batch], [1.0], self._loss)
            gradients = [parameter.grad for parameter in trained]
            self.model.zero_grad(set_to_none=True)
        else:
            loss = self._loss(self.model, batch)
            gradients = list(torch.autograd.grad(loss, trained, allow_unused=True))
        norm = self.parallel.norm(gradient for gradient in gradients if gradient is not None)
        total, norms = self.processes.sum(loss, norm)
        if not math.isfinite(total):
            return f"the loss is {total}"
        return None if math.isfinite(norms) else f"the norm of the gradients is {norms}"

    def _introduce(self) -> None:
        assert self.report is not None
        config, processes, kind = self.config, self.processes, self.parallel.original or type(self.model)
        parameters = self.parallel.parameters or sum(parameter.numel() for parameter in self.model.parameters())
        self.report.say(
            f"{kind.__module__}.{kind.__name__}, {parameters / 1e6:.2f} M parameters; "
            f"vocabulary {len(self.tokenizer)}; "
            f"{self.task.describe(config.block_size)}; "
            f"{processes.world} process(es)" + (f" as {config.mesh}" if config.mesh else "") + f" on "
            f"{processes.device.type}, {torch.get_num_threads()} thread(s) each"
            + (f"; resuming after step {self.step}" if self.step else "")
        )
        if self.step >= config.steps:
            self.report.say(
                f"{self.saver.newest} is at step {self.step}, and --steps is {config.steps}: nothing is left to train; "
                f"to go on, give more --steps and --change steps"
            )


def _draw(output: Path) -> None:
    """Draw the loss curve if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print('loss.png is not drawn, matplotlib is missing: pip install "easytorch[train]"')
    elif series(read_metrics(output / "metrics.jsonl"), "loss"):  # none where every step was skipped
        plot_loss(output / "metrics.jsonl", output / "loss.png")
