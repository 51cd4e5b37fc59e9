"""A few of torch's own samples of a few operations, on NumPy; scripts/frontend_opinfo.py runs them all."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("expecttest") is None:
    pytest.skip("torch's samples need the package expecttest", allow_module_level=True)

from scripts.frontend_opinfo import check, chosen, samples

# One of each kind of lowering.
NAMES = [
    *("add", "pow", "remainder", "clamp", "var", "cumsum", "logcumsumexp", "sort", "median", "argmax", "index_put"),
    *("gather", "scatter_reduce", "masked_scatter", "as_strided", "diagonal", "roll", "fft.irfftn", "cdist", "einsum"),
    *(
        "grid_sampler_2d",
        "nn.functional.conv_transpose2d",
        "nn.functional.upsample_bilinear",
        "nn.functional.max_pool2d",
    ),
    *(
        "nn.functional.avg_pool3d",
        "nn.functional.pixel_shuffle",
        "nn.functional.group_norm",
        "nn.functional.embedding_bag",
    ),
    *("nn.functional.adaptive_max_pool2d", "nn.functional.unfold", "nn.functional.scaled_dot_product_attention"),
]


def failures(names: list[str], dtype: torch.dtype, limit: int) -> list[str]:
    found = []
    for info in chosen(names):
        if dtype not in info.dtypes:
            continue
        for sample in samples(info, dtype, limit):
            reason = check(info, sample, "numpy", dtype)
            if reason is not None:
                found.append(f"{info.name} {info.variant_test_name}: {reason}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_float32(name: str) -> None:
    assert failures([name], torch.float32, 2) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_other_types(dtype: torch.dtype) -> None:
    names = [
        "add",
        "sum",
        "cumsum",
        "gather",
        "index_put",
        "mean",
        "argmax",
        "nn.functional.conv2d",
        "where",
        "softmax",
    ]
    assert failures(names, dtype, 1) == []
