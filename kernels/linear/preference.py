"""Which products are faster than F.linear: few rows by the C++ operator, float32 by oneDNN.

Time of the C++ operator divided by torch's best, one thread of a loaded AMD EPYC (Zen 4), torch 2.13.

    M, dtype       (64, 64)   (128, 128)   (256, 256)   (512, 512)   (1024, 1024)   (4096, 1024)
    1  bfloat16      1.0         0.23         0.27         0.33         0.60           0.53
    4  bfloat16      0.24        0.31         0.40         0.30         0.47           0.45
    16 bfloat16      0.38        0.55         0.77         0.26         0.59           0.73
    1  float32       1.5         1.3          0.93         0.22         0.65           0.77
    4  float32       1.3         1.1          0.73         0.43         0.47           0.59
    16 float32       1.6         1.2          1.3          0.92         0.65           1.05
    4  float16       0.61        0.41         0.30         0.17         0.35           0.22

The same of (4096, 1024) with fewer instructions: an Intel Xeon with AVX-512 but no dot products of bfloat16, and the
same with everything kept to AVX2:

    M               1      4      16
    bfloat16      0.78   0.48   0.35     0.90   0.31   0.25
    float32       1.04   0.68   0.85     1.22   0.54   0.78
    float16       0.77   0.38   0.20

Float32, oneDNN or MKL: a table by CPU vendor.

Time of oneDNN over MKL on 2 cores of an AMD EPYC (Zen 4, AVX-512), torch 2.13, M rows by a weight (N, K):

    M      (384, 384)   (1536, 384)   (1024, 1024)   (4096, 4096)
    1        1.32          0.60          0.53           0.66
    16       1.09          0.83          0.65           0.23
    64       1.05          0.85          0.67           0.44
    256      0.95          0.88          0.88
    512                                                 0.76

A shape that oneDNN has not met takes it 0.6 ms more, once in a process.
"""

from __future__ import annotations

import math

from torch import Tensor, bfloat16, float16, float32

from easytorch.kernels.cpu import processor

# vendor -> how many elements a weight must have for oneDNN to be faster; other vendors keep F.linear
TABLE = {"AuthenticAMD": 2**19}
# For few rows the weight's gradient is an outer product, bound by memory bandwidth: nothing to gain.
TRAINING_ROWS = 64

# dtype -> (rows up to which the C++ operator is faster, elements the weight must have)
FEW_ROWS = {bfloat16: (16, 2**14), float16: (16, 2**14), float32: (8, 2**17)}

# Whether one row in float32 is faster by the operator: MKL reads as fast on Intel, and oneDNN with AVX2.
ONE_FLOAT32_ROW = processor.AVX512 and processor.VENDOR == "AuthenticAMD"

# Columns from which one row in float16 is ATen's: the operator takes 0.99 to 1.09 of its time there.
ATEN_COLUMNS = 4096


def prefers_cpu(x: Tensor, weight: Tensor) -> bool:
    """True where the C++ operator is faster than ATen and oneDNN, without gradients."""
    limits = FEW_ROWS.get(x.dtype) if processor.AVX2 else None
    if limits is None or weight.dim() != 2:
        return False
    rows, least = limits
    count, columns = x.numel(), weight.shape[1]
    if x.dtype == float16 and count == columns >= ATEN_COLUMNS:
        return False
    if x.dtype == float32 and count == columns and not ONE_FLOAT32_ROW:
        return False
    return 0 < count <= rows * columns and weight.numel() >= least


def smallest_weight() -> float:
    """How many elements a weight must have for oneDNN to be faster on this CPU; infinity where it never is."""
    return TABLE.get(processor.VENDOR, math.inf)


def prefers_onednn(x: Tensor, weight: Tensor, training: bool) -> bool:
    """True where the table says oneDNN is faster. training: gradients will be computed too."""
    if weight.numel() < smallest_weight():
        return False
    return not training or x.numel() >= TRAINING_ROWS * weight.shape[1]
