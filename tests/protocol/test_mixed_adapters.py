"""`adapter_names=[...]` in a call: rows of different adapters against PEFT's own wrapper of the same weights."""

from __future__ import annotations

import copy
import sys
import threading

import peft
import pytest
import torch
from transformers import (
    BioGptConfig,
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    MptConfig,
    OPTConfig,
    OPTForCausalLM,
    Qwen2VLConfig,
    T5Config,
)  # fmt: skip

import easytorch
from easytorch import protocol
from easytorch.protocol.adapters import wrapped_layers

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
MODELS = {
    "llama": ("AutoModelForCausalLM", LlamaConfig(**SIZES), "q_proj|up_proj"),
    "gpt2": ("AutoModelForCausalLM", GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4), "c_attn|c_fc"),
    "t5": ("AutoModelForSeq2SeqLM", T5, r"(SelfAttention|EncDecAttention)\.(q|v)$"),
}
# transformers' own classes; mpt calls no attention of ours
MPT = MptConfig(vocab_size=97, d_model=32, n_layers=2, n_heads=4)
STOCKS = {"biogpt": (BioGptConfig(**SIZES, max_position_embeddings=40), "fc1"), "mpt": (MPT, "Wqkv")}
IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60], [6, 7, 8, 9, 10], [44, 3, 2, 20, 81]])
ROWS = ["one", "__base__", "two", "one"]
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:.*fan_in_fan_out")


def adapted(auto: str, config, pattern: str | None):
    """A model with the adapters "one" and "two", the latter active."""
    torch.manual_seed(0)
    model = getattr(easytorch, auto).from_config(copy.deepcopy(config)).eval()
    for name, rank in (("one", 4), ("two", 3)):
        protocol.apply_lora_to_layers(model, rank, pattern, adapter_name=name)
        values = protocol.split_lora_params(model, name)
        protocol.merge_lora_params(model, {key: 0.3 * torch.randn(one.shape) for key, one in values.items()}, name)
    return model.eval()


def hooks(model) -> int:
    return sum(len(layer._forward_pre_hooks) for layer in wrapped_layers(model).values())


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_different_adapters(name, tmp_path):
    model = adapted(*MODELS[name])
    theirs = None
    for adapter in ("one", "two"):
        model.set_adapter(adapter)
        model.save_pretrained(tmp_path / adapter)
        if theirs is None:
            stock = protocol.unwrap_lora_to_layers(copy.deepcopy(model), merge=False).to_torch()
            theirs = peft.PeftModel.from_pretrained(stock, tmp_path / adapter, adapter_name=adapter)
        else:
            theirs.load_adapter(tmp_path / adapter, adapter_name=adapter)
    theirs.eval()
    labels = {"labels": IDS} if name == "t5" else {}
    with torch.no_grad():
        found, right = (one(input_ids=IDS, adapter_names=ROWS, **labels).logits for one in (model, theirs))
        torch.testing.assert_close(found, right, rtol=0, atol=1e-6)
        alone = model(input_ids=IDS, **labels).logits  # of "two", in every row
        assert torch.allclose(found[2], alone[2], atol=1e-6) and not torch.allclose(found[0], alone[0], atol=1e-3)
    settings = {"max_new_tokens": 6, "pad_token_id": 0, "adapter_names": ROWS}
    for beams in (1, 3):
        found, right = (one.generate(input_ids=IDS, num_beams=beams, **settings) for one in (model, theirs))
        assert torch.equal(found, right)
    # PEFT has no word for several sequences a row: the rows are repeated here
    twice = {"input_ids": IDS.repeat_interleave(2, 0), "adapter_names": [one for one in ROWS for _ in "ab"]}
    torch.manual_seed(3)
    right = theirs.generate(do_sample=True, max_new_tokens=6, pad_token_id=0, **twice)
    found = model.generate(input_ids=IDS, do_sample=True, num_return_sequences=2, prng_key=3, **settings)
    assert torch.equal(found, right)
    with torch.no_grad():
        assert not hooks(model) and torch.equal(model(input_ids=IDS, **labels).logits, alone)
    assert "_expand_inputs_for_generation" not in vars(model)


WRONG = {
    "length": (["one"], ValueError, "1 names, and a layer with an adapter gets 4 rows"),
    "unknown": (["one", "three", "two", "one"], ValueError, r"no LoRA adapter three; there are \['one', 'two'\]"),
    "text": ("one", TypeError, "adapter's name"),
    "numbers": ([1, 2, 3, 4], TypeError, "adapter's name"),
}


@pytest.mark.parametrize("case", WRONG)
def test_names_that_do_not_fit(case):
    model = adapted(*MODELS["llama"])
    names, error, words = WRONG[case]
    for call in (model, model.generate):
        with pytest.raises(error, match=words):
            call(input_ids=IDS, adapter_names=names)
    assert not hooks(model)


def test_models_that_do_not_carry_them():
    model = adapted(*MODELS["llama"])
    with pytest.raises(ValueError, match="in training mode"):
        model.train()(input_ids=IDS, adapter_names=ROWS)
    model.eval()
    assert torch.equal(model(input_ids=IDS, adapter_names=None).logits, model(input_ids=IDS).logits)
    plain = protocol.unwrap_lora_to_layers(model, merge=False)
    with pytest.raises(ValueError, match="has no adapter; load_adapter gives it one"):
        plain(input_ids=IDS, adapter_names=["__base__"] * 4)
    dora = protocol.apply_lora_to_layers(plain, 2, "q_proj", dora=True).eval()
    with pytest.raises(ValueError, match="when DoRA is enabled"):
        dora(input_ids=IDS, adapter_names=["default"] * 4)
    other = protocol.unwrap_lora_to_layers(dora, merge=False)
    other.add_adapter(peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match=r"is for LoRA, and model\.layers\.0\.self_attn\.q_proj is a Linear"):
        other.eval()(input_ids=IDS, adapter_names=["default"] * 4)


def test_modules_trained_apart_by_one_adapter():
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]), "two")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "one")
    with pytest.raises(ValueError, match="lm_head is trained apart by other adapters, and not by 'two'"):
        model.eval()(input_ids=IDS, adapter_names=ROWS)


def test_a_tower_of_packed_patches():
    vision = {"embed_dim": 16, "hidden_size": 32, "depth": 1, "num_heads": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=SIZES | {"num_key_value_heads": 2}, vision_config=vision, image_token_id=90)
    model = adapted("AutoModelForImageTextToText", config, r"visual.*qkv")
    with pytest.raises(ValueError, match="visual has adapters, and its rows are patches of all images"):
        model(input_ids=IDS, adapter_names=ROWS)


@pytest.mark.parametrize("name", STOCKS)
def test_a_class_of_transformers_refuses_them_but_generates(name):
    model = adapted("AutoModelForCausalLM", *STOCKS[name])
    with pytest.raises(ValueError, match=r"carry adapter_names, an adapter for each row: put the adapters in by"):
        model(input_ids=IDS, adapter_names=ROWS)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = protocol.generate(model, IDS, adapter_names=ROWS, **settings)
    for adapter, rows in (("one", [0, 3]), ("two", [2])):
        model.set_adapter(adapter)
        assert torch.equal(found[rows], model.generate(IDS[rows], **settings))


def test_a_class_that_runs_tokens_as_rows_says_so():
    """OPT's feed-forward network, of transformers' own class."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 1}
    config = OPTConfig(**sizes)
    config.num_attention_heads = 4
    model = OPTForCausalLM(config).eval()
    protocol.apply_lora_to_layers(model, 4, "fc1", adapter_name="one")
    with pytest.raises(ValueError, match=r"4 names, and a layer with an adapter gets \d+ rows: .* runs tokens as rows"):
        protocol.generate(model, IDS, adapter_names=["one", "__base__", "one", "one"], max_new_tokens=1)


def test_a_model_that_was_compiled_in_place_is_refused():
    model = adapted(*MODELS["llama"])
    with torch.no_grad():
        before = model(IDS, adapter_names=ROWS).logits
        for compiled in (model, model.model.layers[0]):
            compiled.compile(backend="eager")
            with pytest.raises(ValueError, match="adapter_names: the model was compiled in place"):
                model(IDS, adapter_names=ROWS)
            compiled._compiled_call_impl = None
        assert torch.equal(model(IDS, adapter_names=ROWS).logits, before)


def test_threads_have_names_of_their_own():
    model = adapted(*MODELS["llama"])
    settings = {"max_new_tokens": 3, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    wanted = {"a": ROWS, "b": ROWS[::-1], "plain": None}
    right = {key: model.generate(IDS, adapter_names=names, **settings) for key, names in wanted.items()}
    wrong: list[str] = []

    def work(key: str) -> None:
        try:
            for _ in range(8):
                if not torch.equal(model.generate(IDS, adapter_names=wanted[key], **settings), right[key]):
                    wrong.append(key)
        except Exception as error:
            wrong.append(f"{key}: {error!r}")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        threads = [threading.Thread(target=work, args=(key,)) for key in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong and not hooks(model) and "_expand_inputs_for_generation" not in vars(model)


@pytest.mark.parametrize("pattern", [r"vision.*q_proj", "multi_modal_projector"])
def test_adapters_of_a_tower_whose_rows_are_images_are_refused(pattern):
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4
    )
    config = LlavaConfig(
        vision_config=vision, text_config=LlamaConfig(**SIZES), image_token_index=90, image_seq_length=4
    )
    model = adapted("AutoModelForImageTextToText", config, pattern)
    with pytest.raises(ValueError, match="has adapters, and its rows are images"):
        model(IDS, adapter_names=ROWS)
    text = adapted("AutoModelForImageTextToText", config, r"language_model.*q_proj")
    with torch.no_grad():
        assert text(IDS[:2] % 80, adapter_names=ROWS[:2]).logits.shape[:2] == (2, 5)
