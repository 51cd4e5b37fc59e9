"""`attention`: for each call, the fastest measured implementation that supports it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Unpack, cast

from torch import Tensor

from easytorch.kernels.attention.preference import prefers_cpp as prefers_many
from easytorch.kernels.decode.cpu import prefers as prefers_one
from easytorch.kernels.interop.torch_func import FORWARD_REFUSAL, forward_mode
from easytorch.operations.attention import cpu_order
from easytorch.operations.attention.blocksparse import BEYOND_THE_CONTRACT, BlockSparseAttention, BlockSparseFeatures
from easytorch.operations.attention.cpu_order import DECODE_FIRST, DECODE_LAST, SHORT
from easytorch.operations.attention.decode import ONE_QUERY, DecodeAttention
from easytorch.operations.attention.flash import FlashAttention
from easytorch.operations.attention.impl import AttentionImpl, named
from easytorch.operations.attention.sdpa import SdpaAttention
from easytorch.operations.attention.shortcuts import decode_shortcut, sdpa_shortcut
from easytorch.operations.attention.vanilla import VanillaAttention
from easytorch.operations.dispatch.environment import untouched
from easytorch.operations.dispatch.impl import PLAIN_TORCH, Choice, UnsupportedOperationError
from easytorch.operations.dispatch.metadata import OperationMetadata
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.registry import OperationRegistry

# platform -> (implementation, why it is preferred): the first that supports the call is taken, `vanilla` if none does.
# The CPU's order depends on the size of the call: cpu_order.py. Elsewhere decode comes before them for one query.
PREFERENCES: dict[str, tuple[tuple[str, str], ...]] = {
    "cuda": (
        ("flash", "the Triton kernel carries every feature"),
        ("sdpa", "ATen picks cuDNN or its own flash kernel"),
    ),
    "rocm": (("flash", "the Triton kernel carries every feature"), ("sdpa", "ATen picks its own flash kernel")),
    "tpu": (("flash", "online softmax compiled into the XLA graph"),),
    "native": (),
}


@OperationRegistry.register
class Attention(AttentionImpl):
    """Selects an implementation; `metadata.backend` and EASYTORCH_OPS force one, a backend or both ("flash:triton")."""

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        # a forced backend is meant for this operation alone; the implementations below select automatically
        inner = dataclasses.replace(self.metadata, backend=None)
        self.implementations: dict[str, AttentionImpl] = {
            cls.primary_name(): cls(inner)
            for cls in (SdpaAttention, FlashAttention, BlockSparseAttention, VanillaAttention, DecodeAttention)
        }
        self._decode = cast(DecodeAttention, self.implementations["decode"])
        self._flash = cast(FlashAttention, self.implementations["flash"])
        self._by_name = {name: impl for impl in self.implementations.values() for name in impl.all_names()}
        # the candidates, by the CPU's order of preferences, elsewhere by platform and whether there is one query
        self._orders: dict[Any, tuple[Choice, ...]] = {
            order: tuple(self._choice("cpu", *preference) for preference in order) for order in cpu_order.ORDERS
        }
        for platform, order in PREFERENCES.items():
            for one_query in (False, True):
                preferences = (ONE_QUERY, *order) if one_query and order else order
                choices = tuple(self._choice(platform, *preference) for preference in preferences)
                self._orders[platform, one_query] = choices
        self._short = self._orders[SHORT]

    @classmethod
    def get_impl_name(cls) -> str:
        return "attention"

    def forward_native(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[BlockSparseFeatures]
    ) -> AttentionOutput:
        defining = self.definition_of(cast(dict[str, Any], features))
        output: AttentionOutput = defining.forward_native(query, key, value, **features)
        return output

    def _choice(self, platform: str, name: str, why: str) -> Choice:
        implementation = self.implementations[name]
        method, backend = implementation.path(platform)
        return Choice(implementation, method, platform, backend, why)

    def candidates(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Choice]:
        query, key, value, features = (*args, kwargs) if len(args) == 3 else named(*args, **kwargs)
        if not BEYOND_THE_CONTRACT.isdisjoint(features):
            blocksparse = self.implementations["blocksparse"].candidates(platform, args, kwargs)
            return [choice._replace(reason=f"chunks and prefixes; {choice.reason}") for choice in blocksparse]
        preferences = PREFERENCES.get(platform)
        if preferences is None:
            order = cpu_order.preferences(query, key, value, features)
            if order is SHORT:  # fewer queries than either operator in C++ is ahead with
                return self._short
            # the operators in C++ of one query and of many
            one_query = order is DECODE_LAST or order is DECODE_FIRST
            prefers, implementation = (prefers_one, self._decode) if one_query else (prefers_many, self._flash)
            if prefers(query, key, value, features) and implementation.leaves_to_cpp(features):
                return implementation.cpp_choices
            return self._orders[order]
        one_query = bool(preferences) and query.dim() == 4 and query.shape[1] == 1
        return self._orders[platform, one_query]

    def shortcut(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        if choice.operation is self._decode and choice.method == "forward_cpp":
            return decode_shortcut(*args, **kwargs)
        if choice.operation is self.implementations["sdpa"] and choice.method == "forward_cpu":
            return sdpa_shortcut(*args, **kwargs)
        return None

    def refusal_of(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        implementation: Any = choice.operation
        if choice.backend not in PLAIN_TORCH and forward_mode():
            return FORWARD_REFUSAL
        if len(args) == 3:  # passing the features on as keywords takes 1 us
            refusal: str | None = implementation.supports_features(choice.backend, *args, kwargs)
            return refusal
        return super().refusal_of(choice, args, kwargs)

    def definition_of(self, kwargs: dict[str, Any]) -> AttentionImpl:
        return self.implementations["vanilla" if BEYOND_THE_CONTRACT.isdisjoint(kwargs) else "blocksparse"]

    def one_token(self, query: Tensor, key: Tensor, value: Tensor, softmax_scale: float | None = None) -> Tensor | None:
        """query (B, H, 1, D), key (B, K, S, D), value (B, K, S, Dv) -> (B, 1, H, Dv): a call without features.

        None where the full dispatch is needed: a backend is forced, results are compared, metadata is set, or the
        kernel must check more.
        """
        if not (self._free and self._settled_as_given and untouched()):
            return None
        if softmax_scale is not None and not (type(softmax_scale) is float and math.isfinite(softmax_scale)):
            return None
        return self._decode.one_token(query, key, value, softmax_scale)

    def choose_forced(self, forced: str, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        name, _, backend = forced.partition(":")
        beyond = BEYOND_THE_CONTRACT & kwargs.keys()
        if name in self._by_name:
            implementation = self._by_name[name]
            if beyond and implementation is not self.implementations["blocksparse"]:
                raise UnsupportedOperationError(
                    f"attention: {', '.join(sorted(beyond))} is carried by blocksparse alone, and {forced!r} is "
                    f"forced; force blocksparse, or none"
                )
            if backend:
                return implementation.choose_forced(backend, platform, args, kwargs)
            return implementation.choose_by_name(platform, args, kwargs)
        if forced == "native":
            if beyond:
                return self.implementations["blocksparse"].choose_forced("native", platform, args, kwargs)
            return Choice(self.implementations["vanilla"], "forward_native", platform, "native", "forced")
        holders = [impl for impl in self.implementations.values() if forced in impl.backends() and forced != "native"]
        if not holders:
            backends = dict.fromkeys(b for impl in self.implementations.values() for b in impl.backends())
            raise UnsupportedOperationError(
                f"attention has no implementation or backend {forced!r}; it has the implementations "
                f"{', '.join(self._by_name)} and the backends {', '.join(backends)} (forced by metadata.backend, "
                f"attn_implementation or EASYTORCH_OPS)"
            )
        if len(holders) > 1:  # prefer the one that the automatic choice would take
            choice = self.choose_freely(platform, args, kwargs)
            if choice.backend == forced:
                return choice._replace(reason="forced")
        return holders[0].choose_forced(forced, platform, args, kwargs)
