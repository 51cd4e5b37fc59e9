"""One of two processes: the model of each folder sharded by a plan of its config, against the same in one piece."""

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


for argument in sys.argv[1:]:
    plan, folder = argument.split(":")
    plans = {"tp": DistributedConfig(tp_plan="auto"), "ep": DistributedConfig(tp_size=2, ep_size=2)}
    load = easytorch.AutoModelForCausalLM.from_pretrained
    whole, shard = load(folder), load(folder, distributed_config=plans[plan])
    assert type(shard).__module__ == f"easytorch.models.{shard.config.model_type}"
    if shard.config.model_type == "mixtral":
        experts = shard.model.layers[0].mlp.experts
        kept = {"tp": (4, 2 * 24, 32), "ep": (2, 2 * 48, 32)}[plan]
        assert experts.gate_up_proj.to_local().shape == kept, "the experts are not sharded"
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
    print(f"equal {argument}\n", end="", flush=True)
leave_group()
