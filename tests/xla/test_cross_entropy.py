"""The losses on xla tensors equal the CPU's, gradients included."""

from __future__ import annotations

import math
import re

import pytest
import torch

from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["cross_entropy", "fused_linear_cross_entropy"])
def test_losses_and_gradients(name: str, reduction: str) -> None:
    torch.manual_seed(0)
    shapes = [(9, 30)] if name == "cross_entropy" else [(9, 8), (30, 8), (30,)]
    tensors, labels = [torch.randn(shape) for shape in shapes], torch.randint(0, 30, (9,))
    labels[2] = -100
    # a chunk smaller than the rows: what one chunk writes, the next must not lose
    options = {} if name == "cross_entropy" else {"chunk_size": 4}
    options |= {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01}
    results = []
    for device in ("xla", "cpu"):
        given = [tensor.to(device).requires_grad_() for tensor in (t.clone() for t in tensors)]
        first, bias = given[:2], given[2:]
        loss = OperationRegistry.create(name)(*first, labels.to(device), *bias, reduction=reduction, **options)
        results.append([tensor.cpu() for tensor in (loss.detach(), *torch.autograd.grad(loss.sum(), given))])
    for got, want in zip(*results, strict=True):
        assert relative_rms_error(got, want) <= 1e-5


def test_a_step_of_training_holds_no_logits_of_the_whole_vocabulary(monkeypatch) -> None:
    import torch_xla
    from transformers import LlamaConfig

    from easytorch.kernels.cross_entropy import fused_linear
    from easytorch.models.llama import LlamaForCausalLM

    rows, vocabulary = 128, 2**15  # the fewest logits that are deferred
    monkeypatch.setattr(fused_linear, "LOGITS_AT_ONCE", 16 * vocabulary)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = LlamaForCausalLM(config).to("xla").train()
    ids = torch.zeros(2, rows // 2, dtype=torch.int64).to("xla")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    program = torch_xla._XLAC._get_xla_tensors_hlo([loss, *(one.grad for one in model.parameters())])
    shapes = re.findall(r"[a-z]+[0-9]+\[([0-9,]+)\]", program)
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest == 16 * vocabulary, "a chunk's logits"
    assert torch.isfinite(loss.cpu())
