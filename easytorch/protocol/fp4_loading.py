"""Checkpoints of four-bit floats (E2M1): gpt-oss', whose experts are MXFP4, and compressed-tensors' mxfp4 and nvfp4.

gpt-oss has stacks of experts, `experts.gate_up_proj_blocks` (E, N, K / 32, 16) and `_scales` (E, N, K / 32), uint8.
compressed-tensors has layers, `layer.weight_packed` (N, K / 2), `weight_scale` (N, groups) and, of nvfp4,
`weight_global_scale` (1,); experts too, one by one. Layers and experts keep their codes; what no quantized layer of the
model holds is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from easytorch.bridge.core.reader import Reader
from easytorch.bridge.dtypes import to_torch
from easytorch.bridge.errors import CheckpointError
from easytorch.layers.packed_weights import Fp4Weight, fp4_weight
from easytorch.protocol.expert_names import EXPERT, PARTS, STACKS, layer_number
from easytorch.protocol.quantization import linear_layers, stacks_of_experts

GPT_OSS, COMPRESSED = "mxfp4", "compressed-tensors"
FORMATS = ("mxfp4-pack-quantized", "nvfp4-pack-quantized")
_ENDS = {"weight_packed": "weight_packed", "weight_scale": "weight_scale", "weight_global_scale": "weight_global_scale"}
_LEFT_OUT = ("input_global_scale", "weight_shape")
_BLOCKS = re.compile(r"(?P<module>.+)\.(?P<stack>\w+_proj)_(?P<part>blocks|scales)")


class Fp4Checkpoint:
    """The weights of an open checkpoint by layer, and by stack of experts."""

    def __init__(self, reader: Reader, file: Path) -> None:
        self._reader, self._file = reader, file
        self.layers: dict[str, Fp4Weight] = {}
        self.stacks: dict[tuple[str, str], Fp4Weight] = {}
        taken: set[str] = set()
        for name in reader.tensors:
            stem, _, leaf = name.rpartition(".")
            found = _BLOCKS.fullmatch(name)
            if leaf == "weight_packed":
                self.layers[stem] = self._layer(stem)
                taken |= {f"{stem}.{end}" for end in (*_ENDS, *_LEFT_OUT)}
            elif found is not None and found["part"] == "blocks":
                self.stacks[found["module"], found["stack"]] = self._stack(name)
                taken |= {name, f"{name.removesuffix('blocks')}scales"}
        self.plain = [name for name in reader.tensors if name not in taken]

    def _read(self, name: str) -> Tensor:
        if name not in self._reader.tensors:
            raise CheckpointError("is missing beside its codes", file=self._file, tensor=name)
        return to_torch(self._reader.read(name)).clone()

    def _layer(self, name: str) -> Fp4Weight:
        packed, scale = self._read(f"{name}.weight_packed"), self._read(f"{name}.weight_scale")
        whole = f"{name}.weight_global_scale"
        factor = self._read(whole) if whole in self._reader.tensors else None
        self._check(f"{name}.weight_packed", packed, scale)
        if factor is not None and (factor.numel() != 1 or scale.dtype == torch.uint8):
            raise CheckpointError(
                f"is {tuple(factor.shape)} beside scales of {scale.dtype}", file=self._file, tensor=whole
            )
        return fp4_weight(packed, scale, factor)

    def _stack(self, name: str) -> Fp4Weight:
        blocks, scales = self._read(name), self._read(f"{name.removesuffix('blocks')}scales")
        if blocks.dim() != 4 or blocks.shape[-1] != 16:
            raise CheckpointError(
                f"is {tuple(blocks.shape)}, not (experts, N, K / 32, 16)", file=self._file, tensor=name
            )
        packed = blocks.flatten(2)
        self._check(name, packed, scales)
        return fp4_weight(packed, scales)

    def _check(self, name: str, packed: Tensor, scale: Tensor) -> None:
        known = scale.dtype in (torch.uint8, torch.float8_e4m3fn)
        fits = packed.shape[:-1] == scale.shape[:-1] and scale.shape[-1] > 0
        size = 2 * packed.shape[-1] / scale.shape[-1] if fits else 0
        if packed.dtype != torch.uint8 or not known or size != (32 if scale.dtype == torch.uint8 else 16):
            raise CheckpointError(
                f"is {tuple(packed.shape)} {packed.dtype} beside scales {tuple(scale.shape)} {scale.dtype}; read are "
                "bytes of two numbers, with 32 columns a uint8 scale or 16 an fp8 one",
                file=self._file,
                tensor=name,
            )

    def read_plain(self, name: str) -> Tensor:
        return to_torch(self._reader.read(name)).clone()


def read_fp4(
    reader: Reader, file: Path, model: PreTrainedModel, config: PreTrainedConfig, pattern_of: Any, layer_of: Any
) -> tuple[dict[str, Any] | None, dict[str, Tensor], list[str]]:
    """(the arguments of a `QuantizationConfig`, the state, the names of what is decoded) of an open checkpoint.

    model: on the meta device. pattern_of, layer_of: those of `packed_loading`.
    """
    checkpoint = Fp4Checkpoint(reader, file)
    if not checkpoint.layers and not checkpoint.stacks:
        raise CheckpointError(
            "its config says four-bit floats, and it holds neither weight_packed nor _blocks", file=file
        )
    state = {name: checkpoint.read_plain(name) for name in checkpoint.plain}
    layers, experts = linear_layers(model), stacks_of_experts(model)
    prefix = f"{model.base_model_prefix}."
    kinds = [one.format for one in (*checkpoint.layers.values(), *checkpoint.stacks.values())]
    kind = max(sorted(set(kinds)), key=kinds.count)
    taken, decoded = [], []
    of_experts: dict[tuple[int, str], dict[int, str]] = {}
    for name, weight in checkpoint.layers.items():
        layer = layer_of(name, layers, prefix)
        found, number = EXPERT.fullmatch(name), layer_number(name)
        if layer is not None and weight.format == kind:
            taken.append(layer)
            state |= {f"{layer}.weight_{part}": tensor for part, tensor in weight.parts().items()}
        elif found is not None and number is not None and found["part"] in PARTS and weight.format == kind:
            of_experts.setdefault((number, PARTS[found["part"]]), {})[int(found["number"])] = name
        else:
            decoded.append(name)
            state[f"{name}.weight"] = weight.dequantized()
    stacked, used = _stacked(model, experts, of_experts, checkpoint)
    for (module, stack), weight in checkpoint.stacks.items():
        own = layer_of(module, experts, prefix)
        if own is None or stack not in experts[own] or weight.format != kind:
            decoded.append(f"{module}.{stack}")
            state[f"{module}.{stack}"] = weight.dequantized().transpose(1, 2).contiguous()
            continue
        stacked.setdefault(own, {})[stack] = weight
    for name in {one for members in of_experts.values() for one in members.values()} - used:
        decoded.append(name)
        state[f"{name}.weight"] = checkpoint.layers[name].dequantized()
    for module, found_stacks in stacked.items():
        if set(found_stacks) != set(experts[module]):
            raise CheckpointError(
                f"of {module} only {', '.join(sorted(found_stacks))} is in four bits, and {', '.join(experts[module])} "
                "are quantized together",
                file=file,
            )
        taken.append(module)
        for stack, weight in found_stacks.items():
            state |= {f"{module}.{part}_{stack}": tensor for part, tensor in weight.parts().items()}
    if not taken:
        return None, state, decoded
    pattern = pattern_of(taken, {*layers, *experts})
    return {"dtype": kind, "pattern": pattern, "quantize_tensors": bool(stacked)}, state, decoded


def _stacked(
    model: PreTrainedModel,
    experts: Mapping[str, list[str]],
    members: Mapping[tuple[int, str], Mapping[int, str]],
    checkpoint: Fp4Checkpoint,
) -> tuple[dict[str, dict[str, Fp4Weight]], set[str]]:
    """The stacks of modules all of whose experts are there, and the names of these."""
    made: dict[str, dict[str, Fp4Weight]] = {}
    used: set[str] = set()
    for module, stacks in experts.items():
        number, owner = layer_number(module), model.get_submodule(module)
        if number is None or bool(getattr(owner, "is_transposed", False)):
            continue
        found: dict[str, Fp4Weight] = {}
        names: set[str] = set()
        for parts, stack in STACKS.items():
            count = owner.get_parameter(stack).shape[0] if stack in stacks else 0
            each = [members.get((number, part), {}) for part in parts]
            if stack not in stacks or any(set(one) != set(range(count)) for one in each):
                continue
            weights = [[checkpoint.layers[one[index]] for index in range(count)] for one in each]
            found[stack] = Fp4Weight(
                torch.cat([torch.stack([one.codes for one in part]) for part in weights], 1),
                torch.cat([torch.stack([one.scale for one in part]) for part in weights], 1),
            )
            names |= {name for one in each for name in one.values()}
        if set(found) == set(stacks):
            made[module] = found
            used |= names
    return made, used
