"""`BaseModuleProtocol`: what every native model offers, by EasyDeL's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, runtime_checkable

import torch
from transformers import PreTrainedConfig, PreTrainedModel


@runtime_checkable
class BaseModuleProtocol(Protocol):
    """The interface the rooms above models rely on: code that takes any native model names this type.

    `PreTrainedModel` implements the first half, `NativeModel` and `BridgeMixin` the second. It lists only what is
    implemented; `isinstance(model, BaseModuleProtocol)` holds for every native model.
    """

    config: PreTrainedConfig
    base_model_prefix: str

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Write config and weights under transformers' names."""

    @classmethod
    def can_generate(cls) -> bool:
        """Whether `generate` can be called."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, **kwargs: Any) -> Any:
        """Load a torch or a Flax checkpoint."""

    @classmethod
    def from_flax(cls, config: PreTrainedConfig, params: Mapping[str, Any], **kwargs: Any) -> Self:
        """A model of `config` with the weights of a Flax tree."""

    def to_flax(self) -> dict[str, Any]:
        """The weights as a Flax tree."""

    def to_torch(self, *, copy_weights: bool = False) -> PreTrainedModel:
        """transformers' own model with the same weights."""

    @property
    def transform_fn(self) -> Callable[[Mapping[str, torch.Tensor]], dict[str, Any]]:
        """torch state dict -> Flax tree."""

    @property
    def pure_transform_fn(self) -> Callable[[Mapping[str, torch.Tensor]], dict[str, Any]]:
        """The same, keeping nothing of the model's weights alive."""
