"""Adapters of JAX models: kernels with the products of their adapters added are the merged model, in every layout."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import easytorch
from easytorch import protocol
from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.errors import CheckpointError
from easytorch.protocol import flax_adapters

pytest.importorskip("peft")
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
CONFIGS = {
    "llama": ("CausalLM", transformers.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "qwen3": ("CausalLM", transformers.Qwen3Config(**SIZES | GROUPED)),
    "gemma2": ("CausalLM", transformers.Gemma2Config(**SIZES | GROUPED | {"num_hidden_layers": 4})),
    "bert": ("MaskedLM", transformers.BertConfig(**SIZES)),
    "mpt": ("CausalLM", transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=97)),  # not native
}
IDS = torch.tensor([[5, 9, 33, 71, 8, 2]])
ALPHA, RANK = 6.0, 3


def adapted(name: str, pattern: str | None = None) -> Any:
    head, config = CONFIGS[name]
    torch.manual_seed(0)
    model = getattr(easytorch, f"AutoModelFor{head}").from_config(copy.deepcopy(config)).eval()
    protocol.apply_lora_to_layers(model, RANK, pattern, alpha=ALPHA, rngs=0)
    values = protocol.split_lora_params(model)
    return protocol.merge_lora_params(model, {key: torch.randn_like(one) * 0.1 for key, one in values.items()})


def plain(name: str) -> Any:
    model = adapted(name)
    return protocol.unwrap_lora_to_layers(model, merge=False)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def added(kernel: np.ndarray, a: np.ndarray, b: np.ndarray, axis: int | None) -> np.ndarray:
    """A kernel and the product of its adapter, layer by layer along `axis`."""
    if axis is None:
        return kernel + (a.reshape(-1, RANK) @ b.reshape(RANK, -1)).reshape(kernel.shape)
    layers = zip(*(np.moveaxis(one, axis, 0) for one in (kernel, a, b)), strict=True)
    return np.stack([added(*one, None) for one in layers], axis)


@pytest.mark.parametrize(
    ("name", "scheme", "leaves", "ends", "axis"),
    [
        ("llama", "easydel", "nnx", "lora_", None),
        ("llama", "maxtext", "qwix", "kernel_lora_", 1),
        ("llama", "maxtext-unscanned", "qwix", "kernel_lora_", None),
        ("qwen3", "maxtext", "maxtext", "lora_{}/kernel", 1),
        ("gemma2", "maxtext", "maxtext", "lora_{}/kernel", 1),
        ("bert", "flax", "nnx", "lora_", None),
        ("mpt", "easydel", "qwix", "kernel_lora_", None),
    ],
)
def test_kernels_and_adapters_are_the_merged_model(
    name: str, scheme: str, leaves: str, ends: str, axis: int | None
) -> None:
    model = adapted(name)
    tree = flat(protocol.lora_to_flax(model, scheme=scheme, leaves=leaves))
    ends = ends if "{}" in ends else ends + "{}"
    kernels = flat(protocol.to_flax(plain(name), scheme=scheme))
    factor = 1.0 if leaves == "nnx" else ALPHA / RANK
    matrices = [path for path in kernels if path.endswith("/kernel")]
    beside = [path for path in matrices if path.rpartition("/")[0] + "/" + ends.format("a") in tree]
    assert len(tree) == 2 * len(beside) > 0
    for path in beside:
        a, b = (tree[f"{path.rpartition('/')[0]}/{ends.format(part)}"] for part in "ab")
        kernels[path] = added(kernels[path], a, b * factor, axis)
    merged = protocol.from_flax(type(model), model.config, nested(kernels)).eval()
    expected = logits(model)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    again = protocol.lora_from_flax(plain(name), nested(tree), alpha=None if leaves == "nnx" else ALPHA)
    torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-5)


def test_it_is_an_adapter_of_flax_nnx_and_becomes_peft_s_files(tmp_path: Any) -> None:
    nnx, jnp = pytest.importorskip("flax.nnx"), pytest.importorskip("jax.numpy")
    theirs = nnx.LoRA(32, RANK, 32, rngs=nnx.Rngs(0))
    values = {"lora_a": np.asarray(theirs.lora_a[...]), "lora_b": np.full((RANK, 32), 0.5, np.float32)}
    theirs.lora_b[...] = jnp.asarray(values["lora_b"])
    model = plain("llama")
    layer = model.model.layers[1].self_attn.q_proj
    x = torch.randn(5, 32)
    before = layer(x)
    projection = {**values, "base_module": {"kernel": np.ones((32, 32))}}
    protocol.lora_from_flax(model, {"model": {"layers": {1: {"self_attn": {"q_proj": projection}}}}})
    wrapped = model.model.layers[1].self_attn.q_proj
    expected = before.detach() + torch.from_numpy(np.array(theirs(jnp.asarray(x.numpy()))))
    torch.testing.assert_close(wrapped(x).detach(), expected, rtol=1e-4, atol=1e-4)
    assert not hasattr(model.model.layers[0].self_attn.q_proj, "lora_A")
    model.save_pretrained(tmp_path)
    other = plain("llama")
    other.load_adapter(str(tmp_path))
    assert torch.equal(logits(other), logits(model))
    written = flat(protocol.lora_to_flax(other, scheme="easydel"))
    assert sorted(written) == [f"model/layers/1/self_attn/q_proj/lora_{part}" for part in "ab"]
    assert np.array_equal(written["model/layers/1/self_attn/q_proj/lora_a"], values["lora_a"])


def test_a_stack_with_some_layers_has_zeros_and_bfloat16_is_kept() -> None:
    model = adapted("llama", r"layers\.1\.mlp\.up_proj")
    tree = flat(protocol.lora_to_flax(model, scheme="maxtext", leaves="qwix"))
    a = tree["params/params/decoder/layers/mlp/wi_1/kernel_lora_a"]
    assert a.shape == (32, 2, RANK) and not a[:, 0].any() and a[:, 1].any()
    import ml_dtypes

    narrow = nested({key: one.astype(ml_dtypes.bfloat16) for key, one in tree.items()})
    again = protocol.lora_from_flax(plain("llama"), narrow, alpha=ALPHA, scheme="maxtext")
    torch.testing.assert_close(logits(again), logits(model), rtol=2e-2, atol=2e-2)


def test_a_stack_of_one_layer_has_its_dimension() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1})
    model = protocol.apply_lora_to_layers(easytorch.AutoModelForCausalLM.from_config(config), RANK, rngs=0)
    found = flat(protocol.lora_to_flax(model, scheme="maxtext", leaves="qwix"))
    assert {one.shape[1] for one in found.values()} == {1} and {one.ndim for one in found.values()} == {3}


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (lambda tree: {}, CheckpointError, "holds no adapter"),
        (lambda tree: {key: one for key, one in tree.items() if "lora_a" in key}, CheckpointError, "no pair lora_b"),
        (lambda tree: {key.replace("q_proj", "q_porj"): one for key, one in tree.items()}, CheckpointError, "q_proj"),
        (lambda tree: {key: one[:-1] for key, one in tree.items()}, CheckpointError, "belong beside"),
        (
            lambda tree: {key: np.repeat(one, 20, 1 if "lora_a" in key else 0) for key, one in tree.items()},
            ValueError,
            "above the smaller side",
        ),
    ],
)
def test_an_adapter_of_another_model_leaves_this_one_as_it_was(change: Any, error: Any, reason: str) -> None:
    tree = flat(protocol.lora_to_flax(adapted("llama", "q_proj"), scheme="easydel"))
    model = plain("llama")
    before, names = logits(model), [name for name, _ in model.named_modules()]
    with pytest.raises(error, match=reason):
        protocol.lora_from_flax(model, nested(change(tree)))
    assert torch.equal(logits(model), before) and names == [name for name, _ in model.named_modules()]


def test_what_has_no_place_in_jax_is_refused() -> None:
    model = plain("llama")
    protocol.apply_lora_to_layers(model, 2, "q_proj", dora=True)
    with pytest.raises(ValueError, match="has no place in JAX"):
        protocol.lora_to_flax(model)
    with pytest.raises(ValueError, match="must be one of nnx, qwix, maxtext"):
        protocol.lora_to_flax(model, leaves="peft")


def test_the_factor_of_rank_stabilized_adapters() -> None:
    model = plain("llama")
    protocol.apply_lora_to_layers(model, 4, r"layers\.0\.mlp\.up_proj", alpha=ALPHA, rslora=True, rngs=0)
    state = {key: torch.randn_like(one) for key, one in protocol.split_lora_params(model).items()}
    protocol.merge_lora_params(model, state)
    up = next(one for key, one in state.items() if "lora_B" in key)
    for leaves, times in (("nnx", ALPHA / 2), ("qwix", 2.0)):  # qwix counts alpha / 4 itself
        tree = flat(protocol.lora_to_flax(model, scheme="easydel", leaves=leaves))
        b = next(one for key, one in tree.items() if key.endswith("lora_b"))
        np.testing.assert_allclose(b, up.numpy().T * times, rtol=1e-6)


def test_adapters_of_several_ranks_are_refused_both_ways() -> None:
    tree = flat(protocol.lora_to_flax(adapted("llama"), scheme="easydel"))
    cut = {
        key: (one[:, :2] if key.endswith("a") else one[:2]) if "up_proj" in key else one for key, one in tree.items()
    }
    with pytest.raises(CheckpointError, match=r"has the ranks \[2, 3\]"):
        protocol.lora_from_flax(plain("llama"), nested(cut))
    from peft import LoraConfig

    model = plain("llama")
    model.add_adapter(LoraConfig(r=3, target_modules=["up_proj"], rank_pattern={r"layers\.0\.mlp\.up_proj": 2}))
    with pytest.raises(ValueError, match=r"wi_1/kernel holds layers whose adapters have the ranks \[2, 3\]"):
        protocol.lora_to_flax(model, scheme="maxtext", leaves="qwix")
    written = flat(protocol.lora_to_flax(model, scheme="easydel"))
    assert {one.shape[-1] for key, one in written.items() if key.endswith("lora_a")} == {2, 3}


def test_an_adapter_that_is_given_twice_is_refused() -> None:
    tree = flat(protocol.lora_to_flax(adapted("llama", "q_proj"), scheme="easydel"))
    twice = tree | {key.replace("/lora_", "/kernel_lora_"): one for key, one in tree.items()}
    with pytest.raises(CheckpointError, match="q_proj': is given twice"):
        protocol.lora_from_flax(plain("llama"), nested(twice))


def test_a_layer_without_a_kernel_is_refused() -> None:
    """BERT's decoder is the embedding."""
    with pytest.raises(ValueError, match=r"cls.predictions.decoder has no kernel of its own in flax"):
        protocol.lora_to_flax(adapted("bert", "predictions.decoder|query"))


def test_layers_in_one_kernel_need_the_same_a() -> None:
    outputs, sources = np.array([[0, 1, 0, 1]]), np.array([[0, 0, 1, 1]])
    place = flax_adapters._Place(
        "qk/kernel", ("q", "k"), ((2, 3), (2, 3)), None, np.arange(3), outputs, sources, np.ones((1, 4)), (3,), (4,)
    )
    a, b = np.random.default_rng(0).normal(size=(2, RANK, 3)), np.arange(2.0 * 2 * RANK).reshape(2, 2, RANK)
    both = {"q": {"lora_A": a[0], "lora_B": b[0]}, "k": {"lora_A": a[0], "lora_B": b[1]}}
    down, up = flax_adapters._written(place, both, 2.0, flat=True)
    assert np.array_equal(down, a[0].T) and np.array_equal(up, 2 * np.concatenate(list(b)).T)
    for layers in ({"q": both["q"]}, {**both, "k": {"lora_A": a[1], "lora_B": b[1]}}):
        with pytest.raises(ValueError, match="qk/kernel holds q, k, whose adapters have no lora_A in common"):
            flax_adapters._written(place, layers, 2.0, flat=True)


def test_the_adapter_that_is_named_or_active_among_two() -> None:
    """Also leaves below `value`, as an nnx.State has them."""
    model = adapted("llama", "q_proj")
    tree = flat(protocol.lora_to_flax(model, scheme="easydel"))
    state = nested({f"{key}/value": one * 2 for key, one in tree.items()})
    protocol.lora_from_flax(model, state, adapter_name="other", alpha=2.0 * RANK)
    for name, times in ((None, 4), ("default", 1), ("other", 4)):
        found = flat(protocol.lora_to_flax(model, name, scheme="easydel"))
        for key, one in found.items():
            factor = min(times, 2) if key.endswith("lora_a") else times
            np.testing.assert_allclose(one, tree[key] * factor, rtol=1e-6)
