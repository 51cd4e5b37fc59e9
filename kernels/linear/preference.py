"""Which float32 products oneDNN computes faster than the MKL behind F.linear: a table by CPU vendor.

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
import platform
from pathlib import Path

from torch import Tensor

# vendor -> the numbers a weight must have for oneDNN to be ahead; a vendor that is not listed keeps F.linear
TABLE = {"AuthenticAMD": 2**19}
# The gradient of the weight of few rows is an outer product, bound by memory: nothing to gain there.
TRAINING_ROWS = 64


def _vendor() -> str:
    """The CPU's vendor id as cpuid gives it ("AuthenticAMD", "GenuineIntel"), or "" where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        with cpuinfo.open() as file:
            text = file.read(1024)  # of the first processor: the file grows with their number
    else:
        text = platform.processor()
    return next((name for name in ("AuthenticAMD", "GenuineIntel") if name in text), "")


# once, here: inside a traced function the file could not be read
VENDOR = _vendor()


def smallest_weight() -> float:
    """The numbers a weight must have for oneDNN to be ahead on this CPU; infinite where it never is."""
    return TABLE.get(VENDOR, math.inf)


def prefers_onednn(x: Tensor, weight: Tensor, training: bool) -> bool:
    """True where the table says so. training: the gradients will be computed too."""
    if weight.numel() < smallest_weight():
        return False
    return not training or x.numel() >= TRAINING_ROWS * weight.shape[1]
