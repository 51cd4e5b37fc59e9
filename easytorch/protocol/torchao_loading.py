"""torchao's checkpoints, as its `flatten_tensor_state_dict` writes them to safetensors, without torchao.

Of a weight-only `Int8Tensor`, `IntxUnpackedToInt8Tensor` or `Float8Tensor` named `layer.weight` the file holds
`layer._weight_qdata` (N, K), int8 or fp8, `_weight_scale` (N, groups) and, of integers, `_weight_zero_point` like it.
An `Int4Tensor`'s qdata is (N, K / 2) bytes, and its scale and zero point are (groups, N); the file's metadata or the
config's `quant_type` say that it is one.
Of a stack of experts, another parameter than `weight`, it holds `experts._down_proj_qdata` (E, N, K) and the like.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from easytorch.bridge.errors import CheckpointError
from easytorch.layers.packed_weights import TORCHAO_FORMATS, TorchaoWeight, from_int4_tensor
from easytorch.layers.quantized_formats import FormatSettings

_LOG = logging.getLogger(__name__)
PREFIX = "_weight_"
_KNOWN = {"qdata", "scale", "zero_point"}
_PART_OF_STACK = re.compile(rf"_(\w+)_({'|'.join(sorted(_KNOWN))})")


def weights_in(names: Collection[str]) -> dict[str, set[str]]:
    """Layer -> the parts of its weight in a checkpoint of torchao."""
    found: dict[str, set[str]] = {}
    for name in names:
        layer, _, leaf = name.rpartition(".")
        if leaf.startswith(PREFIX):
            found.setdefault(layer, set()).add(leaf.removeprefix(PREFIX))
    return found


def stacks_in(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Parameter -> the parts of its stack of matrices in a checkpoint of torchao, and their tensors."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, leaf = name.rpartition(".")
        if (part := _PART_OF_STACK.fullmatch(leaf)) and not leaf.startswith(PREFIX):
            found.setdefault(f"{module}.{part[1]}", {})[part[2]] = name
    return {name: parts for name, parts in found.items() if "qdata" in parts}


def decoded_stack(name: str, parts: Mapping[str, Tensor], file: Path) -> Tensor:
    """The stack (E, N, K), float32, of the checkpoint's tensors; `CheckpointError` as `torchao_weight`."""
    codes = parts["qdata"]
    if codes.dim() != 3:
        raise CheckpointError(
            f"is {tuple(codes.shape)}; experts are a stack of matrices (E, N, K)", file=file, tensor=f"{name} (qdata)"
        )
    of_each = [
        {part: one[expert] if one.dim() == 3 else one for part, one in parts.items()} for expert in range(len(codes))
    ]
    return torch.stack([torchao_weight(name, one, file).dequantized() for one in of_each])


def torchao_weight(layer: str, parts: Mapping[str, Tensor], file: Path) -> TorchaoWeight:
    """The weight of the checkpoint's tensors; `CheckpointError` for what is packed in another way."""
    tensor = f"{layer}.{PREFIX}qdata"
    if unknown := sorted(set(parts) - _KNOWN):
        raise CheckpointError(
            f"has {', '.join(unknown)} beside it, which is not read: weight-only Int8Tensor, "
            "IntxUnpackedToInt8Tensor, Float8Tensor and Int4Tensor are; load it with torchao installed and "
            "quantization_config=TorchAoConfig(...)",
            file=file,
            tensor=tensor,
        )
    if missing := sorted({"qdata", "scale"} - set(parts)):
        raise CheckpointError(f"is missing beside {layer}", file=file, tensor=f"{layer}.{PREFIX}{missing[0]}")
    codes, scale, zero = parts["qdata"], parts["scale"], parts.get("zero_point")
    if codes.dtype not in TORCHAO_FORMATS or codes.dim() != 2:
        raise CheckpointError(
            f"is {tuple(codes.shape)} {codes.dtype}; int8, float8_e4m3fn and float8_e5m2 matrices are read, and "
            "Int4Tensor where the file's metadata or the config's quant_type name it",
            file=file,
            tensor=tensor,
        )
    rows, columns = codes.shape
    grid = scale.reshape(1, 1) if scale.numel() == 1 else scale
    if grid.dim() != 2 or grid.shape[0] not in (1, rows) or columns % grid.shape[1]:
        shape = tuple(scale.shape)
        raise CheckpointError(
            f"is {shape}, which is no grid over {rows} rows and groups of {columns} columns",
            file=file,
            tensor=f"{layer}.{PREFIX}scale",
        )
    if zero is not None and zero.numel() != scale.numel():
        shapes = f"is {tuple(zero.shape)} beside scales {tuple(scale.shape)}"
        raise CheckpointError(shapes, file=file, tensor=f"{layer}.{PREFIX}zero_point")
    grid = grid.float().expand(rows, -1).contiguous()
    if zero is not None:
        if zero.is_floating_point() and bool((zero != zero.round()).any()):
            raise CheckpointError("has a fraction", file=file, tensor=f"{layer}.{PREFIX}zero_point")
        zero = zero.reshape(-1, grid.shape[1]).to(torch.int32).expand(rows, -1)
    return TorchaoWeight(codes, grid, zero)


def int4_tensors(metadata: Mapping[str, str], quant_type: Any, layers: Collection[str]) -> set[str]:
    """Which layers have an `Int4Tensor`."""
    stated = {name: metadata[f"{name}.weight"] for name in layers if f"{name}.weight" in metadata}
    if stated:
        return {name for name, text in stated.items() if '"Int4Tensor"' in text}
    kind = str(quant_type)
    plain = "Int4WeightOnlyConfig" in kind and not re.search(r"(?i)preshuffled|plain_int32|tile_packed", kind)
    return set(layers) if plain else set()


def int4_weight(layer: str, parts: Mapping[str, Tensor], file: Path) -> TorchaoWeight | Tensor:
    """The weight of an `Int4Tensor`: codes, or decoded where its zero points are no codes."""
    name = f"{layer}.{PREFIX}"
    if missing := sorted(_KNOWN - set(parts)):
        raise CheckpointError(f"is missing beside {layer}", file=file, tensor=f"{name}{missing[0]}")
    if unknown := sorted(set(parts) - _KNOWN):
        raise CheckpointError(f"is beside {layer}, and is not read", file=file, tensor=f"{name}{unknown[0]}")
    packed, scale, zero = parts["qdata"], parts["scale"], parts["zero_point"]
    columns = 2 * packed.shape[-1]
    fits = packed.dim() == 2 and scale.dim() == 2 and scale.shape == zero.shape and scale.shape[1] == packed.shape[0]
    if not fits or packed.dtype not in (torch.uint8, torch.int8) or columns % scale.shape[0]:
        raise CheckpointError(
            f"is {tuple(packed.shape)} {packed.dtype} beside scales {tuple(scale.shape)} and zero points "
            f"{tuple(zero.shape)}; an Int4Tensor has (N, K / 2) in bytes, and (groups, N)",
            file=file,
            tensor=f"{name}qdata",
        )
    return from_int4_tensor(packed, scale, zero)


def most_common(weights: Mapping[str, TorchaoWeight]) -> FormatSettings | None:
    """The format that most layers have: a model has one."""
    counts = Counter(found for one in weights.values() if (found := one.settings()) is not None)
    return counts.most_common(1)[0][0] if counts else None


def warn_activations(settings: Mapping[str, Any]) -> None:
    """Warns where torchao would quantize activations too, which is not done here."""
    kind = str(settings.get("quant_type"))
    if re.search(r"(Dynamic|Static)Activation", kind):
        _LOG.warning("activations are not quantized here: the checkpoint's are, its weights are taken as they are")
