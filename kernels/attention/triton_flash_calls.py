"""The launches of flash attention: kernels, arguments and grids.

Only reads shapes, strides and dtypes, so it describes calls on meta tensors too: that is how triton_aot.py compiles
what a GPU would run. Imports Triton: import it inside the function that needs it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from easytorch.kernels.attention import dropout
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.triton_flash_backward_keys import flash_key_value_grad
from easytorch.kernels.attention.triton_flash_backward_queries import flash_delta, flash_query_grad
from easytorch.kernels.attention.triton_flash_forward import flash_forward
from easytorch.kernels.attention.triton_tuning import padded_dim, tiles_of
from easytorch.kernels.interop.triton_call import Call, adjacent

LOG2E = math.log2(math.e)


def natural_scores(call: AttentionCall) -> bool:
    """Whether the kernels' scores are natural: those with a bias, which as large as it may be has no room for more."""
    return call.bias is not None


def forward_call(
    architecture: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
    lse: torch.Tensor, call: AttentionCall, *, natural: bool | None = None,
) -> Call:  # fmt: skip
    """Fills output (B, T, H, Dv) and lse (B, H, 2, T) float32: logsumexp.py."""
    batch, length, heads, _ = query.shape
    tiles = tiles_of("forward", architecture, query, value, dense=call.dense)
    arguments = {
        "query": query, "key": key, "value": value, "output": output, "lse": lse,
        "sinks": adjacent(call.sinks), "output_strides": output.stride(),
        **shared_arguments(query, key, value, call, natural), **tile_arguments(query, value, tiles),
    }  # fmt: skip
    return Call(
        flash_forward, -(-length // tiles.block_m) * heads * batch, arguments, tiles.num_warps, tiles.num_stages
    )


def delta_call(output: torch.Tensor, output_grad: torch.Tensor, delta: torch.Tensor) -> Call:
    """Fills delta (B, H, T) float32."""
    batch, length, heads, value_dim = output.shape
    arguments = {
        "output": output, "output_grad": output_grad, "delta": delta, "output_strides": output.stride(),
        "grad_strides": output_grad.stride(), "H": heads, "T": length, "DV": value_dim, "BLOCK_M": 64,
        "BLOCK_DV": padded_dim(value_dim),
    }  # fmt: skip
    return Call(flash_delta, -(-length // 64) * heads * batch, arguments)


def key_value_grad_call(
    architecture: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output_grad: torch.Tensor,
    lse: torch.Tensor, delta: torch.Tensor, key_grad: torch.Tensor, value_grad: torch.Tensor, call: AttentionCall,
    *, natural: bool | None = None,
) -> Call:  # fmt: skip
    """Fills key_grad (B, S, K, D) and value_grad (B, S, K, Dv)."""
    batch, keys, kv_heads, _ = key.shape
    tiles = tiles_of("key_value_grad", architecture, query, value, dense=call.dense)
    arguments = {
        "query": query, "key": key, "value": value, "output_grad": output_grad, "lse": lse, "delta": delta,
        "key_grad": key_grad, "value_grad": value_grad, "grad_strides": output_grad.stride(),
        "key_grad_strides": key_grad.stride(), "value_grad_strides": value_grad.stride(),
        "softmax_scale": call.scale, **shared_arguments(query, key, value, call, natural),
        **tile_arguments(query, value, tiles),
    }  # fmt: skip
    programs = -(-keys // tiles.block_n) * kv_heads * batch
    return Call(flash_key_value_grad, programs, arguments, tiles.num_warps, tiles.num_stages)


def query_grad_call(
    architecture: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output_grad: torch.Tensor,
    lse: torch.Tensor, delta: torch.Tensor, query_grad: torch.Tensor, bias_grad: torch.Tensor | None,
    call: AttentionCall, *, natural: bool | None = None,
) -> Call:  # fmt: skip
    """Fills query_grad (B, T, H, D), and bias_grad (B, H, T, S) in the blocks that are seen."""
    batch, length, heads, _ = query.shape
    tiles = tiles_of("query_grad", architecture, query, value, dense=call.dense)
    arguments = {
        "query": query, "key": key, "value": value, "output_grad": output_grad, "lse": lse, "delta": delta,
        "query_grad": query_grad, "bias_grad": bias_grad, "grad_strides": output_grad.stride(),
        "query_grad_strides": query_grad.stride(),
        "bias_grad_strides": None if bias_grad is None else bias_grad.stride(),
        "softmax_scale": call.scale, **shared_arguments(query, key, value, call, natural),
        **tile_arguments(query, value, tiles),
    }  # fmt: skip
    programs = -(-length // tiles.block_m) * heads * batch
    return Call(flash_query_grad, programs, arguments, tiles.num_warps, tiles.num_stages)


def shared_arguments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall, natural: bool | None = None
) -> dict[str, Any]:
    """The arguments that every kernel but delta takes; a mask or bias is broadcast by strides of zero.

    natural: whether scores and lse are, else in units of log2; None is what the call needs (`natural_scores`).
    """
    natural = natural_scores(call) if natural is None else natural
    unit = 1.0 if natural else LOG2E
    batch, length, heads, _ = query.shape
    keys, kv_heads = key.shape[1:3]
    full = (batch, heads, length, keys)
    bias = None if call.bias is None else call.bias.expand(full)
    mask = None if call.mask is None else call.mask.view(torch.uint8).expand(full)
    softcap, scale = call.softcap, call.scale
    return {
        "bias": bias, "mask": mask, "query_ids": call.query_segment_ids, "key_ids": call.key_segment_ids,
        "seed": call.seed,
        "query_strides": query.stride(), "key_strides": key.stride(), "value_strides": value.stride(),
        "bias_strides": _strides(bias), "mask_strides": _strides(mask),
        "query_id_strides": _strides(call.query_segment_ids), "key_id_strides": _strides(call.key_segment_ids),
        "H": heads, "GROUP": heads // kv_heads, "T": length, "S": keys, "left": call.left, "right": call.right,
        "scale": scale * unit if softcap is None else scale / softcap,
        "cap": None if softcap is None else softcap * unit, "NATURAL": natural,
        "threshold": dropout.threshold(call.dropout_prob), "keep_scale": 1.0 / (1.0 - call.dropout_prob),
    }  # fmt: skip


def tile_arguments(query: torch.Tensor, value: torch.Tensor, tiles: Any) -> dict[str, Any]:
    """The sizes a kernel is compiled for, and how it multiplies float32."""
    exact = query.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest" or torch.version.hip
    return {
        "D": query.shape[3], "DV": value.shape[3], "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "BLOCK_D": padded_dim(query.shape[3]), "BLOCK_DV": padded_dim(value.shape[3]),
        "PRECISION": "ieee" if exact else "tf32",
    }  # fmt: skip


def _strides(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.stride()
