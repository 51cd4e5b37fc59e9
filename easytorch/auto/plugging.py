"""Attaches our attention and the bridge to a loaded instance of transformers' own class.

Our attention is attached only where trial.py shows that it gives the same results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.hub_kernels import is_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from easytorch.auto.bound import bridge_of
from easytorch.auto.tiny import configs_in
from easytorch.auto.trial import attention_groups, try_attention
from easytorch.layers.attention import INTERFACES, OF_STOCK, OURS
from easytorch.layers.experts import OURS as EXPERTS
from easytorch.protocol.conversion import plain_config
from easytorch.protocol.native import NativeModel, check_parts

ModelClass = type[PreTrainedModel]

# Attention names in configs of plugged models -> the names that users give.
PUBLIC_NAMES = {ours: name for names in OF_STOCK.values() for name, ours in names.items()}


@dataclass(frozen=True)
class AttentionChoice:
    """The attention a model is loaded with. passed: `attn_implementation` for transformers, None for its own choice.

    ours: group of modules (`attention_groups`) -> our attention's name, set once loaded. reason: why not all get it.
    """

    passed: str | dict[str, str] | None = None
    ours: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None


def attention_for(
    model_class: ModelClass, config: PreTrainedConfig, asked: str | dict[str, str] | None, wants_weights: bool
) -> AttentionChoice:
    """The attention to load `model_class` with.

    wants_weights: the config is to say output_attentions=True, which transformers takes with "eager" alone.
    `ValueError` when ours was asked for by name and `model_class` cannot take it.
    """
    if issubclass(model_class, NativeModel):
        check_parts(config, asked)
        return AttentionChoice(asked or _of_config(config) or ("eager" if wants_weights else "easytorch"))
    config = built_from(model_class, config)
    _check_names(config, asked)
    if isinstance(asked, dict):
        return _by_part(model_class, config, asked)
    if asked is None and wants_weights:
        return AttentionChoice(
            reason="output_attentions=True in the config makes transformers take its own eager attention"
        )
    if asked is None and _of_config(config) is None:
        trial = try_attention(model_class, config)
        return AttentionChoice(None, dict.fromkeys(trial.plugged, "easytorch"), trial.reason)
    if asked not in INTERFACES:
        return AttentionChoice(asked, reason=f"attn_implementation={asked or _of_config(config)!r} was asked for")
    trial = try_attention(model_class, config)
    if trial.reason is not None:
        raise _cannot_be_obeyed(asked, trial.reason)
    return AttentionChoice(None, dict.fromkeys(trial.plugged, asked))


def built_from(model_class: ModelClass, config: PreTrainedConfig) -> PreTrainedConfig:
    """The config that `model_class` is built from: for a language model, the text config of a multimodal one."""
    text = config.sub_configs.get("text_config")
    return config.get_text_config() if text is not None and model_class.config_class == text else config


def plug_attention(model: PreTrainedModel, choice: AttentionChoice) -> None:
    """Give the loaded `model`, and no other of its class, the attention that was chosen for it."""
    if not choice.ours:
        return
    for name, group in attention_groups(model).items():
        stock = group.config._attn_implementation
        if name in choice.ours and stock in OF_STOCK:
            group.switch(OF_STOCK[stock][PUBLIC_NAMES.get(choice.ours[name], choice.ours[name])])


def settled(config: PreTrainedConfig) -> tuple[PreTrainedConfig, str | None]:
    """(a config that transformers can build from, the attention it requests): a loaded model's config has our names.

    "easytorch" in it is no request: every model loaded here has it.
    """
    if not any(
        part._attn_implementation in OURS or part._experts_implementation == EXPERTS for part in configs_in(config)
    ):
        return config, None
    asked = PUBLIC_NAMES.get(config._attn_implementation or "")
    return plain_config(config), None if asked == "easytorch" else asked


def _by_part(model_class: ModelClass, config: PreTrainedConfig, asked: dict[str, str]) -> AttentionChoice:
    """A dict names the attention of the model ("") and of the configs inside it: ours for some, theirs for others."""
    theirs = {key: name for key, name in asked.items() if name not in INTERFACES}
    wanted = {key: name for key, name in asked.items() if name in INTERFACES}
    if not wanted:
        return AttentionChoice(asked, reason=f"attn_implementation={asked!r} was asked for")
    trial = try_attention(model_class, config)
    keys = trial.keys
    ours = {group: wanted[keys[group]] for group in trial.plugged if keys.get(group) in wanted}
    for key, name in wanted.items():
        refused = [reason for group, reason in trial.refusals.items() if keys.get(group, "") == key]
        if refused:
            raise _cannot_be_obeyed(name, "; ".join(refused))
    return AttentionChoice(theirs or None, ours, f"attn_implementation={asked!r} was asked for" if theirs else None)


def _check_names(config: PreTrainedConfig, asked: str | dict[str, Any] | None) -> None:
    """`ValueError` for an unknown attention or sub-config, some of which transformers ignores."""
    if isinstance(asked, dict):
        check_parts(config, asked)
        for part, name in asked.items():
            _check_names(getattr(config, part) if part else config, name)
    elif asked is not None and not isinstance(asked, str):
        raise TypeError(f"attn_implementation={asked!r} must be a name, or a dict of names by part of the config")
    elif asked is not None and not (asked in INTERFACES or _is_theirs(asked)):
        theirs = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()} - OURS)
        raise ValueError(
            f"attn_implementation={asked!r} is unknown; EasyTorch has 'easytorch', 'vanilla' and 'flash', transformers "
            f"{', '.join(map(repr, theirs))}"
        )


def _is_theirs(name: str) -> bool:
    plain = name.removeprefix("paged|")
    return plain in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()) or is_kernel(plain)


def _cannot_be_obeyed(asked: str, reason: str) -> ValueError:
    return ValueError(
        f"attn_implementation={asked!r} cannot be obeyed: {reason}; leave it out, or use transformers' own 'eager' or "
        f"'sdpa'"
    )


def plug_bridge(model: PreTrainedModel) -> PreTrainedModel:
    """Attaches `to_flax` and the other bridge methods to `model`, if its class is transformers' own."""
    if not isinstance(model, NativeModel):
        for name, bound in bridge_of(model).items():
            setattr(model, name, bound)
    return model


def _of_config(config: PreTrainedConfig) -> str | None:
    """The attention that the config object requests; "sdpa" is transformers' default and counts as no request."""
    return None if config._attn_implementation in (None, "sdpa") else config._attn_implementation
