"""What cannot be divided over a mesh is refused alike by `check_sharding`, on meta, and by `shard_model`, untouched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import easytorch
from easytorch.distributed import make_mesh, shard_model
from easytorch.distributed.mesh import parse_axes
from easytorch.distributed.refusals import check_sharding

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SIZES}
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}
# the first stage of two has no experts
DEEPSEEK = {
    "model_type": "deepseek_v3", **SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


def config_of(settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**settings)


@contextmanager
def ranks(world: int) -> Iterator[None]:
    """This process as rank 0 of `world`, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("settings", "mesh", "message"),
    [
        (LLAMA, "tp=4", "num_key_value_heads=2 does not divide over 4 ranks"),
        (LLAMA, "fsdp=2,tp=3", "num_attention_heads=4 does not divide over 3 ranks"),
        (LLAMA, "ep=2", "declares no expert parallel plan"),
        (LLAMA, "pp=3", "2 layers do not make pp=3 stages"),
        ({**LLAMA, "tie_word_embeddings": True}, "pp=2", "one tied weight"),
        (GPT2, "tp=2", "declares no tensor parallel plan"),
        (GPT2, "pp=2", "cannot be divided into stages"),
        ({"model_type": "mamba", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}, "sp=2", "over sp"),
        (DEEPSEEK, "ep=3", "4 experts do not divide over ep=3 ranks"),
        # by the experts, of which the stage of rank 0 has none: the other stage alone refused it
        (DEEPSEEK, "pp=2,tp=3", r"experts\.gate_up_proj: dimension 1 of \(4, 16, 32\), 16, does not divide"),
        # a stage without experts was refused for its want of a plan
        (DEEPSEEK, "pp=2,ep=2", None),
        (LLAMA, "fsdp=3", None),  # FSDP2 pads
        (LLAMA, "pp=2,fsdp=3", None),
    ],
)
def test_shard_model_refuses_what_the_check_does(settings: dict[str, Any], mesh: str, message: str | None) -> None:
    world = math.prod(int(part.partition("=")[2]) for part in mesh.split(","))
    with torch.device("meta"):
        outline = easytorch.AutoModelForCausalLM.from_config(config_of(settings))
    model = easytorch.AutoModelForCausalLM.from_config(config_of(settings))
    axes = parse_axes(mesh, world)
    with ranks(world):
        if message is None:
            check_sharding(outline, axes)
            shard_model(model, mesh=make_mesh(mesh))
            return
        with pytest.raises((ValueError, NotImplementedError), match=message) as refused:
            check_sharding(outline, axes)
        with pytest.raises(refused.type) as refused_too:
            shard_model(model, mesh=make_mesh(mesh))
    assert str(refused.value) == str(refused_too.value)
    assert not any(hasattr(one, "device_mesh") for one in model.parameters())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in outline.named_parameters()]


def test_rules_are_checked_too() -> None:
    with torch.device("meta"):
        model = easytorch.AutoModelForCausalLM.from_config(config_of({**LLAMA, "intermediate_size": 50}))
    name = "model.layers.0.mlp.down_proj.weight"
    for axes, spec, message in (
        ({"pp": 2}, ("pp", None), "shards it over pp"),
        ({"fsdp": 4}, (None, "fsdp"), "dimension 1 of .* does not divide over the 4 devices of fsdp=4"),
        ({"tp": 2}, ("tp", None), None),
    ):
        if message is None:
            check_sharding(model, axes, {name: spec})
            continue
        with pytest.raises(ValueError, match=message):
            check_sharding(model, axes, {name: spec})


TIED = {**LLAMA, "tie_word_embeddings": True}


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize(
    ("settings", "mesh", "rules", "dim"),
    [
        (TIED, "fsdp=2", [("embed_tokens", (None, "fsdp"))], 1),  # the head's own default, 0, took its place
        (TIED, "fsdp=2", [("lm_head", (None, "fsdp"))], 1),
        ({**GPT2, "vocab_size": 64}, "tp=2", [("wte", (None, "tp"))], 1),  # without a plan the rule alone decides
        ({**GPT2, "vocab_size": 64}, "tp=2", [("lm_head", ("tp", None))], 0),
    ],
)
def test_a_rule_of_either_name_shards_a_tied_weight(
    tmp_path: Path, settings: dict[str, Any], mesh: str, rules: Any, dim: int, loaded: bool
) -> None:
    model = easytorch.AutoModelForCausalLM.from_config(config_of(settings))
    if loaded:
        model.save_pretrained(tmp_path)
    with ranks(2):
        if loaded:
            model = easytorch.AutoModelForCausalLM.from_pretrained(
                tmp_path, mesh=make_mesh(mesh), partition_rules=rules
            )
        else:
            shard_model(model, rules, make_mesh(mesh))
        weight = model.get_output_embeddings().weight
        assert weight is model.get_input_embeddings().weight
        assert weight.placements[0].dim == dim
        ids = torch.zeros(1, 4, dtype=torch.int64)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.parametrize("loaded", [True, False])
def test_tied_weights_are_refused_while_they_are_loaded_too(tmp_path: Path, loaded: bool) -> None:
    model = easytorch.AutoModelForCausalLM.from_config(config_of(TIED))
    model.save_pretrained(tmp_path)
    two = [("embed_tokens", (None, "fsdp")), ("lm_head", ("fsdp", None))]
    cases: list[tuple[str, Any, str]] = [("pp=2", None, "one tied weight"), ("fsdp=2", two, "shard them differently")]
    for mesh, rules, message in cases:
        with ranks(2), pytest.raises((ValueError, NotImplementedError), match=message):
            if loaded:
                easytorch.AutoModelForCausalLM.from_pretrained(tmp_path, mesh=make_mesh(mesh), partition_rules=rules)
            else:
                shard_model(model, rules, make_mesh(mesh))


def test_an_adapter_over_tp_leaves_the_model_as_it_was() -> None:
    model: Any = easytorch.AutoModelForCausalLM.from_config(config_of(LLAMA))
    model.apply_lora_to_layers(2, "q_proj", rngs=0)
    names = [name for name, _ in model.named_parameters()]
    with ranks(4), pytest.raises(NotImplementedError, match="q_proj has an adapter"):
        shard_model(model, mesh=make_mesh("pp=2,tp=2"))  # the stages were made first
    assert [name for name, _ in model.named_parameters()] == names
