"""Tied weights: which of them a checkpoint stores separately, and what its config declares.

The tensors decide: a stored head that differs from the embedding it is tied to is a weight of its own, as transformers
5 has it when loading. Configs can be wrong about that, those of the T5 family by design.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.names.hub_names import HubNames
from easytorch.bridge.rules.plan import Same, Step
from easytorch.bridge.rules.table import TIED_ENDINGS
from easytorch.bridge.rules.transforms import get_transform

if TYPE_CHECKING:
    from easytorch.bridge.names.architecture import Architecture

_KEY = "tie_word_embeddings"
# Their forward scales what a tied head is given, so that the setting says more than whether weights are one.
_SCALED = frozenset(("t5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop"))


def held_apart(tensors: Mapping[str, TensorInfo], architecture: Architecture, same: Same) -> frozenset[str]:
    """Hub names of the tied weights in `tensors` (by torch name) whose data differs from that of their original."""
    names = architecture.names
    ties = names.ties
    if not ties:
        return frozenset()
    base = f"{architecture.base}."
    stored = {name.removeprefix(base): name for name in tensors}
    stored |= {new.removeprefix(base): old for old, new in names.aliases(tensors).items()}
    apart = set()
    for repeat, source in ties.items():
        one, other = names.hub_name(repeat), names.hub_name(source)
        if one is None or other is None:
            continue
        given = [stored.get(name.removeprefix(base)) for name in (one, other)]
        if None not in given and not same(*(_as_stored(tensors[name]) for name in given if name is not None)):
            apart.add(one)
    return frozenset(apart)


def declares_ties(content: dict[str, Any], architecture: Architecture) -> bool:
    """Whether config.json ties the head to the embedding.

    transformers 5 writes true for every T5; for an untied one it writes that the outputs are not scaled.
    """
    if content.get("scale_decoder_outputs") is False:
        return False
    return bool(content.get(_KEY, architecture.tie))


def untied(content: dict[str, Any], architecture: Architecture, scheme: str) -> dict[str, Any] | None:
    """config.json's content for a checkpoint in `scheme` whose tied weights are stored separately.

    None where it says so already, or cannot: checkpoints store weights that are still tied once, and a program that
    reads that nothing is tied would miss the other. HF Flax's classes tie some regardless of the config.
    """
    if not architecture.apart:
        return None
    names = architecture.names
    assert isinstance(names, HubNames), "weights that are apart are looked at on the meta device"
    left = {names.hub_name(name) for name in names.ties} - architecture.apart - {None}
    if not declares_ties(content, architecture) or content.get("model_type") in _SCALED:
        return None
    made = {**_nowhere(content), _KEY: False}
    # The config classes of the T5 family tie what is left even so.
    forced = getattr(type(names.model.config).from_dict(dict(made)), _KEY, False)
    always = all(scheme == "flax" and name is not None and name.endswith(TIED_ENDINGS) for name in left)
    return made if always or forced else None


def _nowhere(content: dict[str, Any]) -> dict[str, Any]:
    """`content` with the setting false in every sub-config."""
    return {
        key: _nowhere(value) if isinstance(value, dict) else (False if key == _KEY and value else value)
        for key, value in content.items()
    }


def _as_stored(info: TensorInfo) -> Step:
    return Step((info.name,), (info,), get_transform("identity"), False)
