"""`set_attn_implementation` for transformers' own class with our attention: accepts our names, ignores none."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from easytorch.auto.plugging import attention_for, plug_attention
from easytorch.auto.report import report_on
from easytorch.auto.trial import attention_groups
from easytorch.protocol.conversion import plain_config


def set_attention(model: PreTrainedModel, attn_implementation: str | dict[str, str], **kwargs: Any) -> None:
    """As `PreTrainedModel.set_attn_implementation`, with the names of EasyTorch.

    `ValueError`, leaving the model unchanged, for an unknown name or sub-config, and where ours gives other results.
    """
    choice = attention_for(type(model), plain_config(model.config), attn_implementation, False)
    groups = attention_groups(model)
    before = {name: group.config._attn_implementation for name, group in groups.items()}
    try:
        if choice.passed is not None:
            type(model).set_attn_implementation(model, choice.passed, **kwargs)
        for name in choice.ours:
            models = (module for module in groups[name].modules if isinstance(module, PreTrainedModel))
            groups[name].switch(next(models, model).get_correct_attn_implementation(None))  # what was tried
        plug_attention(model, choice)
    except BaseException:
        for name, group in groups.items():
            group.switch(before[name])
        raise
    report_on(model, choice.reason)
