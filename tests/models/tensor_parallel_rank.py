"""One of two processes: the model of each folder sharded by a plan of its config, against the same in one piece."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import easytorch
from tests.processes import leave_group

IDS = torch.arange(5, 15).view(2, 5)
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative_error(given: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((full(given) - wanted).norm() / wanted.norm()).item()


def check_from_outside(folder: str) -> None:
    """`shard_model` over a mesh: loss and gradients of one process, accumulated too; `gather_model` undoes it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = easytorch.AutoModelForCausalLM.from_pretrained(folder)
    other = easytorch.AutoModelForCausalLM.from_config(model.config)
    other.load_state_dict(model.state_dict())
    if dist.get_rank():  # rank 0's weights count
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1.0)
    assert other.shard_model(mesh=mesh) is other
    tied = model.config.tie_word_embeddings
    assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied
    layer = other.model.layers[0]
    for module, shape in ((layer.self_attn.q_proj, 0), (layer.self_attn.o_proj, 1), (other.model.embed_tokens, 0)):
        assert module.weight.to_local().shape[shape] * 2 == module.weight.shape[shape]
    for passes in range(2):
        losses = [one(IDS, attention_mask=MASK, labels=IDS).loss for one in (model, other)]
        assert abs(full(losses[1]) / losses[0] - 1) < 1e-5
        for loss in losses:
            loss.backward()
        weights = dict(other.named_parameters())
        for name, weight in model.named_parameters():
            error = relative_error(weights[name].grad, weight.grad)
            assert error < 1e-5, f"{name} after {passes + 1} backward passes: {error}"
    tokens = [one.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False) for one in (model, other)]
    assert torch.equal(*tokens)
    other.gather_model()
    assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied
    for name, weight in other.named_parameters():
        assert type(weight) is torch.nn.Parameter and torch.equal(weight, model.get_parameter(name)), name
    model.zero_grad()
    other.zero_grad()
    losses = [one(IDS, attention_mask=MASK, labels=IDS).loss for one in (model, other)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert all(torch.equal(one.grad, model.get_parameter(name).grad) for name, one in other.named_parameters())
    other.shard_model(mesh=mesh).gather_model()


def check_refusals(folder: str) -> None:
    model = easytorch.AutoModelForCausalLM.from_pretrained(folder)
    try:
        model.shard_model(mesh=init_device_mesh("cpu", (2,)))
    except ValueError as error:
        assert "axes have no names" in str(error)
    else:
        raise AssertionError("axes without names were not refused")
    odd = easytorch.AutoModelForCausalLM.from_config(type(model.config)(**model.config.to_dict() | {"vocab_size": 97}))
    try:
        odd.shard_model(mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    except ValueError as error:
        assert "97, does not divide over the 2 devices of tp=2; 96 or 98 would" in str(error)
    else:
        raise AssertionError("97 entries were sharded over 2 ranks")


for argument in sys.argv[1:]:
    plan, folder = argument.split(":")
    if plan == "outside":
        check_from_outside(folder)
        check_refusals(folder)
        print(f"equal {argument}\n", end="", flush=True)
        continue
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
