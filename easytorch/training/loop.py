"""The training loop: one process, or each of those torchrun started, runs `train`."""

from __future__ import annotations

import importlib.util
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from easytorch.training.checkpoint import load_state, save_checkpoint
from easytorch.training.config import TrainingConfig
from easytorch.training.data import Blocks, step_indices
from easytorch.training.interrupt import StopOnSignal
from easytorch.training.optim import learning_rate, make_optimizer
from easytorch.training.plot import plot_loss
from easytorch.training.prepare import find_checkpoint, make_model, prepare_text
from easytorch.training.processes import Processes, joined
from easytorch.training.report import Report

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class TrainingResult:
    """checkpoint: the newest one. steps: optimizer steps done. interrupted: a signal ended the run before the last."""

    checkpoint: Path
    steps: int
    interrupted: bool


def train(config: TrainingConfig) -> TrainingResult:
    """Train, leaving checkpoints, metrics and the loss curve in `config.output`; torchrun calls it in each process.

    Raises `ValueError` for settings that do not fit together and `OSError` for text or an output that cannot be used.
    """
    with joined(config.device) as processes:
        config.share(processes.world)  # refused before anything is written
        checkpoint = find_checkpoint(config)
        tokenizer, blocks = prepare_text(config, processes, checkpoint)
        model = make_model(config, tokenizer, checkpoint, processes.device)
        return _Run(config, processes, tokenizer, blocks, model, checkpoint).run()


class _Run:
    """The state of one process's loop."""

    def __init__(
        self,
        config: TrainingConfig,
        processes: Processes,
        tokenizer: PreTrainedTokenizerBase,
        blocks: Blocks,
        model: PreTrainedModel,
        checkpoint: Path | None,
    ) -> None:
        self.config, self.processes, self.tokenizer, self.blocks, self.model = (
            config, processes, tokenizer, blocks, model,
        )  # fmt: skip
        self.share, self.micro = config.share(processes.world)
        self.optimizer = make_optimizer(model, config)
        self.step, self.checkpoint = 0, checkpoint
        if checkpoint is not None:
            state = load_state(checkpoint)
            self.step = state["step"]
            self.optimizer.load_state_dict(state["optimizer"])
        self.parallel = DistributedDataParallel(model, gradient_as_bucket_view=True) if processes.world > 1 else model
        self.report: Report | None = None

    def run(self) -> TrainingResult:
        config, interrupted = self.config, False
        with ExitStack() as stack:
            stop = stack.enter_context(StopOnSignal())
            if self.processes.first:
                self.report = stack.enter_context(
                    Report(Path(config.output), self.step, config.steps, config.log_every)
                )
                self._introduce()
            while self.step < config.steps and not interrupted:
                self._train_step()
                last = self.step == config.steps
                if self.blocks.eval_count and (last or self.step % config.eval_every == 0):
                    self._evaluate()
                interrupted = not last and self.processes.sum(float(stop.asked))[0] > 0
                if last or interrupted or (config.save_every and self.step % config.save_every == 0):
                    self._save()
            if interrupted and self.report is not None:
                self.report.say(f"stopped after step {self.step}; {self.checkpoint} can be resumed")
        assert self.checkpoint is not None
        if self.processes.first:
            _draw(Path(config.output))
        return TrainingResult(self.checkpoint, self.step, interrupted)

    def _train_step(self) -> None:
        """One optimizer step over `batch_size` blocks, of which this process computes its contiguous share."""
        config, start = self.config, time.perf_counter()
        # Dropout is a function of (seed, step, rank), so that a resumed run draws what it would have drawn.
        torch.manual_seed((config.seed * 1_000_003 + self.step) * 65_537 + self.processes.rank)
        indices = step_indices(self.step, config.batch_size, self.blocks.train_count, config.seed)
        first = self.processes.rank * self.share
        mine = self.blocks.batch(indices[first : first + self.share]).to(self.processes.device)
        rate = learning_rate(self.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.parallel.train()
        pieces = mine.split(self.micro)
        total = torch.zeros((), device=self.processes.device)
        for number, piece in enumerate(pieces, start=1):
            # Gradients are summed over the processes once, with the last piece.
            with self._without_sync() if number < len(pieces) else nullcontext():
                loss = self._loss(self.parallel, piece) / len(pieces)
                loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        mean = self.processes.sum(total)[0] / self.processes.world
        if self.report is not None:
            tokens = config.batch_size * config.block_size
            self.report.step(
                self.step,
                loss=mean,
                learning_rate=rate,
                gradient_norm=float(norm),
                rate=tokens / (time.perf_counter() - start),
            )

    def _loss(self, module: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Mean next-token cross entropy of (N, block_size) token ids."""
        autocast = torch.autocast(
            self.processes.device.type, dtype=torch.bfloat16, enabled=self.config.dtype == "bfloat16"
        )
        with autocast:
            return module(input_ids=tokens, labels=tokens, use_cache=False).loss

    def _without_sync(self) -> Any:
        return self.parallel.no_sync() if isinstance(self.parallel, DistributedDataParallel) else nullcontext()

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Loss of the held-out blocks, each computed by one process."""
        self.model.eval()
        processes, total, count = self.processes, 0.0, 0
        first, end = self.blocks.train_count, self.blocks.train_count + self.blocks.eval_count
        mine = torch.arange(first + processes.rank, end, processes.world)
        for indices in mine.split(self.micro):
            tokens = self.blocks.batch(indices.numpy()).to(processes.device)
            total += float(self._loss(self.model, tokens)) * len(indices)
            count += len(indices)
        summed, blocks = processes.sum(total, float(count))
        if self.report is not None:
            self.report.evaluation(self.step, summed / blocks)

    def _save(self) -> None:
        if self.processes.first:
            self.checkpoint = save_checkpoint(
                Path(self.config.output), self.step, self.model, self.tokenizer,
                {"optimizer": self.optimizer.state_dict()}, self.config.keep_checkpoints,
            )  # fmt: skip
        else:
            self.checkpoint = Path(self.config.output) / f"checkpoint-{self.step}"
        self.processes.barrier()

    def _introduce(self) -> None:
        assert self.report is not None
        config, blocks, processes, kind = self.config, self.blocks, self.processes, type(self.model)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.report.say(
            f"{kind.__module__}.{kind.__name__}, {parameters / 1e6:.2f} M parameters; "
            f"vocabulary {len(self.tokenizer)}; "
            f"{blocks.train_count} blocks of {config.block_size} tokens to train on, {blocks.eval_count} held out; "
            f"{processes.world} process(es) on {processes.device.type}, {torch.get_num_threads()} thread(s) each"
            + (f"; resuming after step {self.step}" if self.step else "")
        )


def _draw(output: Path) -> None:
    """The loss curve, where matplotlib is there to draw it; the run does not depend on it."""
    if importlib.util.find_spec("matplotlib") is None:
        print('loss.png is not drawn, matplotlib is missing: pip install "easytorch[train]"')
    else:
        plot_loss(output / "metrics.jsonl", output / "loss.png")
