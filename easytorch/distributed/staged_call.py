"""A model divided into stages, called as the whole model is: each rank of "pp" calls it with the same batch.

The hidden states go from stage to stage in the forward, and their gradients come back in the backward, which each rank
calls on the loss that it was given. One batch is under way at a time: `Pipeline.step` overlaps several. An error in the
forward of one stage is raised there, and as `StageFailedError` in the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from easytorch.distributed.pipeline_parallel import Pipeline

_KEY = "_pipeline"  # of the model


class StageFailedError(RuntimeError):
    """Another stage raised an error in the forward, which this one quotes instead of waiting for its hidden states."""


def pipeline_of(model: Any) -> Pipeline | None:
    """The stages of a model that `shard_model` has divided; None for any other."""
    found: Pipeline | None = getattr(model, "__dict__", {}).get(_KEY)
    return found


def check_stages(model: Any, stages: int, axes: Mapping[str, int]) -> None:
    """`NotImplementedError` for a model, or the other axes of its mesh, that do not go with stages; `ValueError` for
    fewer layers than stages."""
    kind = type(model).__name__
    if axes.get("sp", 1) > 1:
        raise NotImplementedError("pp and sp do not go together: a stage passes on whole sequences")
    if not hasattr(model, "stage_refusal"):
        raise NotImplementedError(f"{kind} cannot be divided into stages over pp: native decoders can")
    if (why := model.stage_refusal()) is not None:
        raise NotImplementedError(f"{kind} cannot be divided into stages over pp: {why}")
    layers = model.config.get_text_config().num_hidden_layers
    if layers < stages:
        raise ValueError(f"{layers} layers do not make pp={stages} stages: take at most {layers}")


def layers_of_stage(layers: int, stage: int, stages: int) -> range:
    """The places of its layers."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def divide(model: Any, mesh: Any) -> Pipeline:
    """Leave this rank's stage of the model, and make calls of it go through all stages. mesh: with an axis "pp".

    `gather` undoes it.
    """
    from easytorch.distributed.pipeline_parallel import Pipeline  # which takes long to import

    pipeline = Pipeline(model, mesh["pp"] if mesh.ndim > 1 else mesh)
    pipeline.mesh = mesh
    model.__dict__[_KEY] = pipeline
    model.forward = _through_stages(model.forward, pipeline)
    return pipeline


def gather(model: Any) -> None:
    """Undo `divide`: each rank gets the parameters of the other stages."""
    pipeline: Pipeline = model.__dict__.pop(_KEY)
    del model.__dict__["forward"]
    model.restore_layers(pipeline.gathered(model.state_dict(keep_vars=True)))


def _through_stages(stage: Any, pipeline: Pipeline) -> Any:
    """The whole model's forward, of `stage`, the forward of the model without the other layers."""
    from easytorch.cache_names import CACHE

    names = ("input_ids", "attention_mask", "position_ids", CACHE, "inputs_embeds", "labels", "use_cache")

    @functools.wraps(stage)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if pipeline.scheduled:
            return stage(*args, **kwargs)
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        _check(pipeline.model, inputs, more=len(args) > len(names))
        inputs["use_cache"] = False
        given = inputs.get("inputs_embeds")
        shape = inputs["input_ids"].shape if given is None else given.shape[:2]
        anchor = torch.zeros((), device=pipeline.device, requires_grad=torch.is_grad_enabled())
        labels = inputs.get("labels")
        if not pipeline.last:
            # of the last stage: the hidden states of all tokens go on
            inputs = {name: one for name, one in inputs.items() if name not in ("labels", "logits_to_keep")}
        try:
            if not pipeline.first:
                inputs.pop("input_ids", None)
                hidden = _Receive.apply(anchor, tuple(shape), pipeline)  # type: ignore[no-untyped-call]
                inputs["inputs_embeds"] = hidden
            output = stage(**inputs)
        except Exception as error:  # a boundary between processes: the others wait for this one
            _tell(error, pipeline)
            raise
        if not pipeline.last:
            sent = _Send.apply(output.logits, anchor, pipeline)  # type: ignore[no-untyped-call]
            of_last = _from_last(None, pipeline)
            # `sent` is a zero whose gradient is that of the next stage
            shared = of_last + sent if of_last.is_floating_point() else of_last
            loss, logits = (None, shared) if labels is None else (shared, None)
            return type(output)(loss=loss, logits=logits)
        _from_last(output.logits if output.loss is None else output.loss, pipeline)
        return output

    return forward


def _check(model: Any, inputs: dict[str, Any], *, more: bool) -> None:
    from easytorch.cache_names import CACHE, given_cache

    why = None
    if more:
        why = "arguments without a name after use_cache"
    elif given_cache(inputs) is not None or inputs.get("use_cache"):
        why = f"a cache of keys and values (use_cache, {CACHE})"
    elif not _setting(model, inputs, "return_dict", True):
        why = "return_dict=False"
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if _setting(model, inputs, name, False):
            why = f"{name}, of which each stage has a part"
    if why is not None:
        raise NotImplementedError(
            f"{type(model).__name__}: a model divided over pp does not take {why}; gather_model gives the model of one "
            f"process back"
        )
    if (inputs.get("input_ids") is None) == (inputs.get("inputs_embeds") is None):
        raise ValueError("give one of input_ids and inputs_embeds")


def _setting(model: Any, inputs: dict[str, Any], name: str, default: bool) -> Any:
    """That of the call, or of the config where the call leaves it open."""
    given = inputs.get(name)
    return getattr(model.config, name, default) if given is None else given


def _from_last(own: Tensor | None, pipeline: Pipeline) -> Tensor:
    """The tensor of the last stage, on each rank: without a gradient, which the hidden states carry."""
    group = pipeline.ranks.get_group()
    source = dist.get_global_rank(group, pipeline.stages - 1)
    told: list[Any] = [None if own is None else (tuple(own.shape), own.dtype)]
    dist.broadcast_object_list(told, source, group=group, device=pipeline.device)
    if isinstance(told[0], str):
        raise StageFailedError(told[0])
    shape, dtype = told[0]
    value = torch.empty(shape, dtype=dtype, device=pipeline.device) if own is None else own.detach().contiguous()
    dist.broadcast(value, source, group=group)
    return value


def _tell(error: Exception, pipeline: Pipeline) -> None:
    """Tell the other stages, each of which raises `StageFailedError`, instead of the output of this one."""
    words = str(error) if isinstance(error, StageFailedError) else ""
    words = words or f"stage {pipeline.stage} of {pipeline.stages} over pp has failed: {type(error).__name__}: {error}"
    group = pipeline.ranks.get_group()
    if pipeline.last:
        source = dist.get_global_rank(group, pipeline.stages - 1)
        dist.broadcast_object_list([words], source, group=group, device=pipeline.device)
        return
    text = torch.tensor(list(words.encode()), dtype=torch.uint8, device=pipeline.device)
    dist.send(torch.tensor(len(text), device=pipeline.device), _neighbour(pipeline, 1), group=group)
    dist.send(text, _neighbour(pipeline, 1), group=group)
    with contextlib.suppress(StageFailedError):  # this very failure, which the last stage passes on
        _from_last(None, pipeline)


def _neighbour(pipeline: Pipeline, offset: int) -> int:
    return dist.get_global_rank(pipeline.ranks.get_group(), pipeline.stage + offset)


class _Receive(torch.autograd.Function):
    """The hidden states (B, T, D) of the stage before, which is sent their gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shape: tuple[int, ...], pipeline: Pipeline) -> Tensor:
        ctx.pipeline = pipeline
        width = pipeline.model.config.get_text_config().hidden_size
        source, group = _neighbour(pipeline, -1), pipeline.ranks.get_group()
        failed = torch.zeros((), dtype=torch.int64, device=pipeline.device)
        dist.recv(failed, source, group=group)
        if length := int(failed):
            text = torch.empty(length, dtype=torch.uint8, device=pipeline.device)
            dist.recv(text, source, group=group)
            raise StageFailedError(bytes(text.tolist()).decode())
        hidden = torch.empty((*shape, width), dtype=pipeline.dtype, device=pipeline.device)
        dist.recv(hidden, source, group=group)
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        pipeline: Pipeline = ctx.pipeline
        dist.send(gradients[0].contiguous(), _neighbour(pipeline, -1), group=pipeline.ranks.get_group())
        return gradients[0].new_zeros(()), None, None


class _Send(torch.autograd.Function):
    """A zero, for the hidden states (B, T, D) that go to the next stage; the gradient is the one it sends back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, pipeline: Pipeline) -> Tensor:
        ctx.pipeline, ctx.shape, ctx.dtype = pipeline, hidden.shape, hidden.dtype
        hidden = hidden.detach().to(pipeline.dtype).contiguous()
        target, group = _neighbour(pipeline, 1), pipeline.ranks.get_group()
        dist.send(torch.zeros((), dtype=torch.int64, device=pipeline.device), target, group=group)  # none has failed
        dist.send(hidden, target, group=group)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        pipeline: Pipeline = ctx.pipeline
        gradient = torch.empty(ctx.shape, dtype=pipeline.dtype, device=pipeline.device)
        dist.recv(gradient, _neighbour(pipeline, 1), group=pipeline.ranks.get_group())
        return gradient.to(ctx.dtype), None, None
