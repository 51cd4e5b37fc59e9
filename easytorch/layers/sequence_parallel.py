"""Sequence parallelism of a causal language model: each rank of a mesh axis computes its own tokens of every sequence.

The ranks call the model with the same batch. Everything but attention is computed token by token; attention passes keys
and values around a ring (the operation `ring`). Positions, labels and the number of tokens in the loss are those of the
whole sequence; the loss is the same on every rank, the load balancing loss of experts included, and logits, routers'
logits and hidden states are those of the rank's own tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.cache_names import CACHE, takes_cache
from easytorch.kernels.ring.layout import shard
from easytorch.layers.masks import FULL, SLIDING
from easytorch.operations import OperationMetadata, OperationRegistry

# Keywords of a causal language model's forward that are no tensors of tokens, or are divided here.
_TAKEN = frozenset({"shift_labels", "num_items_in_batch"})
_STATE = "_sequence_parallel"  # of the model: the attention it had
_SHARD = "_sequence_shard"  # of the model, while it is called


@dataclass(frozen=True, kw_only=True)
class SequenceShard:
    """What an attention layer is told where the rank has its own tokens of a sequence alone.

    attention: the operation `ring` over the ranks. layout: which tokens each of them has (kernels/ring/layout.py).
    segment_ids (B, T / n) of the rank's tokens: those of other segments are not seen; None for one segment. padding
    (B, T / n): 0 for tokens of the rank that do not count, None where all do. ranks: n. over_ranks: sums a tensor over
    them, with the gradient that their mean needs.
    """

    attention: Callable[..., Any]
    layout: str
    ranks: int
    over_ranks: Callable[[Tensor], Tensor]
    segment_ids: Tensor | None = None
    padding: Tensor | None = None


def shard_of(model: Any) -> SequenceShard | None:
    """The rank's part of the sequences of the call that is running; None where it has them whole."""
    found: SequenceShard | None = model.__dict__.get(_SHARD)
    return found


def refusal(backbone: Any) -> str | None:
    """Why the layers of a decoder (layers/decoder.py) cannot each see a part of the sequence; None where they can."""
    config = backbone.config
    others = sorted(set(backbone.layer_types) - {FULL, SLIDING})
    if others:
        return f"it has {', '.join(others)} layers, which the ring does not compute"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is bidirectional (config.use_bidirectional_attention)"
    for rope in _rope_parameters(config):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            return f"its rotary frequencies depend on the length of a call (rope_type {rope['rope_type']})"
    if config._attn_implementation not in ("easytorch", "ring"):
        return (
            f"attn_implementation={config._attn_implementation!r} sees this rank's tokens alone; leave it out, or give "
            f'"ring"'
        )
    return None


def divide(model: Any, mesh: Any) -> None:
    """Make `model.forward` compute this rank's tokens of the sequences that it is given. mesh: of the one axis.

    `gather` undoes it.
    """
    model.__dict__[_STATE] = model.config._attn_implementation
    model.set_attn_implementation("ring")
    model.forward = _divided(model.forward, model, mesh)


def gather(model: Any) -> None:
    """Undo `divide`, if it was done."""
    if (attention := model.__dict__.pop(_STATE, None)) is not None:
        del model.__dict__["forward"]
        model.set_attn_implementation(attention)


def _divided(forward: Callable[..., Any], model: Any, mesh: Any) -> Callable[..., Any]:
    ring = OperationRegistry.create("ring", OperationMetadata(mesh=mesh))
    group, rank, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def over_ranks(part: Tensor) -> Tensor:
        found: Tensor = _SumOverRanks.apply(part, group, size)
        return found

    @functools.wraps(forward)
    @takes_cache
    def call(
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        _check(model, attention_mask, position_ids, cache, use_cache, kwargs)
        whole = input_ids if inputs_embeds is None else inputs_embeds
        if whole is None:
            raise ValueError("give input_ids or inputs_embeds")
        layout = layout_of(whole.shape[1], size)

        def own(x: Tensor | None) -> Tensor | None:
            return None if x is None else shard(x, rank, size, 1, layout)

        segments = _segments(attention_mask, position_ids)
        if position_ids is None:
            # which asks the embeddings for their length alone
            position_ids = model.base_model.default_positions(whole[:, :, None], attention_mask, None)
        if labels is not None:
            kwargs |= _labels(labels, kwargs, own)
        model.__dict__[_SHARD] = part = SequenceShard(
            attention=ring, layout=layout, ranks=size, over_ranks=over_ranks, segment_ids=own(segments),
            padding=own(attention_mask),
        )  # fmt: skip
        try:
            output = forward(
                input_ids=own(input_ids),
                # finished masks: a query sees the earlier keys of its segment, which the ring knows of
                attention_mask=dict.fromkeys(model.base_model.layer_types),
                position_ids=own(position_ids),
                inputs_embeds=own(inputs_embeds),
                labels=own(labels),
                use_cache=False,
                sequence_shard=part,
                **kwargs,
            )
        finally:
            del model.__dict__[_SHARD]
        first = isinstance(output, tuple)  # return_dict=False
        if labels is not None:
            loss = over_ranks(output[0] if first else output.loss)
            output = (loss, *output[1:]) if first else _with_loss(output, loss)
        return output

    call.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # of the method, without `self`
    return call


def layout_of(length: int, size: int) -> str:
    """How a sequence of `length` tokens is divided: "zigzag", by which causal attention is equal work for the ranks,
    where it divides into twice as many chunks as there are ranks, else "contiguous"."""
    if length % size or not length:
        fit = sorted({max(length // (2 * size), 1) * 2 * size, (length // (2 * size) + 1) * 2 * size})
        raise ValueError(
            f"a sequence of {length} tokens does not divide over the {size} ranks of sp: pad it to a multiple of "
            f"{2 * size}, as {' or '.join(map(str, fit))}"
        )
    return "contiguous" if length % (2 * size) else "zigzag"


def _check(
    model: Any,
    attention_mask: Any,
    position_ids: Tensor | None,
    cache: Any,
    use_cache: bool | None,
    kwargs: dict[str, Any],
) -> None:
    """An error for what is not computed over a divided sequence."""
    why = None
    keep = kwargs.get("logits_to_keep", 0)
    if cache is not None or use_cache:
        why = f"a cache of keys and values (use_cache, {CACHE})"
    elif attention_mask is not None and getattr(attention_mask, "ndim", None) != 2:
        why = "an attention_mask other than (B, T)"
    elif position_ids is not None and position_ids.dim() != 2:
        why = f"position_ids {tuple(position_ids.shape)} other than (B, T)"
    elif isinstance(keep, Tensor) or keep:
        why = "logits_to_keep"
    else:
        others = [key for key, one in kwargs.items() if isinstance(one, Tensor) and key not in _TAKEN]
        if others:
            why = ", ".join(others)
    if why is not None:
        raise NotImplementedError(
            f"{model.config.model_type}: a sequence divided over sp does not take {why}; gather_model gives the model "
            f"of one process back"
        )


def _segments(attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor | None:
    """(B, T) ids of what attends to itself alone: a row's tokens and its padding, or packed sequences.

    As in transformers, positions that do not go on by one start another packed sequence where there is no mask.
    """
    if attention_mask is not None:
        tokens = attention_mask.to(torch.int64)
        return None if bool(tokens.all()) else tokens
    if position_ids is None:
        return None
    starts = F.pad(position_ids.diff(dim=1) != 1, (1, 0))
    return starts.cumsum(1) if bool(starts.any()) else None


def _labels(labels: Tensor, kwargs: dict[str, Any], own: Callable[[Tensor | None], Tensor | None]) -> dict[str, Any]:
    """The keywords of the loss: the next token's label, which may be another rank's, and how many there are in all."""
    ignored = kwargs.get("ignore_index", -100)
    shifted = kwargs.get("shift_labels")
    if shifted is None:
        shifted = F.pad(labels, (0, 1), value=ignored)[:, 1:]
    count = kwargs.get("num_items_in_batch")
    if count is None:
        count = (shifted != ignored).sum()
    return {"shift_labels": own(shifted), "num_items_in_batch": count}


def _with_loss(output: Any, loss: Tensor) -> Any:
    output.loss = loss
    return output


class _SumOverRanks(torch.autograd.Function):
    """A sum over the ranks whose gradient is that of the ranks' mean, as gradients are averaged over them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, size: int) -> Tensor:
        ctx.size = size
        total = part.detach().clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return gradients[0] * ctx.size, None, None


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Those of the model, or of each type of its layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [one for one in rope.values() if isinstance(one, dict)]
    return parts or [rope]
