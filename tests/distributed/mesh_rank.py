"""One of four processes: models over meshes, against the same in one piece, then the trainer's loop with each config
given; prints "rank r ok" when everything held."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import easytorch
from easytorch.distributed import (
    from_placements,
    get_sharding,
    make_mesh,
    params_sharding,
    partition_specs,
    shard_model,
    to_placements,
)
from easytorch.distributed.sharding import data_place
from easytorch.training import TrainingConfig
from easytorch.training.loop import train_among
from easytorch.training.muon import MuonWithAdamW
from easytorch.training.processes import Processes
from tests.models.families import FAMILIES
from tests.processes import leave_group

IDS = torch.arange(4 * 9).view(4, 9) * 7 % 96
# A weight stored otherwise than it is computed with: another dimension, both axes, replicated.
DENSE_RULES = [
    ("q_proj", (None, "tp")),
    ("down_proj", ("tp", None)),
    ("embed_tokens", (None, ("tp",))),
    ("gate_proj|up_proj", None),
    ("layers/0/input_layernorm", ("tp",)),
]
EXPERT_RULES = [("experts.gate_up_proj", (None, None, "tp")), ("experts.down_proj", None), ("o_proj", (None, "fsdp"))]
# family, axes, rules
CASES: list[tuple[str, str, Any]] = [
    ("llama", "dp=-1", None),
    ("llama", "fsdp=2,tp=2", DENSE_RULES),
    ("qwen3_moe", "dp=2,fsdp=-1", None),
    ("qwen3_moe", "fsdp=2,tp=2", EXPERT_RULES),
    ("qwen3_moe", "dp=2,ep=2", None),
    ("deepseek_v3", "fsdp=2,ep=2", None),
    ("qwen3_moe", "ep=2,tp=2", None),
    ("gpt_oss", "ep=-1", None),
]


def make(family: str, **settings: Any) -> Any:
    torch.manual_seed(3)
    config = FAMILIES[family].config(vocab_size=96, num_hidden_layers=2, tie_word_embeddings=family == "llama")
    for name, value in settings.items():
        setattr(config, name, value)
    return easytorch.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def own_rows(mesh: Any) -> torch.Tensor:
    """This rank's rows of a batch: those of its place along the data axes."""
    place, places = data_place(mesh)
    return IDS.chunk(places)[place]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_training(family: str, axes: str, rules: Any) -> None:
    """Gradients, accumulated too, are those of one process; `gather_model` gives back the model as it was."""
    case = (family, axes, rules is not None)
    alone, model = make(family), make(family)
    if dist.get_rank():  # rank 0's weights count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    mesh = make_mesh(axes)
    assert model.shard_model(rules, mesh) is model
    specs = partition_specs(model, rules, mesh)
    for name, parameter in model.named_parameters():
        found = get_sharding(parameter)
        assert (found or (None,) * parameter.ndim) == specs[name], (case, name, found, specs[name])
    wanted_loss = alone(input_ids=IDS, labels=IDS, use_cache=False).loss
    wanted_loss.backward()
    rows = own_rows(mesh)
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for passes in (1, 2):
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        assert abs(float(mean / dist.get_world_size() / wanted_loss.detach()) - 1) < 1e-5, case
        for name, parameter in model.named_parameters():
            error = (full(parameter.grad) / passes - expected[name]).norm() / expected[name].norm()
            assert error < 1e-5, (case, name, passes, float(error))
    model.gather_model()
    model.zero_grad()
    for name, parameter in model.named_parameters():
        assert type(parameter) is torch.nn.Parameter, (case, name)
        assert torch.equal(parameter, alone.get_parameter(name)), (case, name)
    assert type(model) is type(alone)
    again = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    again.backward()
    assert abs(float(again / wanted_loss) - 1) < 1e-6, case
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name]).norm() <= 1e-6 * expected[name].norm(), (case, name)
    model.shard_model(mesh=mesh)
    assert abs(float(model(input_ids=IDS, labels=IDS, use_cache=False).loss / wanted_loss) - 1) < 1e-5, case


def refused(message: str, function: Callable[[], object]) -> None:
    try:
        function()
    except (ValueError, NotImplementedError) as error:
        assert message in str(error), f"{error} instead of {message}"
    else:
        raise AssertionError(f"{message}: was not refused")


def check_uneven() -> None:
    """What does not divide is an error that names it, or is computed by every rank; the numbers stay."""
    mesh = make_mesh("tp=4")
    for settings, message in (
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 does not divide over 4 ranks"),
        ({"vocab_size": 97}, "embed_tokens.weight: dimension 0 of (97, 32), 97, does not divide over the 4 devices"),
        ({"intermediate_size": 50}, "gate_proj.weight: dimension 0 of (50, 32), 50"),
    ):
        settings = {"num_key_value_heads": 4, **settings}
        alone = make("llama", **settings)
        refused(message, lambda settings=settings: make("llama", **settings).shard_model(mesh=mesh))
        model = make("llama", **settings)
        model.shard_model(mesh=mesh, uneven="replicate")
        assert any(found is not None for found in params_sharding(model).values()), "what divides is sharded"
        for one in (alone, model):
            one(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        for name, parameter in alone.named_parameters():
            error = (full(model.get_parameter(name).grad) - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-5, (settings, name, float(error))


def check_experts() -> None:
    """Experts and ranks without tokens, transformers' own class, and what is refused."""
    mesh = make_mesh("ep=4")
    rows = IDS.chunk(4)[dist.get_rank()]
    for kind, number, share in (("all to rank 0", 8, 4), ("transformers", 8, 4), ("six", 6, 1)):
        alone, model = (make("qwen3_moe", num_experts=number) for _ in range(2))
        if kind == "transformers":
            stock = transformers.AutoModelForCausalLM.from_config
            alone, model = (stock(alone.config, dtype=torch.float32) for _ in range(2))
            model.load_state_dict(alone.state_dict())
        if kind == "all to rank 0":  # equal logits: the first two experts are taken
            with torch.no_grad():
                for one in (alone, model):
                    for layer in one.model.layers:
                        layer.mlp.gate.weight.zero_()
        shard_model(model, mesh=mesh, uneven="replicate")
        experts = model.model.layers[0].mlp.experts
        assert experts.num_experts == number // share, kind
        alone(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        for name, parameter in alone.named_parameters():
            error = (full(model.get_parameter(name).grad) - parameter.grad).norm()
            assert error <= 1e-5 * parameter.grad.norm(), (kind, name, float(error))
        model.zero_grad()
        # one rank has no token of its own: (0, D)
        tokens = torch.ones(0 if dist.get_rank() == 1 else 3, 32, requires_grad=True)
        chosen = torch.full((len(tokens), 2), 5)
        if share > 1:
            mixed = experts(tokens, chosen, torch.full((len(tokens), 2), 0.5))
            assert mixed.shape == tokens.shape, kind
            mixed.sum().backward()
    refused(
        "mlp.experts: 6 experts do not divide over ep=4 ranks: take one of 1, 2, 3, 6",
        lambda: make("qwen3_moe", num_experts=6).shard_model(mesh=mesh),
    )
    refused("declares no expert parallel plan", lambda: make("llama").shard_model(mesh=mesh))
    moe = make("qwen3_moe", num_experts=8)
    refused("are over ep", lambda: moe.shard_model([("down_proj", (None, "ep"))], mesh))
    refused("divides the experts alone", lambda: moe.shard_model([("q_proj", ("ep", None))], mesh))


def check_order_of_shards() -> None:
    """Each rank holds the block that its place along the spec's axes, major first, says."""
    mesh = make_mesh("fsdp=2,tp=2")
    x = torch.arange(8.0 * 4).view(8, 4)
    place = {name: mesh.get_local_rank(name) for name in ("fsdp", "tp")}
    for spec in itertools.permutations((("fsdp", "tp"), None)):
        for axes in (spec, tuple(one and one[::-1] for one in spec)):
            shard = distribute_tensor(x, mesh, to_placements(axes, mesh))
            dim = next(index for index, one in enumerate(axes) if one)
            major, minor = axes[dim]
            block = x.chunk(4, dim)[place[major] * 2 + place[minor]]
            assert torch.equal(shard.to_local(), block), axes
            assert from_placements(shard.placements, mesh, 2) == axes


def check_muon() -> None:
    """Muon of a sharded matrix, AdamW of a sharded vector: what one process computes, to rounding."""
    mesh = make_mesh("fsdp=2,tp=2")
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=generator) for shape in ((8, 12), (8,), (8, 12), (8,))]
    steps = []
    for shard in (lambda one: one, lambda one: distribute_tensor(one, mesh, [Shard(0)] * 2)):
        weight, bias, *gradients = (shard(one.clone()) for one in values)
        weight.grad, bias.grad = gradients
        optimizer = MuonWithAdamW(
            [weight], [{"params": [bias], "weight_decay": 0.0}], lr=0.1, weight_decay=0.2, betas=(0.9, 0.95)
        )
        for _ in range(2):
            optimizer.step()
        steps.append([full(weight), full(bias), full(optimizer.state[weight]["momentum_buffer"])])
    for found, expected in zip(*steps, strict=True):
        assert float((found - expected).norm() / expected.norm()) < 1e-6, (found, expected)


def check_refusals() -> None:
    mesh = make_mesh("fsdp=2,tp=2")
    refused("the mesh has pp=4", lambda: make("llama").shard_model(mesh=make_mesh("pp=4")))
    refused("declares no tensor parallel plan", lambda: make("gpt2").shard_model(mesh=mesh))
    refused("sharded already", lambda: make("llama").shard_model(mesh=mesh).shard_model(mesh=mesh))
    refused("uneven must be", lambda: make("llama").shard_model(mesh=mesh, uneven="pad"))
    tied = [("embed_tokens", ("tp",)), ("lm_head", (None, "tp"))]
    refused("are one tied weight", lambda: make("llama").shard_model(tied, mesh))
    narrow = make("llama", hidden_size=34, head_dim=8)
    rules = [("q_proj", (None, "fsdp"))]  # FSDP2 pads the first dimension alone
    refused("dimension 1 of (32, 34), 34, does not divide", lambda: narrow.shard_model(rules, make_mesh("fsdp=4")))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for one in CASES:
        check_training(*one)
    check_uneven()
    check_experts()
    check_order_of_shards()
    check_muon()
    check_refusals()
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    for path in sys.argv[1:]:
        train_among(processes, TrainingConfig.from_dict(json.loads(Path(path).read_text())))
    dist.barrier()
    print(f"rank {dist.get_rank()} ok\n", end="", flush=True)
    leave_group()
