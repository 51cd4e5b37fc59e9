"""`StateSlots`: the states of recurrent layers of many sequences, one slot a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class StateSlots:
    """For each recurrent layer the last inputs of its convolution (slots, C, width) and its state (slots, ...).

    Tensors are allocated at a layer's first update, with its shapes and dtypes. The slot of a new
    sequence holds the states of an earlier one, which `SequenceStates` does not read.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._tensors: dict[tuple[str, int], Tensor] = {}

    def read(self, kind: str, layer_idx: int, slots: Tensor) -> Tensor:
        return self._tensors[kind, layer_idx][slots]

    def write(self, kind: str, layer_idx: int, slots: Tensor, state: Tensor) -> None:
        """state (sequences, ...), of the sequences of `slots`."""
        if (kind, layer_idx) not in self._tensors:
            # not filled: memory is committed as slots are written
            self._tensors[kind, layer_idx] = state.new_empty((self.count, *state.shape[1:]))
        self._tensors[kind, layer_idx][slots] = state


class SequenceStates:
    """The states of some sequences of a step, as transformers' `Cache` gives them to a recurrent layer.

    has_initial_states: the sequences have earlier tokens; without any, states begin at zero.
    """

    def __init__(
        self, states: StateSlots, slots: Sequence[int] | Tensor, device: torch.device, *, has_initial_states: bool
    ) -> None:
        self._states, self._has_initial_states = states, has_initial_states
        self._slots = torch.as_tensor(slots, dtype=torch.int64, device=device)
        self.layers = _Layers(self)

    def has_previous_state(self, layer_idx: int | None = None) -> bool:
        return self._has_initial_states

    def read(self, kind: str, layer_idx: int) -> Tensor:
        return self._states.read(kind, layer_idx, self._slots)

    def update_conv_state(self, x: Tensor, layer_idx: int, *, conv_kernel_size: int, **_: Any) -> None:
        """Keeps the last `conv_kernel_size` inputs: x (sequences, C, T) and what came before it, zeros at first."""
        missing = max(0, conv_kernel_size - x.shape[-1])
        past = self.read("convolution", layer_idx) if self._has_initial_states else x.new_zeros(*x.shape[:-1], missing)
        kept = torch.cat([past, x], dim=-1)[..., -conv_kernel_size:]
        self._states.write("convolution", layer_idx, self._slots, kept)

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_: Any) -> None:
        self._states.write("state", layer_idx, self._slots, state)


class _Layers:
    """`cache.layers[i].conv_states[0]` and `.recurrent_states[0]`."""

    def __init__(self, sequences: SequenceStates) -> None:
        self._sequences = sequences

    def __getitem__(self, layer_idx: int) -> _Layer:
        return _Layer(self._sequences, layer_idx)


class _Layer:
    def __init__(self, sequences: SequenceStates, layer_idx: int) -> None:
        self._sequences, self._layer_idx = sequences, layer_idx

    @property
    def conv_states(self) -> list[Tensor]:
        return [self._sequences.read("convolution", self._layer_idx)]

    @property
    def recurrent_states(self) -> list[Tensor]:
        return [self._sequences.read("state", self._layer_idx)]
