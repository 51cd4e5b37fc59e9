"""Trees of jax's world for models transformers has and EasyTorch has no class of: experts, ties, statistics, bf16."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import transformers
from transformers import GemmaConfig, GPT2Config, LlamaConfig, MixtralConfig, ResNetConfig, T5Config, ViTConfig

import easytorch
from easytorch.bridge.convert import convert
from easytorch.bridge.core.nested import flat
from easytorch.bridge.errors import CheckpointError
from easytorch.protocol import BaseModuleProtocol, conversion

jax = pytest.importorskip("jax")
IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60]])
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES = {
    "experts": ("AutoModelForCausalLM", MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)),
    "tied": (
        "AutoModelForCausalLM",
        GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=1, eos_token_id=2),
    ),
    "shared": (
        "AutoModelForSeq2SeqLM",
        T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0),
    ),
    "statistics": (
        "AutoModelForImageClassification",
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3),
    ),
}


def inputs_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32).to(model.dtype)}
    decoder = {"decoder_input_ids": IDS[:, :3]} if model.config.is_encoder_decoder else {}
    return {"input_ids": IDS, **decoder}


def outputs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs_of(model)).logits


def same_weights(one: torch.nn.Module, two: torch.nn.Module) -> None:
    first, second = one.state_dict(), two.state_dict()
    assert first.keys() == second.keys()
    for name, weight in first.items():
        if not name.endswith("num_batches_tracked"):  # a counter of torch's
            assert weight.dtype == second[name].dtype and torch.equal(weight, second[name]), name


@pytest.fixture(params=CASES)
def case(request, without_native_families):
    """(auto class, model with no weight 0 or 1)."""
    auto, config = CASES[request.param]
    torch.manual_seed(0)
    model = getattr(easytorch, auto).from_config(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return getattr(easytorch, auto), model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_torch_gives_what_transformers_runs_and_saves(case, dtype, tmp_path) -> None:
    _, model = case
    assert isinstance(model, BaseModuleProtocol)
    plain = model.to(dtype).to_torch()
    assert type(plain) is getattr(transformers, type(model).__name__) and plain.dtype == dtype
    assert plain.config._attn_implementation in ("sdpa", "eager") and not hasattr(plain, "easytorch_report")
    weights = dict(model.named_parameters())
    assert all(weight is weights[name] for name, weight in plain.named_parameters())
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(outputs(plain), outputs(model), **tolerance)
    plain.save_pretrained(tmp_path)
    same_weights(type(plain).from_pretrained(tmp_path), model)
    if model.can_generate() and dtype == torch.float32:
        settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(plain.generate(IDS, **settings), model.generate(IDS, **settings))


def test_to_torch_with_weights_of_its_own(case) -> None:
    _, model = case
    before = outputs(model)
    plain = model.to_torch(copy_weights=True)
    with torch.no_grad():
        for weight in plain.parameters():
            weight.zero_()
    assert torch.equal(outputs(model), before)


@pytest.mark.parametrize("copy_weights", [False, True])
def test_tied_weights_stay_tied_in_torch(copy_weights) -> None:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = easytorch.AutoModelForCausalLM.from_config(config)
    plain = model.to_torch(copy_weights=copy_weights)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert (plain.lm_head.weight is model.lm_head.weight) != copy_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trees_both_ways_in_memory_and_through_a_checkpoint(case, dtype, tmp_path) -> None:
    auto, model = case
    tree = model.to(dtype).to_flax()
    assert {leaf.dtype.name for leaf in flat(tree).values()} == {str(dtype).removeprefix("torch.")}
    again = auto.from_flax(model.config, tree)
    assert type(again) is type(model) and again.easytorch_report.attention == model.easytorch_report.attention
    same_weights(again, model)
    model.save_pretrained(tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    on_disk, in_memory = flat(easytorch.bridge.load_tree(tmp_path / "flax")), flat(tree)
    assert on_disk.keys() == in_memory.keys()
    assert all(np.array_equal(leaf, on_disk[path]) for path, leaf in in_memory.items())
    same_weights(auto.from_pretrained(tmp_path / "flax"), model)


def test_jax_arrays_and_the_memory_they_share(case) -> None:
    auto, model = case
    tree = jax.tree.map(jax.numpy.asarray, model.to_flax())
    before = jax.tree.map(np.array, tree)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}

    def in_jax(made: torch.nn.Module) -> list[bool]:
        return [weight.data_ptr() in pointers for weight in made.parameters()]

    shared, own = auto.from_flax(model.config, tree, copy=False), auto.from_flax(model.config, tree)
    same_weights(shared, model)
    # transformers stacks experts
    assert any(in_jax(shared)) and (all(in_jax(shared)) or model.config.model_type == "mixtral")
    assert not any(in_jax(own))
    with torch.no_grad():
        for weight in own.parameters():
            weight.zero_()
    assert all(map(np.array_equal, jax.tree.leaves(tree), jax.tree.leaves(before)))
    back = flat(shared.to_flax(framework="jax", copy=False))
    assert all(np.array_equal(leaf, back[path]) for path, leaf in flat(before).items())


def test_the_first_name_of_the_module_goes_on_to_import() -> None:
    from easytorch.protocol import flax_trees

    assert flax_trees.__all__
    assert all(getattr(flax_trees, name) is getattr(conversion, name) for name in flax_trees.__all__)


def test_what_does_not_fit_is_refused(case) -> None:
    auto, model = case
    tree = flat(model.to_flax())
    path = max(tree)
    missing = {name: leaf for name, leaf in tree.items() if name != path}
    with pytest.raises(CheckpointError, match="missing"):
        auto.from_flax(model.config, missing)
    with pytest.raises(CheckpointError, match="nonsense"):
        auto.from_flax(model.config, tree | {f"{path.rpartition('/')[0]}/nonsense": tree[path]})
    with pytest.raises(CheckpointError, match="shape"):
        auto.from_flax(model.config, tree | {path: np.zeros((3, *tree[path].shape[1:]), np.float32)})


def test_the_functions_take_any_model(case) -> None:
    """One that EasyTorch never saw, as it is."""
    _, model = case
    theirs = getattr(transformers, type(model).__name__)(transformers.AutoConfig.for_model(**model.config.to_dict()))
    theirs.load_state_dict(model.state_dict())
    tree, transform = conversion.to_flax(theirs), conversion.transform_fn(theirs)
    assert flat(tree).keys() == flat(model.to_flax()).keys() == flat(transform(theirs.state_dict())).keys()
    same_weights(conversion.from_flax(type(theirs), theirs.config, tree), model)
    same_weights(conversion.to_torch(theirs), model)
    state = conversion.state_dict_from_flax(type(theirs), theirs.config, tree)
    assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())


def test_models_stay_what_they_were(case) -> None:
    """The class is transformers' as it was; the methods of copies and pickles are about those."""
    _, model = case
    assert not hasattr(type(model), "to_flax")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        same_weights(other, model)
        given = flat(model.to_flax())
        with torch.no_grad():
            for weight in other.parameters():
                weight.fill_(3)
        made = flat(other.to_flax())
        assert made.keys() == given.keys()
        for path, leaf in flat(model.to_flax()).items():
            assert np.array_equal(leaf, given[path]), path
            assert path.startswith("batch_stats/") or (np.asarray(made[path], np.float32) == 3).all(), path


LLAMA = LlamaConfig(**SIZES, num_key_value_heads=1, head_dim=16)
SCHEMES = {
    "flax": LLAMA,
    "maxtext": LLAMA,
    "maxtext-unscanned": LLAMA,
    "easydel": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
    "gemma": GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=16),
    "t5x": T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
    "big_vision": ViTConfig(**{**SIZES, "image_size": 16, "patch_size": 8, "num_labels": 3}),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_trees_in_memory_carry_the_names_of_other_programs(scheme) -> None:
    """Whose they are they tell themselves; MaxText's factor is a power of two for heads of 16."""
    config = SCHEMES[scheme]
    kinds = {"t5": "AutoModelForSeq2SeqLM", "vit": "AutoModelForImageClassification"}
    auto = getattr(easytorch, kinds.get(config.model_type, "AutoModelForCausalLM"))
    model = auto.from_config(config)
    tree = model.to_flax(framework="jax", scheme=scheme)
    for copied in (None, False):
        same_weights(auto.from_flax(config, tree, copy=copied), model)


def test_sharded_weights_are_gathered() -> None:
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = easytorch.AutoModelForCausalLM.from_config(LLAMA)
    expected = flat(model.to_flax())
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in model.state_dict().items()}
        given = flat(model.pure_transform_fn(sharded))
    finally:
        distributed.destroy_process_group()
    assert given.keys() == expected.keys() and all(np.array_equal(given[path], expected[path]) for path in given)


def test_what_flax_always_holds_is_not_left_over_in_a_model_without_it() -> None:
    """Flax's wav2vec2 has the vector that masks features also where the config masks none."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    convolutions = {"conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 12}
    no_masks = {"mask_time_prob": 0.0, "mask_feature_prob": 0.0}
    config = transformers.Wav2Vec2Config(**sizes, **convolutions, **positions, **no_masks)
    model = easytorch.AutoModelForCTC.from_config(config)
    tree = model.to_flax()
    assert "masked_spec_embed" not in tree["wav2vec2"]
    tree["wav2vec2"]["masked_spec_embed"] = np.ones(16, np.float32)
    again = easytorch.AutoModelForCTC.from_flax(config, tree)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    tree["wav2vec2"]["masked_spec_embeds"] = np.ones(16, np.float32)
    with pytest.raises(CheckpointError, match="masked_spec_embeds"):
        easytorch.AutoModelForCTC.from_flax(config, tree)
