"""One of two processes: Llama of each folder sharded by its plan, against the same model in one piece."""

from __future__ import annotations

import sys

import torch
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import easytorch
from tests.processes import leave_group

IDS = torch.arange(5, 15).view(2, 5)
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


for folder in sys.argv[1:]:
    load = easytorch.AutoModelForCausalLM.from_pretrained
    whole, shard = load(folder), load(folder, distributed_config=DistributedConfig(tp_plan="auto"))
    assert type(shard).__module__ == "easytorch.models.llama"
    assert shard.lm_head.weight.to_local().shape[0] == 96 // 2, "the head is not sharded"
    assert (shard.lm_head.weight is shard.model.embed_tokens.weight) == shard.config.tie_word_embeddings
    expected, given = (model(IDS, attention_mask=MASK, labels=IDS) for model in (whole, shard))
    torch.testing.assert_close(full(given.logits), expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(full(given.loss), expected.loss, rtol=1e-5, atol=1e-5)
    expected.loss.backward()
    given.loss.backward()
    weights = dict(shard.named_parameters())
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(full(weights[name].grad), weight.grad, rtol=1e-4, atol=1e-5, msg=name)
    tokens = [model.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False) for model in (whole, shard)]
    assert torch.equal(*tokens)
    print("equal", folder, flush=True)
leave_group()
