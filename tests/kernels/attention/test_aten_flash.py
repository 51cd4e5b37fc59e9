"""Attention in tiles of ATen's products: opcheck, transforms, the bits of dropout, what is skipped, linear memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from easytorch.kernels.attention import aten_flash, aten_flash_tiles, aten_op, native
from easytorch.kernels.attention.call import AttentionCall
from easytorch.operations.dispatch.check import relative_rms_error


def _inputs(length: int = 20, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((2, length, 4, 8), (2, length, 2, 8), (2, length, 2, 6))
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes]


def _documents(length: int, count: int = 3) -> dict[str, torch.Tensor]:
    ids = (torch.arange(length) * count // length).repeat(2, 1)
    return {"query_segment_ids": ids, "key_segment_ids": ids}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows and several chunks of heads, also for short sequences."""
    monkeypatch.setattr(aten_flash_tiles, "ROWS", 16)
    monkeypatch.setattr(aten_flash_tiles, "TILE_BYTES", 1 << 10)


@pytest.mark.parametrize("extras", [False, True])
def test_opcheck(extras: bool) -> None:
    tensors = _inputs()
    ids = torch.zeros(2, 20, dtype=torch.int64)
    optional: list[Any] = [None] * 6
    if extras:
        mask, bias = torch.rand(20, 20) > 0.2, torch.randn(4, 1, 20)
        optional = [mask, bias, ids, ids, torch.randn(4), torch.tensor(3)]
    arguments = (*tensors, *optional, 0.3, None, 0, 2.0 if extras else None, 0.2 if extras else 0.0)
    torch.library.opcheck(torch.ops.easytorch.aten_flash_forward.default, arguments)
    backward = (torch.randn(2, 20, 4, 6), *arguments, extras)
    torch.library.opcheck(torch.ops.easytorch.aten_flash_backward.default, backward)


FEATURES: dict[str, Any] = {
    "plain": lambda n: {},
    "causal": lambda n: {"causal": True},
    "window": lambda n: {"causal": True, "sliding_window": 9},
    "sides": lambda n: {"sliding_window": (5, 20)},
    "documents": lambda n: {"causal": True, **_documents(n)},
    "mask": lambda n: {"mask": (torch.arange(n) % 40 < 30)[:, None] & (torch.arange(n) > 11)},
    # rows that see nothing although mask or documents hide nothing of what is left of their tile
    "left_padding": lambda n: {"mask": (torch.arange(n) >= n * 2 // 3)[None, None, None], "causal": True},
    "left_padding_of_each": lambda n: {"mask": torch.arange(n) >= torch.tensor([7, n // 2])[:, None, None, None],
                                       "causal": True, "sliding_window": 9},
    "right_padding": lambda n: {"mask": (torch.arange(n) < n // 3)[None, None, None], "sliding_window": (4, None)},
    "documents_apart": lambda n: {"query_segment_ids": torch.ones(2, n, dtype=torch.int64), "sliding_window": (5, 3),
                                  "key_segment_ids": (torch.arange(n) > n // 2).long().repeat(2, 1)},
    "mask_heads": lambda n: {"mask": torch.rand(1, 4, n, n) > 0.3, "causal": True},
    "everything": lambda n: {
        **_documents(n), "mask": torch.rand(2, 1, n, n) > 0.2, "bias": torch.randn(4, n, 1), "softcap": 3.0,
        "sinks": torch.randn(4), "dropout_prob": 0.3, "seed": 11,
    },
}  # fmt: skip


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("length", [15, 16, 83])
def test_every_cut_into_tiles_is_exact(length: int, features: str, dtype: torch.dtype) -> None:
    tensors, given = _inputs(length, dtype, requires_grad=True), FEATURES[features](length)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    got, expected = aten_op.attention(*tensors, **given), native.attention(*wide, **given)[0]
    grad = torch.randn_like(expected).to(dtype)
    pairs = [(got, expected)]
    pairs += zip(
        torch.autograd.grad(got, tensors, grad), torch.autograd.grad(expected, wide, grad.double()), strict=True
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype]
    assert relative_rms_error(*pairs[0]) <= tolerance
    assert all(relative_rms_error(*pair) <= 2 * tolerance for pair in pairs[1:])


@pytest.mark.parametrize("seed", [0, -7, 2**31 - 1, 2**32 + 11, 2**63 - 1, torch.tensor(99)])
def test_dropout_drops_the_same_weights_bit_for_bit(seed: Any, small_tiles: None) -> None:
    length = 70
    q, k = torch.zeros(2, length, 4, 8), torch.zeros(2, length, 2, 8)
    v = torch.eye(length).reshape(1, length, 1, length).repeat(2, 1, 2, 1)  # the output is the weights
    got = aten_op.attention(q, k, v, dropout_prob=0.4, seed=seed)
    expected = native.attention(q, k, v, dropout_prob=0.4, seed=seed)[0]
    assert torch.equal(got == 0, expected == 0)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spread", [1.0, 6.0, 12.0, 25.0])
def test_bfloat16_scores_of_any_size(spread: float, causal: bool) -> None:
    """They are not rounded to bfloat16 before the softmax, which at 12 would be an error of 1e-2."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 256, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    tensors = [x.requires_grad_() for x in (q * spread, k, v)]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    got, expected = aten_op.attention(*tensors, causal=causal), native.attention(*wide, causal=causal)[0]
    grad = torch.randn(got.shape).bfloat16()
    assert relative_rms_error(got, expected) <= 3e-3
    gradients = torch.autograd.grad(got, tensors, grad), torch.autograd.grad(expected, wide, grad.double())
    for a, b in zip(*gradients, strict=True):
        assert relative_rms_error(a, b) <= 8e-3


def test_layouts_and_expanded_tensors() -> None:
    q, k, v = _inputs()
    expected = native.attention(q, k, v, bias=torch.ones(20, 20))[0]
    strided = [torch.empty(*x.shape, 2).select(-1, 0).copy_(x) for x in (q, k, v)]
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for variant in (strided, transposed):
        torch.testing.assert_close(aten_op.attention(*variant, bias=torch.ones(1).expand(20, 20)), expected)
    grad = torch.ones(1).expand(2, 20, 4, 6)  # as `.sum()` gives it
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(aten_op.attention(*leaves), leaves, grad)
    want = torch.autograd.grad(native.attention(*leaves)[0], leaves, grad)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_empty_sequences(lengths: tuple[int, int]) -> None:
    queries, keys = lengths
    q = torch.randn(1, queries, 2, 4, requires_grad=True)
    k = torch.randn(1, keys, 2, 4, requires_grad=True)
    sinks = torch.zeros(2, requires_grad=True)
    output = aten_op.attention(q, k, k, sinks=sinks)
    assert torch.equal(output, torch.zeros(1, queries, 2, 4))
    assert all((g == 0).all() for g in torch.autograd.grad(output.sum(), (q, k, sinks)))


def _loss(attend: Any, *tensors: torch.Tensor) -> torch.Tensor:
    output = attend(*tensors, causal=True)
    return (output[0] if isinstance(output, tuple) else output).square().sum()


def test_functional_transforms() -> None:
    q, k, v = (torch.randn(3, 1, 20, 2, 8) for _ in range(3))
    fast, slow = (
        torch.func.grad(lambda *x, attend=attend: _loss(attend, *x), argnums=(0, 1, 2))
        for attend in (aten_op.attention, native.attention)
    )
    want = [torch.stack(x) for x in zip(*(slow(q[i], k[0], v[i]) for i in range(3)), strict=True)]
    torch.testing.assert_close(list(torch.func.vmap(fast, in_dims=(0, None, 0))(q, k[0], v)), want)
    mapped = torch.func.vmap(lambda q, v: _loss(aten_op.attention, q, k[0], v))
    torch.testing.assert_close(torch.func.grad(lambda q: mapped(q, v).sum())(q), want[0])


class _Calls(TorchDispatchMode):
    """How many products of scores are computed, and the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.baddbmm.out:
            self.scores += result.numel()
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


def _calls(
    backward: bool = False,
    dtype: torch.dtype = torch.float32,
    length: int = 1024,
    left: int | None = None,
    right: int | None = None,
    **given: torch.Tensor,
) -> _Calls:
    """What the kernels do, called as the operators call them: a mode does not look into operators."""
    q, k = (torch.randn(1, length, heads, 16, dtype=dtype) for heads in (4, 2))
    call = AttentionCall(scale=0.25, left=left, right=right, **given)
    with _Calls() as calls:
        if backward:
            aten_flash.flash_backward(q, q, k, k, call, False)
        else:
            aten_flash.flash_forward(q, k, k, call)
    return calls


def test_what_nobody_sees_is_not_computed() -> None:
    full, length = _calls().scores, 1024
    ids = (torch.arange(length) // 256)[None]
    lower = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    assert full == 4 * length * length
    assert _calls(right=0).scores <= 0.57 * full
    assert _calls(mask=lower).scores <= 0.57 * full
    assert _calls(left=127, right=0).scores <= 0.25 * full
    assert _calls(query_segment_ids=ids, key_segment_ids=ids).scores <= 0.25 * full
    assert _calls(query_segment_ids=ids, key_segment_ids=ids + 9).scores == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_linear_in_the_length(backward: bool, dtype: torch.dtype) -> None:
    """No tensor is larger than a tile, of fixed size, or an argument."""
    for length in (1024, 4096):
        arguments = 4 * length * 16 * 4
        largest = _calls(backward, dtype, length, right=0).largest
        assert length * 16 * 2 <= largest <= max(aten_flash_tiles.TILE_BYTES, arguments)


def test_a_tile_keeps_its_size_however_many_keys_there_are() -> None:
    for length in (4096, 65536):
        q, k = (torch.empty(1, length, heads, 64, device="meta") for heads in (32, 8))
        n = aten_flash_tiles.tiling_of(q, k, k, AttentionCall(right=0))
        tile = n.heads * n.rows * n.group * n.keys * n.dtype.itemsize
        floor = torch.get_num_threads() * aten_flash_tiles.FEWEST_ROWS * n.group * n.keys * n.dtype.itemsize
        assert tile <= max(aten_flash_tiles.TILE_BYTES, floor)


@pytest.mark.parametrize("right, left, missed", [
    (2, None, False),  # the first row, 4, sees up to key 6, where the tile starts
    (1, None, True),
    (None, 1, True),  # the last row, 7, sees from key 6 on; with no other side the tile [6, 6 + n) holds it
    (None, 0, True),
], ids=str)  # fmt: skip
def test_a_row_whose_band_ends_beside_the_tile(right: int | None, left: int | None, missed: bool) -> None:
    q = torch.zeros(1, 8, 1, 4)
    call = AttentionCall(left=left, right=right)
    n = aten_flash_tiles.tiling_of(q, q, q, call)
    block = aten_flash_tiles.Block(4, 8, 6, 8) if right is not None else aten_flash_tiles.Block(4, 8, 2, 6)
    assert aten_flash_tiles._band_misses(n, call, block) == missed
    if left is not None:  # one key more and the last row sees it
        assert not aten_flash_tiles._band_misses(n, call, aten_flash_tiles.Block(4, 8, 2, 8))
