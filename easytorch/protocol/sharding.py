"""Sharding by EasyDeL's names: by rules on one device, and by the plan that a model declares over several."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel


def shard_model(model: PreTrainedModel, partition_rules: Any = None, mesh: Any = None) -> Any:
    """`model`, its weights sharded over the axis "tp" of `mesh` by its tensor parallel plan; each rank calls this.

    Without a mesh, or with one of a single device, it is unchanged. partition_rules: pattern -> placement, as pairs or
    a mapping; every parameter must match one of the patterns, as in EasyDeL. They are checked, and refused over several
    devices, where the plan decides.
    """
    devices = _devices_of(mesh)
    _check_rules(model, partition_rules)
    if devices == 1:
        return model
    if partition_rules is not None:
        raise NotImplementedError(
            f"the mesh has {devices} devices, over which the model's own plan is carried out: leave partition_rules out"
        )
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"a mesh of {devices} devices must be a torch DeviceMesh, not {type(mesh).__name__}")
    from easytorch.protocol.tensor_parallel import parallelize

    parallelize(model, mesh)
    return model


def gather_model(model: PreTrainedModel, partition_rules: Any = None, mesh: Any = None) -> Any:
    """`model` with every parameter full on its device; those that are sharded are gathered, and tied ones stay tied."""
    _devices_of(mesh)
    _check_rules(model, partition_rules)
    full: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, one in list(module._parameters.items()):
            gather = getattr(one, "full_tensor", None)
            if gather is not None and one is not None:
                if id(one) not in full:
                    full[id(one)] = torch.nn.Parameter(gather().detach(), one.requires_grad)
                module._parameters[name] = full[id(one)]
    from easytorch.protocol.tensor_parallel import undo

    undo(model)
    return model


def _devices_of(mesh: Any) -> int:
    if mesh is None:
        return 1
    size = mesh.size() if callable(getattr(mesh, "size", None)) else getattr(mesh, "size", None)
    if not isinstance(size, int):
        raise TypeError(f"mesh must be a torch DeviceMesh, not {type(mesh).__name__}")
    return size


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
