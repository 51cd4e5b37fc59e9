"""`from_pretrained` of GPTQ, AWQ, torchao and compressed-tensors checkpoints: `QuantizedLinear` of the same codes.

Experts that are not in four-bit floats, heads, layers whose groups have other sizes than the config says and eight bits
with a zero point are decoded to plain weights, since no quantized layer here says the same.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from easytorch.bridge.core.json_files import read_json
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.dtypes import to_torch
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.registry import find
from easytorch.layers.packed_weights import PackedWeight, TorchaoWeight, from_awq, from_gptq
from easytorch.protocol.checkpoint_files import TORCH_FILES, has_torch_weights, hub_snapshot
from easytorch.protocol.compressed_loading import PLAIN_FORMATS, compressed_in, compressed_weight
from easytorch.protocol.flax_loading import load_state_dict
from easytorch.protocol.fp4_loading import COMPRESSED, FORMATS, GPT_OSS, read_fp4
from easytorch.protocol.lazy import lazy_init
from easytorch.protocol.quantization import linear_layers
from easytorch.protocol.quantization_config import QuantizationConfig
from easytorch.protocol.torchao_loading import (
    PREFIX,
    decoded_stack,
    int4_tensors,
    int4_weight,
    most_common,
    stacks_in,
    torchao_weight,
    warn_activations,
    weights_in,
)

_LOG = logging.getLogger(__name__)
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}
_CONFIG_LIMIT = 16 << 20


class PackedCheckpoint(NamedTuple):
    """A folder whose config says how its weights are packed; of GPTQ and AWQ in how many bits."""

    path: Path
    method: str
    bits: int
    group_size: int | None
    zeros_minus_one: bool
    ordered: bool = False
    kind: Any = None


def packed_checkpoint(name_or_path: Any, kwargs: Mapping[str, Any]) -> PackedCheckpoint | None:
    """The checkpoint at `name_or_path`, a folder or a name on the Hub, that this module reads; None for another, or
    where a config is given."""
    if name_or_path is None or kwargs.get("quantization_config") is not None:
        return None
    folder = Path(name_or_path) / (kwargs.get("subfolder") or "")
    if not folder.is_dir():
        snapshot = hub_snapshot(str(name_or_path), kwargs, _is_read)
        if snapshot is None:
            return None
        folder = snapshot
    file, config = folder / "config.json", kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        given = getattr(config, "quantization_config", None)
    else:
        given = read_json(file, limit=_CONFIG_LIMIT).get("quantization_config") if file.is_file() else None
    settings = given if isinstance(given, Mapping) or given is None else given.to_dict()
    if not folder.is_dir() or not (_weights_file(folder) != folder or has_torch_weights(folder, {})):
        return None
    if settings is None:
        settings = _legacy_settings(folder)
    if settings is not None and settings.get("quant_method") == "torchao":
        warn_activations(settings)
        return PackedCheckpoint(folder, "torchao", 0, None, False, kind=settings.get("quant_type"))
    if settings is not None and _is_compressed(settings):
        _warn_activations(settings)
        if settings.get("format") in PLAIN_FORMATS:
            return PackedCheckpoint(folder, COMPRESSED, 0, None, False, kind=settings["format"])
        return PackedCheckpoint(folder, settings["quant_method"], 4, None, False)
    if settings is None or settings.get("quant_method") not in _BITS:
        return None
    method, bits, size = settings["quant_method"], settings.get("bits"), settings.get("group_size")
    if type(bits) is not int or bits not in _BITS[method]:
        known = ", ".join(map(str, _BITS[method]))
        raise CheckpointError(f"is {method} of bits={bits!r}; {known} are read", file=file)
    if type(size) is not int or (size < 1 and size != -1):
        raise CheckpointError(f"is {method} of group_size={size!r}, which must be -1 or at least 1", file=file)
    layout = str(settings.get("checkpoint_format") or settings.get("version") or settings.get("format") or "").lower()
    known_layouts = ("", "gptq", "gptq_v2") if method == "gptq" else ("", "gemm")
    if layout not in known_layouts:
        raise CheckpointError(
            f"is {method} in the layout {layout!r}; {', '.join(filter(None, known_layouts))} are read", file=file
        )
    return PackedCheckpoint(
        folder, method, bits, None if size == -1 else size, layout != "gptq_v2", bool(settings.get("desc_act"))
    )


def _is_read(settings: Mapping[str, Any]) -> bool:
    return settings.get("quant_method") in (*_BITS, "torchao") or _is_compressed(settings)


def _is_compressed(settings: Mapping[str, Any]) -> bool:
    """Whether these are gpt-oss' experts or a format of compressed-tensors that is read."""
    if settings.get("quant_method") == GPT_OSS:
        return not settings.get("dequantize")  # else transformers' loader unpacks the experts
    return settings.get("quant_method") == COMPRESSED and settings.get("format") in (*FORMATS, *PLAIN_FORMATS)


def _warn_activations(settings: Mapping[str, Any]) -> None:
    groups = (settings.get("config_groups") or {}).values()
    if any(isinstance(one, Mapping) and one.get("input_activations") for one in groups):
        _LOG.warning("activations are not quantized here: the checkpoint's are, its weights are taken as they are")


def _legacy_settings(folder: Path) -> dict[str, Any] | None:
    """The settings in the files that AutoGPTQ and AutoAWQ wrote before config.json had them."""
    if (file := folder / "quantize_config.json").is_file():
        return {"quant_method": "gptq", **read_json(file, limit=_CONFIG_LIMIT)}
    if (file := folder / "quant_config.json").is_file():
        stated = read_json(file, limit=_CONFIG_LIMIT)
        renamed = {"bits": stated.get("w_bit"), "group_size": stated.get("q_group_size")}
        return {"quant_method": "awq", **renamed, **stated}
    return None


def load_packed(
    load: Callable[..., Any],
    model_class: Any,
    packed: PackedCheckpoint,
    name_or_path: Any,
    config: Any,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any], Mapping[str, Any]]:
    """(model, loading info, weights) of `load`, a `from_pretrained`, given the weights as a state dict."""
    return load_state_dict(
        load, model_class.config_class, packed.path, name_or_path, config, model_args, kwargs,
        read=lambda made: _read(packed, model_class, made),
    )  # fmt: skip


def _read(
    packed: PackedCheckpoint, model_class: Any, config: PreTrainedConfig
) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
    config = copy.deepcopy(config)
    config.__dict__.pop("quantization_config", None)
    model = lazy_init(model_class, copy.deepcopy(config))
    layers, prefix = linear_layers(model), f"{model.base_model_prefix}."
    format_, file = find(_weights_file(packed.path), prefer="torch")
    if packed.method == "torchao":
        with format_.open(file) as reader:
            return _read_torchao(reader, file, layers, prefix, config, packed.kind)
    if packed.kind in PLAIN_FORMATS:
        with format_.open(file) as reader:
            return _read_compressed(reader, file, layers, prefix, config)
    if packed.method in (GPT_OSS, COMPRESSED):
        with format_.open(file) as reader:
            made, state, decoded = read_fp4(reader, file, model, config, pattern_of, find_layer)
        _warn_decoded(decoded, packed.method)
        if made is not None:
            config.quantization_config = QuantizationConfig(**made).to_dict()
        return config, state
    with format_.open(file) as reader:
        names = list(reader.tensors)
        state = {name: to_torch(reader.read(name)) for name in names if name.rpartition(".")[2] not in _PARTS}
        taken, decoded = [], []
        for name in (one.removesuffix(".qweight") for one in names if one.endswith(".qweight")):
            parts = {part: to_torch(reader.read(f"{name}.{part}")) for part in _PARTS if f"{name}.{part}" in names}
            weight = _weight(packed, name, parts, file)
            layer = find_layer(name, layers, prefix)
            own = None if layer is None else weight.parts(packed.group_size or len(weight.groups), packed.ordered)
            if own is None:
                decoded.append(name)
                state[f"{name}.weight"] = weight.dequantized()
                continue
            assert layer is not None
            taken.append(layer)
            state |= {f"{name}.weight_{part}": tensor for part, tensor in own.items()}
    _warn_decoded(decoded, packed.method)
    if not taken and not decoded:
        raise CheckpointError(f"its config says {packed.method}, and it holds no qweight", file=file)
    if taken:
        size = -1 if packed.group_size is None else packed.group_size
        pattern = pattern_of(taken, layers)
        settings = QuantizationConfig(
            "affine", size, packed.bits, pattern=pattern, quantize_tensors=False, desc_act=packed.ordered
        )
        config.quantization_config = settings.to_dict()
    return config, state


def _read_torchao(
    reader: Reader, file: Path, layers: Collection[str], prefix: str, config: PreTrainedConfig, kind: Any
) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
    names = {
        layer: {part: f"{layer}.{PREFIX}{part}" for part in parts}
        for layer, parts in weights_in(reader.tensors).items()
    }
    stacks = stacks_in(reader.tensors)
    packed = {name for parts in (*names.values(), *stacks.values()) for name in parts.values()}
    state = {name: to_torch(reader.read(name)) for name in reader.tensors if name not in packed}
    weights, decoded = {}, list(stacks)
    for stack, parts in stacks.items():
        state[stack] = decoded_stack(stack, {part: to_torch(reader.read(name)) for part, name in parts.items()}, file)
    of_int4 = int4_tensors(reader.metadata, kind, names)
    for layer, parts in names.items():
        tensors = {part: to_torch(reader.read(name)) for part, name in parts.items()}
        weight = (int4_weight if layer in of_int4 else torchao_weight)(layer, tensors, file)
        if isinstance(weight, torch.Tensor):
            decoded.append(layer)
            state[f"{layer}.weight"] = weight
        else:
            weights[layer] = weight
    if not names and not stacks:
        raise CheckpointError("its config says torchao, and it holds no quantized weight", file=file)
    return _settled(weights, state, decoded, layers, prefix, config, "torchao")


def _read_compressed(
    reader: Reader, file: Path, layers: Collection[str], prefix: str, config: PreTrainedConfig
) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
    names, left_out = compressed_in(reader.tensors)
    packed = {name for parts in names.values() for name in parts.values()} | left_out
    state = {name: to_torch(reader.read(name)) for name in reader.tensors if name not in packed}
    if not names:
        raise CheckpointError("its config says compressed-tensors, and it holds no quantized weight", file=file)
    weights, decoded = {}, []
    for layer, parts in names.items():
        tensors = {part: to_torch(reader.read(name)) for part, name in parts.items()}
        weight = compressed_weight(layer, tensors, file)
        if isinstance(weight, torch.Tensor):
            decoded.append(layer)
            state[f"{layer}.weight"] = weight
        else:
            weights[layer] = weight
    return _settled(weights, state, decoded, layers, prefix, config, COMPRESSED)


def _settled(
    weights: Mapping[str, TorchaoWeight],
    state: dict[str, torch.Tensor],
    decoded: list[str],
    layers: Collection[str],
    prefix: str,
    config: PreTrainedConfig,
    method: str,
) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
    """The config and the state with `weights`: codes where the model has such a layer, of the format most have."""
    own = {name: found for name in weights if (found := find_layer(name, layers, prefix)) is not None}
    common = most_common({name: weights[name] for name in own})
    taken = []
    for name, weight in weights.items():
        if name in own and common is not None and weight.settings() == common:
            taken.append(own[name])
            state |= {f"{own[name]}.weight_{part}": tensor for part, tensor in weight.parts(common).items()}
        else:
            decoded.append(name)
            state[f"{name}.weight"] = weight.dequantized()
    _warn_decoded(decoded, method)
    if taken and common is not None:
        size = -1 if common.group_size is None else common.group_size
        settings = QuantizationConfig(
            common.format, size, common.bits, pattern=pattern_of(taken, layers), quantize_tensors=False
        )
        config.quantization_config = settings.to_dict()
    return config, state


def _weights_file(folder: Path) -> Path:
    """The only safetensors file of a folder, whose name AutoGPTQ chose by its settings, or the folder."""
    found = sorted(folder.glob("*.safetensors"))
    usual = any((folder / name).is_file() for name in TORCH_FILES)
    return found[0] if len(found) == 1 and not usual else folder


def find_layer(name: str, layers: Collection[str], prefix: str) -> str | None:
    """The model's name of a layer of the checkpoint, which may be with or without the base model's prefix."""
    return next((one for one in (name, name.removeprefix(prefix), prefix + name) if one in layers), None)


def _warn_decoded(names: list[str], method: str) -> None:
    if names:
        _LOG.warning("%d %s layers are decoded to plain weights, %s, ...", len(names), method, names[0])


def _weight(packed: PackedCheckpoint, name: str, parts: dict[str, torch.Tensor], file: Path) -> PackedWeight:
    if missing := [part for part in _PARTS[:3] if part not in parts]:
        raise CheckpointError(f"is missing beside {name}.qweight", file=file, tensor=f"{name}.{missing[0]}")
    qweight, qzeros, scales = (parts[part] for part in _PARTS[:3])
    a_number = 32 // packed.bits if packed.bits != 3 else 32 / 3
    if packed.method == "gptq":
        columns, rows = round(qweight.shape[0] * a_number), qweight.shape[1]
    else:
        columns, rows = qweight.shape[0], qweight.shape[1] * 8
    size = packed.group_size or columns
    groups = -(-columns // size)
    g_idx = parts.get("g_idx")
    expected = {"scales": (groups, rows), "qzeros": (groups, -(-rows * packed.bits // 32)), "g_idx": (columns,)}
    for part, shape in expected.items():
        if part in parts and tuple(parts[part].shape) != shape:
            raise CheckpointError(
                f"has the shape {tuple(parts[part].shape)}, and {shape} beside a qweight {tuple(qweight.shape)} of "
                f"{packed.bits} bits in groups of {size}",
                file=file,
                tensor=f"{name}.{part}",
            )
    if any(one.dtype != torch.int32 for one in (qweight, qzeros)):
        raise CheckpointError(f"is {qweight.dtype}, and int32 is read", file=file, tensor=f"{name}.qweight")
    if g_idx is not None and not bool(((g_idx >= 0) & (g_idx < groups)).all()):
        raise CheckpointError(f"names groups beyond the {groups} there are", file=file, tensor=f"{name}.g_idx")
    if packed.method == "awq":
        return from_awq(qweight, qzeros, scales, size)
    return from_gptq(qweight, qzeros, scales, g_idx, packed.bits, size, zeros_minus_one=packed.zeros_minus_one)


def pattern_of(names: Collection[str], known: Collection[str]) -> str:
    """A regular expression that finds `names` and no other of `known`: short where all layers of a kind are in it."""
    exact = {re.escape(name) for name in names}
    any_layer = {re.sub(r"\\\.\d+(?=\\\.)", r"\\.\\d+", name) for name in exact}
    short = f"^({'|'.join(sorted(any_layer))})$"
    found = {name for name in known if re.search(short, name)}
    return short if found == set(names) else f"^({'|'.join(sorted(exact))})$"
