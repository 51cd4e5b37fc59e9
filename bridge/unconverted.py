"""What stands in checkpoints and is not converted: adapters (PEFT) and quantized weights. Each is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import TensorInfo

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_MERGE = "merge it into its model first (`PeftModel.merge_and_unload()`, then `save_pretrained`)"
# What GPTQ, AWQ, bitsandbytes, compressed-tensors and fp8 keep beside or in the place of a weight.
_QUANTIZED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|weight_format|weight_(packed|scale|scale_inv|zero_point|shape|g_idx)"
    r"|(input|activation)_scale|weight\.(absmax|quant_map|nested_\w+|quant_state\.\w+))$"
)


def refuse_adapter(path: Path) -> None:
    """`CheckpointError` for an adapter's own weights, which are no model: a folder or a file."""
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.name not in _ADAPTER_WEIGHTS:
        return
    if (folder / ADAPTER_CONFIG).is_file() or path.name in _ADAPTER_WEIGHTS:
        raise CheckpointError(f"is an adapter (PEFT), which is not converted; {_MERGE}", file=path)


def refuse_adapter_beside(path: Path) -> None:
    """`CheckpointError` for a folder that holds an adapter beside the model it changes."""
    if path.is_dir() and (path / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"holds an adapter (PEFT, {ADAPTER_CONFIG}) beside the model, and adapters are not converted; {_MERGE}, or "
            "give the model's weight file in the folder's place to convert it without the adapter",
            file=path,
        )


def refuse_quantized(content: Mapping[str, Any], file: Path) -> None:
    """`CheckpointError` where config.json says that the weights are quantized."""
    for part in (content, *(value for value in content.values() if isinstance(value, dict))):
        stated = part.get("quantization_config")
        if stated:
            method = stated.get("quant_method") if isinstance(stated, dict) else None
            raise CheckpointError(
                f"its `quantization_config` says that the weights are quantized ({method or 'no `quant_method`'}), and "
                "quantized weights are not converted; dequantize the model first (`model.dequantize()`, then "
                "`save_pretrained`), or remove the key where it is not true",
                file=file,
            )


def is_quantized(name: str) -> bool:
    """Whether a torch tensor is called as the parts of quantized weights are."""
    return _QUANTIZED.search(name) is not None


def note_on_fp8(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """A note on weights of eight bits that come without scales."""
    narrow = [info for info in tensors.values() if info.dtype.startswith("float8")]
    if not narrow:
        return []
    kind = narrow[0].dtype
    return [f"{len(narrow)} tensors are {kind} and no `quantization_config` gives scales; they are taken as they are"]
