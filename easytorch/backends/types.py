"""The enumerations and small records of the interface, by GoMLX's names (package backends, v0.20)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum, auto
from typing import NewType, TypeVar

from easytorch.backends.arguments import integer, integers, text
from easytorch.backends.dtypes import DType
from easytorch.backends.errors import BackendError

DeviceNum = NewType("DeviceNum", int)


class OpType(IntEnum):
    """Every kind of operation: the first 99 after INVALID are GoMLX's, in its order."""

    INVALID = 0
    PARAMETER = auto()
    CONSTANT = auto()
    IDENTITY = auto()
    REDUCE_WINDOW = auto()
    RNG_BIT_GENERATOR = auto()
    BATCH_NORM_FOR_INFERENCE = auto()
    BATCH_NORM_FOR_TRAINING = auto()
    BATCH_NORM_GRADIENT = auto()
    BIT_COUNT = auto()
    ABS = auto()
    ADD = auto()
    ARG_MIN_MAX = auto()
    BITCAST = auto()
    BITWISE_AND = auto()
    BITWISE_NOT = auto()
    BITWISE_OR = auto()
    BITWISE_XOR = auto()
    BROADCAST = auto()
    BROADCAST_IN_DIM = auto()
    CEIL = auto()
    CLZ = auto()
    COMPLEX = auto()
    CONCATENATE = auto()
    CONJ = auto()
    CONV_GENERAL_DILATED = auto()
    CONVERT_DTYPE = auto()
    COS = auto()
    DIV = auto()
    DOT = auto()
    DOT_GENERAL = auto()
    DYNAMIC_SLICE = auto()
    DYNAMIC_UPDATE_SLICE = auto()
    EQUAL = auto()
    EQUAL_TOTAL_ORDER = auto()
    ERF = auto()
    EXP = auto()
    EXPM1 = auto()
    FFT = auto()
    FLOOR = auto()
    GATHER = auto()
    GREATER_OR_EQUAL = auto()
    GREATER_OR_EQUAL_TOTAL_ORDER = auto()
    GREATER_THAN = auto()
    GREATER_THAN_TOTAL_ORDER = auto()
    IMAG = auto()
    IOTA = auto()
    IS_FINITE = auto()
    LESS_OR_EQUAL = auto()
    LESS_OR_EQUAL_TOTAL_ORDER = auto()
    LESS_THAN = auto()
    LESS_THAN_TOTAL_ORDER = auto()
    LOG = auto()
    LOG1P = auto()
    LOGICAL_AND = auto()
    LOGICAL_NOT = auto()
    LOGICAL_OR = auto()
    LOGICAL_XOR = auto()
    LOGISTIC = auto()
    MAX = auto()
    MIN = auto()
    MUL = auto()
    NEG = auto()
    NOT_EQUAL = auto()
    NOT_EQUAL_TOTAL_ORDER = auto()
    PAD = auto()
    POW = auto()
    REAL = auto()
    REDUCE_BITWISE_AND = auto()
    REDUCE_BITWISE_OR = auto()
    REDUCE_BITWISE_XOR = auto()
    REDUCE_LOGICAL_AND = auto()
    REDUCE_LOGICAL_OR = auto()
    REDUCE_LOGICAL_XOR = auto()
    REDUCE_MAX = auto()
    REDUCE_MIN = auto()
    REDUCE_PRODUCT = auto()
    REDUCE_SUM = auto()
    REM = auto()
    RESHAPE = auto()
    REVERSE = auto()
    ROUND = auto()
    RSQRT = auto()
    SCATTER_MAX = auto()
    SCATTER_MIN = auto()
    SCATTER_SUM = auto()
    SELECT_AND_SCATTER_MAX = auto()
    SELECT_AND_SCATTER_MIN = auto()
    SELECT_AND_SCATTER_SUM = auto()
    SHIFT_LEFT = auto()
    SHIFT_RIGHT_ARITHMETIC = auto()
    SHIFT_RIGHT_LOGICAL = auto()
    SIGN = auto()
    SIN = auto()
    SLICE = auto()
    SQRT = auto()
    SUB = auto()
    TANH = auto()
    TRANSPOSE = auto()
    WHERE = auto()
    # Beyond GoMLX's page.
    ATAN2 = auto()
    CLAMP = auto()
    IS_NAN = auto()
    SORT = auto()
    CALL = auto()
    WHILE_LOOP = auto()
    COND = auto()
    ALL_REDUCE = auto()
    ALL_GATHER = auto()
    REDUCE_SCATTER = auto()
    ALL_TO_ALL = auto()
    COLLECTIVE_PERMUTE = auto()
    TAN = auto()
    CBRT = auto()
    ROUND_NEAREST_AFZ = auto()
    REDUCE_PRECISION = auto()
    TRIANGULAR_SOLVE = auto()
    SCATTER_SET = auto()
    SCATTER_MULTIPLY = auto()
    SELECT_AND_SCATTER = auto()
    RNG_BIT_GENERATOR_THREE_FRY = auto()
    # Composite: a backend may take them whole or leave them to their decomposition (composites.py).
    SOFTMAX = auto()
    LAYER_NORM = auto()
    GELU = auto()
    SCALED_DOT_PRODUCT_ATTENTION = auto()
    LAST = auto()

    def __str__(self) -> str:
        return self.go_name

    @property
    def method(self) -> str:
        """The method of `Builder` that adds one; INVALID and LAST have none."""
        return self.name.lower()

    @property
    def go_name(self) -> str:
        """GoMLX's name, without its prefix: `GreaterOrEqual`, `ConvertDType`, `FFT`."""
        return _GO_NAMES.get(self.name, self.name.title().replace("_", ""))


# Where capitals do not follow from the words.
_GO_NAMES = {"CONVERT_DTYPE": "ConvertDType", "FFT": "FFT", "EXPM1": "Expm1", "LOG1P": "Log1p"}
# The kinds that are operations, without the markers at both ends.
OP_TYPES = tuple(op_type for op_type in OpType if op_type not in (OpType.INVALID, OpType.LAST))
GO_OP_TYPES = OP_TYPES[: OpType.WHERE]


class FFTType(IntEnum):
    """The transform that `Builder.fft` computes: complex or real, forward or inverse."""

    FORWARD = 0
    INVERSE = 1
    FORWARD_REAL = 2
    INVERSE_REAL = 3

    def __str__(self) -> str:
        return self.name.title().replace("_", "")

    def is_a_fft_type(self) -> bool:
        """True: every member is one (Go's enumerations are open, Python's are not)."""
        return True


class ReduceOpType(IntEnum):
    """How `Builder.reduce_window` and the collectives put elements together."""

    UNDEFINED = 0
    SUM = 1
    PRODUCT = 2
    MAX = 3
    MIN = 4

    def __str__(self) -> str:
        return self.name.title()

    def is_a_reduce_op_type(self) -> bool:
        """True: every member is one (Go's enumerations are open, Python's are not)."""
        return True


@dataclass(frozen=True)
class PadAxis:
    """Padding before an axis, after it, and between its elements; a negative start or end crops."""

    start: int = 0
    end: int = 0
    interior: int = 0

    def __post_init__(self) -> None:
        for field_ in fields(self):
            name = field_.name
            object.__setattr__(self, name, integer(getattr(self, name), f"PadAxis: {name}"))


@dataclass(frozen=True)
class ConvolveAxesConfig:
    """Which axis is which in the input, the kernel and the output of a convolution."""

    input_batch: int
    input_channel: int
    input_spatial: tuple[int, ...]
    kernel_input_channel: int
    kernel_output_channel: int
    kernel_spatial: tuple[int, ...]
    output_batch: int
    output_channel: int
    output_spatial: tuple[int, ...]

    def __post_init__(self) -> None:
        for field_ in fields(self):
            name = field_.name
            read = integers if name.endswith("spatial") else integer
            object.__setattr__(self, name, read(getattr(self, name), f"ConvolveAxesConfig: {name}"))

    def clone(self) -> ConvolveAxesConfig:
        """Itself: it cannot be changed."""
        return self


@dataclass(frozen=True)
class Capabilities:
    """The operations and dtypes of a backend. `operations`: for each operation the dtypes of its first operand."""

    operations: Mapping[OpType, frozenset[DType]] = field(default_factory=dict)
    dtypes: frozenset[DType] = frozenset()

    def supports(self, op_type: OpType, dtype: DType | None = None) -> bool:
        """Whether operations of the kind are there, of this element type if one is given."""
        found = self.operations.get(op_type)
        return found is not None and (dtype is None or dtype in found)

    def clone(self) -> Capabilities:
        """A copy whose mapping can be changed."""
        return Capabilities(dict(self.operations), self.dtypes)


def op_type_strings() -> list[str]:
    """GoMLX's names of all members of `OpType`, in order, its markers included."""
    return [str(op_type) for op_type in OpType]


def op_type_values() -> list[OpType]:
    """All members, in order."""
    return list(OpType)


def op_type_string(name: str) -> OpType:
    """The member that GoMLX calls so; `BackendError` for none."""
    return _named(OpType, name)


def fft_type_strings() -> list[str]:
    """GoMLX's names of all members of `FFTType`."""
    return [str(fft_type) for fft_type in FFTType]


def fft_type_values() -> list[FFTType]:
    return list(FFTType)


def fft_type_string(name: str) -> FFTType:
    """The member that GoMLX calls so; `BackendError` for none."""
    return _named(FFTType, name)


def reduce_op_type_strings() -> list[str]:
    """GoMLX's names of all members of `ReduceOpType`."""
    return [str(reduction) for reduction in ReduceOpType]


def reduce_op_type_values() -> list[ReduceOpType]:
    return list(ReduceOpType)


def reduce_op_type_string(name: str) -> ReduceOpType:
    """The member that GoMLX calls so; `BackendError` for none."""
    return _named(ReduceOpType, name)


_Member = TypeVar("_Member", OpType, FFTType, ReduceOpType)


def _named(enum: type[_Member], name: str) -> _Member:
    text(name, f"the name of a member of {enum.__name__}")
    for member in enum:
        if name in (str(member), member.name):
            return member
    raise BackendError(f"{enum.__name__} has no member {name!r}; it has {', '.join(map(str, enum))}")
