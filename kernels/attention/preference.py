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

Training, forward and backward, over torch's SDPA / over kernels/attention/aten_flash.py:

                                        float32        bfloat16
    causal, 128 rows                    0.74 / 0.49    0.25 / 0.40
    causal, 128 rows, B8 H12 K12        0.92 / 0.62    0.31 / 0.50
    all see all, 128 rows, B8 K12 D32   1.05 / 0.72    0.19 / 0.41
    causal, 256 rows                    0.65 / 0.60    0.35 / 0.47
    causal, 512 rows                    0.54 / 0.65    0.33 / 0.54
    causal, 1024 rows, K16              0.67 / 0.70    0.45 / 0.50
    all see all, 1024 rows, K16         0.88 / 0.67    0.57 / 0.54
    causal, 2048 rows, H32 K8 D128      0.74 / 0.83    0.48 / 0.59
    window of 129 keys, 1024 rows            0.69           0.50
    softcap, 1024 rows                       0.56           0.33
    sinks, 1024 rows                         0.72           0.41

Packed documents, of ATen's tiles, which skip as well / of SDPA with a mask of blocks; inference, then training:

                                        float32                     bfloat16
    8 of 512 tokens, causal             0.39 / 0.06, 0.49 / 0.08    0.19 / 0.04, 0.29 / 0.05
    7 of different lengths, 1024 rows   0.36 / 0.16, 0.57 / 0.25    0.22 / 0.11, 0.38 / 0.13
    the same without causality          0.43 / 0.27, 0.55 / 0.37    0.29 / 0.14, 0.49 / 0.22
    3, 256 rows                         0.34 / 0.47, 0.48 / 0.63    0.24 / 0.33, 0.41 / 0.30
    3, 128 rows, B8 H12 K12 D32         0.38 / 0.83, 0.49 / 1.00    0.23 / 0.38, 0.39 / 0.24

The first takes 0.17 to 0.21 of what causal attention without documents takes. Dropout, of both likewise, 128 to 1024
rows: 0.17 to 0.42 / 0.05 to 0.53, in float16 too.

With a bias (B or 1, H or 1, T or 1, S), H8 to 12 D64, over torch's SDPA (Intel Xeon with AVX-512, without instructions
for bfloat16), float32 / bfloat16 / float16; a trained bias makes SDPA compute all scores in the graph:

    trained, 128 rows                   0.98 to 1.26 / 0.68 to 0.86 / 0.68 to 0.95
    trained, 256 rows                   0.78 to 1.05 / 0.46 to 0.79 / 0.64 to 0.82
    trained, 512 rows                   0.53 to 0.82 / 0.51 to 0.65 / 0.52 to 0.70
    trained, 1024 rows                  0.79 / 0.51 / 0.54
    trained, causal, 128 to 1024 rows   0.33 to 0.81 / 0.37 to 0.65 / 0.39
    given, 512 rows, training           1.00 to 1.08 / 0.34 to 0.39 / 0.06
    given, causal, 128, 256 rows        1.08, 0.91 / 0.28 / -
    dropout, training, inference        0.54 to 0.58, 0.27 to 0.33 / 0.47 to 0.53, 0.22 to 0.27 / -
    inference, 128 to 1024 rows         1.08 to 1.50 / 0.97 to 1.13 / 1.05 to 1.13
    inference, causal, 256, 1024 rows   0.65, 0.37 / 0.59, 0.45 / 0.59, 0.46

With softcap or sinks 0.55 to 0.81 of what ran without it.

On CPUs with AMX nothing was measured. SDPA multiplies bfloat16 there by tiles (through oneDNN's brgemm), whose peak is
16 times that of the dot products used here: it keeps what it carries in inference, plain and causal attention.

Training in float16: 0.06 to 0.09 of SDPA, 0.45 to 0.67 of aten_flash.py, without causality and with features too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import cpu
from easytorch.kernels.cpu import processor
from easytorch.kernels.interop.torch_func import recording

# The least query rows at which it was measured to be ahead, and of inference in float32, with numbers of a head. On an
# Intel Xeon with AVX-512 128 rows, B1 to 32 H4 to 12 D32 and 64, causal, take 0.53 to 0.62 in bfloat16.
ROWS, FLOAT32_ROWS, FLOAT32_DIM = 128, 256, 64
# The same with a given bias in inference, and with a trained one in float32.
BIASED_ROWS, TRAINED_BIAS_ROWS = 256, 512
# What it was not measured with, or is slower with; and the same in float16.
_WITHOUT = ("mask",)
_NOT_IN_SDPA = ("sliding_window", "softcap", "sinks")
_WITHOUT_IN_FLOAT16 = (*_WITHOUT, *_NOT_IN_SDPA)


def prefers_cpp(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> bool:
    """True where `cpu.attention` is faster than ATen and carries this call. It may build the library."""
    shape, dtype, get = query.shape, query.dtype, features.get
    if len(shape) != 4 or shape[1] < ROWS or not query.is_cpu or not processor.AVX2:
        return False
    bias = get("bias")
    training = recording(query, key, value, bias, get("sinks"))
    # of these ATen computes every score, or has no fused kernel
    slow = get("query_segment_ids") is not None or get("dropout_prob", 0.0) > 0.0
    if dtype == torch.float32 and shape[1] < FLOAT32_ROWS and not training and not slow:
        return False
    # a thread takes a head of the keys, with all queries that share it
    if training and shape[0] * key.shape[2] < torch.get_num_threads():
        return False
    short = dtype == torch.float16 and not training  # the list of what it was measured to be ahead with
    if bias is not None:
        if not slow and not _gains_with_bias(shape, dtype, training, bias, get):
            return False
    elif not slow:
        if (short or dtype == torch.float32) and not get("causal"):
            return False
        if dtype == torch.float32 and shape[3] < FLOAT32_DIM:
            return False
        tiles = processor.AMX_PRODUCTS and dtype == torch.bfloat16 and not training
        if tiles and all(get(name) is None for name in _NOT_IN_SDPA):
            return False
    for name in _WITHOUT_IN_FLOAT16 if short else _WITHOUT:
        if get(name) is not None:
            return False
    return cpu.supports(query, key, value, features) is None


def _gains_with_bias(
    shape: torch.Size, dtype: torch.dtype, training: bool, bias: Tensor, get: Callable[[str], Any]
) -> bool:
    """Whether it was measured to be ahead with this bias, and neither segments nor dropout."""
    if get("softcap") is not None or get("sinks") is not None or (training and dtype != torch.float32):
        return True
    if recording(bias):
        return bool(get("causal")) or shape[1] >= TRAINED_BIAS_ROWS
    return bool(get("causal")) and shape[1] >= BIASED_ROWS and (dtype != torch.float32 or shape[3] >= FLOAT32_DIM)
