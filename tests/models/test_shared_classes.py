"""Types that transformers makes of another type's classes, as EXAONE 3 of Llama's: native where those classes are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import easytorch
from easytorch.protocol.native import NativeModel

_SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
# those of transformers 5.24 are left out where it is 5.23
TYPES = {
    name: sizes
    for name, sizes in {
        "internlm3": _SIZES,
        "iquestcoder": _SIZES,
        "exaone": _SIZES,
        "sarvam_moe": _SIZES | _EXPERTS | {"head_dim": 8},
        "sarvam_mla": _SIZES | _EXPERTS | {
            "num_key_value_heads": None, "kv_lora_rank": 8,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
        },
    }.items()
    if name in transformers.CONFIG_MAPPING
}  # fmt: skip
IDS = torch.tensor([[5, 9, 33, 71, 8, 12], [0, 0, 4, 90, 12, 60]])
MASK = (IDS != 0).long()


def both(name: str, auto: str = "AutoModelForCausalLM") -> tuple[Any, Any]:
    """Ours and transformers' own, with the same weights."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**TYPES[name])
    theirs = getattr(transformers, auto).from_config(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    ours = getattr(easytorch, auto).from_config(config).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("name", TYPES)
def test_outputs_gradients_and_tokens(name: str) -> None:
    ours, theirs = both(name)
    assert isinstance(ours, NativeModel) and ours.config.model_type == name
    outputs = [one(IDS, attention_mask=MASK, labels=IDS) for one in (ours, theirs)]
    for output in outputs:
        output.loss.backward()
    torch.testing.assert_close(outputs[0].logits[MASK == 1], outputs[1].logits[MASK == 1], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss, rtol=1e-5, atol=1e-5)
    expected = dict(theirs.named_parameters())
    for key, weight in ours.named_parameters():
        assert (weight.grad is None) == (expected[key].grad is None), key
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, expected[key].grad, rtol=1e-4, atol=2e-5)
    tokens = [one.generate(IDS, attention_mask=MASK, max_new_tokens=5, do_sample=False) for one in (ours, theirs)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForCausalLM"])
def test_files_go_both_ways(name: str, auto: str, tmp_path: Any) -> None:
    ours, theirs = both(name, auto)
    theirs.save_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    stored = [load_file(tmp_path / one / "model.safetensors") for one in ("ours", "theirs")]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(value, stored[1][key]) for key, value in stored[0].items())
    for one in ("ours", "theirs"):
        again = getattr(easytorch, auto).from_pretrained(tmp_path / one)
        assert all(torch.equal(value, ours.state_dict()[key]) for key, value in again.state_dict().items())


@pytest.mark.parametrize("name", TYPES)
def test_flax_and_back(name: str, tmp_path: Any) -> None:
    ours, _ = both(name)
    again = easytorch.AutoModelForCausalLM.from_flax(ours.config, ours.to_flax())
    state = again.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in ours.state_dict().items())


@pytest.mark.skipif("exaone" not in TYPES, reason="transformers 5.24 is the first with EXAONE 3")
def test_exaone_s_own_names(tmp_path: Any) -> None:
    """Its checkpoints have the names of GPT-2's parts."""
    ours, _ = both("exaone")
    ours.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    names = {
        "model.embed_tokens.": "transformer.wte.",
        "model.layers.": "transformer.h.",
        "model.norm.": "transformer.ln_f.",
        ".self_attn.o_proj.": ".attn.attention.out_proj.",
        ".self_attn.": ".attn.attention.",
        ".input_layernorm.": ".ln_1.",
        ".post_attention_layernorm.": ".ln_2.",
        ".mlp.gate_proj.": ".mlp.c_fc_0.",
        ".mlp.up_proj.": ".mlp.c_fc_1.",
        ".mlp.down_proj.": ".mlp.c_proj.",
    }

    def named(key: str) -> str:
        for new, old in names.items():
            key = key.replace(new, old)
        return key

    tensors = {named(key): value for key, value in load_file(file).items()}
    assert any(".attn.attention.out_proj." in key for key in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    state = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, state[key]) for key, value in ours.state_dict().items())
