"""What Triton flash attention refuses, without running a kernel; test_triton_gpu.py and _interpreter.py run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from easytorch.kernels.attention.triton_flash import flash_attention, supports
from easytorch.kernels.attention.triton_tuning import padded_dim, tiles_of
from easytorch.kernels.interop.installed import INSTALLED
from easytorch.kernels.interop.triton_devices import DTYPES, SHARED_MEMORY

ROOT = Path(__file__).parents[3]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under TRITON_INTERPRET=1, for what only asks."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(INSTALLED, "triton", True)


def tensors(dtype: torch.dtype = torch.float32, dim: int = 64, value_dim: int = 64) -> tuple[torch.Tensor, ...]:
    return (
        torch.zeros(1, 4, 2, dim, dtype=dtype),
        torch.zeros(1, 4, 1, dim, dtype=dtype),
        torch.zeros(1, 4, 1, value_dim, dtype=dtype),
    )


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("dim", "value_dim"), [(16, 16), (60, 60), (256, 256), (192, 128)])
def test_supports_any_head_dim_up_to_256(dim: int, value_dim: int) -> None:
    assert supports(*tensors(dim=dim, value_dim=value_dim)) is None


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (tensors(torch.float64), "float64"),
        (tensors(torch.bfloat16), "interpreter truncates to bfloat16"),
        (tensors(dim=257), "query and key must be in 1..256, got 257"),
        (tensors(value_dim=320), "value must be in 1..256, got 320"),
    ],
)
def test_refuses_with_the_reason(given: tuple[torch.Tensor, ...], reason: str) -> None:
    assert reason in (supports(*given) or "")
    with pytest.raises(ValueError, match=reason):
        flash_attention(*given)


@pytest.mark.usefixtures("interpreted")
def test_meta_tensors_get_the_shape() -> None:
    query, key, value = (tensor.to("meta") for tensor in tensors(value_dim=48))
    output = flash_attention(query, key, value, causal=True)
    assert output.shape == (1, 4, 2, 48)
    assert output.device.type == "meta"


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(INSTALLED, "triton", True)
    assert "TRITON_INTERPRET=1" in (supports(*tensors()) or "")


@pytest.mark.usefixtures("interpreted")
def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSTALLED, "triton", False)
    assert "pip install 'easytorch[gpu]'" in (supports(*tensors()) or "")
    with pytest.raises(ImportError, match=r"pip install 'easytorch\[gpu\]'"):
        flash_attention(*tensors())


@pytest.mark.usefixtures("interpreted")
def test_checks_the_contract() -> None:
    query, key, value = tensors()
    with pytest.raises(ValueError, match="mask must be boolean"):
        flash_attention(query, key, value, mask=torch.zeros(4, 4))
    with pytest.raises(ValueError, match="does not broadcast"):
        flash_attention(query, key, value, bias=torch.zeros(3, 4))
    with pytest.raises(ValueError, match="sliding_window"):
        flash_attention(query, key, value, sliding_window=0)


def test_importing_it_loads_no_triton() -> None:
    code = "import sys, easytorch.kernels.attention.triton_flash; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=600)


@pytest.mark.parametrize("architecture", SHARED_MEMORY)
@pytest.mark.parametrize("kernel", ["forward", "key_value_grad", "query_grad"])
def test_the_table_has_tiles_for_every_head_dim(kernel: str, architecture: str) -> None:
    for dtype in DTYPES:
        for dim in (1, 16, 60, 64, 80, 128, 192, 256):
            query, _, value = tensors(dtype, dim, 64)
            tiles = tiles_of(kernel, architecture, query, value)
            # what tl.dot takes: powers of two, at least 16
            assert all(size >= 16 and size & (size - 1) == 0 for size in (tiles.block_m, tiles.block_n))


def test_padded_dim() -> None:
    assert [padded_dim(dim) for dim in (1, 16, 17, 60, 64, 65, 256)] == [16, 16, 32, 64, 64, 128, 256]
