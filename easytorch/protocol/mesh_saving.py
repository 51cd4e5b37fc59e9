"""`save_pretrained` of models over a mesh: the ranks share the writing, or the first of them writes what all hold."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from easytorch.distributed.sharding import full_tensors, mesh_of
from easytorch.distributed.xla_spmd import is_spmd_mesh
from easytorch.layers.quantized import is_quantized
from easytorch.protocol.adapters import adapter_names
from easytorch.protocol.dtypes import dtype_of
from easytorch.protocol.reference_arguments import folder_of

# Arguments of transformers' that are of a model in one process.
_OF_ONE = ("push_to_hub", "variant", "distributed_checkpoint")


def is_sharded(model: Any) -> bool:
    """Whether the model is over a mesh that transformers' own `save_pretrained` does not know of."""
    return mesh_of(model) is not None and getattr(model.config, "distributed_config", None) is None


def by_ranks(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `save_sharded` takes a call of `save_pretrained` with these arguments."""
    return kwargs.get("to", "torch") != "torch" or (kwargs.get("state_dict") is None and is_sharded(model))


def save_foreign(model: Any, save_directory: Any, **kwargs: Any) -> Any:
    """`save_pretrained` of a class of transformers', sharded or not."""
    save = functools.partial(type(model).save_pretrained, model, save_directory)
    if by_ranks(model, kwargs):
        return save_sharded(model, save_directory, save, kwargs)
    kwargs.pop("to", None)
    return save(**kwargs)


def by_name(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Those of transformers' `save_pretrained` behind the folder, given by their places."""
    places = list(inspect.signature(PreTrainedModel.save_pretrained).parameters)[2:]
    return dict(zip(places, arguments, strict=False))


def save_sharded(model: Any, save_directory: Any, save: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """`save_pretrained` of a model over a mesh, or in another format than torch's. Each rank calls this.

    save: the one of a single process, with the folder, for what is gathered by the first rank: adapters, quantized
    weights, an upload, a mesh of torch_xla. kwargs: those of `save_pretrained` that are given; is_main_process is that
    of a replica, of which one writes: over a mesh all take part.
    """
    given = {name: one for name, one in kwargs.items() if one is not None}
    mesh, to = mesh_of(model), given.pop("to", "torch")
    if mesh is None and given.get("is_main_process") is False:
        return None
    why = _only_gathered(model, mesh, given)
    if why is not None:
        if to != "torch":
            raise ValueError(f"to={to!r} does not go with {why}: save it as torch's and convert that")
        return _save_gathered(model, mesh, save, given)
    dtype, step = given.pop("float_dtype", None), given.pop("step", None)
    original = given.pop("save_original_format", True)
    size = given.pop("max_shard_size", "50GB")
    folder = folder_of(save_directory, step)

    from easytorch.protocol.saving_by_parts import save_by_parts  # which loads the bridge's formats

    wanted = None if dtype is None else dtype_of(dtype)
    save_by_parts(model, folder, mesh=mesh, to=to, max_shard_size=size, dtype=wanted, original=original)
    return None


def _only_gathered(model: Any, mesh: Any, kwargs: dict[str, Any]) -> str | None:
    """Why the first rank writes what all hold; None where the ranks share the writing."""
    if mesh is not None and is_spmd_mesh(mesh):
        return "a mesh of torch_xla"
    if adapter_names(model):
        return "an adapter"
    if is_quantized(model) or getattr(model, "hf_quantizer", None) is not None:
        return "quantized weights"
    if kwargs.get("state_dict") is not None:
        return "state_dict"
    return next((name for name in _OF_ONE if kwargs.get(name)), None)


def _save_gathered(model: nn.Module, mesh: Any, save: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """`save(**kwargs)` with the full weights, gathered one at a time and kept on the CPU by the mesh's first rank.

    Each rank calls this; the first alone writes. Its error is raised there, and the others raise `RuntimeError`.
    """
    import torch.distributed as dist

    if is_spmd_mesh(mesh):
        return save(state_dict=full_tensors(model), **kwargs)
    first = not any(mesh.get_coordinate())
    state = full_tensors(model, keep=first)
    result, error = None, None
    if first:
        try:
            result = save(state_dict=state, **kwargs)
        except Exception as raised:  # the other ranks wait for this one
            error = raised
    failed = torch.tensor(float(error is not None), device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(failed, group=mesh.get_group(axis))
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("save_pretrained: the first rank could not write the model")
    return result
