"""Pipeline parallelism: the layers of a model divided into stages over the axis "pp", by torch.distributed.pipelining.

Each rank of the axis has one stage, and all of them are given the same micro-batches, whose hidden states go from stage
to stage and whose gradients come back (1F1B, arXiv:1806.03377).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from easytorch.distributed.staged_call import check_stages, layers_of_stage

Batch = dict[str, Tensor]
Loss = Callable[[Any, Any], Tensor]  # of a module, which is called by keywords and whose output has a loss, and a batch


class Pipeline:
    """One rank's stage of `model`, whose other layers are left out of it.

    `ValueError` where there are fewer layers than stages, `NotImplementedError` for a model that cannot be divided.
    """

    mesh: Any = None  # all axes, where `shard_model` has made the stages
    scheduled = False  # the model is called as one stage, by a schedule

    def __init__(self, model: Any, ranks: DeviceMesh) -> None:
        check_stages(model, ranks.size(), {})
        self.model, self.ranks = model, ranks
        self.stage, self.stages = ranks.get_local_rank(), ranks.size()
        self.first, self.last = self.stage == 0, self.stage == self.stages - 1
        own = layers_of_stage(model.config.get_text_config().num_hidden_layers, self.stage, self.stages)
        model.keep_layers(own.start, own.stop)

    @property
    def device(self) -> torch.device:
        """Of the stage, which may be loaded or moved after it was made."""
        found: torch.device = self.model.device
        return found

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states between stages."""
        found: torch.dtype = self.model.dtype
        return found

    def step(self, batches: Sequence[Batch], divisors: Sequence[float], loss_of: Loss) -> Tensor:
        """Forward and backward of each micro-batch: gradients of sum(loss / divisor), which each rank returns, ().

        The micro-batches are of one shape. loss_of: as called with the full model.
        """
        return self._run(batches, divisors, loss_of, train=True)

    def evaluate(self, batch: Batch, loss_of: Loss) -> Tensor:
        """The loss of one batch, without gradients, on each rank."""
        return self._run([batch], [1.0], loss_of, train=False)

    def norm(self, own: Tensor) -> Tensor:
        """The norm of all stages' gradients, of this stage's."""
        squared = own.detach().float().square()
        dist.all_reduce(squared, group=self.ranks.get_group())
        return squared.sqrt()

    def of_stages(self, own: Any) -> list[Any]:
        """What each stage passes, in order; picklable."""
        found: list[Any] = [None] * self.stages
        dist.all_gather_object(found, own, group=self.ranks.get_group())
        return found

    def gathered(self, own: Mapping[str, Any], *, keep: bool = True) -> dict[str, Tensor]:
        """The full tensors of all stages by their names, on the CPU; each rank passes its own, which may be sharded.

        They are gathered and sent one at a time, by the stage that has them. keep: False on a rank that only takes
        part, whose tensors are empty.
        """
        group, every = self.ranks.get_group(), dict[str, Tensor]()
        described = self.of_stages([(name, tuple(x.shape), x.dtype) for name, x in own.items()])
        for stage, tensors in enumerate(described):
            source = dist.get_global_rank(group, stage)
            for name, shape, dtype in tensors:
                if stage == self.stage:
                    one = own[name].detach()
                    one = (one.full_tensor() if hasattr(one, "full_tensor") else one).to(self.device).contiguous()
                else:
                    one = torch.empty(shape, dtype=dtype, device=self.device)
                dist.broadcast(one, source, group=group)
                every[name] = one.cpu() if keep else torch.empty(0)
        return every

    def _run(self, batches: Sequence[Batch], divisors: Sequence[float], loss_of: Loss, *, train: bool) -> Tensor:
        failed: list[Exception] = []

        def run(x: Tensor, number: int) -> Tensor:
            try:
                loss = loss_of(_StageModule(self, x), batches[number])
            except Exception as error:  # raised again below
                failed.append(error)
                raise
            return loss / divisors[number] if self.last else loss

        shapes = {tuple(one["input_ids"].shape) for one in batches}
        if len(shapes) > 1:
            raise ValueError(f"micro-batches over pp are of one shape, not of {sorted(shapes)}")
        numbers = torch.arange(len(batches), device=self.device)
        hidden = torch.empty(
            (*shapes.pop(), self.model.config.get_text_config().hidden_size), dtype=self.dtype, device="meta"
        ).requires_grad_(train)
        stage = _Stage(
            self.model, self.stage, self.stages, self.device,
            input_args=numbers[:1].to("meta") if self.first else hidden,
            output_args=torch.empty((), dtype=self.dtype, device="meta").requires_grad_(train) if self.last else hidden,
            group=self.ranks.get_group(),
        )  # fmt: skip
        stage.run = run
        # 1F1B takes at least one micro-batch for each stage
        kind = Schedule1F1B if len(batches) >= self.stages else ScheduleGPipe
        schedule = kind(stage, len(batches), loss_fn=lambda loss, _: loss, scale_grads=False)
        losses: list[Tensor] = []
        more: dict[str, Any] = {"target": numbers, "losses": losses} if self.last else {}
        self.scheduled = True
        try:
            with nullcontext() if train else torch.no_grad():
                act = schedule.step if train else schedule.eval
                act(*([numbers] if self.first else []), number=numbers, return_outputs=False, **more)
        except RuntimeError as error:
            if failed:  # torch says of any error that the stage failed, and prints its arguments
                raise failed[0] from None
            raise error
        finally:
            self.scheduled = False
        total = torch.stack([one.detach().float() for one in losses]).sum() if self.last else torch.zeros(())
        total = total.to(self.device)
        group = self.ranks.get_group()
        dist.broadcast(total, dist.get_global_rank(group, self.stages - 1), group=group)
        return total


class _Stage(PipelineStage):
    run: Callable[[Tensor, int], Tensor]

    def forward_maybe_with_nosync(self, x: Tensor, number: Tensor) -> Tensor:
        return self.run(x, int(number))

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing: shapes are given, so no trial has run whose gradients torch would remove here, with all others."""


class _StageModule:
    """The model as a loss calls it: the stage's forward of `x` takes the place of the full one."""

    def __init__(self, pipeline: Pipeline, x: Tensor) -> None:
        self.pipeline, self.x = pipeline, x

    def __call__(self, **inputs: Any) -> Any:
        pipeline = self.pipeline
        if not pipeline.first:
            inputs = {name: one for name, one in inputs.items() if name != "input_ids"} | {"inputs_embeds": self.x}
        if pipeline.last:
            return pipeline.model(**inputs)
        inputs.pop("labels", None)
        return SimpleNamespace(loss=pipeline.model(**inputs).logits)

    def __getattr__(self, name: str) -> Any:
        model: nn.Module = self.pipeline.model
        return getattr(model, name)
