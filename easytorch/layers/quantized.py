"""Linear layers and experts whose weights have few bits, through the `quantized_matmul` operation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from easytorch.kernels.interop.torch_func import eager
from easytorch.kernels.quantized_matmul import cpu, cpu_layout
from easytorch.kernels.quantized_matmul.formats import FORMATS, storage
from easytorch.kernels.quantized_matmul.gguf_blocks import BLOCKS
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight
from easytorch.layers.linear import watched
from easytorch.layers.quantized_formats import FormatSettings, quantize_weight
from easytorch.operations import OperationRegistry

_OPERATION = OperationRegistry.create("quantized_matmul")
_PARTS = ("codes", "scale_bits", "zero")


class CodedWeight(NamedTuple):
    """How a weight in few bits may be divided. shape: of the weight. columns: its dimension that groups go along; unit:
    how many columns stay together. buffers: name -> for each dimension of the weight the buffer's that is divided with
    it; None where the buffer has the same for all of it."""

    shape: tuple[int, ...]
    columns: int
    unit: int
    buffers: dict[str, tuple[int | None, ...]]


class DecodedWeight(Tensor):
    """A decoded weight. Setting its `data`, as PEFT's merge does, is refused: the codes would stay as they are."""

    # results are plain tensors, as those of a Parameter
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ValueError("the weights are quantized: nothing can be merged into them; dequantize the model first")


class QuantizedLinear(nn.Linear):
    """A linear layer of a frozen weight in few bits; gradients go to the input and the bias.

    Buffers: `weight_codes`, `weight_scale_bits` (the bits of float32, which no change of dtype rounds) and, of formats
    with one, `weight_zero`; of columns in an order of their own `weight_order`, the input's column for each column of
    the codes. `weight` is what they decode to, a new tensor whenever it is read, whose `data` may not be
    set. It is an `nn.Linear`, which PEFT puts an adapter on.

    The first product of few rows on a CPU interleaves the rows of `weight_codes` (`lay_out`). A state dict has them one
    after another: asking for it, setting it or moving the layer lays them back, and so does `separate_codes`.
    """

    weight_order: Tensor
    laid_out: bool = False

    def __init__(
        self, in_features: int, out_features: int, settings: FormatSettings, dtype: torch.dtype, bias: Tensor | None
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.settings, self.compute_dtype = settings, dtype
        self.was_conv1d = False  # in place of transformers' Conv1D, whose weight is (in, out)
        self.bias: Any = None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad)

    @classmethod
    def of(cls, layer: nn.Linear | Conv1D, settings: FormatSettings) -> QuantizedLinear:
        """A layer of the codes nearest to the weight of `layer`, whose bias it shares."""
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()
        outputs, inputs = weight.shape
        made = cls(inputs, outputs, settings, weight.dtype, layer.bias)
        made.bias, made.was_conv1d = layer.bias, isinstance(layer, Conv1D)
        made.set_weight(weight)
        made.train(layer.training)
        return made

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Takes the codes nearest to `weight` (out_features, in_features)."""
        self.laid_out = False
        for part, tensor in parts_of(quantize_weight(weight, self.settings)).items():
            self.register_buffer(f"weight_{part}", tensor)
        if self.settings.ordered:
            self.register_buffer("weight_order", torch.empty(self.in_features, dtype=torch.int32, device="meta"))

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight of the codes, with its columns as they are stored."""
        return weight_of(self, "weight_", self.settings, (self.out_features, self.in_features))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self._dequantized(self.compute_dtype).as_subclass(DecodedWeight)

    def _dequantized(self, dtype: torch.dtype) -> Tensor:
        weight = self.quantized.dequantize(dtype)
        return weight[:, self.weight_order.argsort()] if self.settings.ordered else weight

    def decoded(self, dtype: torch.dtype | None = None) -> nn.Linear | Conv1D:
        """The plain layer of the weight that the codes stand for, of the class that was there."""
        weight = self._dequantized(self.compute_dtype if dtype is None else dtype)
        with torch.device("meta"):
            plain: Any = (
                Conv1D(self.out_features, self.in_features)
                if self.was_conv1d
                else nn.Linear(self.in_features, self.out_features, bias=False)
            )
        plain.weight = nn.Parameter(weight.t().contiguous() if self.was_conv1d else weight)
        plain.bias = self.bias
        made: nn.Linear | Conv1D = plain.train(self.training)
        return made

    def lay_out(self) -> None:
        """Interleaves the codes in place of what they are, where products of few rows on this CPU gain by it."""
        self.laid_out = True
        codes = self._buffers.get("weight_codes")
        # memory that processes share stays so; what FSDP and others put in place of tensors is theirs
        if type(codes) is not Tensor or not codes.is_cpu or codes.is_shared():
            return
        storage_, columns = self.settings.storage, self.in_features
        with torch.inference_mode(False):  # a tensor made within cannot be used in training later
            made = cpu_layout.interleave(codes, storage_, columns, self._group_size())
        if made is not None:
            self._buffers["weight_codes"] = made

    def _group_size(self) -> int:
        """Of the columns that share a scale: 32 for one scale a row."""
        one = self._buffers["weight_scale_bits"].shape[1] == 1  # type: ignore[union-attr]
        return 32 if one else self.settings.columns(self.in_features)

    def separate(self) -> None:
        """The reverse of `lay_out`."""
        self.laid_out = False
        codes = self._buffers.get("weight_codes")
        if codes is None or self.out_features == codes.shape[0]:
            return
        with torch.inference_mode(False):
            separated = cpu_layout.separate(codes, self.settings.storage, self.in_features)
        self._buffers["weight_codes"] = separated

    def _gains(self, input: Tensor) -> bool:
        """Whether the product of this input is one for which the codes should be laid out."""
        few = 0 < input.numel() <= cpu.MOST_INTERLEAVED_ROWS * self.in_features
        return few and not watched(self) and cpu.prefers(input.flatten()[: self.in_features], self.quantized, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.separate()  # the tensors of a state dict are the module's own
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.separate()
        super()._load_from_state_dict(*args)

    def forward(self, input: Tensor) -> Tensor:
        if not self.laid_out and eager() and self._gains(input):  # a graph learns nothing of how many rows there are
            self.lay_out()
        if self.settings.ordered:
            input = input.index_select(-1, self.weight_order)
        output: Tensor = _OPERATION(input, self.quantized, self.bias)
        return output

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.separate()
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=self.quantized.data.device)).dtype
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.settings}"

    # how transformers' styles of tensor parallelism know that the layer computes with its own part of the codes
    _hf_quantized_needs_local_tp = True

    def coded_weights(self) -> dict[str, CodedWeight]:
        shape = (self.out_features, self.in_features)
        parts = {f"weight_{part}": self._buffers.get(f"weight_{part}") for part in _PARTS}
        return {"weight": _coded(parts, shape, (0, 1), self.settings)}

    @contextlib.contextmanager
    def with_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
        """Within it the buffers are those of a weight of that shape."""
        kept = self.out_features, self.in_features
        self.out_features, self.in_features = shapes["weight"]
        try:
            yield
        finally:
            self.out_features, self.in_features = kept


class QuantizedStacks(nn.Module):
    """Mixed in before a class of experts: its stacks of weights (E, N, K), or (E, K, N), are codes.

    Of each, say `gate_up_proj`, the buffers are `codes_gate_up_proj` and so on, and the attribute is what they decode
    to. Our experts multiply by one expert's codes at a time (`quantized_experts`).
    """

    stacks: dict[str, tuple[torch.Size, bool]]
    settings: dict[str, FormatSettings]
    compute_dtype: torch.dtype

    def quantized_experts(self, name: str) -> list[QuantizedWeight]:
        """The weights (N, K) of the stack `name`, expert by expert."""
        shape, transposed = self.stacks[name]
        rows, columns = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
        parts = {part: getattr(self, f"{part}_{name}", None) for part in _PARTS}
        return [
            _built(
                {part: one[index] for part, one in parts.items() if one is not None},
                self.settings[name],
                (rows, columns),
            )
            for index in range(parts["codes"].shape[0])  # type: ignore[union-attr]
        ]

    def stack_of_buffer(self) -> dict[str, str]:
        """The buffers (E, ...) of codes -> the stack that they are of."""
        names = {f"{part}_{name}": name for name in self.stacks for part in _PARTS}
        return {buffer: name for buffer, name in names.items() if self._buffers.get(buffer) is not None}

    def coded_weights(self) -> dict[str, CodedWeight]:
        found = {}
        for name, (shape, transposed) in self.stacks.items():
            parts = {f"{part}_{name}": self._buffers.get(f"{part}_{name}") for part in _PARTS}
            dims = (0, 2, 1) if transposed else (0, 1, 2)
            found[name] = _coded(parts, tuple(shape), dims, self.settings[name])
        return found

    @contextlib.contextmanager
    def with_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
        """Within it the buffers are those of stacks of these shapes."""
        kept = self.stacks
        self.stacks = kept | {name: (torch.Size(shape), kept[name][1]) for name, shape in shapes.items()}
        try:
            yield
        finally:
            self.stacks = kept

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # the class is made at run time: pickle finds none under its name
        return _empty, (type(self).__bases__[1], tuple(self.stacks)), self.__dict__.copy()

    def decoded(self, name: str) -> Tensor:
        stack = torch.stack([one.dequantize(self.compute_dtype) for one in self.quantized_experts(name)])
        return stack.transpose(1, 2) if self.stacks[name][1] else stack

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        device = next(self.buffers()).device
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=device)).dtype
        return super()._apply(fn, recurse)


def quantize_stacks(module: nn.Module, settings: dict[str, FormatSettings], transposed: bool) -> None:
    """Makes codes of the stacked weights of `module` that `settings` name, and its class one with `QuantizedStacks`."""
    found, names = {}, list(settings)
    for name in names:
        stack = module.get_parameter(name).detach()
        rows = stack.transpose(1, 2).contiguous() if transposed else stack
        weights = [parts_of(quantize_weight(one, settings[name])) for one in rows]
        found[name] = {part: torch.stack([one[part] for one in weights]) for part in weights[0]}
    shapes = {name: (module.get_parameter(name).shape, transposed) for name in names}
    dtype = module.get_parameter(names[0]).dtype
    for name in names:
        del module._parameters[name]
    base: Any = type(module)
    module.__class__ = _with_stacks(base, tuple(names))
    module.stacks, module.settings, module.compute_dtype = shapes, settings, dtype  # type: ignore[assignment]
    for name, parts in found.items():
        for part, tensor in parts.items():
            module.register_buffer(f"{part}_{name}", tensor)


@functools.cache
def _with_stacks(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    decoded = {name: property(functools.partial(_decoded, name)) for name in names}
    return type(f"Quantized{base.__name__}", (QuantizedStacks, base), {"__module__": __name__, **decoded})


def _empty(base: Any, names: tuple[str, ...]) -> nn.Module:
    made = _with_stacks(base, names)
    empty: nn.Module = made.__new__(made)
    return empty


def _decoded(name: str, module: QuantizedStacks) -> Tensor:
    return module.decoded(name)


def parts_of(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of a weight as integers, which changes of a model's dtype leave alone."""
    codes = weight.data if weight.data.dtype in (torch.uint8, torch.int8) else weight.data.view(torch.uint8)
    parts = {"codes": codes, "scale_bits": weight.scale.view(torch.int32)}
    return parts if weight.zero is None else {**parts, "zero": weight.zero}


def weight_of(module: nn.Module, prefix: str, settings: FormatSettings, shape: tuple[int, int]) -> QuantizedWeight:
    """The weight of a module's buffers, under the names of `parts_of` behind `prefix`."""
    parts = {part: getattr(module, f"{prefix}{part}", None) for part in _PARTS}
    return _built({part: one for part, one in parts.items() if one is not None}, settings, shape)


def _built(parts: dict[str, Tensor], settings: FormatSettings, shape: tuple[int, int]) -> QuantizedWeight:
    data = parts["codes"].view(storage(settings.storage, shape[1])[1])
    scale = parts["scale_bits"].view(torch.float32)
    return QuantizedWeight(data, scale, parts.get("zero"), settings.storage, shape, settings.columns(shape[1]))


def _coded(
    parts: Mapping[str, Tensor | None], shape: tuple[int, ...], dims: tuple[int, ...], settings: FormatSettings
) -> CodedWeight:
    """parts: buffer -> tensor. dims: of the buffers, for each dimension of the weight; the last of them is columns'."""
    columns = dims.index(len(shape) - 1)
    width, tensors = shape[columns], {name: one for name, one in parts.items() if one is not None}
    groups = max(one.shape[-1] for name, one in tensors.items() if "scale_bits" in name)
    if settings.ordered:  # each column of the codes takes any of the input's
        unit = width
    elif settings.format in BLOCKS:
        unit = BLOCKS[settings.format].columns
    else:
        unit = settings.columns(width) if groups > 1 else 2 if FORMATS[settings.storage].packed else 1
    buffers = {name: tuple(dim if one.shape[dim] > 1 else None for dim in dims) for name, one in tensors.items()}
    return CodedWeight(shape, columns, unit, buffers)


def separate_codes(model: nn.Module) -> None:
    """Lays the codes of all its layers as they are saved: what reads a model's buffers calls it before."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.separate()


QUANTIZED = (QuantizedLinear, QuantizedStacks)


def is_quantized(model: nn.Module) -> bool:
    """Whether any module of `model` has quantized weights."""
    return any(isinstance(module, QUANTIZED) for module in model.modules())
