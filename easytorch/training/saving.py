"""When and how a run writes its checkpoints: full by the first process, or sharded by all, in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from easytorch.bridge.storage.atomic import new_folder
from easytorch.distributed.shards import ShardsFailedError, Stager, model_tensors, result_of, save_shards
from easytorch.training import adapter
from easytorch.training.checkpoint import PROGRESS, checkpoint_path, remove_old, save_checkpoint
from easytorch.training.config import TrainingConfig
from easytorch.training.disk import named_os_errors
from easytorch.training.optim import full_state, without_moments
from easytorch.training.parallel import ParallelModel
from easytorch.training.processes import Processes
from easytorch.training.sharded import MODEL, export_model, moments, progress_text
from easytorch.training.stages import full_state_of_stages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CheckpointSaver:
    """Writes the checkpoints of one run. Each process has one, and calls its methods together with the others.

    newest: the newest checkpoint that is complete. settings: what a checkpoint stores of them, in the first process.
    """

    def __init__(
        self,
        config: TrainingConfig,
        processes: Processes,
        parallel: ParallelModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: Mapping[str, Any],
        newest: Path | None,
    ) -> None:
        self.config, self.processes, self.parallel = config, processes, parallel
        self.tokenizer, self.settings, self.newest = tokenizer, settings, newest
        # adapters are small, and PEFT's files
        self.sharded = config.checkpoint_format == "sharded" or (
            config.checkpoint_format == "auto" and parallel.sharded and config.lora is None
        )
        self._stager = Stager()
        self._running: tuple[Path, Future[Any], ExitStack] | None = None

    def save(self, step: int, optimizer: torch.optim.Optimizer, data: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`, or begin to. Raises the error of the one before, if it failed.

        data: the place in the data, where the step does not say it.
        """
        self.wait()
        final = checkpoint_path(Path(self.config.output), step)
        if self.sharded:
            self._save_sharded(final, step, optimizer, data)
            return
        model = self.parallel.to_save()
        if self.parallel.pipeline is None:
            state, absent = full_state(optimizer), without_moments(optimizer)
        else:
            state, absent = full_state_of_stages(model, self.parallel, optimizer, self.processes, self.config)
        with self.processes.together():
            if self.processes.first:
                save_checkpoint(
                    final, step, model, self.tokenizer,
                    {
                        "optimizer": state, "without_moments": absent, "settings": self.settings, "data": dict(data),
                    },
                    self.config.keep_checkpoints,
                )  # fmt: skip
        self.newest = final

    def before_update(self) -> None:
        """Wait until a save in the background has copied what the optimizer is about to change."""
        self._stager.wait_for_copies()

    def wait(self) -> None:
        """Wait for the save in the background, if there is one. Its error is raised in one process."""
        if self._running is None:
            return
        (final, future, staging), self._running = self._running, None
        self._end(final, staging, lambda: result_of(future))

    def finish(self) -> None:
        """After the last step: wait, and write the model of a sharded checkpoint as transformers does."""
        self.wait()
        with self.processes.together():
            if self.sharded and self.processes.first and self.newest is not None:
                folder = Path(self.config.output) / MODEL
                with named_os_errors(folder):
                    export_model(self.newest, folder)
            if self.config.lora is not None and self.config.lora.get("merge") and self.processes.first:
                folder = Path(self.config.output) / MODEL
                if self.parallel.sharded and self.newest is not None:
                    adapter.merge_saved(self.config, self.newest, self.tokenizer, folder)
                else:
                    adapter.write_merged(self.parallel.model, self.tokenizer, folder)

    def close(self) -> None:
        """Let a save in the background come to its end where the run has failed, whose error is the one to report."""
        if self._running is not None:
            (_, future, staging), self._running = self._running, None
            if (error := future.exception()) is not None:
                staging.__exit__(type(error), error, None)

    def _save_sharded(self, final: Path, step: int, optimizer: torch.optim.Optimizer, data: Mapping[str, Any]) -> None:
        staging = ExitStack()
        folder = final
        with self.processes.together():
            if self.processes.first:
                folder = staging.enter_context(new_folder(final, replace=True))
        try:
            tensors, steps = moments(self.parallel.model, optimizer)
            if self.parallel.pipeline is not None:
                steps = self.processes.merged(steps)
            progress = progress_text(step, self.settings, steps, data)
            self._begin(final, tensors, progress, staging, self.processes.from_first(folder))
        except BaseException as error:
            staging.__exit__(type(error), error, error.__traceback__)
            raise

    def _begin(
        self, final: Path, tensors: Mapping[str, torch.Tensor], progress: str, staging: ExitStack, folder: Path
    ) -> None:
        with self.processes.together():
            if self.processes.first:
                with named_os_errors(final):
                    self._write_beside(folder, progress)
        keep = self.config.keep_checkpoints

        def publish() -> None:
            staging.close()
            remove_old(final.parent, keep)

        state = {**model_tensors(self.parallel.model), **tensors}
        # forward and backward may change buffers, and the optimizer alone the rest
        buffers = {name for name, _ in self.parallel.model.named_buffers(remove_duplicate=False)}
        self._stager.constant = frozenset(
            name for name, one in state.items() if one.device.type == "cpu" and name not in buffers
        )
        group, background = self.processes.cpu_group(), self.config.async_checkpoint
        future = None

        def write() -> None:
            nonlocal future
            future = save_shards(state, folder, publish, group=group, in_background=background, stager=self._stager)

        if background:
            write()
            assert future is not None
            self._running = final, future, staging
        else:
            self._end(final, staging, write)

    def _write_beside(self, folder: Path, progress: str) -> None:
        """Everything but the tensors."""
        model = self.parallel.model
        config = model.config
        config.architectures = [(self.parallel.original or type(model)).__name__]
        config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        (folder / PROGRESS).write_text(progress, encoding="utf-8")

    def _end(self, final: Path, staging: ExitStack, write: Callable[[], None]) -> None:
        """Run `write`, which all processes are in: where it fails in some, the first of these raises its error."""
        causes: dict[int, BaseException] = {}
        try:
            write()
        except ShardsFailedError as error:
            causes = error.causes
        if not causes:
            self.newest = final
            return
        with self.processes.together(), named_os_errors(final):
            if self.processes.first:
                staging.__exit__(ShardsFailedError, ShardsFailedError(causes), None)
            if self.processes.rank == min(causes):
                cause = causes[self.processes.rank]
                raise cause if isinstance(cause, Exception) else RuntimeError(str(cause))
