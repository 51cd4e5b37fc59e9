"""`LossConfig`, what `compute_loss` takes, and `LossMetrics`, what it returns beside the model's output."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor

PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
REDUCTIONS = ("mean", "sum", "none")
_DTYPES = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}


class SpecialLossNormalizingFactor(enum.StrEnum):
    """Divisors of the summed losses that depend on the batch."""

    NO_WEIGHT_NUM_REAL_TARGET_TOKENS = "NO_WEIGHT_NUM_REAL_TARGET_TOKENS"
    NUM_REAL_TARGET_TOKENS = "NUM_REAL_TARGET_TOKENS"
    NUM_TOTAL_TARGET_TOKENS = "NUM_TOTAL_TARGET_TOKENS"
    AVERAGE_PER_SEQUENCE = "AVERAGE_PER_SEQUENCE"


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How `compute_loss` makes a loss of a model's output; the defaults give transformers' loss.

    ignore_index: labels that do not contribute to the loss. label_smoothing: as in torch's `cross_entropy`. z_loss: how
    much a token's squared logsumexp counts. class_weights, or torch's word `weight`: of each label. reduction: "mean"
    (over what counts, by class weights), "sum", "none" (shaped as the labels); None is the mean. num_items_in_batch:
    the sum is divided by it instead, for gradient accumulation. loss_normalizing_factor: a number, or a name of
    `SpecialLossNormalizingFactor`, by which the sum is divided: the weights of the tokens that count (the mean), their
    number, the number of all labels, or each row by its own weights and then by the rows. divide_weight_sum: by the sum
    of the weights in addition. shift_tokens: False where the labels of a causal model are shifted already.
    problem_type, or classification_problem_type: of sequence and image classification; None is the model's own, or
    told by the labels. num_labels, or num_classification_labels: checked against the model. chunk_token_size: tokens
    whose logits are materialized at once; chunk_vocab_size and chunk_block_size: the same in logits a token, so that
    as many logits are materialized at once. router_aux_loss_coef: of the experts' load balancing loss; None is the
    model's own.
    break_on_nan: `FloatingPointError` for a loss that is not finite. compute_dtype: of the head's product, "fp32" or
    "bf16"; None is the model's. The loss itself is computed in float32.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weights: Tensor | Sequence[float] | None = None
    reduction: str | None = None
    num_items_in_batch: Tensor | float | None = None
    loss_normalizing_factor: float | str | None = None
    divide_weight_sum: bool = False
    shift_tokens: bool = True
    problem_type: str | None = None
    num_labels: int | None = None
    chunk_token_size: int | None = None
    chunk_vocab_size: int | None = None
    chunk_block_size: int | None = None
    router_aux_loss_coef: float | None = None
    break_on_nan: bool = False
    compute_dtype: str | torch.dtype | None = None
    weight: InitVar[Tensor | Sequence[float] | None] = None
    classification_problem_type: InitVar[str | None] = None
    num_classification_labels: InitVar[int | None] = None

    def __post_init__(self, weight: Any, classification_problem_type: Any, num_classification_labels: Any) -> None:
        for name, also, given in (
            ("class_weights", "weight", weight),
            ("problem_type", "classification_problem_type", classification_problem_type),
            ("num_labels", "num_classification_labels", num_classification_labels),
        ):
            if given is not None:
                if getattr(self, name) is not None:
                    raise ValueError(f"LossConfig takes {name} or {also}, which are one setting, not both")
                object.__setattr__(self, name, given)
        for name in ("divide_weight_sum", "shift_tokens", "break_on_nan"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        self._check_numbers()
        self._check_names()

    def _check_numbers(self) -> None:
        if type(self.ignore_index) is not int:
            raise TypeError(f"ignore_index={self.ignore_index!r} must be an int")
        for name, highest in (("label_smoothing", 1.0), ("z_loss", math.inf), ("router_aux_loss_coef", math.inf)):
            number = getattr(self, name)
            if number is None and name == "router_aux_loss_coef":
                continue
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise TypeError(f"{name}={number!r} must be a number")
            if not 0 <= number <= highest or math.isinf(number):
                limits = "at least 0" if highest == math.inf else f"from 0 to {highest}"
                raise ValueError(f"{name}={number!r} must be {limits}")
        for name in ("chunk_token_size", "chunk_vocab_size", "chunk_block_size", "num_labels"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 1):
                raise ValueError(f"{name}={number!r} must be an int of at least 1, or None")
        if sum(getattr(self, name) is not None for name in _CHUNKS) > 1:
            raise ValueError(f"{', '.join(_CHUNKS)} are ways to say one thing: give one of them")
        if self.class_weights is not None:
            if not isinstance(self.class_weights, Tensor | Sequence) or isinstance(self.class_weights, str):
                kind = type(self.class_weights).__name__
                raise TypeError(f"class_weights must be a tensor or a list of numbers, not {kind}")
            weights = torch.as_tensor(self.class_weights)
            fits = weights.dim() == 1 and not weights.is_complex()
            if not fits or not bool(((weights >= 0) & weights.isfinite()).all()):
                raise ValueError("class_weights must be one finite number of at least 0 for each label")
            object.__setattr__(self, "class_weights", weights.to(torch.float32))

    def _check_names(self) -> None:
        for name, known in (("reduction", REDUCTIONS), ("problem_type", PROBLEMS)):
            if getattr(self, name) is not None and getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}, or None")
        if self.compute_dtype is not None:
            dtype = _DTYPES.get(self.compute_dtype) if isinstance(self.compute_dtype, str) else self.compute_dtype
            if dtype not in _DTYPES.values():
                raise ValueError(f'compute_dtype={self.compute_dtype!r} must be "fp32", "bf16" or None')
            object.__setattr__(self, "compute_dtype", dtype)
        factor = self.loss_normalizing_factor
        if isinstance(factor, str):
            if factor not in SpecialLossNormalizingFactor.__members__:
                known_factors = ", ".join(SpecialLossNormalizingFactor)
                raise ValueError(f"loss_normalizing_factor={factor!r} must be a number or one of {known_factors}")
        elif factor is not None:
            _check_divisor("loss_normalizing_factor", factor)
        if self.num_items_in_batch is not None:
            _check_divisor("num_items_in_batch", self.num_items_in_batch)
        if factor is not None and self.reduction is not None:
            raise ValueError("reduction and loss_normalizing_factor both say what the losses are divided by: give one")
        if self.num_items_in_batch is not None and (factor is not None or self.reduction in ("sum", "none")):
            raise ValueError("num_items_in_batch is what the sum is divided by: give no other factor or reduction")

    @property
    def average_per_sequence(self) -> bool:
        return self.loss_normalizing_factor == SpecialLossNormalizingFactor.AVERAGE_PER_SEQUENCE

    def chunk_size(self, labels: Tensor, vocabulary: int) -> int | None:
        """Tokens whose logits are materialized at once; None: the operation chooses."""
        columns = self.chunk_vocab_size or self.chunk_block_size
        if columns is None:
            return self.chunk_token_size
        return max(1, labels.numel() * min(columns, vocabulary) // vocabulary)

    def given(self) -> list[str]:
        """The names of the settings that differ from their defaults."""
        return [field.name for field in dataclasses.fields(self) if not _is_default(getattr(self, field.name), field)]

    def with_settings(self, settings: Mapping[str, Any]) -> LossConfig:
        """This config with other values for some of its settings; `TypeError` for an unknown one."""
        names = {field.name for field in dataclasses.fields(self)}
        also = {"weight", "classification_problem_type", "num_classification_labels"}
        if unknown := sorted(set(settings) - names - also):
            raise TypeError(f"loss_kwargs has {unknown}; it takes shift_labels and {', '.join(sorted(names | also))}")
        # a second word for a setting replaces what the config has under the first
        replaced = {_FIRST_WORD.get(name, name): value for name, value in settings.items()}
        none: dict[str, Any] = dict.fromkeys(also)
        return dataclasses.replace(self, **replaced, **none)


_CHUNKS = ("chunk_token_size", "chunk_vocab_size", "chunk_block_size")
_FIRST_WORD = {
    "weight": "class_weights",
    "classification_problem_type": "problem_type",
    "num_classification_labels": "num_labels",
}


def _check_divisor(name: str, number: Any) -> None:
    """A number above 0, or a tensor with one; what a tensor on a device holds is not read, which would wait for it."""
    if isinstance(number, Tensor):
        if number.numel() != 1 or number.is_complex():
            raise ValueError(f"{name} of the shape {tuple(number.shape)} must be one number")
        if not number.is_cpu or torch.compiler.is_compiling():
            return
        number = number.item()
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise TypeError(f"{name}={number!r} must be a number")
    if not 0 < float(number) < math.inf:
        raise ValueError(f"{name}={number!r} must be above 0 and finite")


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    return value is field.default or (not isinstance(value, Tensor) and value == field.default)


@dataclass
class LossMetrics:
    """The metrics of a training step.

    loss: what to call `backward` on. weight_sum: of the tokens or rows that count. z_loss: its part of the loss.
    accuracy: the share of what counts where the largest logit is the label's. aux_loss: the experts' load balancing
    loss, before its coefficient. Accuracy and z_loss are computed when they are read: they need logits, which a loss
    of a large vocabulary does not materialize. A trainer may fill the other fields.
    """

    loss: Tensor | None = None
    weight_sum: Tensor | None = None
    aux_loss: Tensor | None = None
    learning_rate: float | None = None
    max_grad_norm: Tensor | float | None = None
    mean_grad_norm: Tensor | float | None = None
    grad_norms: Mapping[str, Tensor] | None = None
    chosen_rewards: Tensor | None = None
    rejected_rewards: Tensor | None = None
    other_metrics: Mapping[str, Any] | None = None
    execution_time: float | None = None
    compute: Callable[[], tuple[Tensor | None, Tensor | None]] | None = dataclasses.field(default=None, repr=False)

    def _computed(self) -> tuple[Tensor | None, Tensor | None]:
        if self.compute is not None:
            self._found, self.compute = self.compute(), None
        return getattr(self, "_found", (None, None))

    @property
    def accuracy(self) -> Tensor | None:
        return self._computed()[0]

    @property
    def z_loss(self) -> Tensor | None:
        return self._computed()[1]
