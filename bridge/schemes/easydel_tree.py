"""EasyDeL's names: torch's own paths, with the last name and the order of the dimensions changed.

Source: EasyDeL 0.3.0, `utils/parameters_transformation.py` (`process_tensor`, `apply_moe_transformations`) and the
`reform_param` of its modules. A weight becomes `embedding` in an Embed, `scale` in a LayerNorm and `kernel` in all
others, its RMSNorm included; the dimensions of kernels are permuted by their number alone, 2-d (1, 0), 3-d (2, 1, 0),
4-d (2, 3, 1, 0), for every module. Experts of one projection are one leaf, (expert, in, out).
Other versions called the RMSNorm's leaf `scale`: what is read may be either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.names.architecture import Architecture
from easytorch.bridge.names.computed_buffers import is_computed
from easytorch.bridge.names.flax_convention import Row, convention_rules, outlined_rules
from easytorch.bridge.names.hub_names import HubNames
from easytorch.bridge.names.outline import OutlinedNames
from easytorch.bridge.names.tied_weights import declares_ties, untied
from easytorch.bridge.rules.head_transforms import stacked
from easytorch.bridge.rules.table import BUFFER, TIED, TIES, UNREAD, Rules
from easytorch.bridge.rules.transforms import Shape, Transform

if TYPE_CHECKING:
    import torch

# Dimensions of a kernel -> transform.
_KERNELS = {2: "linear", 3: "conv1d", 4: "conv2d", 5: "conv3d"}
# What the weights of an Embed and of a LayerNorm are called; those of others are kernels.
_MODULES = ("embedding", "scale")
_EXPERT = re.compile(r"(?P<block>.+\.experts)\.(?P<number>\d+)\.(?P<projection>[^.]+)\.(?P<end>weight|bias)")
# Experts that torch too holds in one tensor; in its matrix gate and up stand side by side or take turns.
_FUSED = re.compile(r"(?P<block>.+\.experts)\.(?P<projection>gate_up_proj|down_proj)(?P<bias>_bias)?")
_IN_TURN, _SIDE_BY_SIDE = ("gpt_oss",), ("llama4_text", "llama4")


class EasydelTree:
    """EasyDeL's scheme, for any model, including those that EasyDeL lacks."""

    name = "easydel"
    by_outline = True

    def recognises(self, tensors: Mapping[str, TensorInfo], config: Config | None) -> bool:
        """By what HF Flax never writes: a norm's one-dimensional `kernel`, or experts in one three-dimensional one."""
        return any(
            name.endswith("/kernel") and (len(info.shape) == 1 or (len(info.shape) == 3 and "/experts/" in name))
            for name, info in tensors.items()
        )

    def rules(self, config: Config, architecture: Architecture, tensors: Mapping[str, TensorInfo] | None) -> Rules:
        """One row per tensor, or one for all experts of a projection."""
        leaves = frozenset(tensors or ())
        declared = declares_ties(config.content, architecture)
        if declared and architecture.apart and untied(config.content, architecture, self.name) is None:
            raise CheckpointError(
                "differs from the weight it is tied to, which is what EasyDeL computes a tied model with; convert to "
                "flax or orbax, or set `tie_word_embeddings` to false in config.json where the model is not tied",
                tensor=min(architecture.apart),
            )
        if isinstance(architecture.names, OutlinedNames):
            assert tensors is None, "an outline is for what is written"
            rules = outlined_rules(architecture.names, architecture.given, _outlined_rows)
            assert rules is not None, "an outline answers where it knows all names"
            return rules
        rows = partial(_rows, leaves=leaves, unread=tensors is not None and declared)
        return convention_rules(architecture.names, leaves.union(architecture.given), rows)

    def infer_config(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
        """None: EasyDeL writes config.json beside every checkpoint."""
        return None


def _rows(names: HubNames, leaves: frozenset[str], unread: bool) -> Iterator[Row]:
    modules = dict(names.model.named_modules())
    base = f"{names.model.base_model_prefix}/"
    # A checkpoint of the base model alone has leaves without the prefix, one with a head has them with it.
    leaves |= {leaf.removeprefix(base) for leaf in leaves} | {base + leaf for leaf in leaves}
    experts: dict[tuple[str, str, str], dict[int, str]] = {}
    paths: dict[str, str] = {}
    tied = {names.hub_name(name) for name in names.model.all_tied_weights_keys}
    for name, tensor in names.tensors.items():
        if (found := _EXPERT.fullmatch(name)) is not None:
            members = experts.setdefault((found["block"], found["projection"], found["end"]), {})
            members[int(found["number"])] = name
        elif (fused := _fused(name, names)) is not None:
            yield fused
        elif not tensor.dtype.is_floating_point and is_computed(name, tensor):
            yield (name,), None, BUFFER
        else:
            place = names.places[name]
            owner = modules.get(place.name.rpartition(".")[0]) if place.name in names.state else None
            paths[name], transform = _leaf(name, _module_of(owner), tensor.dim(), leaves)
            yield (name,), paths[name], transform
            # EasyDeL's graph of a tied model may keep a head of its own, which is initialized and never used.
            if unread and name in tied:
                yield (name,), paths[name], UNREAD
    yield from _stacked_experts(experts)
    for repeat, source in names.model.all_tied_weights_keys.items():
        repeated, source_path = names.hub_name(repeat), paths.get(names.hub_name(source) or "")
        if repeated is not None and source_path is not None:
            yield (repeated,), source_path, TIED
    for name in sorted(names.scratch):
        yield (name,), None, BUFFER


def _stacked_experts(experts: Mapping[tuple[str, str, str], Mapping[int, str]]) -> Iterator[Row]:
    for (block, projection, end), members in experts.items():
        leaf = "kernel" if end == "weight" else end
        path = f"{block}.{projection}".replace(".", "/") + f"/{leaf}"
        one = "linear" if end == "weight" else "identity"
        yield tuple(members[number] for number in sorted(members)), path, stacked(one, len(members), 0)


def _outlined_rows(names: OutlinedNames) -> Iterator[Row]:
    """`_rows` of an outline's class, for a checkpoint that is written.

    The convention's leaves say which module holds a weight: `embedding`, `scale` of a LayerNorm, or any other.
    scripts/outline_tables.py --check compares.
    """
    experts: dict[tuple[str, str, str], dict[int, str]] = {}
    paths: dict[str, str] = {}
    scratch: list[str] = []
    for name, leaf, kind, shape in names.rows:
        if name in paths or (kind in TIES and shape is None):
            continue
        if kind == BUFFER and shape is None:
            scratch.append(name)
        elif (found := _EXPERT.fullmatch(name)) is not None:
            members = experts.setdefault((found["block"], found["projection"], found["end"]), {})
            members[int(found["number"])] = name
        else:
            own = "" if kind in TIES else (leaf or "").rpartition("/")[2]
            if leaf is None and "embed" in name.split(".")[-2]:
                own = "embedding"  # positions that Flax computes
            paths[name], transform = _leaf(name, own if own in _MODULES else "", len(shape or ()), frozenset())
            yield (name,), paths[name], transform
    yield from _stacked_experts(experts)
    for repeat, source in names.ties.items():
        if source in paths:
            yield (repeat,), paths[source], TIED
    for name in sorted(scratch):
        yield (name,), None, BUFFER


def _module_of(owner: torch.nn.Module | None) -> str:
    """Which of `_MODULES` a module is, "" for any other."""
    from torch import nn

    if isinstance(owner, nn.Embedding):
        return "embedding"
    return "scale" if isinstance(owner, nn.LayerNorm | nn.GroupNorm) else ""


def _leaf(name: str, module: str, rank: int, leaves: frozenset[str]) -> tuple[str, str]:
    """The path of a torch tensor and how its dimensions are permuted; `module` is which of `_MODULES` holds it."""
    path = name.replace(".", "/")
    if "weight" not in name.rpartition(".")[2]:
        return path, "identity"
    if not name.endswith(".weight"):
        return path, _KERNELS.get(rank, "identity")
    stem = path.removesuffix("weight")
    if module:
        return f"{stem}{module}", "identity"
    if rank == 1 and f"{stem}scale" in leaves:
        return f"{stem}scale", "identity"
    return f"{stem}kernel", _KERNELS.get(rank, "identity")


def _fused(name: str, names: HubNames) -> Row | None:
    """The row of experts that torch holds in one tensor, (expert, in, out) already; None for any other tensor."""
    found, family = _FUSED.fullmatch(name), names.model.config.get_text_config().model_type
    if found is None or family not in _IN_TURN + _SIDE_BY_SIDE:
        return None
    block, leaf = found["block"].replace(".", "/"), "bias" if found["bias"] else "kernel"
    if found["projection"] == "down_proj":
        return (name,), f"{block}/down_proj/{leaf}", "identity"
    return (
        (name,),
        (f"{block}/gate_proj/{leaf}", f"{block}/up_proj/{leaf}"),
        _in_turn if family in _IN_TURN else _side_by_side,
    )


def _doubled(shapes: list[Shape]) -> Shape:
    if len(set(shapes)) != 1:
        raise CheckpointError(f"gate and up have the shapes {sorted(set(shapes))}, and must have one")
    return (*shapes[0][:-1], 2 * shapes[0][-1])


def _halved(shape: Shape) -> list[Shape]:
    if not shape or shape[-1] % 2:
        raise CheckpointError(f"a tensor of shape {shape} holds no gate and up of one size")
    return [(*shape[:-1], shape[-1] // 2)] * 2


# Two leaves <-> torch's one; rows that hold several leaves read from those to torch.
_in_turn = Transform(
    name="in_turn",
    to_flax=lambda leaves: np.stack(leaves, axis=-1).reshape(*leaves[0].shape[:-1], -1),
    to_torch=lambda array: (array[..., 0::2], array[..., 1::2]),
    flax_shape=lambda shapes: _doubled(list(shapes)),
    torch_shapes=_halved,
    parts=2,
)
_side_by_side = Transform(
    name="side_by_side",
    to_flax=lambda leaves: np.concatenate(leaves, axis=-1),
    to_torch=lambda array: np.split(array, 2, axis=-1),
    flax_shape=lambda shapes: _doubled(list(shapes)),
    torch_shapes=_halved,
    parts=2,
)
