"""The experts of a mixture of experts, stacked in one parameter per projection, through the `grouped_matmul`
operation."""

from __future__ import annotations

import itertools
import operator
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from easytorch.kernels.experts_step.native import Unit
from easytorch.kernels.grouped_matmul.routing import combine_experts, rows_of_experts, sort_by_expert
from easytorch.kernels.linear.preference import ONE_FLOAT32_ROW
from easytorch.layers.basics import activation
from easytorch.layers.experts_step import experts_step, unit_of_activation
from easytorch.layers.gate import gated
from easytorch.layers.linear import eager_inference, few_rows
from easytorch.operations import OperationRegistry

grouped_matmul = OperationRegistry.create("grouped_matmul")
quantized_matmul = OperationRegistry.create("quantized_matmul")

OURS = "easytorch"  # our name in transformers' ExpertsInterface
NATIVE_INTERFACES = (None, OURS, "eager")  # the values of `config._experts_implementation` that run ours


def apply_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states (N, D), top_k_index and top_k_weights (N, k) -> (N, D): the weighted sum of k experts per token.

    module: one of `Experts`, or of transformers' classes that take an `experts_implementation`. An index of
    `module.num_experts` or more is an expert on another device and adds nothing here.
    """
    few = experts_step(module, hidden_states, top_k_index, top_k_weights)
    if few is not None:
        return few
    order, sizes = sort_by_expert(top_k_index, module.num_experts)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    rows = rows_of_experts(hidden_states, order, top_k_index.shape[1])
    if getattr(module, "scales_inputs", False):
        rows = rows * top_k_weights.reshape(-1)[order][:, None].to(rows.dtype)
        top_k_weights = torch.ones_like(top_k_weights)
    rows = _project(module, name, rows, sizes)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = _project(module, "down_proj", rows, sizes)
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)
    return combine_experts(rows, order, top_k_weights).to(hidden_states.dtype)


def _project(module: Any, name: str, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    if hasattr(module, "quantized_experts"):
        return _project_codes(module.quantized_experts(name), rows, sizes, bias)
    weight = getattr(module, name)
    # most experts have one row: where `linear` leaves that to ATen, the products of the others would be thrown away
    one_row = weight.dtype != torch.float32 or ONE_FLOAT32_ROW
    if one_row and not module.is_transposed and weight.is_cpu and eager_inference():
        few = _project_few(weight, rows, sizes.tolist(), bias)
        if few is not None:
            return few
    return grouped_matmul(rows.to(weight.dtype), weight, sizes, bias, transposed=not module.is_transposed)


def _project_few(
    weight: torch.Tensor, rows: torch.Tensor, counts: list[int], bias: torch.Tensor | None
) -> torch.Tensor | None:
    """The same where each expert has so few rows that all of them go to `linear`'s operator in C++; None elsewhere.

    That reads a weight at the memory's speed, and a token's experts are nothing else.
    """
    starts = list(itertools.accumulate(counts, initial=0))
    done = []
    # the expert with most rows first: if it is refused, the others need not be checked
    for expert in sorted(range(len(counts)), key=counts.__getitem__, reverse=True):
        if not counts[expert]:
            break
        part = rows[starts[expert] : starts[expert + 1]]
        product = few_rows(part, weight[expert], None if bias is None else bias[expert])
        if product is None:
            return None
        done.append((expert, product))
    parts = [product for _, product in sorted(done, key=operator.itemgetter(0))]
    if (left := len(rows) - starts[-1]) or not parts:
        parts.append(rows.new_zeros(left, weight.shape[1]))
    return torch.cat(parts)


def _project_codes(weights: Any, rows: torch.Tensor, sizes: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same with quantized weights, one expert after the other. Rows after the last expert's are zero."""
    counts = sizes.tolist()
    parts = rows[: sum(counts)].split(counts)
    done = [
        quantized_matmul(part, weight, None if bias is None else bias[index])
        for index, (part, weight) in enumerate(zip(parts, weights, strict=True))
        if len(part)
    ]
    left = len(rows) - sum(counts)
    if left or not done:
        done.append(rows.new_zeros(left, weights[0].shape[0]))
    return torch.cat(done)


class Experts(nn.Module):
    """E gated feed-forward networks down(act(gate(x)) * up(x)): gate_up_proj (E, 2 * I, D), down_proj (E, D, I).
    Without `has_gate` they are down(act(up(x))), up_proj (E, I, D).

    The attributes are those that transformers' expert functions and its parallel plans read. A family overrides
    `_apply_gate` where its gate differs. Legend: E experts, D hidden size, I intermediate size, N tokens.
    """

    has_gate: ClassVar[bool] = True
    has_bias: ClassVar[bool] = False
    has_post_expert_norm: ClassVar[bool] = False
    is_transposed: ClassVar[bool] = False  # weights are (E, in, out)
    scales_inputs: ClassVar[bool] = False  # the router's weights multiply an expert's input, not its output (Llama 4)
    is_concatenated: ClassVar[bool] = True  # the gate's rows come before the up projection's, not interleaved

    def __init__(
        self,
        config: Any,
        num_experts: int,
        intermediate_size: int,
        *,
        hidden_size: int | None = None,
        act: str | nn.Module | None = None,
    ) -> None:
        """hidden_size, act: of the config unless given."""
        super().__init__()
        self.config = config
        self.num_experts = num_experts  # on this device: expert parallelism lowers it
        self._is_expert_parallel = False
        self.hidden_dim = config.hidden_size if hidden_size is None else hidden_size
        self.intermediate_dim = intermediate_size
        if self.has_gate:
            self._add("gate_up_proj", self.hidden_dim, 2 * intermediate_size)
        else:
            self._add("up_proj", self.hidden_dim, intermediate_size)
        self._add("down_proj", intermediate_size, self.hidden_dim)
        self.act_fn = activation(config.hidden_act if act is None else act)

    def _add(self, name: str, inputs: int, outputs: int) -> None:
        shape = (inputs, outputs) if self.is_transposed else (outputs, inputs)
        setattr(self, name, nn.Parameter(torch.empty(self.num_experts, *shape)))
        if self.has_bias:
            setattr(self, f"{name}_bias", nn.Parameter(torch.empty(self.num_experts, outputs)))

    def reset_parameters(self, std: float) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                initialization.zeros_(parameter)
            else:
                initialization.normal_(parameter, mean=0.0, std=std)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(M, 2 * I) -> (M, I)."""
        return gated(self.act_fn, *gate_up.chunk(2, dim=-1))

    def step_unit(self) -> Unit | None:
        """`_apply_gate` as the operator for few tokens has it; None where it has not."""
        plain = self.is_concatenated and type(self)._apply_gate is Experts._apply_gate
        return unit_of_activation(self.act_fn) if plain else None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states (N, D), top_k_index and top_k_weights (N, k) -> (N, D)."""
        implementation = self.config._experts_implementation
        if implementation in NATIVE_INTERFACES or self.scales_inputs:  # which the others have not
            return apply_experts(self, hidden_states, top_k_index, top_k_weights)
        function = ALL_EXPERTS_FUNCTIONS.get_interface(implementation, apply_experts)
        return function(self, hidden_states, top_k_index, top_k_weights)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.hidden_dim}, {self.intermediate_dim})"


ExpertsInterface.register(OURS, apply_experts)
