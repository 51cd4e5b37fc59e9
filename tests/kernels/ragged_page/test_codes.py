"""Attention over pages of int8 and float8: every instruction set this CPU has, odd sizes, guard pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from easytorch.kernels.cpu import library
from easytorch.kernels.decode.codes import CODES, Codes
from easytorch.kernels.quantized_matmul.weight import quantize
from easytorch.kernels.ragged_page import codes
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded
from tests.kernels.ragged_page.test_cpu import SIZES, features
from tests.operations.test_ragged_page import Batch, dense, make

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")


def coded(pages: torch.Tensor, kind: torch.dtype, group: int) -> Codes:
    """Pages of which what is not in use, NaN in the tests, has scales of NaN."""
    used = pages.isfinite().all(-1, keepdim=True)
    name = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3fn", torch.float8_e5m2: "fp8_e5m2"}[kind]
    width = min(group, pages.shape[-1])
    made = quantize(torch.where(used, pages, 1.0).float().reshape(-1, pages.shape[-1]), name, width)
    scale = made.scale.unflatten(0, pages.shape[:-1]).masked_fill(~used, float("nan"))
    return Codes(made.data.unflatten(0, pages.shape[:-1]), scale, group)


@needs_library
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("level", library.levels_of("decode"))
def test_every_feature_at_odd_sizes(level: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for number, (lengths, sizes) in enumerate(SIZES):
        batch = make(*lengths, **sizes)
        query, tables = batch.query.to(dtype), batch[3:]
        keys, values = (coded(pages, CODES[(number + level) % 3], 16) for pages in batch[1:3])
        behind = [
            Codes(guarded(x.data.view(torch.int8)).view(x.data.dtype), guarded(x.scale), x.group_size)
            for x in (keys, values)
        ]
        exact = Batch(query.double(), *(x.decoded(dtype).double() for x in (keys, values)), *tables)
        options = features(sizes["heads"])[(number + level) % 3]
        call = codes.resolve(query, keys, values, (*tables, None), options)
        for most in (10**6, 1):  # every sequence by the operator, and those of several rows by ATen
            got = codes.over_pages(query, *behind, (*tables, None), call, most_rows=most, level=level)
            error = relative_rms_error(got, dense(exact, **options))
            assert got.dtype == dtype and error <= TOLERANCE[dtype], (sizes, list(options), error)


@needs_library
def test_the_definition_and_what_is_refused() -> None:
    batch = make([1, 3], [9, 20], heads=4, dim=8, value_dim=6, page_size=4)
    tables: tuple[Any, ...] = batch[3:]
    keys, values = (coded(pages, torch.int8, 4) for pages in batch[1:3])
    got = codes.ragged_page_attention(batch.query, keys, values, *tables, sliding_window=5)
    clean = [x._replace(scale=x.scale.nan_to_num()) for x in (keys, values)]
    torch.testing.assert_close(got, codes.define(batch.query, *clean, *tables, sliding_window=5), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="key codes are"):
        codes.ragged_page_attention(batch.query, keys._replace(scale=keys.scale[..., :1]), values, *tables)
    with pytest.raises(ValueError, match="head_dim differ"):
        codes.ragged_page_attention(batch.query[..., :7], keys, values, *tables)
    with pytest.raises(NotImplementedError, match="codes of one dtype"):
        codes.ragged_page_attention(batch.query, keys, values._replace(data=values.data.to(torch.float8_e5m2)), *tables)
    wrong = tables[1].clone()
    wrong[1, 0] = len(keys.data)
    with pytest.raises(ValueError, match="block_tables"):
        codes.ragged_page_attention(batch.query, keys, values, tables[0], wrong, tables[2])
