"""Sharding by EasyDeL's names, on one device: several are the distributed work's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel


def shard_model(model: PreTrainedModel, partition_rules: Any = None, mesh: Any = None) -> Any:
    """`model`, whose parameters lie on one device, which a mesh of one device is too.

    partition_rules: pattern -> placement, as pairs or a mapping; every parameter must match one of the patterns, as in
    EasyDeL. `NotImplementedError` for a mesh of several devices; the model is unchanged.
    """
    _check_mesh(mesh)
    _check_rules(model, partition_rules)
    return model


def gather_model(model: PreTrainedModel, partition_rules: Any = None, mesh: Any = None) -> Any:
    """`model` with every parameter full on its device; those that are sharded already are gathered."""
    _check_mesh(mesh)
    _check_rules(model, partition_rules)
    for module in model.modules():
        for name, one in list(module._parameters.items()):
            gather = getattr(one, "full_tensor", None)
            if gather is not None and one is not None:
                module._parameters[name] = torch.nn.Parameter(gather().detach(), one.requires_grad)
    return model


def _check_mesh(mesh: Any) -> None:
    if mesh is None:
        return
    size = mesh.size() if callable(getattr(mesh, "size", None)) else getattr(mesh, "size", None)
    if not isinstance(size, int):
        raise TypeError(f"mesh must be a torch DeviceMesh, not {type(mesh).__name__}")
    if size != 1:
        raise NotImplementedError(
            f"the mesh has {size} devices, and shard_model places parameters on one; shard with torch's "
            "fully_shard or transformers' tp_plan, whose parameters params_sharding and gather_model read"
        )


def _check_rules(model: PreTrainedModel, rules: Any) -> None:
    if rules is None:
        return
    pairs: Iterable[Any] = rules.items() if isinstance(rules, Mapping) else rules
    patterns = []
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"partition_rules are pairs (pattern, placement), got {pair!r}")
        try:
            patterns.append(re.compile(pair[0]))
        except re.error as error:
            raise ValueError(f"partition_rules: {pair[0]!r} is no regular expression: {error}") from error
    for name, _ in model.named_parameters():
        # EasyDeL's rules are written for paths with slashes
        if not any(one.search(name) or one.search(name.replace(".", "/")) for one in patterns):
            raise ValueError(f"no partition rule matches {name!r}; end the rules with ('.*', None)")
