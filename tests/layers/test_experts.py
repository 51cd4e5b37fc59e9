"""Experts: the gradient of the rows that each of them gets."""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig

import easytorch
from easytorch.kernels.grouped_matmul.routing import rows_of_experts, sort_by_expert


def nodes(tensor: torch.Tensor) -> set[str]:
    """The names of the functions in a tensor's graph."""
    found, seen, waiting = set(), set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(node.name())
        waiting += [one for one, _ in node.next_functions]
    return found


def test_no_sum_depends_on_the_order_of_threads() -> None:
    """Of a repeated index ATen adds gradients as threads come to them: IndexBackward0, above 32,768 numbers."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = easytorch.AutoModelForCausalLM.from_config(Qwen3MoeConfig(vocab_size=97, **sizes, **experts, head_dim=8))
    ids = torch.tensor([[5, 9, 33, 71, 8, 2]])
    assert not [name for name in nodes(model.train()(ids).logits) if name.startswith("IndexBackward")]


def test_rows_of_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 256, generator=generator, dtype=torch.float32)
    indices = torch.randint(5, (300, 3), generator=generator)
    order, _ = sort_by_expert(indices, 5)
    weights = torch.randn(900, 256, generator=generator)
    assert torch.equal(rows_of_experts(hidden, order, 3), hidden[order // 3])
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        grads = []
        for _ in range(8):
            leaf = hidden.clone().requires_grad_()
            rows = rows_of_experts(leaf, order, 3)
            assert torch.equal(rows, hidden[order // 3])
            grads.append(torch.autograd.grad((rows * weights).sum(), leaf)[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, grads[0]) for one in grads)
    expected = torch.zeros(300, 256, dtype=torch.float64).index_add(0, order // 3, weights.double())
    torch.testing.assert_close(grads[0].double(), expected, rtol=1e-5, atol=1e-5)
