"""The names of element types: a name that is none is never read as NumPy's default."""

from __future__ import annotations

import numpy as np
import pytest

from easytorch.bridge.dtypes import FLOATING, SAFETENSORS_CODES, is_dtype, numpy_dtype


def test_every_name_has_its_dtype() -> None:
    for name in {*SAFETENSORS_CODES, *FLOATING}:
        assert is_dtype(name) and numpy_dtype(name).name == name


@pytest.mark.parametrize("name", ["", "float", "F32", "torch.float32", "complex256", "object"])
def test_an_unknown_name_is_no_dtype(name: str) -> None:
    """`np.empty(shape, None)` would be float64."""
    assert np.empty(0, None).dtype == np.float64
    assert not is_dtype(name)
    with pytest.raises(KeyError):
        numpy_dtype(name)
