"""Contents of checkpoints that are not converted: adapters (PEFT) and quantized weights. Each is refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import FLOATING
from easytorch.bridge.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_MERGE = "merge it into its model first (`PeftModel.merge_and_unload()`, then `save_pretrained`)"
# What GPTQ, AWQ, bitsandbytes, compressed-tensors, fp8, mxfp4, ModelOpt, MLX, EETQ, HQQ, quanto and torchao store
# beside or instead of a weight.
_QUANTIZED = re.compile(
    r"(\.(qweight|qzeros|scales|biases|g_idx|SCB|W_q|weight_format|[kqv]_(scale|zero_point)"
    r"|(weight|input|output|activation)_(global_)?(scales?(_inv|_2)?|zero_point)|weight_(packed|shape|g_idx)"
    r"|weight\.(absmax|quant_map|nested_\w+|quant_state\.\w+|_data|_scale|_shift)"
    r"|_weight_(qdata|scale|zero_point))|_(blocks|scales))$"
)
_ADAPTED = re.compile(r"^base_model\.model\.|\.(base_layer|lora_(A|B|embedding_A|embedding_B|magnitude_vector))\.")
# The config keys: transformers', compressed-tensors' former one, MLX's. Messages name the first.
_KEYS = ("quantization_config", "compression_config", "quantization")


def refuse_adapter(path: Path) -> None:
    """`CheckpointError` for a folder or file that holds only an adapter's weights."""
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.name not in _ADAPTER_WEIGHTS:
        return
    if (folder / ADAPTER_CONFIG).is_file() or path.name in _ADAPTER_WEIGHTS:
        raise CheckpointError(f"is an adapter (PEFT), which is not converted; {_MERGE}", file=path)


def adapter_in(folder: Path) -> str | None:
    """The name of an adapter's file in `folder`, if there is one."""
    return next((name for name in (ADAPTER_CONFIG, *_ADAPTER_WEIGHTS) if (folder / name).is_file()), None)


def note_on_adapter(*places: Path | None) -> list[str]:
    """Notes on adapters beside the model, in those of `places` that are folders."""
    found = [(path, adapter_in(path)) for path in places if path is not None and path.is_dir()]
    return [
        f"{path} holds an adapter (PEFT, {file}) too, which is no part of these weights" for path, file in found if file
    ]


def refuse_adapter_beside(path: Path | None) -> None:
    """`CheckpointError` for a folder, where `path` is one, that holds an adapter beside the model it changes."""
    if path is not None and path.is_dir() and (found := adapter_in(path)) is not None:
        raise CheckpointError(
            f"holds an adapter (PEFT, {found}) beside the model, and adapters are not converted; {_MERGE}, or "
            "give the model's weight file in the folder's place to convert it without the adapter",
            file=path,
        )


def refuse_quantized(content: Mapping[str, Any], file: Path) -> None:
    """`CheckpointError` where config.json says that the weights are quantized."""
    for part in (content, *(value for value in content.values() if isinstance(value, dict))):
        key = next((key for key in _KEYS if part.get(key)), None)
        if key is not None:
            stated = part[key]
            method = stated.get("quant_method") if isinstance(stated, dict) else None
            raise CheckpointError(
                f"its `{key}` says that the weights are quantized ({method or 'no `quant_method`'}), and "
                "quantized weights are not converted; dequantize the model first (`model.dequantize()`, then "
                "`save_pretrained`), or remove the key where it is not true",
                file=file,
            )


def refuse_cast(tensors: Mapping[str, TensorInfo]) -> None:
    """`CheckpointError` where quantized weights are to be cast, which would destroy them.

    Any model may have a weight named like scales; scales of quantized weights come with narrow integers.
    """
    narrow = {name for name, info in tensors.items() if info.dtype.startswith("float8") or info.dtype not in FLOATING}
    # `q_proj.weight`: of q_proj, and, where scales are called `q_proj.weight.absmax`, of itself.
    modules = {name.rpartition(".")[0] for name in narrow} | narrow
    name = next((name for name in tensors if is_quantized(name) and name.rpartition(".")[0] in modules), None)
    if name is not None:
        message = "belongs to quantized weights, which cannot be cast; convert without `dtype`"
        raise CheckpointError(message, file=tensors[name].file or None, tensor=name)


def is_adapters(name: str) -> bool:
    """Whether a torch tensor has a name as in the state dict of a model with an adapter."""
    return _ADAPTED.search(name) is not None


def is_quantized(name: str) -> bool:
    """Whether a torch tensor has a name as the parts of quantized weights have."""
    return _QUANTIZED.search(name) is not None


def note_on_narrow(tensors: Mapping[str, TensorInfo], weights: Collection[str]) -> list[str]:
    """A note on 8-bit weights, and on integers where the model has floating point, that come without scales.

    weights: the names of those that are floating point numbers in the model.
    """
    narrow = [
        info
        for name, info in tensors.items()
        if info.dtype.startswith("float8") or (name in weights and info.dtype not in FLOATING)
    ]
    if not narrow:
        return []
    kinds = ", ".join(sorted({info.dtype for info in narrow}))
    return [f"{len(narrow)} tensors are {kinds} and no `quantization_config` gives scales; they are taken as they are"]
