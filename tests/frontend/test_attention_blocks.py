"""Attention of training in blocks of queries: outputs and gradients are ATen's, for lengths that do not divide."""

from __future__ import annotations

import pytest
import torch

from easytorch import frontend
from easytorch.frontend.aten import attention_training

aten = torch.ops.aten


class Attention(torch.nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query, key, value, grad, mask):
        mask = None if self.causal else mask
        output, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, self.causal, attn_mask=mask
        )
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, sums, 0.0, self.causal, attn_mask=mask
        )
        return output, sums, *grads


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("rows", "keys"), [(11, 11), (9, 13), (13, 9)])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_are_the_attention_of_all_queries(rows, keys, causal, monkeypatch):
    monkeypatch.setattr(attention_training, "_BLOCK", 4)
    monkeypatch.setattr(attention_training, "_LONG", 8)
    query, grad = torch.randn(2, 2, 4, rows, 8)
    key, value = torch.randn(2, 2, 4, keys, 8)
    given = (query, key, value, grad, torch.randn(2, 1, rows, keys))
    found = frontend.compile(Attention(causal), given, backend="numpy")(*given)
    for one, wanted in zip(found, Attention(causal)(*given), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=5e-6)
