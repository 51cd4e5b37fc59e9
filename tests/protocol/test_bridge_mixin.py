"""Native models as transformers models, and as Flax trees."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import BertConfig, LlamaConfig

from easytorch.bridge.convert import convert
from easytorch.bridge.core.nested import flat
from easytorch.bridge.errors import CheckpointError
from easytorch.models import bert, llama
from easytorch.protocol import BaseModuleProtocol

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60]])
CASES = {
    "llama": (llama.LlamaForCausalLM, LlamaConfig(**SIZES, num_key_value_heads=2)),
    "llama-tied": (llama.LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama-biases": (llama.LlamaModel, LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama-classifier": (llama.LlamaForSequenceClassification, LlamaConfig(**SIZES, pad_token_id=0)),
    "llama-answers": (llama.LlamaForQuestionAnswering, LlamaConfig(**SIZES)),
    "bert": (bert.BertModel, BertConfig(**SIZES, max_position_embeddings=40)),
    "bert-words": (bert.BertForPreTraining, BertConfig(**SIZES, max_position_embeddings=40)),
    "bert-classifier": (bert.BertForSequenceClassification, BertConfig(**SIZES, max_position_embeddings=40)),
    "bert-decoder": (
        bert.BertLMHeadModel,
        BertConfig(**SIZES, max_position_embeddings=40, is_decoder=True, add_cross_attention=True),
    ),
}


@pytest.fixture(params=CASES)
def model(request) -> torch.nn.Module:
    model_class, config = CASES[request.param]
    torch.manual_seed(0)
    model = model_class(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def same_weights(one: torch.nn.Module, two: torch.nn.Module) -> None:
    first, second = one.state_dict(), two.state_dict()
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert weight.dtype == second[name].dtype and torch.equal(weight, second[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copy_weights", [False, True])
def test_to_torch(model, dtype, copy_weights) -> None:
    model.to(dtype)
    theirs = model.to_torch(copy_weights=copy_weights)
    assert type(theirs) is getattr(transformers, type(model).__name__)
    assert theirs.config._attn_implementation == "sdpa" and theirs.training == model.training
    same_weights(model, theirs)
    with torch.no_grad():
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(theirs(IDS)[0], model(IDS)[0], **tolerance)
        before = model(IDS)[0].clone()
        theirs.get_input_embeddings().weight.zero_()
        assert torch.equal(model(IDS)[0], before) == copy_weights
    if model.config.tie_word_embeddings and model.get_output_embeddings() is not None:
        assert theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight


def test_to_torch_keeps_what_is_frozen_and_trained(model) -> None:
    model.train().get_input_embeddings().weight.requires_grad_(False)
    for copy_weights in (False, True):
        theirs = model.to_torch(copy_weights=copy_weights)
        assert theirs.training and not theirs.get_input_embeddings().weight.requires_grad
        assert not model.get_input_embeddings().weight.requires_grad
        assert sum(p.requires_grad for p in theirs.parameters()) == sum(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_flax_and_back(model, dtype) -> None:
    model.to(dtype)
    tree = model.to_flax()
    again = type(model).from_flax(model.config, tree)
    assert again.dtype == dtype and not again.training
    same_weights(model, again)
    leaves = flat(tree)
    assert any(path.endswith("kernel") for path in leaves) and {leaf.dtype.name for leaf in leaves.values()} == {
        str(dtype).removeprefix("torch.")
    }


@pytest.mark.parametrize("dtype", [None, "auto", "float16", torch.float16])
def test_a_flax_folder_loads_in_the_dtype_a_torch_folder_does(model, tmp_path, dtype) -> None:
    model.bfloat16().save_pretrained(tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    given = {} if dtype is None else {"dtype": dtype}
    torch_side, flax_side = (type(model).from_pretrained(tmp_path / name, **given) for name in ("torch", "flax"))
    same_weights(torch_side, flax_side)
    assert flax_side.dtype == flax_side.config.dtype == (torch.float16 if "float16" in str(dtype) else torch.bfloat16)


def test_from_flax_takes_jax_arrays_and_refuses_what_does_not_fit() -> None:
    jax = pytest.importorskip("jax")
    model = bert.BertForSequenceClassification(CASES["bert-classifier"][1])
    tree = jax.tree.map(jax.numpy.asarray, model.to_flax())
    same_weights(model, bert.BertForSequenceClassification.from_flax(model.config, tree))
    broken = jax.tree.map(lambda leaf: leaf, tree)
    del broken["classifier"]["bias"]
    with pytest.raises(CheckpointError, match=r"classifier\.bias.*missing"):
        bert.BertForSequenceClassification.from_flax(model.config, broken)
    kept = bert.BertForSequenceClassification.from_flax(model.config, broken, strict=False)
    assert torch.equal(kept.classifier.weight, model.classifier.weight)
    with pytest.raises(CheckpointError, match=r"classifier\..*is in the tree .*no place for it"):
        bert.BertModel.from_flax(model.config, tree)
    with pytest.raises(CheckpointError, match="shape"):
        bert.BertForSequenceClassification.from_flax(BertConfig(**SIZES | {"vocab_size": 50}), tree)


def test_the_transform_keeps_no_weight_alive(model) -> None:
    transform = model.pure_transform_fn
    tree = transform(model.state_dict())
    expected = flat(model.to_flax())
    assert {path: leaf.shape for path, leaf in flat(tree).items()} == {p: leaf.shape for p, leaf in expected.items()}
    captured = [cell.cell_contents for cell in transform.__closure__]
    assert not any(isinstance(value, torch.nn.Module | torch.Tensor) for value in captured)


def test_every_native_model_keeps_the_protocol(model) -> None:
    assert isinstance(model, BaseModuleProtocol)
    assert not isinstance(transformers.BertModel(CASES["bert"][1]), BaseModuleProtocol)
