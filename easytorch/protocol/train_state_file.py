"""train_state.json and train_state.safetensors: written, and read as one document that is checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from easytorch.bridge.core.json_files import read_json
from easytorch.bridge.errors import CheckpointError
from easytorch.protocol.adapter_files import check_adapter_config
from easytorch.protocol.optimizer_state import OptimizerState
from easytorch.protocol.state import State

TENSORS, STATE = "train_state.safetensors", "train_state.json"
FORMAT, VERSION = "easytorch train state", 1
# Some hundred bytes a tensor.
STATE_LIMIT = 1 << 28
_LONGEST = 60


@dataclass(frozen=True, kw_only=True)
class Document:
    """What the two files say. frozen, frozen_before_adapters: None in states that were saved without these lists."""

    step: int
    params: State
    buffers: State
    optimizer: OptimizerState | None
    adapters: list[tuple[str, dict[str, Any]]]
    active_adapters: list[str]
    frozen: list[str] | None
    frozen_before_adapters: list[str] | None


def read_document(folder: Path) -> Document:
    """The state in `folder`. `CheckpointError` for a file that is missing, damaged, or says what no state says."""
    file = folder / STATE
    if not file.is_file():
        raise CheckpointError("is not there; pass a folder that TrainState.save wrote", file=file)
    content = read_json(file, limit=STATE_LIMIT)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(f"is no train state of version {VERSION}, as TrainState.save writes it", file=file)
    return _Reader(content, file, _tensors(folder / TENSORS)).document()


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON; its tensors go to `tensors` under their path."""
    if isinstance(value, torch.Tensor):
        # A file of safetensors holds no views.
        tensors[path] = value.detach().contiguous().clone()
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"dict": [[key, encode(one, f"{path}/{key}", tensors)] for key, one in value.items()]}
    if isinstance(value, list | tuple):
        inner = [encode(one, f"{path}/{number}", tensors) for number, one in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": inner}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{path} is {type(value).__name__}, which a train state cannot hold; it holds tensors and numbers")


def _tensors(file: Path) -> State:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"is damaged ({error}); save the state again", file=file) from error


class _Reader:
    """Reads the parts of a document; each says by its place what it must be and is not."""

    def __init__(self, content: Mapping[str, Any], file: Path, tensors: State) -> None:
        self.content, self.file, self.tensors = content, file, tensors

    def document(self) -> Document:
        step = self.content.get("step")
        self.require(type(step) is int and step >= 0, "step", step, "an integer of at least 0")
        adapters = self.adapters()
        active = self.names("active_adapters") if adapters else []
        self.require(
            active is not None and set(active) <= {name for name, _ in adapters},
            "active_adapters", active, f"names of the adapters {[name for name, _ in adapters]}",
        )  # fmt: skip
        return Document(
            step=int(step or 0),
            params=self.state("params"),
            buffers=self.state("buffers"),
            optimizer=self.optimizer(),
            adapters=adapters,
            active_adapters=active or [],
            frozen=self.names("frozen"),
            frozen_before_adapters=self.names("frozen_before_adapters"),
        )

    def optimizer(self) -> OptimizerState | None:
        saved = self.content.get("optimizer")
        if saved is None:
            return None
        self.require(isinstance(saved, dict), "optimizer", saved, "an object with kind, slots and groups")
        kind = saved.get("kind")
        self.require(isinstance(kind, str) and kind != "", "optimizer.kind", kind, "the name of a class")
        slots = self.decode(saved.get("slots"), "optimizer.slots")
        self.require(isinstance(slots, dict), "optimizer.slots", saved.get("slots"), "a dict by parameter name")
        for name, values in slots.items():
            fits = isinstance(name, str) and isinstance(values, dict)
            self.require(fits, f"optimizer.slots of {name!r}", values, "a dict of slots")
        groups = self.decode(saved.get("groups"), "optimizer.groups")
        self.require(isinstance(groups, list), "optimizer.groups", saved.get("groups"), "a list of groups")
        for number, group in enumerate(groups):
            place = f"optimizer.groups[{number}]"
            self.require(isinstance(group, dict), place, group, "a dict of settings")
            names = group.get("params")
            self.require(_are_names(names), f"{place}.params", names, "a list of parameter names")
        return OptimizerState(kind, slots, groups)

    def state(self, key: str) -> State:
        found = self.decode(self.content.get(key), key)
        fits = isinstance(found, dict) and all(isinstance(one, torch.Tensor) for one in found.values())
        self.require(fits, key, self.content.get(key), "a dict of tensors by name")
        state: State = found
        return state

    def adapters(self) -> list[tuple[str, dict[str, Any]]]:
        given = self.content.get("adapters") or []
        pairs = isinstance(given, list) and all(
            isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], dict)
            for one in given
        )
        self.require(pairs, "adapters", given, "pairs of a name and PEFT's config")
        for _, config in given:
            check_adapter_config(config, self.file)
        return [(name, config) for name, config in given]

    def names(self, key: str) -> list[str] | None:
        if key not in self.content:
            return None
        names = self.content[key]
        self.require(_are_names(names), key, names, "a list of names")
        return list(names)

    def decode(self, value: Any, place: str) -> Any:
        """The value that `encode` wrote."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        words = 'what TrainState.save writes: a number, a text, or {"tensor" or "dict" or "list" or "tuple": ...}'
        self.require(isinstance(value, dict) and len(value) == 1, place, value, words)
        ((kind, inner),) = value.items()
        if kind == "tensor":
            fits = isinstance(inner, str) and inner in self.tensors
            self.require(fits, place, value, f"the name of a tensor in {TENSORS}")
            return self.tensors[inner]
        if kind == "dict":
            pairs = isinstance(inner, list) and all(
                isinstance(one, list) and len(one) == 2 and not isinstance(one[0], list | dict) for one in inner
            )
            self.require(pairs, place, value, "a list of pairs of key and value")
            made = {key: self.decode(one, f"{place}/{key}") for key, one in inner}
            self.require(len(made) == len(inner), place, value, "of keys that differ")
            return made
        self.require(kind in ("list", "tuple") and isinstance(inner, list), place, value, words)
        items = [self.decode(one, f"{place}/{number}") for number, one in enumerate(inner)]
        return tuple(items) if kind == "tuple" else items

    def require(self, fits: bool, place: str, value: Any, words: str) -> None:
        if not fits:
            text = repr(value)
            text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
            raise CheckpointError(
                f"is damaged: {place} must be {words}, and is {text}; save the state again", file=self.file
            )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
