"""`quantize`: a model's linear layers and experts in few bits, saved and loaded as such."""

from __future__ import annotations

import copy
import functools
import logging
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from easytorch.argument_types import check_types
from easytorch.layers import layers_step
from easytorch.layers.quantized import QUANTIZED, QuantizedLinear, QuantizedStacks, is_quantized, quantize_stacks
from easytorch.layers.simulated import is_simulated, simulate, stop_simulating
from easytorch.protocol.dtypes import dtype_of, to_dtype
from easytorch.protocol.lazy import refuse_offloaded
from easytorch.protocol.quantization_config import METHOD, QuantizationConfig

_LOG = logging.getLogger(__name__)
# Routers choose experts by small differences; the heads of classifiers are small.
_LEFT = re.compile(r"(^|\.)(router|gate|shared_expert_gate|score|classifier|qa_outputs|lm_head|embed_out)$")
_STACKS = ("gate_up_proj", "up_proj", "gate_proj", "down_proj")
_NAMED = 3


@check_types("quantization_config")
def quantize(
    model: PreTrainedModel,
    quantization_config: QuantizationConfig | str | None = None,
    quantize_tensors: bool = True,
    verbose: bool | None = None,
    **settings: Any,
) -> Any:
    """Quantizes the weights of linear layers and experts of `model` in place, and returns it.

    quantization_config: a `QuantizationConfig`, or the name of a format, with its settings as keywords: "int8" (the
    default), "int4", "nf4", "fp8", "mxfp4", ... quantize_tensors: the stacked weights of experts too. The weights are
    frozen; biases, norms, embeddings and heads stay as they are, and adapters train (`apply_lora_to_layers`).
    `save_pretrained` writes codes and scales, which `from_pretrained` loads.

    `ValueError` where no layer is left to quantize, the model is quantized or carries an adapter, or a weight is not
    finite; the model is then unchanged.
    """
    config = quantization_config
    if config is None or isinstance(config, str):
        config = QuantizationConfig("int8" if config is None else config, quantize_tensors=quantize_tensors, **settings)
    elif settings:
        raise ValueError(
            f"{', '.join(settings)}: give settings with a format's name, or a QuantizationConfig with them"
        )
    if not isinstance(config, QuantizationConfig):
        raise TypeError(f"quantization_config must be a QuantizationConfig or a name, not {type(config).__name__}")
    if is_quantized(model) or getattr(model, "is_quantized", False) or _simulated(model):
        raise ValueError(f"{type(model).__name__} is quantized already; dequantize it first")
    refuse_offloaded(model, "quantize")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError("the model carries an adapter: unwrap_lora_to_layers first, or apply it after quantize")
    if config.quantize_tensors and not quantize_tensors:
        config = copy.copy(config)
        config.quantize_tensors = False  # as the saved model is to be read again
    layers, stacks = _chosen(model, config, experts=config.quantize_tensors)
    for name, weight in _weights(model, layers, stacks):
        if not weight.is_meta and not bool(weight.isfinite().all()):
            raise ValueError(f"{name} has infinities or NaN, which have no codes")
    if config.simulate:
        every = [(name, "weight") for name in layers] + [(name, one) for name, found in stacks.items() for one in found]
        for name, parameter in every:
            module = model.get_submodule(name)
            transposed = isinstance(module, Conv1D) or bool(getattr(module, "is_transposed", False))
            simulate(module, parameter, config.settings, transposed)
        return model
    config_of_its_own(model)
    layers_step.forget(model)  # else all weights stay in memory beside their codes
    _replace(model, config, layers, stacks)
    marked: Any = model
    marked.hf_quantizer = EasyTorchQuantizer(config, pre_quantized=True)
    model.config.quantization_config = config
    marked.is_quantized, marked.quantization_method = True, METHOD
    if verbose:
        _LOG.warning("%s: %d layers and %d stacks of experts", config.settings, len(layers), len(stacks))
    return model


def config_of_its_own(model: PreTrainedModel) -> None:
    """Gives the model and its modules a copy of their config: models that are built of one config hold the same one."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        held = vars(module).get("config")
        if held is not None and id(held) in copies:
            module.config = copies[id(held)]


@check_types()
def dequantize(model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> Any:
    """The reverse of `quantize`, but for the rounding: plain linear layers and experts, of `dtype` or as before.

    Weights that `simulate` rounds in every forward pass are those that were trained again, not rounded.
    """
    dtype = None if dtype is None else dtype_of(dtype)
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, QUANTIZED)]
    layers_step.forget(model)
    if simulated := _simulated(model):
        for module in simulated:
            stop_simulating(module)
        return model if dtype is None else to_dtype(model, dtype)
    if not found:
        raise ValueError(f"{type(model).__name__} is not quantized")
    if any(name.endswith(".base_layer") for name, _ in found):
        raise ValueError("the model carries an adapter: unwrap_lora_to_layers first")
    config_of_its_own(model)
    for name, module in found:
        if isinstance(module, QuantizedLinear):
            _put(model, name, module.decoded(dtype))
            continue
        assert isinstance(module, QuantizedStacks)
        decoded = {stack: module.decoded(stack).contiguous() for stack in module.stacks}
        for stack in module.stacks:
            for part in ("codes", "scale_bits", "zero"):
                module._buffers.pop(f"{part}_{stack}", None)
        module.__class__ = type(module).__mro__[2]
        for stack, value in decoded.items():
            module.register_parameter(stack, nn.Parameter(value if dtype is None else value.to(dtype)))
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    model.__dict__.pop("is_quantized", None)
    return model


@register_quantization_config(METHOD)
class _Registered(QuantizationConfig):
    """The quantization config as transformers builds it from config.json."""


@register_quantizer(METHOD)
class EasyTorchQuantizer(HfQuantizer):
    """`from_pretrained(quantization_config=...)`, and of checkpoints that hold codes."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            config: Any = self.quantization_config
            layers, stacks = _chosen(model, config, experts=config.quantize_tensors)
            _replace(model, config, layers, stacks)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            config: Any = self.quantization_config
            layers, stacks = _chosen(model, config, experts=config.quantize_tensors)
            _replace(model, config, layers, stacks)
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        return dequantize(model, dtype)

    def is_serializable(self, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters are


def _simulated(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if is_simulated(one)]


def linear_layers(model: PreTrainedModel, *, heads: bool = False) -> set[str]:
    """The names of the linear layers that `quantize` can take: all but heads that generate, and tied ones.

    heads: those that generate too, as in models of a GGUF file.
    """
    return set(_found(model, QuantizationConfig(pattern=""), experts=False, generating=heads)[0])


def stacks_of_experts(model: PreTrainedModel) -> dict[str, list[str]]:
    """Modules with stacked weights of experts, and the names of these."""
    return _found(model, QuantizationConfig(pattern=""), experts=True)[1]


def _chosen(
    model: PreTrainedModel, config: QuantizationConfig, *, experts: bool
) -> tuple[list[str], dict[str, list[str]]]:
    """The names of linear layers, and of modules with stacks of experts and these; `ValueError` where there is none."""
    layers, stacks = _found(model, config, experts=experts)
    if not layers and not stacks:
        known = [name for name, one in model.named_modules() if isinstance(one, nn.Linear | Conv1D)]
        some = f"; its linear layers are {', '.join(known[:_NAMED])}, ..." if known else ""
        kind = type(model).__name__
        if config.pattern is None:
            raise ValueError(f"{kind} has no layer to quantize but heads and routers, which stay as they are{some}")
        raise ValueError(f"no layer of {kind} has {config.pattern!r} in its name{some}")
    return layers, stacks


def _found(
    model: PreTrainedModel, config: QuantizationConfig, *, experts: bool, generating: bool = False
) -> tuple[list[str], dict[str, list[str]]]:
    """generating: heads that generate may be taken, as with a config that names the layers of a GGUF file."""
    heads: set[Any] = set(_tied(model))
    if not generating and config.blocks is None:
        heads.add(model.get_output_embeddings())
    layers, stacks = [], {}
    for name, module in model.named_modules():
        kind: Any = type(module)
        wanted = bool(re.search(config.pattern, name)) if config.pattern is not None else not _LEFT.search(name)
        if not wanted or module in heads:
            continue
        if isinstance(module, Conv1D) or kind is nn.Linear or _computes_as_linear(kind):
            layers.append(name)
        elif experts:
            own = dict(module.named_parameters(recurse=False))
            if found := [
                one for one in _STACKS if one in own and own[one].dim() == 3 and config.has_blocks(f"{name}.{one}")
            ]:
                stacks[name] = found
    return layers, stacks


@functools.cache
def _computes_as_linear(kind: Any) -> bool:
    """Whether a class of transformers' models, as Falcon's, gives what `nn.Linear` gives, which a small one shows."""
    if not issubclass(kind, nn.Linear) or not kind.__module__.startswith("transformers.models."):
        return False
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            layer, x = kind(6, 4).float(), torch.randn(3, 6)
            given = layer(x)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):  # a router, made of a config
        return False
    own = {name for name, _ in layer.named_parameters()}
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    return own == {"weight", "bias"} and isinstance(given, Tensor) and torch.allclose(given, expected, atol=1e-6)


def _tied(model: PreTrainedModel) -> list[nn.Module]:
    """Linear layers whose weight is an embedding's too."""
    shared = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    return [
        one for one in model.modules() if isinstance(one, nn.Linear) and id(one._parameters.get("weight")) in shared
    ]


def _weights(model: PreTrainedModel, layers: list[str], stacks: dict[str, list[str]]) -> list[tuple[str, Tensor]]:
    names = [f"{name}.weight" for name in layers] + [f"{name}.{one}" for name, found in stacks.items() for one in found]
    return [(name, model.get_parameter(name)) for name in names]


def _replace(
    model: PreTrainedModel, config: QuantizationConfig, layers: list[str], stacks: dict[str, list[str]]
) -> None:
    for name in layers:
        layer: Any = model.get_submodule(name)
        _put(model, name, QuantizedLinear.of(layer, config.settings_of(name)))
    for name, found in stacks.items():
        module = model.get_submodule(name)
        settings = {one: config.settings_of(f"{name}.{one}") for one in found}
        quantize_stacks(module, settings, bool(getattr(module, "is_transposed", False)))


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)
