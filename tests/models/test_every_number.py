"""Every number of a family's config at once, none at its default: outputs, rates and eps are transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from tests.models.families import FAMILIES, LANGUAGE
from tests.models.test_parity import assert_same, inputs_for, labels_for, seen

# What no model can have as it comes: the widths that a factor makes, and rates that decide which weights there are.
KEPT = ("partial_rotary_factor", "mlp_ratio", "expansion_ratio", "capacity_factor", "pixel_shuffle_ratio")
RATES = ("dropout", "drop", "prob", "p_")


def change_numbers(config: transformers.PreTrainedConfig, numbers: Iterator[int]) -> list[str]:
    """Changes each number that has a point, of the configs within too; returns the names."""
    changed = []
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            changed += change_numbers(value, numbers)
        elif name == "rope_parameters" and isinstance(value, dict):
            changed += [f"rope.{key}" for key in change_dict(value, numbers)]
        elif isinstance(value, float) and name not in KEPT:
            setattr(config, name, other(name, value, next(numbers)))
            changed.append(name)
    return changed


def change_dict(given: dict[str, Any], numbers: Iterator[int]) -> list[str]:
    inside = [key for value in given.values() if isinstance(value, dict) for key in change_dict(value, numbers)]
    own = [key for key, value in given.items() if isinstance(value, float) and key not in KEPT]
    for key in own:
        given[key] = other(key, given[key], next(numbers))
    return inside + own


def other(name: str, value: float, number: int) -> float:
    if "eps" in name:
        return 0.01 + 0.01 * (number % 7)
    if any(word in name for word in RATES):
        return 0.05 + 0.02 * (number % 9)
    return value * (1.15 + 0.05 * (number % 5)) if value else 0.1 + 0.01 * (number % 5)


KEPT_BY = ((torch.nn.Dropout, "p"), (torch.nn.LayerNorm, "eps"), (torch.nn.Embedding, "padding_idx"))


def attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Rates, eps and padding that modules keep of a config."""
    return {
        f"{path}.{name}": getattr(module, name)
        for path, module in model.named_modules()
        for kind, name in KEPT_BY
        if isinstance(module, kind)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_no_number_of_the_config_is_lost(family, batch, make_pair) -> None:
    row, name = FAMILIES[family], LANGUAGE.get(family, FAMILIES[family].heads[0])
    config = row.config()
    changed = change_numbers(config, iter(range(1000)))
    assert "initializer_range" in changed or len(changed) > 1
    ours, theirs = make_pair(name, config, row.reference)
    assert ours.config.to_dict() == theirs.config.to_dict() | {"dtype": ours.config.to_dict()["dtype"]}
    here, there = attributes(ours), attributes(theirs)
    assert {key: here[key] for key in here if key in there} == {key: there[key] for key in there if key in here}
    inputs, labels = inputs_for(name, batch), labels_for(name, batch)
    rows = seen(family, batch)
    if rows is not None and "CausalLM" in name:
        labels["labels"][:, 1:][~rows[:, :-1]] = -100
    with torch.no_grad():
        assert_same(ours(**inputs, **labels), theirs(**inputs, **labels), rows)


COMMON = {*vars(transformers.PreTrainedConfig()), "use_cache"}


def flags_of(config: transformers.PreTrainedConfig) -> list[str]:
    return [name for name, value in vars(config).items() if type(value) is bool and name not in COMMON]


def taken(family: str, flags: list[str], inputs: dict[str, torch.Tensor]) -> bool:
    """Whether transformers' own class runs with these flags the other way round."""
    try:
        config = flipped(family, flags)
        with torch.no_grad():
            getattr(transformers, LANGUAGE[family])._from_config(config, attn_implementation="eager").eval()(**inputs)
    except (ValueError, RuntimeError, TypeError, AttributeError, LookupError):
        return False
    return True


def flipped(family: str, flags: list[str]) -> transformers.PreTrainedConfig:
    """The config with these flags the other way round, and no number at its default: that of a norm a flag adds too."""
    config = FAMILIES[family].config()
    change_numbers(config, iter(range(1000)))
    for name in flags:
        setattr(config, name, not getattr(config, name))
    return config


WITH_FLAGS = [family for family in LANGUAGE if flags_of(FAMILIES[family].config())]


@pytest.mark.parametrize("family", WITH_FLAGS)
def test_no_flag_of_the_config_is_lost(family, batch, make_pair) -> None:
    """All of them the other way round; one after the other where transformers does not run them together."""
    flags, inputs = flags_of(FAMILIES[family].config()), inputs_for(LANGUAGE[family], batch)
    together = [flags] if taken(family, flags, inputs) else [[one] for one in flags if taken(family, [one], inputs)]
    for names in together:
        ours, theirs = make_pair(LANGUAGE[family], flipped(family, names), FAMILIES[family].reference)
        with torch.no_grad():
            assert_same(ours(**inputs), theirs(**inputs), seen(family, batch))
