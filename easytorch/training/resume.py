"""The settings that a resumed run must share with the run that wrote its checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from easytorch.training.config import TrainingConfig

# What a checkpoint of before a setting was trained with.
_DEFAULTS = {item.name: item.default for item in dataclasses.fields(TrainingConfig)}


def fingerprint(texts: Sequence[str]) -> str:
    """A hash of the documents in order, independent of file names."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def stored_settings(config: TrainingConfig, processes: int, sha256: str) -> dict[str, Any]:
    """Stored in a checkpoint: the settings that affect the result, a hash of the text or of the examples, the number of
    processes."""
    settings: Mapping[str, Any] = {name: value for name, value in config.settings().items() if name != "dataset"}
    files = list(config.text) if config.dataset is None else [config.dataset]
    return {
        **settings,
        "text": {"files": files, "sha256": sha256},
        "processes": processes,
    }


def check_same(stored: dict[str, Any], now: dict[str, Any], change: Sequence[str], checkpoint: str) -> list[str]:
    """Notes on the differences that `change` allows. `ValueError` naming all others."""
    differing = {name: _difference(name, stored.get(name, _DEFAULTS.get(name)), now[name]) for name in now}
    found = {name: words for name, words in differing.items() if words}
    refused = [words for name, words in found.items() if name not in change]
    if refused:
        flags = " ".join(name for name in found if name not in ("model", "vocab_size"))
        allow = f", or allow them with --change {flags}" if flags else ""
        raise ValueError(
            f"{checkpoint} was trained with other settings: {'; '.join(refused)}. Resume with its own{allow}"
        )
    return list(found.values())


def _difference(name: str, stored: Any, now: Any) -> str:
    if name == "text":
        if stored["sha256"] == now["sha256"]:
            return ""
        return f"--text has other content ({', '.join(now['files'])}, and it had {', '.join(stored['files'])})"
    if stored == now:
        return ""
    return f"--{name.replace('_', '-')} is {now!r}, and it had {stored!r}"
