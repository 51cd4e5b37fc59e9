"""`save_pretrained` of models over a mesh: the ranks share the writing, or the first of them writes what it gathers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from easytorch.distributed.gathering import Gathering, Request
from easytorch.distributed.sharding import mesh_of
from easytorch.distributed.staged_call import pipeline_of
from easytorch.distributed.together import by_first, cpu_group, own_errors, together
from easytorch.distributed.xla_spmd import is_spmd_mesh
from easytorch.layers.quantized import is_quantized
from easytorch.protocol.adapters import adapter_names, check_savable
from easytorch.protocol.dtypes import dtype_of
from easytorch.protocol.mesh_upload import push_sharded, save_and_upload
from easytorch.protocol.quantization import EasyTorchQuantizer
from easytorch.protocol.reference_arguments import folder_of

_PUSH = "push_to_hub"
# What saving takes; what else is given with `push_to_hub` is of the upload.
_OF_PARTS = (
    "save_original_format", "max_shard_size", "variant", "is_main_process", "save_peft_format", "state_dict",
)  # fmt: skip


def is_sharded(model: Any) -> bool:
    """Whether the model is over a mesh that transformers' own `save_pretrained` does not know of."""
    return mesh_of(model) is not None and getattr(model.config, "distributed_config", None) is None


def by_ranks(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `save_sharded` takes a call of `save_pretrained` with these arguments.

    A `state_dict` of full tensors is written by the rank that has it, as transformers does: the others need not call.
    `ValueError` for one of shards.
    """
    _check_full(model, kwargs.get("state_dict"))
    if kwargs.get("to", "torch") != "torch":
        return True
    # transformers writes a quantizer's own tensors in the place of those that are cast
    cast = kwargs.get("float_dtype") is not None and isinstance(
        getattr(model, "hf_quantizer", None), EasyTorchQuantizer
    )
    return kwargs.get("state_dict") is None and (cast or is_sharded(model))


def _check_full(model: Any, state_dict: Any) -> None:
    if not state_dict or not is_sharded(model):
        return
    shards = [name for name, one in state_dict.items() if hasattr(one, "full_tensor")]
    part = f"shard of {shards[0]}" if shards else None
    if part is None and pipeline_of(model) is not None and state_dict.keys() <= model.state_dict().keys():
        part = "stage"
    if part is not None:
        raise ValueError(
            f"state_dict has this rank's {part} alone: leave it out, and all ranks write the model together, or give "
            f"full tensors"
        )


def save_foreign(model: Any, save_directory: Any, **kwargs: Any) -> Any:
    """`save_pretrained` of a class of transformers', sharded or not."""
    save = functools.partial(type(model).save_pretrained, model)
    if by_ranks(model, kwargs):
        return save_sharded(model, save_directory, save, kwargs)
    kwargs.pop("to", None)
    return save(save_directory, **kwargs)


def by_name(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Those of transformers' `save_pretrained` behind the folder, given by their places."""
    places = list(inspect.signature(PreTrainedModel.save_pretrained).parameters)[2:]
    return dict(zip(places, arguments, strict=False))


def save_sharded(model: Any, save_directory: Any, save: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """`save_pretrained` of a model over a mesh, or in another format than torch's. Each rank calls this.

    save: the one of a single process, for what the first rank writes alone: adapters, of which it gets no other
    tensors. kwargs: those of `save_pretrained` that are given; is_main_process is that of a replica, of which one
    writes: over a mesh all take part. push_to_hub: the first rank uploads what all have written.
    """
    given = {name: one for name, one in kwargs.items() if one is not None}
    mesh, to = mesh_of(model), given.pop("to", "torch")
    if mesh is None and given.get("is_main_process") is False:
        return None
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not isinstance(quantizer, EasyTorchQuantizer):
        raise ValueError(
            f"{type(quantizer).__name__} writes weights of one process: save the model without a mesh, or quantize it "
            "by model.quantize()"
        )
    why = _only_gathered(model, given)
    unwritable = why or ("variant" if given.get("variant") else "quantized weights" if is_quantized(model) else None)
    if to != "torch" and unwritable is not None:
        raise ValueError(f"to={to!r} does not go with {unwritable}: save it as torch's and convert that")
    shards = bool(given.pop("distributed_checkpoint", False))
    if shards:
        _check_shards(to, unwritable, given)
    float_dtype, folder = given.pop("float_dtype", None), folder_of(save_directory, given.pop("step", None))
    dtype = None if float_dtype is None else dtype_of(float_dtype)
    mesh = None if is_spmd_mesh(mesh) else mesh  # of torch_xla: one process has it all
    hub = {name: given.pop(name) for name in list(given) if name not in _OF_PARTS} if given.pop(_PUSH, None) else None
    if why is not None:
        if dtype is not None and not adapter_names(model):
            raise ValueError(f"float_dtype does not go with {why}: cast the model by to_dtype")

        def write(place: Any) -> None:
            _save_gathered(model, mesh, functools.partial(save, place), given, dtype)

    else:
        from easytorch.protocol.saving_by_parts import save_by_parts  # which loads the bridge's formats

        def write(place: Any) -> None:
            save_by_parts(
                model, place, mesh=mesh, to=to, max_shard_size=given.get("max_shard_size", "50GB"), dtype=dtype,
                original=given.get("save_original_format", True), variant=given.get("variant"), shards=shards,
            )  # fmt: skip

    if hub is None:
        write(folder)
    else:
        save_and_upload(model, folder, mesh, write, hub)
    return None


def push_sharded_model(
    model: Any, repo_id: str, *, float_dtype: Any = None, max_shard_size: int | str = "50GB", **hub: Any
) -> Any:
    """`push_to_hub` of a model over a mesh; each rank calls this. hub: see `push_sharded`."""
    mesh = mesh_of(model)

    def save(folder: Any) -> None:
        save_alone = functools.partial(type(model).save_pretrained, model)
        save_sharded(model, folder, save_alone, {"float_dtype": float_dtype, "max_shard_size": max_shard_size})

    check_savable(model)
    return push_sharded(model, None if is_spmd_mesh(mesh) else mesh, repo_id, save, **hub)


def _only_gathered(model: Any, kwargs: dict[str, Any]) -> str | None:
    """Why the first rank writes alone; None where the ranks share the writing."""
    if adapter_names(model):
        return "an adapter"
    return None if kwargs.get("state_dict") is None else "state_dict"


def _check_shards(to: str, unwritable: str | None, given: dict[str, Any]) -> None:
    """`ValueError` for what does not go with shards, each written by the rank that has it. unwritable: what goes with
    torch's files alone."""
    refused = [name for name in ("float_dtype", _PUSH) if given.get(name)] + ([] if to == "torch" else ["to"])
    other = refused[0] if refused else unwritable
    if other is not None:
        raise ValueError(
            f"distributed_checkpoint does not go with {other}: save without it, all ranks write all the same"
        )


def _save_gathered(
    model: Any, mesh: Any, save: Callable[..., Any], kwargs: dict[str, Any], dtype: torch.dtype | None
) -> None:
    """`save(state_dict=..., **kwargs)` in the mesh's first rank, with the full tensors that it writes: of an adapter
    its own. Each is gathered by itself and kept on the CPU, in `dtype` where it is floating point.

    Each rank calls this. The first rank's error is raised there, and the others raise `RuntimeError`.
    """
    with cpu_group(mesh) as group, own_errors("save_pretrained: the first rank could not write the model"):
        # FSDP2 frees what an evaluation has left gathered when it is asked for a state dict
        gathering = Gathering(model.state_dict(keep_vars=True), group)
        first = gathering.rank == 0
        found = together(group, lambda: _taken(model, gathering))
        files = {name: source for one in found for name, source in one.items()}
        distinct = list(dict.fromkeys(gathering.tensors[source].tied for source in files.values()))
        wanted: list[list[Request]] = [[(name,) for name in distinct], *([] for _ in range(gathering.ranks - 1))]
        rounds = gathering.rounds(wanted)

        full: dict[str, torch.Tensor] = {}

        def gather() -> None:
            full.update({name: one for _ in distinct for name, one in rounds.next().items()} if first else {})
            rounds.finish()

        def write() -> None:
            if dtype is not None:
                full.update({name: one.to(dtype) for name, one in full.items() if one.is_floating_point()})
            state = {name: full[gathering.tensors[source].tied] for name, source in files.items()}
            with _as_given(model):
                save(state_dict=state, **kwargs)

        together(group, gather)
        by_first(group, write)


def _taken(model: Any, gathering: Gathering) -> dict[str, str]:
    """Name that `save_pretrained` gives a tensor -> that in the model: of an adapter those that PEFT takes of the
    modules that this rank has, which over pp are those of a stage."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        return {name: name for name in gathering.tensors}
    stand_ins = {
        name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in gathering.tensors.items()
    }
    names = {id(one): name for name, one in stand_ins.items()}
    taken = model.get_adapter_state_dict(state_dict=dict(stand_ins))
    if made := [name for name, one in taken.items() if id(one) not in names]:
        raise NotImplementedError(f"{made[0]} is computed when its adapter is saved: gather_model first")
    return {name: names[id(one)] for name, one in taken.items()}


@contextmanager
def _as_given(model: Any) -> Iterator[None]:
    """transformers writes the state dict that it gets: a quantizer's, which is that of this rank, takes its place
    otherwise, and PEFT takes of it what belongs to this rank's modules."""
    quantizer = model.__dict__.pop("hf_quantizer", None)
    model.get_adapter_state_dict = lambda state_dict: state_dict
    try:
        yield
    finally:
        del model.get_adapter_state_dict
        if quantizer is not None:
            model.hf_quantizer = quantizer
