"""`from_pretrained(..., gguf_file=...)`: linear layers, heads and experts keep the file's blocks (`QuantizedLinear`).

Embeddings, heads that are tied to them, norms, and what is in blocks that are not of `GGUF_BLOCKS`, are decoded.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from easytorch.bridge.checkpoint import open_checkpoint
from easytorch.bridge.core.config import Config
from easytorch.bridge.dtypes import to_torch
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.gguf_files.file import Gguf, GgufReader
from easytorch.bridge.rules.plan import Step
from easytorch.bridge.rules.planned_reader import PlannedReader
from easytorch.bridge.rules.transforms import get_transform
from easytorch.bridge.schemes.registry import TORCH
from easytorch.layers.quantized_formats import GGUF_BLOCKS
from easytorch.protocol.checkpoint_files import HUB_ARGUMENTS
from easytorch.protocol.expert_names import EXPERT, PARTS, STACKS, layer_number
from easytorch.protocol.flax_loading import load_state_dict
from easytorch.protocol.lazy import lazy_init
from easytorch.protocol.packed_loading import find_layer, pattern_of
from easytorch.protocol.quantization import linear_layers, stacks_of_experts
from easytorch.protocol.quantization_config import GGUF, QuantizationConfig

_LOG = logging.getLogger(__name__)


def gguf_source(name_or_path: Any, kwargs: dict[str, Any]) -> Path | None:
    """The GGUF file whose blocks are kept; None where there is none, or it is for transformers to unpack.

    That is `gguf_file`, as in transformers, where `quantization_config` is None or a `GgufConfig` (a dict of
    `{"quant_method": "gguf"}` too) without `dequantize`; with such a config also the GGUF file of a folder. Both
    arguments are popped then.
    """
    settings = _settings(kwargs)
    if settings.get("quant_method") == GGUF and settings.get("dequantize"):
        if isinstance(kwargs["quantization_config"], Mapping) or kwargs.get("gguf_file") is None:
            del kwargs["quantization_config"]
        return None
    file = _gguf_file(name_or_path, kwargs)
    if file is None or _stated_config(file) is None:
        return None
    kwargs.pop("gguf_file", None)
    kwargs.pop("quantization_config", None)
    return file


def gguf_config(name_or_path: Any, kwargs: Mapping[str, Any]) -> PreTrainedConfig | None:
    """The config that the file of `gguf_source` states, which may be of a family that transformers does not read."""
    file = _gguf_file(name_or_path, kwargs)
    content = None if file is None else _stated_config(file)
    return None if content is None else CONFIG_MAPPING[content["model_type"]].from_dict(content)


def _settings(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    given = kwargs.get("quantization_config")
    return {} if given is None else given if isinstance(given, Mapping) else given.to_dict()


def _gguf_file(name_or_path: Any, kwargs: Mapping[str, Any]) -> Path | None:
    """The file whose blocks are to be kept."""
    name, settings = kwargs.get("gguf_file"), _settings(kwargs)
    of_gguf = settings.get("quant_method") == GGUF and not settings.get("dequantize")
    if name_or_path is None or not (of_gguf or (name is not None and not settings)):
        return None
    return _file(name_or_path, name, kwargs)


def _file(name_or_path: Any, name: str | None, kwargs: Mapping[str, Any]) -> Path | None:
    folder = Path(name_or_path) / (kwargs.get("subfolder") or "")
    if name is not None and Path(name).is_file():
        return Path(name)
    if folder.is_dir():
        found = Gguf().detect(folder) if name is None else folder / name
        if name is None and found is None:
            raise CheckpointError("holds no GGUF file, which quantization_config names; give gguf_file", file=folder)
        return found if found is not None and found.is_file() else None  # transformers says that it is missing
    if name is None:
        return None
    where = {key: kwargs[key] for key in HUB_ARGUMENTS if kwargs.get(key) is not None}
    cached = cached_file(name_or_path, name, **where)
    return None if cached is None else Path(cached)


def _stated_config(file: Path) -> dict[str, Any] | None:
    """config.json's content; None for an architecture whose names the bridge lacks, which transformers may know."""
    if importlib.util.find_spec("gguf") is None:
        return None
    stamp = file.stat()
    return copy.deepcopy(_read_config(file, stamp.st_mtime_ns, stamp.st_size))


@functools.lru_cache(maxsize=1)
def _read_config(file: Path, mtime_ns: int, size: int) -> dict[str, Any] | None:
    """`reader.config()`: a load asks several times, and opening a file reads the vocabulary in it."""
    with Gguf().open(file) as reader:
        return reader.config() if isinstance(reader, GgufReader) else None


def load_gguf(
    load: Callable[..., Any],
    model_class: Any,
    file: Path,
    name_or_path: Any,
    config: Any,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any], Mapping[str, Any]]:
    """(model, loading info, weights) of `load`, a `from_pretrained`, given the file's blocks as a state dict."""
    if not isinstance(config, PreTrainedConfig) and not (Path(name_or_path) / "config.json").is_file():
        stated = _stated_config(file)
        assert stated is not None, "gguf_source names no other file"
        config = model_class.config_class.from_dict(stated)
    return load_state_dict(
        load, model_class.config_class, file, name_or_path, config, model_args, kwargs,
        read=lambda made: _read(file, model_class, made),
    )  # fmt: skip


def _read(
    file: Path, model_class: type[PreTrainedModel], config: PreTrainedConfig
) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    config = copy.deepcopy(config)
    config.__dict__.pop("quantization_config", None)
    model = lazy_init(model_class, copy.deepcopy(config))
    content = Config(file.parent / "config.json", config.to_dict())
    with open_checkpoint(file, config=content) as checkpoint:
        reader = checkpoint.in_scheme(TORCH, strict=False).reader
        assert isinstance(reader, PlannedReader) and isinstance(checkpoint.reader, GgufReader)
        blocks = _Blocks(model, checkpoint.reader)
        state = {name: blocks.tensors(name, reader.step(name)) for name in reader.tensors}
        stacked = blocks.stacks()
        taken: dict[str, Tensor] = {}
        for name, tensors in state.items():
            if tensors is not None:
                taken |= tensors
            elif name not in blocks.in_stacks:
                taken[name] = to_torch(reader.read(name)).clone()
        taken |= stacked
    if blocks.decoded:
        first, kinds = blocks.decoded[0][0], ", ".join(sorted({kind for _, kind in blocks.decoded}))
        _LOG.warning("%d layers in blocks of %s are decoded, %s, ...", len(blocks.decoded), kinds, first)
    if blocks.kinds:
        patterns = {
            kind: pattern_of([one for one, own in blocks.kinds.items() if own == kind], blocks.names)
            for kind in sorted(set(blocks.kinds.values()))
        }
        # a module of experts is chosen by its own name, and each of its stacks by that of the stack
        modules = "|".join(f"^{re.escape(one)}$" for one in blocks.modules)
        pattern = "|".join([*(f"({one})" for one in patterns.values()), *([modules] if modules else [])])
        config.quantization_config = QuantizationConfig(
            GGUF, pattern=pattern, blocks=patterns, quantize_tensors=bool(modules)
        ).to_dict()
    return config, taken


class _Blocks:
    """Which layers of `model` keep the blocks of `file`: `kinds`, layer or stack -> block."""

    def __init__(self, model: PreTrainedModel, file: GgufReader) -> None:
        self._model, self._file = model, file
        self._layers, self._prefix = linear_layers(model, heads=True), f"{model.base_model_prefix}."
        self._experts = stacks_of_experts(model)
        self.names = {*self._layers, *(f"{name}.{one}" for name, found in self._experts.items() for one in found)}
        self.kinds: dict[str, str] = {}
        self.modules: list[str] = []
        self.decoded: list[tuple[str, str]] = []
        self.in_stacks: set[str] = set()
        self._stacked: dict[tuple[int, str], tuple[str, list[str]]] = {}

    def tensors(self, name: str, step: Step) -> dict[str, Tensor] | None:
        """The buffers of the layer whose weight is the torch tensor `name`; None where it is decoded."""
        kind = self._file.tensors[step.sources[0]].packed.lower() if len(step.sources) == 1 else ""
        if not kind:
            return None
        if len(step.targets) > 1:
            self._add_expert(name, step)
            return None
        layer = find_layer(name.removesuffix(".weight"), self._layers, self._prefix)
        if layer is None:
            return None
        rows = self._rows(step, isinstance(self._model.get_submodule(layer), Conv1D))
        if kind not in GGUF_BLOCKS or rows is None:
            self.decoded.append((layer, kind))
            return None
        self.kinds[layer] = kind
        return {f"{layer}.weight_codes": _tensor(rows), f"{layer}.weight_scale_bits": _ones(1, 1)}

    def _rows(self, step: Step, conv1d: bool) -> np.ndarray | None:
        """The packed rows (out_features, bytes) in torch's order."""
        packed = self._file.read_packed(step.sources[0])
        shape = self._file.tensors[step.sources[0]].shape
        rows = packed.reshape(shape[0], -1) if len(shape) == 2 else None
        if rows is None or conv1d != (step.transform is get_transform("linear")):
            return None
        if conv1d or step.transform is get_transform("identity"):
            return rows  # Conv1D's weight is (in, out), which GGUF turns
        return step.transform.to_torch(rows)[0] if step.transform.moves_rows else None

    def _add_expert(self, name: str, step: Step) -> None:
        found, layer = EXPERT.fullmatch(name.removesuffix(".weight")), layer_number(name)
        if found is None or layer is None or found["part"] not in PARTS:
            return
        key = layer, PARTS[found["part"]]
        self._stacked.setdefault(key, (step.sources[0], []))[1].append(name)

    def stacks(self) -> dict[str, Tensor]:
        """The buffers of the experts, whose gate and up have one kind of block where they are one stack."""
        made: dict[str, Tensor] = {}
        for module, stacks in self._experts.items():
            layer = layer_number(module)
            if layer is None or getattr(self._model.get_submodule(module), "is_transposed", False):
                continue
            for parts, stack in STACKS.items():
                sources = [self._stacked.get((layer, part)) for part in parts]
                if stack not in stacks or None in sources:
                    continue
                kinds = {self._file.tensors[one[0]].packed.lower() for one in sources if one is not None}
                if len(kinds) > 1 or not kinds <= set(GGUF_BLOCKS):
                    self.decoded.append((f"{module}.{stack}", "/".join(sorted(kinds))))
                    continue
                arrays = [self._of_experts(one[0]) for one in sources if one is not None]
                codes = _tensor(np.concatenate(arrays, 1) if len(arrays) > 1 else arrays[0])
                made[f"{module}.codes_{stack}"] = codes
                made[f"{module}.scale_bits_{stack}"] = _ones(len(codes), 1, 1)
                self.kinds[f"{module}.{stack}"] = kinds.pop()
                self.in_stacks |= {name for one in sources if one is not None for name in one[1]}
                if module not in self.modules:
                    self.modules.append(module)
        return made

    def _of_experts(self, source: str) -> np.ndarray:
        shape = self._file.tensors[source].shape
        return self._file.read_packed(source).reshape(*shape[:2], -1)


def _tensor(array: np.ndarray) -> Tensor:
    """A copy, since the file is closed again."""
    return torch.from_numpy(np.array(array))


def _ones(*shape: int) -> Tensor:
    """Scales of one, as `QuantizedLinear` has the bits of scales."""
    return torch.ones(shape, dtype=torch.float32).view(torch.int32)
