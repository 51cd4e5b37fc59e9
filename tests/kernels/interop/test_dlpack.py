"""torch <-> jax: no copy where the layout allows, same values everywhere, no narrowed dtype."""

from __future__ import annotations

import gc

import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'easytorch[jax]'")
pytestmark = pytest.mark.jax_cpu

from easytorch.kernels.interop.dlpack import to_jax, to_torch  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool])
def test_contiguous_tensors_are_not_copied(dtype: torch.dtype) -> None:
    tensor = (torch.randn(5, 7) * 2).to(dtype)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.devices() == {jax.devices("cpu")[0]}
    back = to_torch(array)
    assert back.data_ptr() == tensor.data_ptr()
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_other_layouts_keep_their_values() -> None:
    base = torch.randn(6, 8)
    complex_tensor = torch.randn(4, dtype=torch.complex64)
    for tensor in (base.T, base[:, ::2], base[1:, 1:], base[0].expand(3, 8), base[2, 3], base[:0],
                   complex_tensor.conj(), complex_tensor.conj().imag, base.clone().requires_grad_()):  # fmt: skip
        back = to_torch(to_jax(tensor))
        assert torch.equal(back, tensor)
        assert not back.requires_grad


def test_memory_outlives_the_other_side() -> None:
    tensor = to_torch(jax.jit(lambda x: x + 1)(to_jax(torch.zeros(1000))))
    gc.collect()
    others = [torch.full((1000,), 7.0) for _ in range(50)]
    assert torch.equal(tensor, torch.ones(1000)) and others
    array = to_jax(torch.ones(1000))
    gc.collect()
    others = [torch.full((1000,), 7.0) for _ in range(50)]
    assert float(array.sum()) == 1000


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_a_dtype_jax_would_narrow_is_an_error(dtype: torch.dtype) -> None:
    assert not jax.config.jax_enable_x64, "nothing of EasyTorch may turn x64 on for the process"
    with pytest.raises(TypeError, match="would narrow"):
        to_jax(torch.ones(3, dtype=dtype))


def test_only_the_cpu() -> None:
    with pytest.raises(ValueError, match="CPU tensors"):
        to_jax(torch.empty(3, device="meta"))
