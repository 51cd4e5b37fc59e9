"""What `diff` says of tensors that differ by little: every bit counts without a tolerance, and no distance is rounded
away."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from easytorch.bridge.diff import Difference, diff

INF, NAN = np.inf, np.nan
HUGE = 2**53


def compared(folder, one, other, tolerance=0.0) -> Difference:
    for name, array in (("one", one), ("other", other)):
        save_file({"w": array}, folder / f"{name}.safetensors", metadata={"format": "pt"})
    return diff(folder / "one.safetensors", folder / "other.safetensors", tolerance=tolerance)


@pytest.mark.parametrize(
    ("one", "other", "absolute", "relative"),
    [
        (np.array([HUGE, 5]), np.array([HUGE + 1, 5]), 1.0, 1 / HUGE),
        (np.array([HUGE], np.uint64), np.array([HUGE + 1], np.uint64), 1.0, 1 / HUGE),
        (np.array([2**64 - 1], np.uint64), np.array([0], np.uint64), 2.0**64, 1.0),
        (np.array([-(2**63), 0]), np.array([2**63 - 1, 0]), 2.0**64, 2.0),
        (np.array([HUGE + 1]), np.array([7], np.int32), HUGE - 6, (HUGE - 6) / (HUGE + 1)),
        (np.array([True, False]), np.array([True, True]), 1.0, INF),
        (np.array([INF, 1.0]), np.array([-INF, 1.0]), INF, INF),
        (np.array([INF, 1.0]), np.array([3.0, 1.0]), INF, INF),
        (np.array([2.0, 1.0]), np.array([NAN, 1.0]), INF, INF),
        (np.array([NAN, 2.0]), np.array([NAN, 3.0]), 1.0, 0.5),
        (np.array([complex(NAN, 1)], np.complex64), np.array([complex(NAN, 3)], np.complex64), 2.0, INF),
        (np.array([complex(INF, 1)], np.complex64), np.array([complex(INF, 1.5)], np.complex64), 0.5, 0.0),
        (np.array([3 + 4j], np.complex64), np.array([0j], np.complex64), 5.0, 1.0),
        (np.array([5e-324]), np.array([0.0]), 5e-324, 1.0),
    ],
)
def test_how_far_apart(tmp_path, one, other, absolute, relative):
    (found,) = compared(tmp_path, one, other).differing
    assert (found.max_abs, found.max_rel) == (absolute, pytest.approx(relative, rel=1e-12))
    within = compared(tmp_path, one, other, tolerance=absolute)
    assert within.same == (one.dtype == other.dtype)
    if one.dtype == other.dtype and absolute < INF:
        assert not compared(tmp_path, one, other, tolerance=absolute * 0.5).same or absolute == 5e-324


@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16", "complex64"])
def test_a_tolerance_is_of_values_and_none_of_bits(tmp_path, kind):
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    zeros = np.zeros(3, dtype)
    negative = -zeros
    payload = np.full(3, NAN, dtype)
    other = payload.copy()
    other.view(np.uint8)[0] ^= 1
    for one, another in ((zeros, negative), (payload, other)):
        (found,) = compared(tmp_path, one, another).differing
        assert (found.max_abs, found.max_rel) == (0.0, 0.0)
        assert compared(tmp_path, one, another, tolerance=1e-30).same


@pytest.mark.parametrize("tolerance", [-1.0, NAN])
def test_a_tolerance_that_is_none(tmp_path, tolerance):
    with pytest.raises(ValueError, match="give a number from 0 on"):
        compared(tmp_path, np.zeros(1), np.zeros(1), tolerance=tolerance)
