"""ATen's fused attention, with gradients that are right for scores of any size.

The backward of its CPU kernel takes a row's logsumexp as one number (logsumexp.py). Where that loses the logarithm,
beside scores or a bias beyond 1024, products and a softmax with gradients of their own compute the call. In a graph,
which has no numbers to look at, the fused kernel stays.

Its maximum of fewer scores than a vector holds skips NaN, so a query of NaN would attend to nothing and give zeros: a
mask that hides nothing takes the kernel's other path, which keeps it. In a graph, which may be of any number of keys,
rows whose first score is NaN are made NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.attention.contract import kept_scores
from easytorch.kernels.attention.logsumexp import LARGEST, fits_one_number
from easytorch.kernels.interop.torch_func import forward_mode, transforming, untraced

# Keys below which ATen's kernel loses NaN without a mask: scores in a vector of the widest instructions, AVX-512.
LANES = 16


def fused(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    """`F.scaled_dot_product_attention`; in forward mode its own definition, since its kernels have no tangents."""
    if forward_mode():
        return _by_definition(query, key, value, **settings)
    loses_nan = settings.get("attn_mask") is None and query.is_cpu
    if not untraced():
        loses_nan = loses_nan and _may_be_few(key)
        if loses_nan and _has_numbers(key):
            rows = query.shape[2] if settings.pop("is_causal", False) else 0
            hidden = (
                query.new_full((rows, key.shape[2]), -torch.inf).triu_(1) if rows else query.new_zeros(1, key.shape[2])
            )
            return F.scaled_dot_product_attention(query, key, value, **settings | {"attn_mask": hidden})
        output = F.scaled_dot_product_attention(query, key, value, **settings)
        return output * _nan_or_one(query, key).to(output.dtype) if loses_nan else output
    if loses_nan and 0 < (keys := key.shape[2]) < LANES:
        # ATen's causal aligns the first query and key, as its callers have as many of both.
        causal = settings.pop("is_causal", False)
        rows, right = (query.shape[2], 0) if causal else (1, None)
        settings["attn_mask"] = kept_scores(rows, keys, None, right, query.dtype)
    output = F.scaled_dot_product_attention(query, key, value, **settings)
    if (
        output.requires_grad and type(output) is Tensor and output.is_cpu
        and not _differentiable(output, query, key, value, settings)
    ):  # fmt: skip
        return _by_definition(query, key, value, **settings)
    return output


def _by_definition(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    """`F.scaled_dot_product_attention` in ATen's plain operations, which have every derivative."""
    mask = settings.get("attn_mask")
    if mask is not None and mask.dtype is torch.bool:  # added as it is, True would be a score of 1
        settings["attn_mask"] = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    output: Tensor = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, **settings)[0]
    return output


def _may_be_few(key: Tensor) -> bool:
    """Whether the graph may be run on fewer keys than `LANES`."""
    if torch.jit.is_tracing():
        return True
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return not statically_known_true(key.shape[2] >= LANES)


def _has_numbers(key: Tensor) -> bool:
    """Whether `key` is known not to be empty; False in graphs and traces."""
    graph = torch.compiler.is_compiling() or transforming() or torch.jit.is_tracing()
    return not graph and type(key.shape[2]) is int and key.shape[2] > 0


def _nan_or_one(query: Tensor, key: Tensor) -> Tensor:
    """(B, H, T, 1): NaN for the queries whose score with the first key is NaN. Without a mask each query sees that
    key, so where it is a number the kernel has not skipped all."""
    grouped = query.detach().unflatten(1, (key.shape[1], -1))[..., None, :]
    first = key.detach()[:, :, None, None, :1]
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (grouped.to(wide) * first.to(wide)).sum(-1)
    return torch.where(scores.isnan().any(-1, keepdim=True), torch.nan, 1.0).flatten(1, 2)


def _differentiable(output: Tensor, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> bool:
    """Whether the gradients that autograd would compute of the output are exact."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        # what was saved is no longer there: hooks of a checkpoint would compute all of it again
        if _largest_score(query, key, settings) <= LARGEST:
            return True
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            output = F.scaled_dot_product_attention(query, key, value, **settings)
    logsumexp = getattr(output.grad_fn, "_saved_logsumexp", None)
    return logsumexp is None or fits_one_number(logsumexp)


def _largest_score(query: Tensor, key: Tensor, settings: dict[str, Any]) -> float:
    """No score that is finite is further from zero."""
    if not (query.numel() and key.numel()):
        return 0.0
    scale, added = settings.get("scale"), settings.get("attn_mask")
    wide = torch.promote_types(query.dtype, torch.float32)
    norms = (float(torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide).amax()) for x in (query, key))
    most = abs(query.shape[-1] ** -0.5 if scale is None else scale) * next(norms) * next(norms)
    if added is not None and added.is_floating_point():
        rows = added.detach().amax(-1)
        most += float(torch.where(rows.isinf(), 0.0, rows).abs().amax())
    return most


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
