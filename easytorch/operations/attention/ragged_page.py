"""`ragged_page_attention`: prefill and decode in one batch, over a paged key/value cache."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from easytorch.kernels.attention.contract import check_softcap
from easytorch.kernels.cpu import processor
from easytorch.kernels.interop.arguments import check_scale
from easytorch.kernels.interop.torch_func import recording, transforming_in_graph, without_numbers
from easytorch.kernels.ragged_page import cpu, grouped, native, opaque
from easytorch.kernels.ragged_page.contract import FEATURES
from easytorch.operations.attention.impl import AttentionFeatures, xla_refusal
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.impl import Choice, OperationImpl, UnsupportedOperationError
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.registry import OperationRegistry

# why features of the attention contract are refused here
_REASONS = {
    "mask": "a boolean mask over ragged rows and pages has no shape; leave tokens out of the batch instead",
    "bias": "an additive bias over ragged rows and pages has no shape",
    "query_segment_ids": "each sequence is a segment of its own already (query_start_loc)",
    "key_segment_ids": "each sequence is a segment of its own already (block_tables)",
    "dropout_prob": "it reads a cache, for inference: there is no dropout",
    "seed": "there is no dropout to seed",
}


class RaggedPageFeatures(AttentionFeatures, total=False):
    """The features of every attention; all but `FEATURES` of kernels/ragged_page/contract.py are refused."""


class PagedImpl(OperationImpl):
    """Shared by the operations over pages: the features they refuse, and the metadata's defaults."""

    settings: ClassVar[tuple[str, ...]] = ("runtime_softmax_dtype", "softmax_scale", "dropout_prob")
    _accepted: ClassVar[frozenset[str]] = FEATURES  # the names of what the operation takes

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        parameters = inspect.signature(cls.forward_native).parameters.values()
        own = {one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
        cls._accepted = cls._accepted | own

    def choose_on(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        self.refuse(kwargs)  # the definition refuses it too: there is nothing to fall back to
        if transforming_in_graph():
            raise UnsupportedOperationError(
                f"{self.primary_name()} cannot be transformed by torch.func inside torch.compile: a graph does not "
                "follow the numbers of the block tables, and torch.func takes no gradient of an operator; transform "
                "outside of the compiled function"
            )
        return super().choose_on(platform, args, kwargs)

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().check_call(args, kwargs)
        if kwargs.get("softmax_scale") is not None:
            kwargs["softmax_scale"] = check_scale(self.primary_name(), "softmax_scale", kwargs["softmax_scale"])
        if kwargs.get("softcap") is not None:
            kwargs["softcap"] = check_softcap(self.primary_name(), kwargs["softcap"])

    def refuse(self, features: Any) -> None:
        """`UnsupportedOperationError` for a feature of attention that it lacks, `TypeError` for what is no feature."""
        name, own = self.primary_name(), f"its features are {', '.join(sorted(FEATURES))}"
        given = {feature: value for feature, value in features.items() if feature not in self._accepted}
        if unknown := given.keys() - AttentionFeatures.__annotations__.keys():
            raise TypeError(f"{name} got an unexpected keyword argument {min(unknown)!r}; {own}")
        if given.get("dropout_prob") is None:
            given["dropout_prob"] = self.metadata.dropout_prob
        for feature, value in given.items():
            if value is not None and not (feature == "dropout_prob" and value == 0.0):
                raise UnsupportedOperationError(f"{name} does not take {feature}: {_REASONS.get(feature, own)}")

    def settle(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """The kernel's keyword arguments: those of the call, with the metadata's scale where the call gives none."""
        self.refuse(features)
        settled = {name: value for name, value in features.items() if name in self._accepted}
        if self.metadata.softmax_scale is not None and settled.get("softmax_scale") is None:
            settled["softmax_scale"] = self.metadata.softmax_scale
        return settled

    def jax_refusal(self, dtype: torch.dtype) -> str | None:
        return xla_refusal(self.metadata.runtime_dtype or dtype)


@OperationRegistry.register
class RaggedPageAttention(PagedImpl):
    """`op(query, key_pages, value_pages, context_lens, block_tables, query_start_loc, num_seqs=None, **features)`.

    (tokens, H, D), (P, page_size, K, D), (P, page_size, K, Dv) -> `AttentionOutput` of (tokens, H, Dv);
    kernels/ragged_page/contract.py says the rest. The values of the integer tensors are checked on the CPU and by the
    definition; on other devices that would synchronize, so only EASYTORCH_CHECK=1 does it.
    """

    folder = "ragged_page"
    paths: ClassVar = {"cpp": "cpu", "gpu": "triton", "tpu": "pallas"}
    cpp_reason = "pages are read where they lie, once for all heads"

    @classmethod
    def get_impl_name(cls) -> str:
        return "ragged_page_attention"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        query, pages = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((64, 32, 128), (4096, 16, 8, 128))
        )
        lens, tables, starts = (
            torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((64,), (64, 256), (65,))
        )
        return (query, pages, pages, lens, tables, starts), {}

    def supports(
        self,
        backend: str,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        num_seqs: int | Tensor | None = None,
        **features: Unpack[RaggedPageFeatures],
    ) -> str | None:
        if backend == "native":
            return None
        if (refusal := self.metadata.softmax_refusal(query.dtype)) is not None:
            return refusal
        if backend == "aten":
            return None
        if backend == "cpu":
            tensors = (query, key_pages, value_pages, context_lens, block_tables, query_start_loc, num_seqs)
            return cpu.supports(self.metadata.runtime_dtype or query.dtype, *tensors, features.get("sinks"))
        if recording(query, key_pages, value_pages, features.get("sinks")):
            return "its kernel has no backward, and this call needs a gradient"
        if backend == "pallas":
            return self.jax_refusal(query.dtype)
        from easytorch.kernels.ragged_page import triton_op

        return triton_op.supports(query.device, self.metadata.runtime_dtype or query.dtype, *_dims(query, value_pages))

    def prefers_cpp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        query: Tensor = args[0] if args else kwargs["query"]
        return (
            processor.AVX2  # where it was measured
            and query.is_cpu
            and self.supports("cpu", *args, **kwargs) is None
        )

    def forward_native(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        num_seqs: int | Tensor | None = None,
        **features: Unpack[RaggedPageFeatures],
    ) -> AttentionOutput:
        run = opaque.ragged_page_attention if without_numbers(query, context_lens) else native.ragged_page_attention
        definition = functools.partial(run, softmax_dtype=self.metadata.runtime_softmax_dtype)
        tables = (context_lens, block_tables, query_start_loc, num_seqs)
        return self.run(definition, query, key_pages, value_pages, *tables, **features)

    @backend("aten")
    def forward_cpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        if without_numbers(*args, *kwargs.values()):
            return self.run(functools.partial(opaque.ragged_page_attention, by_groups=True), *args, **kwargs)
        return self.run(grouped.ragged_page_attention, *args, **kwargs)

    def run(
        self, kernel: Callable[..., Tensor], query: Tensor, key_pages: Tensor, value_pages: Tensor, *tables: Any,
        **others: Any,
    ) -> AttentionOutput:  # fmt: skip
        """The output of `kernel`, whose arguments are those of the operation."""
        tensors = (self.cast(x) for x in (query, key_pages, value_pages))
        return AttentionOutput(attention_outputs=kernel(*tensors, *tables, **self.settle(others)))


def _dims(query: Tensor, value_pages: Tensor) -> tuple[int, int]:
    return query.shape[-1], value_pages.shape[-1]
