"""`ragged_page_multi_latent_attention`: DeepSeek's attention of a mixed batch over pages of latents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from easytorch.kernels.interop.torch_func import recording, without_numbers
from easytorch.kernels.multi_latent import cpu_pages, paged
from easytorch.kernels.multi_latent.contract import check_widths
from easytorch.kernels.multi_latent.paged import Pages
from easytorch.operations.attention.ragged_page import PagedImpl, RaggedPageFeatures
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.registry import OperationRegistry


@OperationRegistry.register
class RaggedPageMultiLatentAttention(PagedImpl):
    """`op(query, query_rope, latent_pages, context_lens, block_tables, query_start_loc, num_seqs=None, up_key=None,
    up_value=None, **features)` -> `AttentionOutput` of (tokens, H, Dv), or (tokens, H, L) without `up_value`.

    (tokens, H, Dn), (tokens, H, R), (P, page_size, L + R) or a pair of (P, page_size, L) and (P, page_size, R);
    kernels/multi_latent/paged.py says the rest. The values of the integer tensors are checked on the CPU.

    On TPU make the width of each pool a multiple of 128: XLA lays out other widths differently, and the kernel's call
    starts with a copy of the whole pool (160 MiB of temporary memory for 2048 pages of 64 x 576 in bfloat16). Pad
    `query_rope` and its keys with zeros: R = 64 to 128, and give `softmax_scale`, whose default would count the
    padding. Of a pair of pools only the second is copied.
    """

    paths: ClassVar = {"cpp": "cpu", "gpu": "triton", "tpu": "pallas"}
    functions: ClassVar = {"cpu": "cpu_pages.ragged_page_multi_latent_attention"}
    folder = "multi_latent"
    cpp_reason = "pages are read where they lie, once for all heads, and one call projects before and after"

    @classmethod
    def get_impl_name(cls) -> str:
        return "ragged_page_multi_latent_attention"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        tables = (empty(*shape, dtype=torch.int32) for shape in ((64,), (64, 256), (65,)))
        up = empty(128, 128, 512)
        return (empty(64, 128, 128), empty(64, 128, 64), empty(4096, 64, 576), *tables, None, up, up), {}

    def supports(
        self,
        backend: str,
        query: Tensor,
        query_rope: Tensor,
        latent_pages: Pages,
        context_lens: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        num_seqs: int | Tensor | None = None,
        up_key: Tensor | None = None,
        up_value: Tensor | None = None,
        **features: Unpack[RaggedPageFeatures],
    ) -> str | None:
        if backend == "native":
            return None
        if (refusal := self.metadata.softmax_refusal(query.dtype)) is not None:
            return refusal
        if backend == "aten":
            return None
        if backend == "cpu":
            given = (query, query_rope, latent_pages, context_lens, block_tables, query_start_loc, num_seqs)
            others = (up_key, up_value, features.get("sinks"))
            return cpu_pages.supports(self.metadata.runtime_dtype or query.dtype, *given, *others)
        latent, rope = paged.split_pages(latent_pages, query_rope.shape[-1])
        if recording(query, query_rope, latent, rope, up_key, up_value, features.get("sinks")):
            return "its kernel has no backward, and this call needs a gradient"
        if backend == "pallas":
            return self.jax_refusal(query.dtype)
        from easytorch.kernels.multi_latent import triton_op

        sizes = check_widths(query, query_rope, latent, rope, up_key, up_value)
        return triton_op.supports(query.device, self.metadata.runtime_dtype or query.dtype, sizes)

    def forward_native(
        self,
        query: Tensor,
        query_rope: Tensor,
        latent_pages: Pages,
        context_lens: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        num_seqs: int | Tensor | None = None,
        up_key: Tensor | None = None,
        up_value: Tensor | None = None,
        **features: Unpack[RaggedPageFeatures],
    ) -> AttentionOutput:
        kernel = paged.in_graph if without_numbers(query, context_lens) else paged.definition
        definition = functools.partial(kernel, softmax_dtype=self.metadata.runtime_softmax_dtype)
        tables = (context_lens, block_tables, query_start_loc, num_seqs)
        return self.run(definition, query, query_rope, latent_pages, *tables, up_key, up_value, **features)

    def prefers_cpp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        # where nothing is cast: then its own operands say whether it is faster
        return (
            self.metadata.runtime_dtype is None
            and self.metadata.runtime_softmax_dtype is None
            and cpu_pages.prefers(*args, **kwargs)
        )

    @backend("aten")
    def forward_cpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        kernel = paged.in_graph if without_numbers(*args, *kwargs.values()) else paged.by_plans
        return self.run(kernel, *args, **kwargs)

    def run(
        self,
        kernel: Callable[..., Tensor],
        query: Tensor,
        query_rope: Tensor,
        latent_pages: Pages,
        context_lens: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        num_seqs: int | Tensor | None = None,
        up_key: Tensor | None = None,
        up_value: Tensor | None = None,
        **features: Any,
    ) -> AttentionOutput:
        """The output of `kernel`, whose arguments are those of the operation."""
        latent_pages = paged.checked_pages(latent_pages)
        output = kernel(
            *self._cast_all(query, query_rope, latent_pages), context_lens, block_tables, query_start_loc, num_seqs,
            *self._cast_all(up_key, up_value), **self.settle(features),
        )  # fmt: skip
        return AttentionOutput(attention_outputs=output)

    def _cast_all(self, *tensors: Any) -> tuple[Any, ...]:
        return tuple(
            None if x is None else self.cast(x) if isinstance(x, Tensor) else tuple(map(self.cast, x)) for x in tensors
        )
