"""The jax forward passes of `convert --verify`, held to what HF's own Flax classes and transformers compute."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from easytorch.bridge.convert import convert
from easytorch.bridge.core.config import read_config, settings_of
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.forwards import decoder, encoder_decoder, vision
from easytorch.bridge.jobs import verify
from easytorch.bridge.load_tree import load_tree

TINY = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 50}
LLAMA = TINY | {"num_key_value_heads": 2, "max_position_embeddings": 64}
T5 = {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
CONFIGS = {
    "bert": transformers.BertConfig(**TINY),
    "roberta": transformers.RobertaConfig(**TINY),
    "xlm-roberta": transformers.XLMRobertaConfig(**TINY),
    "llama": transformers.LlamaConfig(**LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
    "mistral": transformers.MistralConfig(**LLAMA, head_dim=8),
    "gemma": transformers.GemmaConfig(**LLAMA, head_dim=8),
    "gpt2": transformers.GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=50),
    "t5": transformers.T5Config(**T5),
    "t5 gated": transformers.T5Config(**T5, feed_forward_proj="gated-gelu"),
    "vit": transformers.ViTConfig(**TINY, image_size=16, patch_size=4),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_jax_forward_computes_what_transformers_does(saved_torch, tmp_path, name):
    folder = saved_torch(CONFIGS[name])
    convert(folder, tmp_path / "flax", to="flax")
    found = verify.compare_outputs(folder, tmp_path / "flax", read_config(folder))
    assert found.note is None
    assert found.difference is not None and found.difference < 1e-5


def test_every_forward_is_tested():
    assert {name.split()[0] for name in CONFIGS} == set(verify._FORWARDS)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma", "t5", "vit"])
def test_the_forward_computes_what_hf_flax_did(flax_fixture, family):
    """Recorded logits, through the head that each of these has."""
    folder = flax_fixture(family)
    reference, config = np.load(folder / "reference.npz"), settings_of(read_config(folder)).to_dict()
    tree = load_tree(folder)
    inputs = {name[6:]: jnp.asarray(reference[name]) for name in reference if name.startswith("input.")}
    mask = inputs.pop("attention_mask", None)
    inputs.pop("position_ids", None)
    if mask is not None and not bool(mask.all()):
        rows = np.flatnonzero(np.asarray(mask).all(axis=1))
        inputs = {name: array[rows] for name, array in inputs.items()}
    else:
        rows = np.arange(len(reference["output.logits"]))
    forward = {"t5": encoder_decoder.t5, "vit": vision.vit}.get(family) or getattr(decoder, family)
    base = {"gpt2": "transformer", "llama": "model", "gemma": "model", "vit": "vit"}.get(family)
    states = np.asarray(forward(tree if base is None else tree[base], config, **inputs))
    if family == "vit":
        logits = states[:, 0] @ tree["classifier"]["kernel"] + tree["classifier"]["bias"]
    elif family == "llama":
        logits = states @ tree["lm_head"]["kernel"]
    elif family == "t5":
        head = tree.get("lm_head", {}).get("kernel")
        scaled = states * config["d_model"] ** -0.5
        logits = scaled @ tree["shared"]["embedding"].T if head is None else states @ head
    else:
        table = tree["transformer"]["wte"] if family == "gpt2" else tree["model"]["embed_tokens"]
        logits = states @ table["embedding"].T
    expected = reference["output.logits"][rows]
    assert len(rows), "no row of the reference is without padding"
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


HEADED = {
    "LlamaForCausalLM": transformers.LlamaConfig(**LLAMA),
    "MistralForCausalLM": transformers.MistralConfig(**LLAMA, tie_word_embeddings=True),
    "GemmaForCausalLM": transformers.GemmaConfig(**LLAMA, head_dim=8),
    "GPT2LMHeadModel": transformers.GPT2Config(n_embd=24, n_layer=1, n_head=4, vocab_size=50),
    "T5ForConditionalGeneration": transformers.T5Config(**T5),
    "BertForMaskedLM": transformers.BertConfig(**TINY),
    "BertForSequenceClassification": transformers.BertConfig(**TINY),
    "BertForTokenClassification": transformers.BertConfig(**TINY),
    "RobertaForMaskedLM": transformers.RobertaConfig(**TINY),
    "ViTForImageClassification": transformers.ViTConfig(**TINY, image_size=16, patch_size=4),
}


@pytest.mark.parametrize("name", HEADED)
def test_the_head_is_run(tmp_path, name):
    """A head that is another on one side is seen by the outputs alone."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(HEADED[name])
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.save_pretrained(tmp_path / "torch")
    report = convert(tmp_path / "torch", tmp_path / "flax", to="flax", verify=True)
    assert report.outputs_difference is not None and report.outputs_difference < 1e-5
    file = tmp_path / "torch/model.safetensors"
    state = load_file(file)
    names = ("lm_head.weight", "classifier.weight", "cls.predictions.decoder.weight", "lm_head.decoder.weight")
    output = model.get_output_embeddings()
    head = next((one for one in names if one in state), names[0])
    shape = state[head].shape if head in state else output.weight.shape
    if name.endswith("MaskedLM"):
        head = "cls.predictions.bias" if name.startswith("Bert") else "lm_head.bias"
        shape = state[head].shape
    other = torch.from_numpy(np.random.default_rng(1).normal(size=tuple(shape)).astype(np.float32))
    save_file(state | {head: other}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="computes something else in torch and in jax"):
        verify.compare_outputs(tmp_path / "torch", tmp_path / "flax", read_config(tmp_path / "torch"))
