"""Which calls of many queries the operator in C++ takes before ATen's ways, and the measurements behind it.

kernels/attention/cpu*.cpp over what is chosen without it; inference, processor time of one thread
of a busy machine, the least of five calls in turn, B1 H16 K8 D64 unless it says more:

                                        float32    bfloat16    float16
    causal, 128 rows                    0.93       0.57       0.34
    causal, 128 rows, B8 K12 D32        1.71       0.73       0.45
    causal, 256 rows                    0.69       0.61       0.40
    causal, 512 rows                    0.61       0.41        0.76
    causal, 1024 rows                   0.68       0.53        0.62
    causal, 2048 rows, H32 K8 D128      0.75       0.43        0.64
    all see all, 256, 1024 rows         0.97, 0.94 0.74, 0.57
    window of 129 keys, 256, 1024 rows  0.64, 0.61 -, 0.49
    softcap, 256, 1024 rows             0.50, 0.70 -, 0.52
    sinks, 256, 1024 rows               0.63, 0.60 -, 0.44
    bias, 256 rows                      1.17       0.94
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import cpu
from easytorch.kernels.cpu import processor

# The least query rows, and in float32 numbers of a head, at which it was measured to be ahead.
ROWS, FLOAT32_DIM = 256, 64
# What it was not measured with, or is slower with; and the same in float16.
_WITHOUT = ("mask", "bias", "query_segment_ids")
_WITHOUT_IN_FLOAT16 = (*_WITHOUT, "sliding_window", "softcap", "sinks")


def prefers_cpp(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> bool:
    """True where `cpu.attention` is faster than ATen and carries this call. It may build the library."""
    shape, dtype, get = query.shape, query.dtype, features.get
    if len(shape) != 4 or shape[1] < ROWS or not query.is_cpu or not processor.BFLOAT16_DOT_PRODUCTS:
        return False
    if (dtype != torch.bfloat16 and not get("causal")) or (dtype == torch.float32 and shape[3] < FLOAT32_DIM):
        return False
    for name in _WITHOUT_IN_FLOAT16 if dtype == torch.float16 else _WITHOUT:
        if get(name) is not None:
            return False
    return cpu.supports(query, key, value, features) is None
