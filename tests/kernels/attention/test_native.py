"""The definition against a loop over single scores, written from contract.py with Python numbers."""

from __future__ import annotations

import math

import torch

from easytorch.kernels.attention import native
from easytorch.kernels.attention.dropout import keep_mask
from easytorch.kernels.random.constants import COLUMN, HEAD, MIX, ROW

B, T, S, H, K, D = 2, 4, 6, 4, 2, 3


def _mix(x: int) -> int:
    x = (x ^ (x >> 16)) * MIX[0] % 2**32
    x = (x ^ (x >> 15)) * MIX[1] % 2**32
    return x ^ (x >> 16)


def _kept(seed: int, probability: float, b: int, h: int, i: int, j: int) -> bool:
    state = _mix(seed % 2**32 ^ (b * H + h) * HEAD % 2**32)
    state = _mix(state ^ i * ROW % 2**32)
    return _mix(state ^ j * COLUMN % 2**32) >= int(probability * 2**32)


def test_every_feature_at_once_against_a_loop() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(B, T, H, D), torch.randn(B, S, K, D), torch.randn(B, S, K, 2)
    mask, bias, sinks = torch.rand(B, H, T, S) > 0.3, torch.randn(H, T, S), torch.randn(H)
    query_ids, key_ids = torch.randint(0, 2, (B, T)), torch.randint(0, 2, (B, S))
    left, right, cap, scale, probability, seed = 3, 1, 2.0, 0.7, 0.3, 2**33 + 5
    output, weights = native.attention(
        *(x.double() for x in (q, k, v)), mask=mask, bias=bias.double(), causal=True, query_segment_ids=query_ids,
        key_segment_ids=key_ids, sliding_window=(left, right), softcap=cap, sinks=sinks.double(), softmax_scale=scale,
        dropout_prob=probability, seed=seed,
    )  # fmt: skip
    empty_rows = 0
    for b in range(B):
        for h in range(H):
            for i in range(T):
                own = i + S - T
                scores = {}
                for j in range(S):
                    score = scale * sum(float(q[b, i, h, d]) * float(k[b, j, h // (H // K), d]) for d in range(D))
                    score = cap * math.tanh(score / cap) + float(bias[h, i, j])
                    inside = own - left <= j <= min(own, own + right)
                    if mask[b, h, i, j] and inside and query_ids[b, i] == key_ids[b, j]:
                        scores[j] = score
                empty_rows += not scores
                total = math.exp(float(sinks[h])) + sum(math.exp(s) for s in scores.values())
                expected = [0.0, 0.0]
                for j, score in scores.items():
                    weight = math.exp(score) / total
                    weight = weight / (1 - probability) if _kept(seed, probability, b, h, i, j) else 0.0
                    assert math.isclose(weight, float(weights[b, h, i, j]), rel_tol=1e-6, abs_tol=1e-12)
                    expected = [e + weight * float(x) for e, x in zip(expected, v[b, j, h // (H // K)], strict=True)]
                torch.testing.assert_close(
                    output[b, i, h], torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0
                )
    assert empty_rows > 0


def test_an_int_window_counts_the_own_token() -> None:
    q = torch.randn(1, 6, 1, 4)
    weights = native.attention(q, q, q, causal=True, sliding_window=2)[1][0, 0]
    seen = torch.tensor([[i - 1 <= j <= i for j in range(6)] for i in range(6)])
    assert torch.equal(weights > 0, seen)


def test_dropout_keeps_its_share_and_depends_on_the_position() -> None:
    keep = keep_mask(3, 0.25, (2, 3, 64, 65), torch.device("cpu"))
    assert abs(keep.float().mean().item() - 0.75) < 0.01
    block = keep_mask(3, 0.25, (2, 3, 10, 20), torch.device("cpu"), first_row=7, first_column=30)
    assert torch.equal(block, keep[:, :, 7:17, 30:50])
    assert not torch.equal(keep, keep_mask(4, 0.25, (2, 3, 64, 65), torch.device("cpu")))


def test_no_keys_give_zeros() -> None:
    q, k = torch.randn(1, 3, 2, 4), torch.randn(1, 0, 2, 4)
    assert torch.equal(native.attention(q, k, k)[0], torch.zeros(1, 3, 2, 4))


def test_a_row_that_sees_nothing_is_zero() -> None:
    q, k, v = torch.randn(1, 3, 2, 4), torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4)
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    mask[:, :, 1] = False
    output, weights = native.attention(q, k, v, mask=mask)
    assert (output[:, 1] == 0).all() and (weights[:, :, 1] == 0).all()
    assert output.isfinite().all() and (output[:, [0, 2]] != 0).any()
