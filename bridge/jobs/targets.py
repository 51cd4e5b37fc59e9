"""The targets of `--to`: each a container format and a naming scheme."""

from __future__ import annotations

from dataclasses import dataclass

from easytorch.bridge.formats.base import WritableFormat
from easytorch.bridge.formats.registry import writable


@dataclass(frozen=True)
class Target:
    """A container format and a naming scheme, by name."""

    format_name: str
    scheme: str

    @property
    def format(self) -> WritableFormat:
        return writable(self.format_name)


TARGETS: dict[str, Target] = {
    "torch": Target("torch safetensors", "torch"),
    "flax": Target("Flax msgpack", "flax"),
    "flax-safetensors": Target("Flax safetensors", "flax"),
    "easydel": Target("EasyDeL", "easydel"),
    "easydel-msgpack": Target("EasyDeL msgpack", "easydel"),
    "t5x": Target("T5X", "t5x"),
    "big_vision": Target("npz", "big_vision"),
    "dcp": Target("torch DCP", "torch"),
    "gguf": Target("GGUF", "gguf"),
    "orbax": Target("Orbax", "flax"),
    "orbax-zarr": Target("Orbax zarr", "flax"),
    "maxtext": Target("Orbax", "maxtext"),
    "maxtext-unscanned": Target("Orbax", "maxtext-unscanned"),
    "gemma": Target("Orbax", "gemma"),
}


def target_names() -> list[str]:
    """The names that `--to` accepts."""
    return list(TARGETS)


def target(name: str) -> Target:
    """The target called `name` by `--to`; `ValueError` listing the known names otherwise."""
    if name not in TARGETS:
        raise ValueError(f"cannot write {name!r}; known targets: {', '.join(TARGETS)}")
    return TARGETS[name]
