"""Checks on the weights that were loaded: where transformers warns and keeps random values, EasyTorch raises.

Loading another head (a base model into a classifier, or a language model into its base) stays a warning: the head is
meant to be new, or dropped. A missing base weight, a weight that no class of the family has, and a different shape are
errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from easytorch.bridge.errors import CheckpointError, nearest

if TYPE_CHECKING:
    from easytorch.protocol.native import NativeModel

CHECKPOINT = "the checkpoint"


class MismatchedShapeError(CheckpointError, RuntimeError):
    """A weight of another shape than the model's: also a `RuntimeError`, which is what transformers raises for it."""

    __init__ = CheckpointError.__init__  # not RuntimeError's, which takes no place


def check_loaded(
    model: NativeModel, info: dict[str, Any], source: str | None, *, ignore_mismatched_sizes: bool
) -> None:
    """`CheckpointError` naming the first weight of `info` (transformers' loading info) that a native `model` refuses.

    `model.optional_weights` and `model.head_weights` are the patterns of names a checkpoint of the family may lack, or
    may have more.
    """
    check_shapes(model, info, source, ignore_mismatched_sizes)
    optional = re.compile("|".join(model.optional_weights) or r"(?!)")
    heads = re.compile("|".join(model.head_weights) or r"(?!)")
    same_head = type(model).__name__ in (model.config.architectures or ())
    missing = [name for name in info["missing_keys"] if not optional.search(name)]
    if not same_head:
        missing = [name for name in missing if not heads.search(name)]
    refuse_missing(model, missing, info["unexpected_keys"], source)
    left_over = [name for name in info["unexpected_keys"] if not optional.search(name) and not heads.search(name)]
    refuse_left_over(model, left_over, source)


def check_loaded_foreign(
    model: PreTrainedModel, info: dict[str, Any], source: str | None, *, ignore_mismatched_sizes: bool
) -> None:
    """The same for transformers' own class, whose optional weights are not listed: layers are compared with each other.

    A missing weight is an error if another layer has it, an unexpected one if the model lacks its layer.
    """
    check_shapes(model, info, source, ignore_mismatched_sizes)
    expected = set(model.state_dict())
    absent = set(info["missing_keys"])
    loaded = {_any_layer(name) for name in expected - absent}
    refuse_missing(
        model, [n for n in absent if _is_layered(n) and _any_layer(n) in loaded], info["unexpected_keys"], source
    )
    known = {_any_layer(name) for name in expected}
    prefix = f"{model.base_model_prefix}."
    known |= {prefix + name for name in known} | {name.removeprefix(prefix) for name in known}
    refuse_left_over(model, [n for n in info["unexpected_keys"] if _is_layered(n) and _any_layer(n) in known], source)


def check_shapes(model: PreTrainedModel, info: dict[str, Any], source: str | None, ignore: bool) -> None:
    """`MismatchedShapeError` naming the first weight whose shape is not the model's."""
    if ignore or not info["mismatched_keys"]:
        return
    name, given, expected = min(info["mismatched_keys"])
    raise MismatchedShapeError(
        f"has shape {tuple(given)} in the checkpoint and {tuple(expected)} in {type(model).__name__}"
        f"{_others(info['mismatched_keys'])}; load it with the config it was saved with, or pass "
        f"ignore_mismatched_sizes=True to start those weights anew",
        file=source,
        tensor=name,
    )


def refuse_missing(
    model: PreTrainedModel, names: Iterable[str], unexpected: Iterable[str], source: str | None, what: str = CHECKPOINT
) -> None:
    """`CheckpointError` naming the first of the weights that `what` lacks, and the nearest of the `unexpected` ones."""
    names = sorted(names)
    if names:
        raise CheckpointError(
            f"is missing from {what}{_others(names)}{nearest(names[0], unexpected)}, and "
            f"{type(model).__name__} would run with random numbers there; restore it, or pass strict=False to "
            f"accept it",
            file=source,
            tensor=names[0],
        )


def refuse_left_over(model: PreTrainedModel, names: Iterable[str], source: str | None, what: str = CHECKPOINT) -> None:
    """`CheckpointError` naming the first of the weights of `what` that the model has no place for."""
    names = sorted(names)
    if names:
        raise CheckpointError(
            f"is in {what}{_others(names)} and {type(model).__name__} has no place for it"
            f"{nearest(names[0], model.state_dict())}; check the config against the weights, or pass strict=False to "
            f"leave it behind",
            file=source,
            tensor=names[0],
        )


def _others(names: Iterable[Any]) -> str:
    more = len(list(names)) - 1
    return f" (and {more} more)" if more else ""


def _any_layer(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", f".{name}")[1:]


def _is_layered(name: str) -> bool:
    return _any_layer(name) != name
