"""Dtypes, text, switches and auto classes of models."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import BertConfig, LlamaConfig, T5Config

from easytorch import protocol
from easytorch.cache_names import CACHE
from easytorch.models import bert, llama

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.fixture
def model() -> torch.nn.Module:
    return llama.LlamaForCausalLM(LlamaConfig(**SIZES))


def test_dtypes(model):
    assert model.half() is model and model.dtype is torch.float16 and model.config.dtype is torch.float16
    model.float(change_runtime_dtype=False)
    assert model.dtype is torch.float32 and model.config.dtype is torch.float16
    assert model.to_dtype("bfloat16").dtype is torch.bfloat16
    assert all(one.dtype is torch.float32 for key, one in model.named_buffers() if key.endswith("inv_freq"))
    for wrong in ("bf", torch.int8, None, "Tensor"):
        with pytest.raises(ValueError, match="is no floating dtype of torch"):
            model.to_dtype(wrong)
    theirs = transformers.T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1))
    assert protocol.half(theirs).dtype is torch.float16 and protocol.float32(theirs).dtype is torch.float32


def test_text(model):
    text = protocol.printify_nnx(model)
    assert "(layers): ModuleList()" in text and "(0-2): 3 x LlamaDecoderLayer()" in text
    assert text.count("q_proj") == 1 and "weight: float32 (97, 32)" in text
    count = sum(one.numel() for one in model.parameters())
    assert text.endswith(f"{count:,} parameters, {4 * count / 1e3:.3g} KB")
    assert protocol.get_module_repr(model.lm_head) == "weight: float32 (97, 32)"
    shallow = protocol.prettify_nnx(model, indent="> ", max_depth=1)
    assert "embed_tokens" not in shallow and all(line.startswith("> ") for line in shallow.splitlines())
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj = torch.nn.Linear(32, 40)
    assert "(0-1): 2 x LlamaDecoderLayer()" in protocol.prettify_nnx(model)
    other = protocol.prettify_nnx(model, module_param={"lm_head.weight": torch.empty(5, 6, device="meta")})
    assert "weight: float32 (5, 6) on meta" in other


def test_switches(model):
    names = model.get_static_arguments()
    assert {"use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"} <= set(names)
    assert not {"input_ids", "attention_mask", "position_ids", CACHE, "labels"} & set(names)


def test_auto_classes():
    expected = {
        llama.LlamaForCausalLM: transformers.AutoModelForCausalLM,
        llama.LlamaModel: transformers.AutoModel,
        bert.BertForMaskedLM: transformers.AutoModelForMaskedLM,
        bert.BertForPreTraining: transformers.AutoModelForPreTraining,
        bert.BertForSequenceClassification: transformers.AutoModelForSequenceClassification,
    }
    for model_class, auto in expected.items():
        assert model_class.get_torch_loader() is auto, model_class
    assert protocol.get_torch_loader(transformers.ViTModel) is transformers.AutoModel
    assert protocol.get_torch_loader(transformers.T5ForConditionalGeneration) is transformers.AutoModelForSeq2SeqLM
    with pytest.raises(ValueError, match="no auto class of transformers makes Linear"):
        protocol.get_torch_loader(torch.nn.Linear)


def test_a_model_on_one_device_is_not_sharded(model):
    assert model.mesh is None and set(model.params_sharding.values()) == {None}
    assert protocol.params_sharding(bert.BertModel(BertConfig(**SIZES))).keys() >= {"embeddings.word_embeddings.weight"}


def test_a_decorator_for_type_checkers():
    @protocol.return_type_adjuster(llama.LlamaForCausalLM)
    def build(number: int) -> torch.nn.Module:
        return torch.nn.Linear(number, 1)

    assert build(3).in_features == 3
