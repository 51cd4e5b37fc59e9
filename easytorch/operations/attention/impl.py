"""Shared by the attention implementations: their keyword arguments, and the defaults they take from the metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypedDict, cast

import torch
from torch import Tensor

from easytorch.kernels.attention import cpp_call
from easytorch.kernels.attention.call import COMMON, DIFFERENTIABLE
from easytorch.kernels.attention.contract import SMALLEST_CAP, check_dropout, check_seed, check_softcap
from easytorch.kernels.attention.dropout import draw_seed
from easytorch.kernels.interop.arguments import LARGEST, check_flag, check_scale
from easytorch.kernels.interop.installed import missing
from easytorch.operations.dispatch.impl import OperationImpl
from easytorch.operations.dispatch.metadata import OperationMetadata
from easytorch.operations.dispatch.output import AttentionOutput

_SETTINGS = frozenset(("softmax_scale", "dropout_prob", "softcap", "seed"))


class AttentionFeatures(TypedDict, total=False):
    """The keyword arguments of every attention; kernels/attention/contract.py says what they mean."""

    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    query_segment_ids: Tensor | None
    key_segment_ids: Tensor | None
    sliding_window: int | tuple[int | None, int | None] | None
    softcap: float | None
    sinks: Tensor | None
    softmax_scale: float | None
    dropout_prob: float
    seed: int | Tensor | None


BEYOND_COMMON = tuple(sorted(AttentionFeatures.__annotations__.keys() - COMMON))


class AttentionImpl(OperationImpl):
    """`attn(query, key, value, **features)`: (B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> `AttentionOutput`."""

    settings: ClassVar[tuple[str, ...]] = ("runtime_softmax_dtype", "softmax_scale", "dropout_prob")
    _feature_names: ClassVar[frozenset[str]]  # the names that a call with three positional tensors may give
    takes_seed = frozenset({"native"})  # the backends whose dropout follows `seed`
    carries: ClassVar[Mapping[str, frozenset[str]]] = {}  # backend -> features that not every kernel has

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        given = self.metadata
        # checked once here instead of at each call: without settings a call's arguments are already the kernel's
        self._settled_as_given = (
            given.runtime_dtype is None
            and given.runtime_softmax_dtype is None
            and given.softmax_scale is None
            and given.dropout_prob == 0.0
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # empty where three tensors are not all, which the check of every operation looks at
        known = cls._keywords if cls._required == cls._leading == 3 else None
        cls._feature_names = frozenset() if known is None else known - frozenset((cls._positional or ())[:3])

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # unrolled: this check is a tenth of the dispatch of a small call
        if (
            len(args) != 3
            or not (isinstance(args[0], Tensor) and isinstance(args[1], Tensor) and isinstance(args[2], Tensor))
            or not kwargs.keys() <= self._feature_names
            or not (args[0].layout is args[1].layout is args[2].layout is torch.strided)
        ):
            super().check_call(args, kwargs)
        causal = kwargs.get("causal")
        if causal is not None and causal is not True and causal is not False:
            check_flag("attention", "causal", causal)
        if not _SETTINGS.isdisjoint(kwargs):
            get = kwargs.get
            scale, softcap = get("softmax_scale"), get("softcap")
            dropout_prob, seed = get("dropout_prob", 0.0), get("seed")
            if (
                seed is not None
                or type(dropout_prob) is not float
                or dropout_prob != 0.0
                or not (scale is None or (type(scale) is float and -LARGEST <= scale <= LARGEST))
                or not (softcap is None or (type(softcap) is float and SMALLEST_CAP <= softcap <= LARGEST))
            ):
                self._check_settings(kwargs)

    def _check_settings(self, features: dict[str, Any]) -> None:
        """The numbers among the features as Python's: those of NumPy overflow, and take products of tensors over."""
        if "softmax_scale" in features:
            features["softmax_scale"] = check_scale("attention", "softmax_scale", features["softmax_scale"])
        if "softcap" in features:
            features["softcap"] = check_softcap("attention", features["softcap"])
        if "dropout_prob" in features:
            features["dropout_prob"] = check_dropout(features["dropout_prob"])
        check_seed(features.get("seed"))

    def refusal(
        self, backend: str, query: Tensor, key: Tensor, value: Tensor, features: AttentionFeatures
    ) -> str | None:
        """`supports` for a backend other than the definition, with the metadata's settings already in `features`."""
        return None

    def supports(self, backend: str, query: Tensor, key: Tensor, value: Tensor, **features: Any) -> str | None:
        return self.supports_features(backend, query, key, value, features)

    def supports_features(self, backend: str, query: Tensor, key: Tensor, value: Tensor, features: Any) -> str | None:
        """`supports` with the features as one mapping, which is not changed: passing them on as keywords takes 1 us."""
        if backend == "native":
            return None
        if BEYOND_COMMON and (reason := self.beyond_common(backend, features)) is not None:
            return reason
        if self._settled_as_given:
            return self.refusal(backend, query, key, value, features)
        if (reason := self.metadata.softmax_refusal(query.dtype)) is not None:
            return reason
        return self.refusal(backend, *self.prepare(query, key, value, features.copy()))

    def leaves_to_cpp(self, features: Mapping[str, Any]) -> bool:
        """Whether the operator in C++ may be asked: no setting changes the call, and it carries every feature."""
        return self._settled_as_given and (not BEYOND_COMMON or self.beyond_common("cpu", features) is None)

    def beyond_common(self, backend: str, features: Mapping[str, Any]) -> str | None:
        """The refusal of an optional feature that `backend` does not list in `carries`, and the operators in C++ not in
        `cpp_call.SUPPORTED`; None without one."""
        carried = cpp_call.SUPPORTED if backend == "cpu" else self.carries.get(backend, frozenset())
        lacking = [name for name in BEYOND_COMMON if name not in carried and features.get(name) is not None]
        return f"it does not carry {', '.join(lacking)}" if lacking else None

    def prepare(
        self, query: Tensor, key: Tensor, value: Tensor, features: AttentionFeatures
    ) -> tuple[Tensor, Tensor, Tensor, AttentionFeatures]:
        """The kernel arguments: tensors in `runtime_dtype`, the metadata's scale and dropout if the call has none."""
        if self._settled_as_given:
            return query, key, value, features
        query, key, value = self._cast(query, key, value)
        return query, key, value, self._settled(features)

    def run(self, kernel: Callable[..., Tensor], *args: Any, **kwargs: Any) -> AttentionOutput:
        """The output of a path of `paths`."""
        query, key, value, features = named(*args, **kwargs)
        query, key, value, settled = self.prepare(query, key, value, features)
        return AttentionOutput(attention_outputs=kernel(query, key, value, **settled))

    def reproducible(self, backend: str, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        if kwargs.get("seed") is not None or not self._settled(cast(AttentionFeatures, dict(kwargs))).get(
            "dropout_prob"
        ):
            return kwargs
        return {**kwargs, "seed": draw_seed()} if backend in self.takes_seed else None

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        heads = torch.empty(1, 1024, 16, 64, dtype=torch.bfloat16, device="meta")
        return (heads, heads, heads), {"causal": True}

    def _cast(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        dtype = self.metadata.runtime_dtype
        return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)

    def _settled(self, features: AttentionFeatures) -> AttentionFeatures:
        metadata = self.metadata
        if metadata.softmax_scale is not None and features.get("softmax_scale") is None:
            features["softmax_scale"] = metadata.softmax_scale
        if metadata.dropout_prob and features.get("dropout_prob") is None:  # an explicit 0.0 drops nothing
            features["dropout_prob"] = metadata.dropout_prob
        return features


def xla_refusal(dtype: torch.dtype) -> str | None:
    """Why attention in XLA does not take tensors of a dtype, None where it does."""
    return "XLA attention computes in float32, not float64" if dtype == torch.float64 else missing("jax")


def without_float64(features: Any) -> Any:
    """The features with float64 tensors cast to float32, in which XLA computes scores: jax has no wider type."""
    wide = [name for name in DIFFERENTIABLE if getattr(features.get(name), "dtype", None) == torch.float64]
    return {**features, **{name: features[name].to(torch.float32) for name in wide}} if wide else features


def named(query: Tensor, key: Tensor, value: Tensor, **features: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    """The arguments of an attention however they were given."""
    return query, key, value, features
