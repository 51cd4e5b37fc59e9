"""Layouts of Flax's layers for the rule table of a user's own model: the third entry of a row.

By name: `identity`, `linear`, `conv1d`, `conv2d`, `conv3d` (`bridge.rules.transforms`), and from here
`conv_transpose1d`, `conv_transpose2d`, `conv_transpose3d` and the same with `_transposed` for `transpose_kernel=True`.
The functions take the sizes that names and shapes do not tell. Those named after a layer return all of its rows:

    RULES = (
        ("embed.weight", "embed/embedding", "identity"),
        *attention("attn", "attn", heads=8),
        *lstm("rnn", "LSTMCell_0"),
        ("head.weight", "head/kernel", dense_general(inputs=(8, 64), outputs=(512,))),
    )

linen and nnx have the same leaves, except recurrent cells (`nnx_gru`, ...). In torch they are `torch.nn.Linear`,
`MultiheadAttention`, `RNN`, `GRU`, `LSTM`, `ConvTranspose1d/2d/3d`. A layout of your own is a `Transform`
(`bridge.transforms`), functions for both directions and for the shapes in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.rules.head_transforms import heads_bias, heads_in, heads_out, joined, stacked
from easytorch.bridge.rules.table import Rule, Rules
from easytorch.bridge.rules.transforms import Arrays, Shape, Transform, get_transform, register_transform

__all__ = [
    "attention",
    "dense_general",
    "einsum",
    "gru",
    "heads_bias",
    "heads_in",
    "heads_out",
    "joined",
    "lstm",
    "nnx_gru",
    "nnx_lstm",
    "nnx_rnn",
    "reshaped",
    "rnn",
    "stacked",
]


def dense_general(*, inputs: Shape, outputs: Shape) -> Transform:
    """torch (prod(outputs), prod(inputs)) <-> (*inputs, *outputs), the kernel of `DenseGeneral` and `LinearGeneral`."""
    return _matrix("dense_general", inputs, outputs, tuple(range(len(inputs) + len(outputs))))


def reshaped(shape: Shape) -> Transform:
    """torch (prod(shape),) <-> `shape`: the bias of `DenseGeneral`, whose shape are its `outputs`."""
    return Transform(
        name=f"reshaped[{shape}]",
        to_flax=lambda arrays: arrays[0].reshape(shape),
        to_torch=lambda array: (array.reshape(-1),),
        flax_shape=lambda shapes: _sized(shapes[0], (math.prod(shape),), shape),
        torch_shapes=lambda given: (_sized(given, shape, (math.prod(shape),)),),
        rank=len(shape),
        torch_rank=1,
    )


def einsum(equation: str, shape: Shape) -> Transform:
    """torch (outputs, inputs) <-> `shape`, the kernel of `Einsum(equation, shape)`.

    Inputs are the kernel's letters that also occur in the layer's input, in that order; outputs those in its output.
    `ValueError` for an equation that is not a linear map of the last dimensions.
    """
    operands, arrow, result = equation.replace(" ", "").replace("...", "").partition("->")
    given, comma, kernel = operands.partition(",")
    inputs, outputs = ([letter for letter in side if letter in kernel] for side in (given, result))
    if not arrow or not comma or len(kernel) != len(shape) or sorted(inputs + outputs) != sorted(kernel):
        raise ValueError(
            f"{equation!r} with a kernel of {shape} is no matrix: each of the kernel's letters is either summed over "
            "(in the input) or new (in the output), as in 'BTD,DNH->BTNH'"
        )
    order = tuple(kernel.index(letter) for letter in (*inputs, *outputs))
    sizes = [shape[place] for place in order]
    return _matrix("einsum", tuple(sizes[: len(inputs)]), tuple(sizes[len(inputs) :]), order)


def _matrix(name: str, inputs: Shape, outputs: Shape, order: tuple[int, ...]) -> Transform:
    """torch (outputs, inputs) <-> a leaf whose dimensions, taken in `order`, are `inputs` and then `outputs`."""
    back = tuple(order.index(axis) for axis in range(len(order)))
    apart = (*inputs, *outputs)
    leaf, matrix = tuple(apart[axis] for axis in back), (math.prod(outputs), math.prod(inputs))
    return Transform(
        name=f"{name}[{inputs}, {outputs}, {order}]",
        to_flax=lambda arrays: arrays[0].T.reshape(apart).transpose(back),
        to_torch=lambda array: (array.transpose(order).reshape(matrix[::-1]).T,),
        flax_shape=lambda shapes: _sized(shapes[0], matrix, leaf),
        torch_shapes=lambda shape: (_sized(shape, leaf, matrix),),
        rank=len(leaf),
        torch_rank=2,
    )


def _sized(given: Shape, wanted: Shape, made: Shape) -> Shape:
    if tuple(given) != tuple(wanted):
        raise CheckpointError(f"has shape {tuple(given)}, and its row of the table says {tuple(wanted)}")
    return made


def _conv_transpose(dimensions: int, transposed: bool) -> Transform:
    """torch (in, out, *window) <-> (*window, in, out), flipped in every dimension of the window.

    torch's is the gradient of a convolution, jax's a convolution of the dilated input: the kernels are flips of each
    other. With `transpose_kernel=True` Flax holds (*window, out, in), and flips it itself.
    """
    window = tuple(range(dimensions))
    to_flax = (*(2 + axis for axis in window), *((1, 0) if transposed else (0, 1)))
    to_torch = tuple(to_flax.index(axis) for axis in range(len(to_flax)))

    def turned(array: np.ndarray) -> np.ndarray:
        return array if transposed else np.flip(array, window)

    return Transform(
        name=f"conv_transpose{dimensions}d{'_transposed' if transposed else ''}",
        to_flax=lambda arrays: turned(arrays[0].transpose(to_flax)),
        to_torch=lambda array: (turned(array).transpose(to_torch),),
        flax_shape=lambda shapes: tuple(shapes[0][axis] for axis in to_flax),
        torch_shapes=lambda shape: (tuple(shape[axis] for axis in to_torch),),
        rank=len(to_flax),
        torch_rank=len(to_flax),
    )


for _dimensions in (1, 2, 3):
    for _transposed in (False, True):
        register_transform(_conv_transpose(_dimensions, _transposed))


def attention(torch: str, flax: str, *, heads: int, bias: bool = True) -> Rules:
    """`torch.nn.MultiheadAttention`, queries, keys and values of one width <-> `MultiHeadDotProductAttention`."""
    parts = tuple(f"{flax}/{part}" for part in ("query", "key", "value"))
    rows: list[Rule] = [
        (f"{torch}.in_proj_weight", tuple(f"{part}/kernel" for part in parts), joined(heads_out(heads), 3)),
        (f"{torch}.out_proj.weight", f"{flax}/out/kernel", heads_in(heads)),
    ]
    if bias:
        rows += [
            (f"{torch}.in_proj_bias", tuple(f"{part}/bias" for part in parts), joined(heads_bias(heads), 3)),
            (f"{torch}.out_proj.bias", f"{flax}/out/bias", "identity"),
        ]
    return tuple(rows)


def rnn(torch: str, flax: str, *, layer: str = "l0") -> Rules:
    """One layer of `torch.nn.RNN` <-> linen's `SimpleCell`, with one bias for torch's two.

    layer: the end of torch's names, `l0_reverse` for one. The activation is tanh in both unless they are told another.
    """
    return (
        (f"{torch}.weight_ih_{layer}", f"{flax}/i/kernel", "linear"),
        (f"{torch}.weight_hh_{layer}", f"{flax}/h/kernel", "linear"),
        ((f"{torch}.bias_ih_{layer}", f"{torch}.bias_hh_{layer}"), f"{flax}/i/bias", _rnn_bias),
    )


def gru(torch: str, flax: str, *, layer: str = "l0") -> Rules:
    """One layer of `torch.nn.GRU` <-> linen's `GRUCell`, whose reset and update gates have one bias for torch's two.

    layer: the end of torch's names, `l0_reverse` for one. torch's two are added: Flax cannot tell them apart.
    """
    given, hidden = ([f"{flax}/{side}{gate}" for gate in "rzn"] for side in "ih")
    leaves = (*(f"{path}/bias" for path in given), f"{hidden[2]}/bias")
    return (
        *_gates(torch, layer, given, hidden),
        ((f"{torch}.bias_ih_{layer}", f"{torch}.bias_hh_{layer}"), leaves, _gru_biases),
    )


def lstm(torch: str, flax: str, *, layer: str = "l0") -> Rules:
    """One layer of `torch.nn.LSTM` <-> linen's `LSTMCell` or `OptimizedLSTMCell`, with one bias for torch's two."""
    return _lstm(torch, flax, layer, "if")


def _lstm(torch: str, flax: str, layer: str, forget: str) -> Rules:
    """forget: the name of the forget gate's input kernel, since `if` is a Python keyword."""
    given = [f"{flax}/{name}" for name in ("ii", forget, "ig", "io")]
    hidden = [f"{flax}/h{gate}" for gate in "ifgo"]
    leaves = tuple(f"{path}/bias" for path in hidden)
    return (
        *_gates(torch, layer, given, hidden),
        ((f"{torch}.bias_ih_{layer}", f"{torch}.bias_hh_{layer}"), leaves, _lstm_biases),
    )


def nnx_rnn(torch: str, flax: str, *, layer: str = "l0") -> Rules:
    """One layer of `torch.nn.RNN` <-> `nnx.SimpleCell`, with one bias for torch's two."""
    return _fused_gates(torch, flax, layer, f"{flax}/dense_i/bias", _rnn_bias)


def nnx_gru(torch: str, flax: str, *, layer: str = "l0") -> Rules:
    """One layer of `torch.nn.GRU` <-> `nnx.GRUCell`, which has the gates in one leaf and no second bias.

    torch's second is added to the first, and has to be zero for the new gate, which multiplies it.
    """
    return _fused_gates(torch, flax, layer, f"{flax}/dense_i/bias", _nnx_gru_bias)


def nnx_lstm(torch: str, flax: str, *, layer: str = "l0", optimized: bool = False) -> Rules:
    """One layer of `torch.nn.LSTM` <-> `nnx.LSTMCell`, or `nnx.OptimizedLSTMCell`: one bias where torch adds two."""
    if not optimized:
        return _lstm(torch, flax, layer, "if_")
    return _fused_gates(torch, flax, layer, f"{flax}/dense_h/bias", _nnx_lstm_bias)


def _fused_gates(torch: str, flax: str, layer: str, bias: str, biases: Transform) -> Rules:
    return (
        (f"{torch}.weight_ih_{layer}", f"{flax}/dense_i/kernel", "linear"),
        (f"{torch}.weight_hh_{layer}", f"{flax}/dense_h/kernel", "linear"),
        ((f"{torch}.bias_ih_{layer}", f"{torch}.bias_hh_{layer}"), bias, biases),
    )


def _gates(torch: str, layer: str, given: Sequence[str], hidden: Sequence[str]) -> Rules:
    matrices = joined(get_transform("linear"), len(given))
    return (
        (f"{torch}.weight_ih_{layer}", tuple(f"{path}/kernel" for path in given), matrices),
        (f"{torch}.weight_hh_{layer}", tuple(f"{path}/kernel" for path in hidden), matrices),
    )


def _two_biases(name: str, gates: int, leaves: int) -> Transform:
    """torch's two biases (gates * H,) <-> one per gate, and, with `leaves` > `gates`, the last gate's second one apart.

    Flax's bias becomes torch's first for a GRU and its second for an LSTM, as the modules place them, and torch's other
    one zero; in the other direction the two are added, since only their sum is used.
    """
    own = leaves > gates  # A GRU's last gate multiplies its second bias, and keeps it.

    def to_flax(arrays: Arrays) -> Arrays:
        first, second = (np.split(array, gates) for array in arrays)
        summed = [one + other for one, other in zip(first, second, strict=True)]
        return [*summed[:-1], first[-1], second[-1]] if own else summed

    def to_torch(arrays: Arrays) -> Arrays:
        zero = np.zeros_like(arrays[0])
        if own:
            return [np.concatenate(arrays[:gates]), np.concatenate([*[zero] * (gates - 1), arrays[-1]])]
        return [np.concatenate([zero] * gates), np.concatenate(arrays)]

    def flax_shapes(shapes: Sequence[Shape]) -> Sequence[Shape]:
        if len(set(shapes)) != 1 or len(shapes[0]) != 1 or shapes[0][0] % gates:
            raise CheckpointError(f"biases of shapes {list(shapes)} are not those of {gates} gates")
        return [(shapes[0][0] // gates,)] * leaves

    def torch_shapes(shapes: Sequence[Shape]) -> Sequence[Shape]:
        if len(set(shapes)) != 1 or len(shapes[0]) != 1:
            raise CheckpointError(f"biases of one cell have the shapes {list(shapes)}")
        return [(shapes[0][0] * gates,)] * 2

    both_ways: dict[str, Any] = {
        "to_flax": to_flax,
        "to_torch": to_torch,
        "flax_shape": flax_shapes,
        "torch_shapes": torch_shapes,
    }
    return Transform(name=name, parts=2, leaves=leaves, **both_ways)


_gru_biases = _two_biases("gru_biases", 3, 4)
_lstm_biases = _two_biases("lstm_biases", 4, 4)


def _summed_bias(name: str, gates: int, *, first: bool, apart: bool) -> Transform:
    """torch's two biases (gates * H,) <-> their sum, which becomes torch's `first` or second one.

    apart: the last gate's second bias cannot be added, so it must be zero.
    """

    def to_flax(arrays: Arrays) -> np.ndarray:
        given, hidden = arrays
        if apart and np.split(hidden, gates)[-1].any():
            raise CheckpointError(
                "the new gate's part of bias_hh is not zero, and nnx.GRUCell has no such bias; linen's GRUCell has"
            )
        return given + hidden

    def flax_shape(shapes: Sequence[Shape]) -> Shape:
        if len(set(shapes)) != 1 or shapes[0][0] % gates:
            raise CheckpointError(f"biases of shapes {list(shapes)} are not those of {gates} gates")
        return shapes[0]

    def to_torch(array: np.ndarray) -> Arrays:
        zero = np.zeros_like(array)
        return (array, zero) if first else (zero, array)

    return Transform(
        name=name,
        parts=2,
        rank=1,
        torch_rank=1,
        to_flax=to_flax,
        to_torch=to_torch,
        flax_shape=flax_shape,
        torch_shapes=lambda shape: (shape, shape),
    )


_rnn_bias = _summed_bias("rnn_bias", 1, first=True, apart=False)
_nnx_gru_bias = _summed_bias("nnx_gru_bias", 3, first=True, apart=True)
_nnx_lstm_bias = _summed_bias("nnx_lstm_bias", 4, first=False, apart=False)
