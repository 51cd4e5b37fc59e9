"""A weight that is the embedding and the head: one gradient, and no second matrix as large as the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.cross_entropy import shared_weight
from easytorch.kernels.cross_entropy.fused_linear import fused_linear_cross_entropy
from easytorch.layers import tied_embedding

CLASSES, WIDTH = 64, 8


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.randint(0, CLASSES, (2, 9), generator=generator)
    ids[0, :3], ids[1, 2:6] = 5, 11  # one of them the padding, the other more than once
    return weight, ids, torch.randint(0, CLASSES, (18,), generator=generator)


def loss(weight: Tensor, ids: Tensor, labels: Tensor, *, shared: bool, head: bool = True) -> Tensor:
    rows, of_head = F.embedding(ids, weight, 5), weight
    if shared:
        rows, of_head = shared_weight.embedding_and_weight(ids, weight, 5)
    rows = rows.flatten(0, 1).sin()
    if not head:
        return rows.square().sum()
    return fused_linear_cross_entropy(rows, of_head, labels, reduction="sum", chunk_size=7) / 18


@pytest.mark.parametrize("head", [True, False])
def test_the_gradient_is_that_of_both_uses(head: bool) -> None:
    weight, ids, labels = inputs()
    wanted = torch.autograd.grad(loss(weight, ids, labels, shared=False, head=head), weight)[0]
    total = loss(weight, ids, labels, shared=True, head=head)
    for _ in range(2):  # the first pass leaves the second its numbers
        found = torch.autograd.grad(total, weight, retain_graph=True)[0]
        torch.testing.assert_close(found, wanted)
    weight.grad = torch.ones_like(weight)
    loss(weight, ids, labels, shared=True, head=head).backward()
    torch.testing.assert_close(weight.grad, wanted + 1)


@pytest.mark.parametrize("shared", [True, False])
def test_gradients_of_several_losses_at_once(shared: bool) -> None:
    weight, ids, labels = inputs()
    total = loss(weight, ids, labels, shared=shared)
    losses = torch.stack((total, 2 * total))
    wanted = torch.autograd.grad(total, weight, retain_graph=True)[0]
    found = torch.autograd.grad(losses, weight, torch.eye(2, dtype=losses.dtype), is_grads_batched=True)[0]
    torch.testing.assert_close(found, torch.stack((wanted, 2 * wanted)))


def test_gradients_of_the_gradient() -> None:
    weight, ids, labels = inputs()
    found = []
    for shared in (True, False):
        first = torch.autograd.grad(loss(weight, ids, labels, shared=shared), weight, create_graph=True)[0]
        found.append(torch.autograd.grad(first.square().sum(), weight)[0])
    torch.testing.assert_close(*found)


def test_the_rows_are_added_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, ids, labels = inputs(torch.float32)
    monkeypatch.setattr(torch.ops.aten, "embedding_backward", None)
    loss(weight, ids, labels, shared=True).backward()
    assert weight.grad is not None


def test_a_scope_shares_the_weight_of_its_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied_embedding, "SMALLEST_WEIGHT", 0)
    layer, other = torch.nn.Embedding(CLASSES, WIDTH), torch.nn.Embedding(CLASSES, WIDTH)
    head = torch.nn.Linear(WIDTH, CLASSES, bias=False)
    head.weight = layer.weight
    ids = torch.arange(4)[None]

    def node(rows: Tensor) -> str:
        function: Any = rows.grad_fn
        return str(function.name())

    assert node(tied_embedding.embed(layer, ids)) == "EmbeddingBackward0"
    with tied_embedding.sharing(head):
        assert node(tied_embedding.embed(other, ids)) == "EmbeddingBackward0"
        assert tied_embedding.of_head(head.weight) is head.weight
        assert node(tied_embedding.embed(layer, ids)) == "_SharedBackward"
        assert node(tied_embedding.embed(layer, ids)) == "EmbeddingBackward0"
        assert tied_embedding.of_head(head.weight) is not head.weight
        assert tied_embedding.of_head(head.weight) is head.weight
        layer.register_forward_hook(lambda *given: None)
        assert node(tied_embedding.embed(layer, ids)) == "EmbeddingBackward0"
    with tied_embedding.sharing(head), torch.no_grad():
        assert tied_embedding.embed(other, ids).grad_fn is None
    assert tied_embedding._scope.weight is None
    layer.weight.requires_grad_(False)
    with tied_embedding.sharing(head):
        assert tied_embedding._scope.weight is None
