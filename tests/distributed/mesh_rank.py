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
from easytorch.distributed.sharding import data_place, full_tensors, mesh_of
from easytorch.distributed.staged_call import pipeline_of
from easytorch.kernels.cross_entropy.native import linear_cross_entropy
from easytorch.kernels.ring.layout import position_ids
from easytorch.layers.vocabulary_parallel import vocabulary_parallel_cross_entropy
from easytorch.protocol.loss_config import LossConfig
from easytorch.training import TrainingConfig
from easytorch.training.finite import first_nonfinite
from easytorch.training.gradients import total_norm
from easytorch.training.loop import train_among
from easytorch.training.muon import MuonWithAdamW
from easytorch.training.processes import Processes
from tests.distributed.seen_shapes import Shapes
from tests.models.families import FAMILIES
from tests.processes import leave_group

IDS = torch.arange(4 * 12).view(4, 12) * 7 % 96
# A weight stored otherwise than it is computed with: another dimension, both axes, replicated.
DENSE_RULES = [
    ("q_proj", (None, "tp")),
    ("down_proj", ("tp", None)),
    ("embed_tokens", (None, ("tp",))),
    ("gate_proj|up_proj", None),
    ("layers/0/input_layernorm", ("tp",)),
]
EXPERT_RULES = [("experts.gate_up_proj", (None, None, "tp")), ("experts.down_proj", None), ("o_proj", (None, "fsdp"))]
WINDOWS = ["full_attention", "sliding_attention"]
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
    ("llama", "dp=1,fsdp=2,sp=2", None),
    ("qwen3_moe", "sp=2,tp=2", None),
    ("qwen3_moe", "ep=2,sp=2", None),
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


def check_codes() -> None:
    """Weights in few bits are divided over tp, experts over ep too: each rank holds its part of the codes, loss and
    gradients of the rest are those of one process, and they are gathered to the bit."""
    for family, bits, axes, share in (
        ("qwen3_moe", "nf4", "ep=2,tp=2", 0.25), ("qwen3_moe", "nvfp4", "fsdp=2,tp=2", 0.5),
        ("llama", "int8", "dp=2,tp=2", 0.5), ("mixtral", "affine", "ep=2,tp=2", 0.25),
    ):  # fmt: skip
        sizes = {"head_dim": 16, "moe_intermediate_size": 32} if bits == "nvfp4" else {}  # groups of 16
        alone, model = (make(family, **sizes).quantize(bits).train() for _ in range(2))
        mesh = make_mesh(axes)
        model.shard_model(mesh=mesh)
        rows = own_rows(mesh)
        wanted = alone(input_ids=IDS, labels=IDS, use_cache=False).loss
        wanted.backward()
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        assert abs(float(mean / dist.get_world_size() / wanted.detach()) - 1) < 1e-5, (family, bits, axes)
        for name, parameter in alone.named_parameters():
            error = (full(model.get_parameter(name).grad) - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-5, (family, bits, axes, name, float(error))
        with torch.no_grad():
            assert (model(IDS).logits - alone(IDS).logits).norm() < 1e-5 * alone(IDS).logits.norm(), (family, axes)
        held = {name: one for name, one in model.named_buffers() if "codes" in name}
        divided = {name: one for name, one in held.items() if "experts" in name or family == "llama"}
        assert divided and all(one.to_local().numel() == share * one.numel() for one in divided.values()), (
            family,
            axes,
        )
        model.gather_model()
        state = alone.state_dict()
        for name, one in model.state_dict().items():
            assert type(one) is torch.Tensor and torch.equal(one, state[name]), (family, axes, name)
        again = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        assert abs(float((again / wanted).detach()) - 1) < 1e-6, (family, axes)
    narrow, odd = (make("llama", num_key_value_heads=heads) for heads in (4, 1))
    narrow.quantize("nvfp4")
    odd.quantize("int8")
    refused("its 32 columns do not divide over 4 ranks by the 16", lambda: narrow.shard_model(mesh=make_mesh("tp=4")))
    refused("num_key_value_heads=1 does not divide", lambda: odd.shard_model(mesh=make_mesh("tp=4")))
    expected = odd(IDS).logits
    odd.shard_model(mesh=make_mesh("tp=4"), uneven="replicate")
    assert (odd(IDS).logits - expected).norm() < 1e-5 * expected.norm()


def check_pipeline() -> None:
    """Two stages, of one layer and of two: loss, gradients and evaluation of the full model by a schedule and by plain
    calls, the model gathered again; and what is refused."""
    mesh = make_mesh("fsdp=2,pp=2")
    loss_of: Any = lambda module, batch: module(**batch, use_cache=False).loss  # noqa: E731
    alone, model = (make("qwen3_moe", num_hidden_layers=3) for _ in range(2))
    if dist.get_rank():  # rank 0's weights count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    model.shard_model([("q_proj", (None, "fsdp"))], mesh)
    pipeline = pipeline_of(model)
    assert pipeline is not None and mesh_of(model) is mesh
    own = ("model.embed_tokens", "model.layers.0.") if pipeline.first else ("model.layers.", "model.norm", "lm_head")
    assert all(name.startswith(own) for name, _ in model.named_parameters())
    expected = alone(input_ids=IDS, labels=IDS, use_cache=False)
    expected.loss.backward()
    rows = IDS.chunk(2)[mesh.get_local_rank("fsdp")]
    for pieces in (1, 2, 0):  # fewer micro-batches than stages, as many, and a plain call
        model.zero_grad()
        if pieces:
            batches = [{"input_ids": one, "labels": one} for one in rows.chunk(pieces)]
            total = pipeline.step(batches, [float(pieces)] * pieces, loss_of)
        else:
            total = model(rows, labels=rows).loss
            total.backward()
            total = total.detach().clone()
        dist.all_reduce(total)
        assert abs(float(total / 4 / expected.loss.detach()) - 1) < 1e-5, pieces
        for name, parameter in model.named_parameters():
            wanted = alone.get_parameter(name).grad
            assert (full(parameter.grad) - wanted).norm() < 1e-5 * wanted.norm(), (pieces, name)
    norm = pipeline.norm(total_norm(one.grad for one in model.parameters()))
    assert abs(float(norm / total_norm(one.grad for one in alone.parameters())) - 1) < 1e-5
    batch = {"input_ids": IDS[:1], "labels": IDS[:1]}
    assert abs(float(pipeline.evaluate(batch, loss_of) / loss_of(alone, batch).detach()) - 1) < 1e-5
    with torch.no_grad():
        assert (model(IDS).logits - expected.logits).norm() < 1e-5 * expected.logits.norm(), "on each rank"
        torch.testing.assert_close(model(IDS, logits_to_keep=2).logits, expected.logits[:, -2:], rtol=1e-5, atol=1e-6)
        items = [*model(IDS, labels=IDS)]  # each rank calls it
        assert pipeline.last or items == ["loss"], "no hidden states"
    refused("divided over pp does not take a cache", lambda: model(IDS, use_cache=True))
    refused("does not take output_hidden_states", lambda: model(IDS, output_hidden_states=True))
    refused("sharded already", lambda: model.shard_model(mesh=mesh))
    every = full_tensors(model, keep=dist.get_rank() == 0)
    assert [*every] == [*alone.state_dict()], "by name, in the model's order"
    model.gather_model()
    assert mesh_of(model) is None and type(model) is type(alone)
    model.zero_grad()
    again = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    again.backward()
    assert abs(float(again / expected.loss) - 1) < 1e-6
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, alone.get_parameter(name)), name
        assert every[name].numel() == 0 or torch.equal(parameter, every[name]), name
        assert (parameter.grad - alone.get_parameter(name).grad).norm() <= 1e-6 * parameter.grad.norm(), name
    half = make("qwen3_moe").bfloat16().shard_model(mesh=mesh)
    half.config.output_hidden_states = True
    refused("does not take output_hidden_states", lambda: half(IDS))
    half.config.output_hidden_states = False
    losses = pipeline_of(half).of_stages(half(IDS, labels=IDS).loss.detach())
    assert losses[0].dtype is losses[1].dtype and torch.equal(*losses), "the last stage's, in its dtype"
    deep = [make("qwen3_moe", num_hidden_layers=5) for _ in range(2)]
    for one in (deep[0], deep[1].shard_model(mesh=make_mesh("pp=4"))):  # stages in the middle
        (one(input_ids=IDS, labels=IDS, use_cache=False).loss / 3).backward()
    for name, parameter in deep[1].named_parameters():
        wanted = deep[0].get_parameter(name).grad
        assert (parameter.grad - wanted).norm() < 1e-5 * wanted.norm(), name
    check_failing_stage(deep[1])
    stages, bad, of_stages = make_mesh("pp=4"), "model.layers.3.mlp.gate.weight", pipeline_of(deep[1]).of_stages
    own = dict(deep[1].named_parameters())
    if bad in own:
        own[bad].grad[0] = torch.nan
    said = first_nonfinite(deep[1], 1.0, float("nan"), of_stages)
    assert said == f"the gradient of {bad} has 32 of 128 values that are not finite", said
    assert first_nonfinite(deep[1], float("nan"), float("nan"), of_stages) == "the loss is nan"
    if bad in own:
        own[bad].data[1] = torch.nan
    said = first_nonfinite(deep[1], float("nan"), float("nan"), of_stages)
    assert said == f"the parameter {bad} has 32 of 128 values that are not finite", said
    refused("lm_head and embed_tokens are one tied weight", lambda: make("llama").shard_model(mesh=stages))
    three = make("qwen3_moe", num_hidden_layers=3)
    refused("3 layers do not make pp=4 stages", lambda: three.shard_model(mesh=stages))
    refused("GPT2Model does not run its layers one after the other", lambda: make("gpt2").shard_model(mesh=stages))
    refused("native decoders can", lambda: shard_model(torch.nn.Linear(2, 2), mesh=stages))
    refused("pp and sp do not go together", lambda: three.shard_model(mesh=make_mesh("pp=2,sp=2")))
    refused("rule shards it over pp", lambda: deep[0].shard_model([("q_proj", ("pp", None))], stages))


def check_failing_stage(model: Any) -> None:
    """An error of the first stage alone, or of the last, is raised there and quoted by the others, which do not wait;
    the model can be called again."""
    for failing, ids, labels in ((3, IDS, IDS[:, :3]), (0, IDS + 10**6, IDS)):
        try:
            model(input_ids=ids, labels=labels)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        own = dist.get_rank() == failing
        assert said.startswith(f"StageFailedError: stage {failing} of 4 over pp has failed: ") is not own, said
    model(input_ids=IDS, labels=IDS).loss.backward()


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


def check_sequences() -> None:
    """Packed, padded and odd sequences that are divided over ranks, with labels that are ignored."""
    mesh = make_mesh("sp=4")
    packed = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(4, -1)
    padding = torch.ones_like(IDS)
    padding[1, 5:] = 0
    labels = torch.where(padding == 1, IDS, -100)
    labels[2, 3:7] = -100
    of_eight = {"shift_labels": labels[:, :8].contiguous()}
    cases = [(12, {"position_ids": packed}), (12, {"attention_mask": padding}), (8, of_eight)]
    for number, (length, more) in enumerate(cases):
        alone = make("llama", layer_types=WINDOWS, sliding_window=3)
        model = make("llama", layer_types=WINDOWS, sliding_window=3)
        model.shard_model(mesh=mesh)
        given = {"input_ids": IDS[:, :length], "labels": labels[:, :length], **more}
        found, wanted = model(**given), alone(**given, use_cache=False)
        found.loss.backward()
        wanted.loss.backward()
        assert abs(float(found.loss.detach() / wanted.loss.detach()) - 1) < 1e-5, number
        places = position_ids(length // 4, dist.get_rank(), 4, "zigzag" if length == 8 else "contiguous")
        counted = (padding[:, :length] == 1)[:, places]
        own, expected = found.logits[counted], wanted.logits[:, places][counted]
        assert (own - expected).norm() < 1e-5 * expected.norm(), "logits are those of the rank's own tokens"
        for name, parameter in alone.named_parameters():
            error = (full(model.get_parameter(name).grad) - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-5, (number, name, float(error))
    with torch.no_grad():
        model(**given)
    assert mesh_of(model) is not None, "an evaluated model is saved as a sharded one"


def check_balance_over_sequences() -> None:
    """The load balancing loss of experts, of all tokens that are no padding, on each rank, with its gradients."""
    mesh, padding = make_mesh("sp=2,tp=2"), torch.ones_like(IDS)
    padding[1, 5:] = 0
    for mask in (None, padding):
        alone, model = (make("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5) for _ in range(2))
        model.router_aux_loss_coef = alone.router_aux_loss_coef = 0.5
        model.shard_model(mesh=mesh)
        labels = IDS if mask is None else torch.where(mask == 1, IDS, -100)
        outputs = [one(input_ids=IDS, attention_mask=mask, labels=labels, use_cache=False) for one in (model, alone)]
        for one in outputs:
            one.loss.backward()
        for key in ("loss", "aux_loss"):
            found, wanted = (float(one[key].detach()) for one in outputs)
            assert abs(found / wanted - 1) < 1e-5, (mask is None, key, found, wanted)
        for name, parameter in alone.named_parameters():
            error = (full(model.get_parameter(name).grad) - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-5, (mask is None, name, float(error))


def check_sequences_refused() -> None:
    mesh = make_mesh("sp=4")
    for family, message in (
        ("mamba", "MambaForCausalLM cannot divide sequences over sp"),
        ("qwen3_next", "it has linear_attention layers"),
        ("llama4_text", "it has chunked_attention layers"),
        ("bert", "native causal language models do"),
    ):
        one: Any = easytorch.AutoModelForCausalLM.from_config(FAMILIES[family].config())
        refused(message, lambda one=one: one.shard_model(mesh=mesh))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    refused("depend on the length of a call", lambda: make("llama", rope_parameters=rope).shard_model(mesh=mesh))
    other = make("llama")
    other.set_attn_implementation("flash")
    refused("attn_implementation='flash' sees this rank's tokens alone", lambda: other.shard_model(mesh=mesh))
    model = make("qwen3_moe").shard_model(mesh=mesh)
    assert model.config._attn_implementation == "ring"
    refused("a sequence of 10 tokens does not divide over the 4 ranks of sp", lambda: model(input_ids=IDS[:, :10]))
    refused("does not take a cache", lambda: model(input_ids=IDS, use_cache=True))
    refused("an attention_mask other than (B, T)", lambda: model(IDS, IDS[:, None, None].bool()))
    refused("does not take token_type_ids", lambda: model(IDS, token_type_ids=IDS))
    model.set_attn_implementation("sdpa")
    refused("does not go with an attention other than ring", lambda: model(input_ids=IDS))
    model.gather_model()
    assert model.config._attn_implementation == "easytorch"


def check_vocabulary_loss() -> None:
    """The loss of a head that is sharded by the vocabulary is that of one process, with its options."""
    mesh, vocabulary = make_mesh("tp=4"), 404
    torch.manual_seed(5)
    tensors = (torch.randn(3, 5, 16), torch.randn(vocabulary, 16), torch.randn(vocabulary))
    labels, factors = torch.randint(0, vocabulary, (3, 5)), torch.arange(1.0, 16.0).view(3, 5)
    labels[1, 2:] = -1
    for reduction, options in itertools.product(
        ("mean", "sum", "none"),
        ({}, {"label_smoothing": 0.1, "z_loss": 1e-2}, {"softcap": 3.0, "label_smoothing": 0.2}),
    ):
        more = {"ignore_index": -1, "reduction": reduction, **options}
        wanted = [x.clone().requires_grad_() for x in tensors]
        parts = [distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in tensors[1:]]
        found = [tensors[0].clone().requires_grad_(), *parts]
        loss = vocabulary_parallel_cross_entropy(found[0], parts[0], labels, parts[1], chunk_size=4, **more)
        expected = linear_cross_entropy(wanted[0], wanted[1], labels, wanted[2], **more)
        (loss * factors).sum().backward()
        (expected * factors).sum().backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for one, other in zip(found, wanted, strict=True):
            assert (full(one.grad) - other.grad).norm() < 1e-5 * other.grad.norm(), more
    for wrong, message in (({}, "labels must be in 0..403"), ({"chunk_size": 0}, "chunk_size must be at least 1")):
        given = labels + vocabulary if not wrong else labels
        refused(message, lambda given=given, wrong=wrong: vocabulary_parallel_cross_entropy(
            tensors[0], parts[0], given, ignore_index=-1, **wrong
        ))  # fmt: skip


def check_vocabulary() -> None:
    """A model's loss over "tp": no rank has all logits or the full head, in training or evaluation."""
    mesh, vocabulary = make_mesh("tp=4"), 404
    for tied, training in ((True, True), (False, False)):
        sizes = {"vocab_size": vocabulary, "num_key_value_heads": 4, "tie_word_embeddings": tied}
        alone, model = (make("llama", **sizes).train(training) for _ in range(2))
        model.shard_model(mesh=mesh)
        with Shapes() as shapes:
            found = model(input_ids=IDS, labels=IDS, use_cache=False)
            found.loss.backward()
        assert not [shape for shape in shapes.seen if vocabulary in shape], (tied, shapes.seen)
        wanted = alone(input_ids=IDS, labels=IDS, use_cache=False)
        wanted.loss.backward()
        assert abs(float(found.loss.detach() / wanted.loss.detach()) - 1) < 1e-5
        for name, parameter in alone.named_parameters():
            error = (full(model.get_parameter(name).grad) - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-5, (tied, name, float(error))
        assert (found.logits - wanted.logits).norm() < 1e-5 * wanted.logits.norm(), "gathered where they are read"


def check_options_of_the_loss() -> None:
    """`compute_loss` over "tp", with options that transformers' own loss has not."""
    mesh, vocabulary = make_mesh("tp=4"), 404
    config = LossConfig(label_smoothing=0.1, z_loss=1e-2)
    alone, model = (make("llama", vocab_size=vocabulary, num_key_value_heads=4) for _ in range(2))
    model.shard_model(mesh=mesh)
    with Shapes() as shapes:
        output, found = model.compute_loss(input_ids=IDS, labels=IDS, loss_config=config)
        found.loss.backward()
    # one position shows what the model does with its logits
    assert not [shape for shape in shapes.seen if vocabulary in shape and torch.Size(shape).numel() > 4 * vocabulary]
    expected, wanted = alone.compute_loss(input_ids=IDS, labels=IDS, loss_config=config)
    wanted.loss.backward()
    assert abs(float(found.loss.detach() / wanted.loss.detach()) - 1) < 1e-5
    assert float(found.accuracy) == float(wanted.accuracy)
    assert (output.logits - expected.logits).norm() < 1e-5 * expected.logits.norm()
    for name, parameter in alone.named_parameters():
        error = (full(model.get_parameter(name).grad) - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, (name, float(error))


def check_refusals() -> None:
    mesh = make_mesh("fsdp=2,tp=2")
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
    check_codes()
    check_pipeline()
    check_order_of_shards()
    check_muon()
    check_sequences()
    check_balance_over_sequences()
    check_sequences_refused()
    check_vocabulary_loss()
    check_vocabulary()
    check_options_of_the_loss()
    check_refusals()
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    for path in sys.argv[1:]:
        train_among(processes, TrainingConfig.from_dict(json.loads(Path(path).read_text())))
    dist.barrier()
    print(f"rank {dist.get_rank()} ok\n", end="", flush=True)
    leave_group()
