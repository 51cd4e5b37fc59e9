"""Tied weights that a checkpoint stores under another of their names than the loaded class has.

An encoder-decoder stores the embeddings of both halves once, as `shared`; its decoder alone (`BartForCausalLM`) has
them as `embed_tokens`, which transformers would leave random, even for a torch checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from easytorch.bridge.checkpoint import open_checkpoint
from easytorch.bridge.dtypes import to_torch
from easytorch.bridge.rules.table import TIED_ALWAYS, compile_rules
from easytorch.protocol import conversion
from easytorch.protocol.checkpoint_files import torch_folder

logger = logging.getLogger(__name__)

Read = Callable[[str], torch.Tensor]


def fill_repeats(model: PreTrainedModel, info: dict[str, Any], opened: AbstractContextManager[Read]) -> None:
    """Fills those of `info["missing_keys"]` that repeat one of `info["unexpected_keys"]`, and removes both.

    opened: entered at most once, gives a weight of the checkpoint by its name there.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in info["missing_keys"] if name in parameters]
    if not missing or not info["unexpected_keys"]:
        return
    repeats = _repeats(model, missing, info["unexpected_keys"])
    if not repeats:
        return
    with opened as read, torch.no_grad():
        for name, source in repeats.items():
            parameters[name].copy_(read(source))
    for name, source in repeats.items():
        logger.warning("%s is not new: it is %s of the checkpoint", name, source)
        filled = {other for other in missing if parameters[other] is parameters[name]}
        info["missing_keys"] = type(info["missing_keys"])(set(info["missing_keys"]) - filled)
        info["unexpected_keys"] = type(info["unexpected_keys"])(set(info["unexpected_keys"]) - {source})


@contextmanager
def weights_of(name_or_path: Any, kwargs: dict[str, Any]) -> Iterator[Read]:
    """The torch checkpoint that was loaded with `kwargs`, open: a function that reads single weights of it."""
    if name_or_path is None:
        yield kwargs["state_dict"].__getitem__
        return
    with open_checkpoint(torch_folder(name_or_path, kwargs), prefer="torch") as checkpoint:
        yield lambda name: to_torch(checkpoint.reader.read(name))


def _repeats(model: PreTrainedModel, missing: list[str], unexpected: Any) -> dict[str, str]:
    """Missing weight -> the unexpected one that it repeats."""
    architecture, rules = conversion.described(type(model), model.config, unexpected)
    table, base = compile_rules(rules), f"{architecture.base}."
    there = {name.removeprefix(base): name for name in unexpected}
    found = {}
    for name in missing:
        tie = table.tie(architecture.names.hub_name(name) or name)
        if tie is None or not (architecture.tie or tie[0].kind == TIED_ALWAYS):
            continue
        row = table.flax_rule(tie[1])
        assert row is not None  # ties name leaves that rows have
        rule, bindings = row
        source = rule.torch[0].fill(bindings).removeprefix(base)
        if source in there:
            found[name] = there[source]
    return found
