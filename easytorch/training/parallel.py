"""The model over the mesh of the processes: DistributedDataParallel, FSDP2, tensor parallelism by one interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from easytorch.distributed.fully_sharded import keep_gathered
from easytorch.distributed.mesh import make_mesh
from easytorch.distributed.sharding import Uneven, data_place, full_tensors, shard_model
from easytorch.distributed.staged_call import pipeline_of
from easytorch.training.adapter import add_same_adapter, has_adapter
from easytorch.training.config import TrainingConfig, flag
from easytorch.training.finite import first_nonfinite, nonfinite_parameter
from easytorch.training.gradients import total_norm
from easytorch.training.processes import Processes
from easytorch.training.task import Batch, Task, on_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from easytorch.distributed.pipeline_parallel import Loss, Pipeline


@dataclass
class ParallelModel:
    """The model as a training step calls it, in one process.

    model: the one whose parameters are trained. place, places: the data parallel rank of this process, and
    their number; the processes of a tensor or sequence parallel group share one rank. sharded: each call communicates,
    evaluation's too. tokens: a number for the tokens that this process computes, of which dropout is drawn.
    parameters: of the full model. pipeline: the stages of which this process has one.
    """

    model: PreTrainedModel
    module: nn.Module
    place: int = 0
    places: int = 1
    sharded: bool = False
    tokens: int = 0
    original: type[PreTrainedModel] | None = None
    parameters: int = 0
    pipeline: Pipeline | None = None

    def step(self, batches: Iterable[Batch], divisors: Sequence[float], loss_of: Loss) -> torch.Tensor:
        """Forward and backward of the pieces of a batch: the sum of loss / divisor over them, and its gradients, which
        are summed over the processes once, with the last piece."""
        if self.pipeline is not None:
            return self.pipeline.step(list(batches), divisors, loss_of)
        total = torch.zeros((), device=self.model.device)
        for number, (batch, divisor) in enumerate(zip(batches, divisors, strict=True), start=1):
            with self.backward_of(last=number == len(divisors)):
                loss = loss_of(self.module, batch) / divisor
                loss.backward()
            total += loss.detach()
        return total

    def evaluate(self, batch: Batch, loss_of: Loss) -> torch.Tensor:
        """The loss of a batch, without gradients."""
        return loss_of(self.model, batch) if self.pipeline is None else self.pipeline.evaluate(batch, loss_of)

    def norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """The norm of this process's gradients and those of the other stages."""
        own = total_norm(gradients)
        return own if self.pipeline is None else self.pipeline.norm(own)

    def first_nonfinite(self, loss: float, norm: float) -> str | None:
        """The first tensor that is not finite, over all stages; each process calls this."""
        return first_nonfinite(self.model, loss, norm, self._of_stages)

    def nonfinite_parameter(self) -> str | None:
        """The first parameter that is not finite, over all stages; each process calls this."""
        return nonfinite_parameter(self.model, self._of_stages)

    @property
    def _of_stages(self) -> Callable[[str | None], list[str | None]] | None:
        return None if self.pipeline is None else self.pipeline.of_stages

    def backward_of(self, last: bool) -> AbstractContextManager[Any]:
        """For the forward and backward of one piece of a batch: gradients are reduced with the `last` one alone."""
        if isinstance(self.module, DistributedDataParallel):
            return nullcontext() if last else self.module.no_sync()
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        return nullcontext()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step."""
        optimizer.step()

    def place_batch(self, batch: Batch) -> Batch:
        """A batch where the model computes it."""
        return on_device(batch, self.model.device)

    def place_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide moments that were loaded as their weights are. DTensors' are divided as they load."""

    def seed(self, seed: int) -> None:
        """Of dropout."""
        torch.manual_seed(seed)

    def to_save(self) -> PreTrainedModel:
        """The unsharded model, with the full weights on the CPU; each process calls this. Of one with an adapter, whose
        files have nothing else, the weights below it have no values."""
        if not self.sharded:
            return self.model
        assert self.original is not None
        if not has_adapter(self.model):
            return unsharded(self.model, self.original, full_tensors(self.model))
        found, adapter = self.outline(), full_tensors(self.model, trained=True)
        assert adapter.keys() == {name for name, one in found.named_parameters() if one.requires_grad}
        found.load_state_dict(adapter, strict=False, assign=True)
        return found

    def outline(self) -> PreTrainedModel:
        """The unsharded model, its tensors of their shapes without their memory, for functions that refuse the meta
        device: fused optimizers, `save_pretrained`."""
        assert self.original is not None
        with torch.device("meta"):
            found = self.original(self.model.config)
        if has_adapter(self.model):
            add_same_adapter(found, self.model)
        for module in found.modules():
            for name, one in module._parameters.items():
                if one is not None:
                    module._parameters[name] = nn.Parameter(_of_one_number(one), requires_grad=one.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = _of_one_number(buffer)
        return found


def _of_one_number(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)


def unsharded(
    model: PreTrainedModel, original: type[PreTrainedModel], weights: dict[str, torch.Tensor]
) -> PreTrainedModel:
    """A model of the class `original` with the config of `model` and full weights."""
    with torch.device("meta"):
        found = original(model.config)
    found.load_state_dict(weights, assign=True)
    found.tie_weights()
    found.generation_config = model.generation_config
    return found


def in_parallel(model: PreTrainedModel, task: Task, processes: Processes, config: TrainingConfig) -> ParallelModel:
    """The model over the mesh of the config: replicas alone by DistributedDataParallel, other axes sharded in place.

    To be called before the optimizer is made, of the parameters that this leaves.
    """
    if processes.device.type == "xla":
        from easytorch.training.spmd import over_devices

        return over_devices(model, task, config)
    if processes.world == 1:
        return ParallelModel(model, model)
    axes, parameters = config.axes(processes.world), sum(one.numel() for one in model.parameters())
    if all(size == 1 for name, size in axes.items() if name != "dp"):
        module = _replicated(model, task, processes)
        return ParallelModel(model, module, processes.rank, processes.world, tokens=processes.rank)
    mesh = processes.mesh = make_mesh(axes, processes.device.type, timeout=processes.timeout)
    place, places = data_place(mesh)
    # the loop changes no output in place, which is what torch warns of at each forward
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    original, wrong = type(model), None
    try:
        shard_model(model, mesh=mesh, uneven=uneven_of(config))
        if not reshards(config, processes.device):
            keep_gathered(model)
        task.shard(mesh)
    except (ValueError, NotImplementedError) as error:  # sizes and plans, which are the same in each process
        wrong = ValueError(f"{flag('mesh')} {config.mesh}: {error}")
    with processes.together():
        if wrong is not None:
            raise wrong
    tokens = place * axes.get("sp", 1) + (mesh.get_local_rank("sp") if "sp" in axes else 0)
    return ParallelModel(
        model, model, place, places, sharded=True, tokens=tokens, original=original, parameters=parameters,
        pipeline=pipeline_of(model),
    )  # fmt: skip


def uneven_of(config: TrainingConfig) -> Uneven:
    return "replicate" if config.uneven == "replicate" else "error"


def reshards(config: TrainingConfig, device: torch.device) -> bool:
    """Whether layers over "fsdp" free their full weights between forward and backward."""
    if config.reshard_after_forward == "auto":
        return device.type != "cpu"
    return config.reshard_after_forward == "always"


def _replicated(model: PreTrainedModel, task: Task, processes: Processes) -> DistributedDataParallel:
    """The model, of which not every parameter need have a gradient: the loss may not depend on it, and an expert may
    see no token. Without `find_unused_parameters` the second step fails then; where every parameter has one, that costs
    a walk over the graph at each step, and a warning of torch's."""
    with processes.together():
        unused = _has_unused(model, task, on_device(task.rows(task.sample(processes.rank)), processes.device))
    find = processes.any(unused)
    # Lays the codes of quantized layers as they are saved: buffers are broadcast byte by byte, and a rank whose sample
    # was short has interleaved them.
    model.state_dict()
    return DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=find)


def _has_unused(model: PreTrainedModel, task: Task, batch: Batch) -> bool:
    """Whether a parameter to be trained is not in the graph of the loss of a batch."""
    model.train()
    loss, _ = task.loss(model, batch)
    seen, found, nodes = set(), set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(leaf)
        nodes += [below for below, _ in node.next_functions]
    return any(parameter.requires_grad and parameter not in found for parameter in model.parameters())
