"""An attention call as one record: its arguments beside query, key and value, checked and normalized.

`contract.resolve` makes it, once per call; every kernel takes it, in any language. It is a tuple of tensors followed by
numbers, so a custom operator's flat arguments are its fields: `operator(query, key, value, *flatten(call))`, and
inside `unflatten(arguments)`. A new feature is a field here, a check in contract.py, the definition in native.py, and
the kernels that carry it.

Imports neither torch nor jax: the tensors may be either's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Array = Any  # a torch.Tensor; inside jax, and in Pallas kernels, one of jax's


# Features that every kernel supports unless it says otherwise. A new feature stays out of here until they all do:
# meanwhile the operations refuse it for each backend that does not list it (`AttentionImpl.carries`).
COMMON = frozenset({
    "mask", "bias", "causal", "query_segment_ids", "key_segment_ids", "sliding_window", "softcap", "sinks",
    "softmax_scale", "dropout_prob", "seed",
})  # fmt: skip


class AttentionCall(NamedTuple):
    """None is absent. Causal and the sliding window are the band i + S - T - left <= j <= i + S - T + right.

    seed: int64, shape (), with dropout only. The other tensors are as they were given.
    """

    mask: Array | None = None
    bias: Array | None = None
    query_segment_ids: Array | None = None
    key_segment_ids: Array | None = None
    sinks: Array | None = None
    seed: Array | None = None
    scale: float = 1.0
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    dropout_prob: float = 0.0

    @property
    def dense(self) -> bool:
        """Whether the call has a mask or bias of the size of the scores."""
        return self.mask is not None or self.bias is not None

    @property
    def plain(self) -> bool:
        """Whether the call is softmax(scale * query @ key^T) @ value, over all keys or a band of them."""
        return (
            self.mask is self.bias is self.query_segment_ids is self.sinks is self.softcap is None
            and self.dropout_prob == 0.0
        )

    def part(self, rows: slice, columns: slice) -> AttentionCall:
        """The call for some of its queries and keys; seed and band are unchanged."""
        query_ids, key_ids = self.query_segment_ids, self.key_segment_ids
        return self._replace(
            mask=_part(self.mask, rows, columns),
            bias=_part(self.bias, rows, columns),
            query_segment_ids=None if query_ids is None else query_ids[:, rows],
            key_segment_ids=None if key_ids is None else key_ids[:, columns],
        )

    def seed_on(self, device: Any) -> AttentionCall:
        """The call with its seed, where it has one, on a device of torch: it is drawn on the CPU."""
        return self if self.seed is None else self._replace(seed=self.seed.to(device))

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The fields that are tensors, None where there is none."""
        return self[:TENSORS]

    @property
    def numbers(self) -> tuple[float | int | None, ...]:
        """The fields that are not tensors: hashable, constants of a compiled program."""
        return self[TENSORS:]


def _part(matrix: Array | None, rows: slice, columns: slice) -> Array | None:
    """The rows and columns of what broadcasts to (B, H, T, S)."""
    if matrix is None:
        return None
    if matrix.ndim >= 2 and matrix.shape[-2] != 1:
        matrix = matrix[..., rows, :]
    if matrix.ndim >= 1 and matrix.shape[-1] != 1:
        matrix = matrix[..., columns]
    return matrix


TENSORS = AttentionCall._fields.index("scale")  # how many fields, the first ones, are tensors

# The fields that may be given gradients. A kernel that gives them returns query, key, value and these.
DIFFERENTIABLE = ("bias", "sinks")

_TYPES = {"Array | None": "Tensor?", "int | None": "SymInt?", "float": "float", "float | None": "float?"}

_KINDS = [_TYPES[str(getattr(kind, "__forward_arg__", kind))] for kind in AttentionCall.__annotations__.values()]
_FLOATS = [place for place, kind in enumerate(_KINDS) if kind.startswith("float")]


def schema() -> str:
    """The fields as arguments of a custom operator."""
    return ", ".join(f"{kind} {name}" for kind, name in zip(_KINDS, AttentionCall._fields, strict=True))


def flatten(call: AttentionCall) -> tuple[Any, ...]:
    """The record as the arguments of an operator of `schema`, which takes a number as its type says it."""
    for place in _FLOATS:
        number = call[place]
        if type(number) is not float and number is not None:
            named: dict[str, Any] = {call._fields[place]: float(number)}
            call = call._replace(**named)
    return call


def unflatten(arguments: Iterable[Any]) -> AttentionCall:
    """The record of an operator's arguments."""
    return AttentionCall._make(arguments)


def gradients_by_field(gradients: Mapping[str, Any]) -> tuple[Any, ...]:
    """A gradient for each argument of `flatten`: None but for the given fields."""
    return tuple(gradients.get(name) for name in AttentionCall._fields)


def map_tensors(call: AttentionCall, function: Callable[[str, Array], Any]) -> AttentionCall:
    """The record with `function(name, tensor)` in place of each tensor that is there."""
    names = AttentionCall._fields[:TENSORS]
    tensors = (None if x is None else function(name, x) for name, x in zip(names, call, strict=False))
    return unflatten((*tensors, *call.numbers))
