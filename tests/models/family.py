"""A row of the table of native families."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from easytorch.cache_names import CACHE


@dataclass(frozen=True)
class Family:
    """A row of the table. reference: the attention of transformers' class with which outputs are compared, or
    that of each of its parts.

    dropouts: the rates of dropout outside of the attention, which draws by itself. packs: whether positions that start
    again keep packed sequences apart in transformers' class too. cache: the argument that the cache is passed as.
    attentions: how many layers attend. wide: the logits are float32 whatever the weights are.
    """

    config_class: type[PreTrainedConfig]
    heads: tuple[str, ...]
    sizes: dict[str, Any]
    reference: str | dict[str, str] = "sdpa"
    variants: tuple[dict[str, Any], ...] = field(default=())
    dropouts: tuple[str, ...] = ()
    packs: bool = True
    cache: str = CACHE
    attentions: int = 2
    wide: bool = False

    def config(self, **changes: Any) -> PreTrainedConfig:
        return self.config_class(**self.sizes | changes)
