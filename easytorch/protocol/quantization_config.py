"""`QuantizationConfig`: which weights get how many bits, as transformers keeps it in config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from easytorch.layers.quantized_formats import GGUF_BLOCKS, STORAGE, FormatSettings

METHOD = "easytorch"
GGUF = "gguf"
ALIASES = {"8bit": "int8", "a8bit": "int8", "4bit": "nf4", "fp8_e4m3fn": "fp8", "float8": "fp8"}


class QuantizationConfig(QuantizationConfigMixin):
    """Weight-only quantization of linear layers and experts.

    dtype: int8, int4, nf4, fp8, fp8_e5m2, mxfp8, mxfp4, nvfp8, nvfp4, affine, ternary or binary. group_size, EasyDeL's
    block_size too: columns that share a scale, -1 for a row; None is the format's own. bits: of affine, 2 to 8; 4 by
    default. pattern: a regular expression that is searched for in the names of layers; None is all of them but heads
    and routers. simulate: the weights stay as they are and are rounded in every forward pass, and gradients pass
    straight through (quantization-aware training). quantize_tensors: the stacked weights of experts too.
    desc_act: of GPTQ checkpoints, whose columns are grouped in the order of activations.
    blocks: of "gguf", what a model loaded from a GGUF file has: the patterns of the layers of each kind of block.
    runtime_dtype, jax_native: of JAX's compiler; refused.
    """

    def __init__(
        self,
        dtype: str = "int8",
        group_size: int | None = None,
        bits: int | None = None,
        simulate: bool = False,
        pattern: str | None = None,
        *,
        block_size: int | None = None,
        quantize_tensors: bool = True,
        desc_act: bool = False,
        blocks: Mapping[str, str] | None = None,
        runtime_dtype: None = None,
        jax_native: bool = False,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(f"QuantizationConfig has no {', '.join(sorted(unknown))}")
        name = ALIASES.get(str(dtype).lower(), str(dtype).lower())
        if name == GGUF or blocks is not None:
            pattern = _check_blocks(name, blocks, pattern)
        elif name not in STORAGE:
            raise ValueError(f"unknown format {dtype!r}; known: {', '.join([*STORAGE, *ALIASES])}")
        if runtime_dtype is not None or jax_native:
            raise ValueError("runtime_dtype and jax_native choose what JAX compiles; here the input's dtype decides")
        if group_size is not None and block_size is not None and group_size != block_size:
            raise ValueError("group_size and block_size are one setting: give one of them")
        size = group_size if group_size is not None else block_size
        if size is not None and (type(size) is not int or (size < 1 and size != -1)):
            raise ValueError(f"group_size={size!r} must be an int of at least 1, -1 for a row, or None")
        if size is not None and name[:2] in ("mx", "nv") and size != STORAGE[name][1]:
            raise ValueError(f"group_size={size}: {name} is {STORAGE[name][1]} columns a scale")
        if bits is not None and (name != "affine" or type(bits) is not int or not 2 <= bits <= 8):
            raise ValueError(f"bits={bits!r} is a number from 2 to 8, of affine alone")
        if pattern is not None and not isinstance(pattern, str):
            raise TypeError(f"pattern={pattern!r} must be a regular expression, as 'mlp|q_proj', or None")
        for word, flag in (("simulate", simulate), ("quantize_tensors", quantize_tensors), ("desc_act", desc_act)):
            if not isinstance(flag, bool):
                raise TypeError(f"{word}={flag!r} must be True or False")
        if desc_act and (name != "affine" or simulate):
            raise ValueError("desc_act is of GPTQ checkpoints: affine, and not simulated")
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from error
        self.quant_method: Any = quant_method
        self.dtype, self.group_size, self.bits, self.simulate = name, size, bits, simulate
        self.pattern, self.quantize_tensors = pattern, quantize_tensors
        self.desc_act = desc_act
        self.blocks = None if blocks is None else dict(blocks)

    @property
    def settings(self) -> FormatSettings:
        if self.dtype == GGUF:
            raise ValueError("GGUF's blocks are read from files: from_pretrained(folder, gguf_file=...)")
        size = STORAGE[self.dtype][1] if self.group_size is None else self.group_size
        return FormatSettings(self.dtype, None if size == -1 else size, self.bits, self.desc_act)

    def settings_of(self, name: str) -> FormatSettings:
        """The settings of one layer or stack."""
        if self.blocks is None:
            return self.settings
        found = next(kind for kind, pattern in self.blocks.items() if re.search(pattern, name))
        return FormatSettings(found, None)

    def has_blocks(self, name: str) -> bool:
        """False for a stack of experts that a GGUF file does not hold in blocks known here."""
        return self.blocks is None or any(re.search(pattern, name) for pattern in self.blocks.values())


def _check_blocks(name: str, blocks: Mapping[str, str] | None, pattern: str | None) -> str:
    """The pattern of all layers in blocks; `ValueError` for blocks of another format, or unknown ones."""
    if name != GGUF or not isinstance(blocks, Mapping) or not blocks:
        raise ValueError(
            'blocks are of "gguf", which needs them: from_pretrained(folder, gguf_file=...) reads such a model'
        )
    if unknown := sorted(set(blocks) - set(GGUF_BLOCKS)):
        raise ValueError(f"unknown blocks {', '.join(unknown)}; known: {', '.join(GGUF_BLOCKS)}")
    return "|".join(f"({one})" for one in blocks.values()) if pattern is None else pattern


def settings_of_name(kwargs: dict[str, Any]) -> None:
    """Makes a `QuantizationConfig` of a name, such as "int8", under `quantization_config` of `from_pretrained`."""
    given = kwargs.get("quantization_config")
    if isinstance(given, str):
        kwargs["quantization_config"] = QuantizationConfig(given)
    elif given is not None and not isinstance(given, Mapping | QuantizationConfigMixin):
        raise TypeError(
            "quantization_config must be a QuantizationConfig, one of transformers' or a name such as 'int8', not "
            f"{type(given).__name__}"
        )
