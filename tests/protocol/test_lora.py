"""Adapters against PEFT's own wrapper: outputs, gradients, files; what does not fit leaves the model as it was."""

from __future__ import annotations

import copy
import re
import sys

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config

import easytorch
from easytorch import protocol

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
MODELS = {
    "llama": ("AutoModelForCausalLM", LlamaConfig(**SIZES), "q_proj|up_proj"),
    "bert": ("AutoModelForMaskedLM", BertConfig(**SIZES, max_position_embeddings=40), r"attention\.self"),
    "gpt2": ("AutoModelForCausalLM", GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4), "c_attn|c_fc"),
    "t5": ("AutoModelForSeq2SeqLM", T5, r"SelfAttention\.(q|v)$"),
}
IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60]])
SOME_PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:.*fan_in_fan_out")


@pytest.fixture(params=MODELS)
def case(request):
    auto, config, pattern = MODELS[request.param]
    torch.manual_seed(0)
    return getattr(easytorch, auto).from_config(copy.deepcopy(config)).eval(), pattern


def filled(model) -> dict[str, torch.Tensor]:
    """Random values for the active adapter, whose B is zero when it is new."""
    generator = torch.Generator().manual_seed(1)
    there = protocol.split_lora_params(model)
    return {name: 0.1 * torch.randn(one.shape, generator=generator) for name, one in there.items()}


@pytest.mark.parametrize(
    "settings", [{}, {"alpha": 16, "rslora": True}, {"dora": True}], ids=["lora", "rslora", "dora"]
)
def test_as_pefts_own(case, settings, tmp_path):
    model, pattern = case
    plain = copy.deepcopy(model)
    protocol.apply_lora_to_layers(model, 4, pattern, rngs=0, **settings)
    protocol.merge_lora_params(model, filled(model))
    model.save_pretrained(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True).eval()
    outputs = [one(input_ids=IDS, labels=IDS) for one in (model, theirs)]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=0, atol=1e-6)
    for output in outputs:
        output.loss.backward()
    expected = {name.removeprefix("base_model.model."): one.grad for name, one in theirs.named_parameters()}
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert len(trained) == len(protocol.split_lora_params(model)) and all("lora_" in name for name in trained)
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-7)


def test_files_are_pefts_bit_for_bit(case, tmp_path):
    model, pattern = case
    plain, names = copy.deepcopy(model), model.state_dict().keys()
    protocol.apply_lora_to_layers(model, 4, pattern, rngs=0)
    protocol.merge_lora_params(model, filled(model))
    model.save_pretrained(tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    one, two = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "theirs"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    again = copy.deepcopy(model)
    again.delete_adapter("default")
    again.load_adapter(tmp_path / "theirs", adapter_name="read")
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS, labels=IDS).logits, model(input_ids=IDS, labels=IDS).logits)
    # without the adapter that was read the model is saved under its own names
    protocol.unwrap_lora_to_layers(again)
    again.save_pretrained(tmp_path / "merged")
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() <= names


def test_merged_and_taken_out(case):
    model, pattern = case
    names = list(model.state_dict())
    next(model.parameters()).requires_grad_(False)
    with torch.no_grad():
        before = model(input_ids=IDS, labels=IDS).logits
        protocol.apply_lora_to_layers(model, 4, pattern)
        protocol.merge_lora_params(model, protocol.unflatten(filled(model)))
        adapted = model(input_ids=IDS, labels=IDS).logits
        dropped = protocol.unwrap_lora_to_layers(copy.deepcopy(model), merge=False)
        protocol.unwrap_lora_to_layers(model)
        torch.testing.assert_close(model(input_ids=IDS, labels=IDS).logits, adapted, rtol=0, atol=2e-6)
        assert torch.equal(dropped(input_ids=IDS, labels=IDS).logits, before) and not torch.equal(adapted, before)
    for one in (model, dropped):
        assert list(one.state_dict()) == names
        assert [parameter.requires_grad for parameter in one.parameters()][:2] == [False, True]
    with pytest.raises(ValueError, match="has no adapter; it was merged already"):
        protocol.unwrap_lora_to_layers(model)
    protocol.to_torch(model)


def test_several_adapters():
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    outputs = {}
    with torch.no_grad():
        outputs["none"] = model(IDS).logits
        for number, name in enumerate(("one", "two")):
            model.apply_lora_to_layers(2 + number, "q_proj", adapter_name=name)
            model.merge_lora_params({key: one + number + 1 for key, one in filled(model).items()}, name)
            outputs[name] = model(IDS).logits
        for name in ("one", "two"):
            model.set_adapter(name)
            assert torch.equal(model(IDS).logits, outputs[name])
            assert {one.shape[0] for key, one in model.split_lora_params().items() if "lora_A" in key} == {
                2 if name == "one" else 3
            }
        model.disable_adapters()
        assert torch.equal(model(IDS).logits, outputs["none"])
    assert not torch.equal(outputs["one"], outputs["two"])


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "mpt"])
def test_adapters_are_switched_as_pefts(name):
    """Three adapters, of other ranks, layers and scales, switched call by call; two at once; none."""
    if name == "mpt":  # not native
        config = transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=97)
        auto, patterns = "AutoModelForCausalLM", ("Wqkv", "up_proj", "Wqkv|down_proj")
    else:
        auto, config, pattern = MODELS[name]
        patterns = (pattern, {"llama": "v_proj", "bert": "intermediate", "t5": "wi"}[name], pattern)
    torch.manual_seed(0)
    model = getattr(easytorch, auto).from_config(copy.deepcopy(config)).eval()
    plain, theirs = copy.deepcopy(model), None
    values = {}
    for number, (key, settings) in enumerate((("a", {}), ("b", {"rslora": True}), ("c", {"dora": True}))):
        protocol.apply_lora_to_layers(model, 2 + number, patterns[number], alpha=4, adapter_name=key, **settings)
        values[key] = {one: value * (number + 1) for one, value in filled(model).items()}
        protocol.merge_lora_params(model, values[key], key)
        config = copy.deepcopy(model.peft_config[key])
        theirs = peft.PeftModel(plain, config, key) if theirs is None else theirs
        if key not in theirs.peft_config:
            theirs.add_adapter(key, config)
        own = dict(theirs.named_parameters())
        for one, value in values[key].items():
            stem, part = next((one.split(f".{part}")[0], part) for part in SOME_PARTS if f".{part}" in one)
            own[f"base_model.model.{stem}.{part}.{key}.weight"].data.copy_(value)

    def compare(chosen):
        outputs = [one(input_ids=IDS, labels=IDS) for one in (model, theirs)]
        torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=0, atol=1e-6)
        for one, output in zip((model, theirs), outputs, strict=True):
            one.zero_grad()
            output.loss.backward()
        own = {one: parameter for one, parameter in theirs.named_parameters() if parameter.grad is not None}
        found = {one: parameter.grad for one, parameter in model.named_parameters() if parameter.grad is not None}
        assert found.keys() == {one.removeprefix("base_model.model.") for one in own}
        assert {key for key in "abc" if any(f".{key}." in one for one in found)} == set(chosen)
        for one, parameter in own.items():
            torch.testing.assert_close(
                found[one.removeprefix("base_model.model.")], parameter.grad, rtol=1e-5, atol=1e-6
            )
        return outputs[0].logits.detach()

    seen = {}
    for key in "bacab":
        model.set_adapter(key)
        theirs.set_adapter(key)
        logits = compare(key)
        assert torch.equal(seen.setdefault(key, logits), logits)
        assert protocol.split_lora_params(model).keys() == values[key].keys()
    assert not any(torch.equal(seen[one], seen[other]) for one, other in ("ab", "bc", "ac"))
    model.set_adapter(["a", "b"])
    theirs.base_model.set_adapter(["a", "b"])
    compare("ab")
    model.disable_adapters()
    with theirs.disable_adapter(), torch.no_grad():
        assert torch.equal(model(input_ids=IDS, labels=IDS).logits, theirs(input_ids=IDS, labels=IDS).logits)


def test_seeds():
    models = [easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)) for _ in range(3)]
    state = torch.get_rng_state()
    for model, rngs in zip(models, (7, 7, torch.Generator().manual_seed(3)), strict=True):
        model.apply_lora_to_layers(2, rngs=rngs)
    assert torch.equal(torch.get_rng_state(), state), "the process's own numbers are not drawn"
    one, two, three = (model.split_lora_params() for model in models)
    assert all(torch.equal(one[name], two[name]) for name in one) and len(one) == 2 * 2 * 7
    assert not all(torch.equal(one[name], three[name]) for name in one)


WRONG = {
    "rank": ({"lora_rank": 0}, "must be an int of at least 1"),
    "float rank": ({"lora_rank": 2.0}, "must be an int of at least 1"),
    "large rank": ({"lora_rank": 33}, r"above the smaller side of model.layers.0.self_attn.q_proj, \(32, 32\)"),
    "pattern": ({"lora_pattern": "q_porj"}, "no linear layer of LlamaForCausalLM has 'q_porj' in its name; they are"),
    "expression": ({"lora_pattern": "("}, "is no regular expression"),
    "dropout": ({"dropout": 1.0}, "at least 0 and below 1"),
    "init": ({"init": "gausian"}, "gausian"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("second", [False, True])
def test_what_does_not_fit_leaves_the_model_as_it_was(wrong, second):
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    if second:
        model.apply_lora_to_layers(2, "k_proj", adapter_name="first")
    before = {name: (one.requires_grad, one.clone()) for name, one in model.named_parameters()}
    given, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        model.apply_lora_to_layers(**{"lora_rank": 2, "lora_pattern": "q_proj"} | given)
    after = dict(model.named_parameters())
    assert [name.replace("base_layer.", "") for name in after] == [name.replace("base_layer.", "") for name in before]
    assert [one.requires_grad for one in after.values()] == [flag for flag, _ in before.values()]
    with torch.no_grad():
        model(IDS)
    if second:
        assert model.active_adapters() == ["first"]
        with pytest.raises(ValueError, match="there is an adapter 'first' already"):
            model.apply_lora_to_layers(2, adapter_name="first")


def test_values_that_do_not_fit():
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    for function in (model.split_lora_params, lambda: model.merge_lora_params({})):
        with pytest.raises(ValueError, match="has no adapter"):
            function()
    model.apply_lora_to_layers(2, "q_proj")
    values = filled(model)
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    before = {key: one.clone() for key, one in model.split_lora_params().items()}
    wrong = {
        "is not given": {key: one for key, one in values.items() if key != name},
        "nearest known name": {**values, name.replace("lora_A", "lora_C"): torch.ones(1)},
        "has the shape": {**values, name: torch.ones(3, 32)},
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            model.merge_lora_params(given)
    with pytest.raises(TypeError, match="is int and must be"):
        model.merge_lora_params({**values, name: 1})
    with pytest.raises(ValueError, match="there is no adapter 'other'"):
        model.split_lora_params("other")
    assert all(torch.equal(one, before[key]) for key, one in model.split_lora_params().items())
    model.merge_lora_params({**values, name: torch.full((2, 32), torch.inf)})
    weights = model.model.layers[0].self_attn.q_proj.base_layer.weight.clone()
    with pytest.raises(ValueError, match=r"(?i)nan"):
        model.unwrap_lora_to_layers()
    assert torch.equal(model.model.layers[0].self_attn.q_proj.base_layer.weight, weights)
    assert len(model.split_lora_params()) == len(values)


@pytest.mark.parametrize("dora", [False, True])
def test_a_refused_merge_leaves_the_very_numbers(dora):
    """Of the layers before the broken one too, which in bfloat16 an adapter added and subtracted would round."""
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).to_dtype("bfloat16")
    model.apply_lora_to_layers(4, "q_proj", rngs=0, dora=dora)
    broken = "model.layers.1.self_attn.q_proj.lora_B.weight"
    model.merge_lora_params({**filled(model), broken: torch.full((32, 4), torch.inf)})
    before = {name: (one.data_ptr(), one.clone()) for name, one in model.named_parameters()}
    with pytest.raises(ValueError, match=r"(?i)nan"):
        model.unwrap_lora_to_layers()
    after = dict(model.named_parameters())
    assert all(
        after[name].data_ptr() == there and torch.equal(after[name], one) for name, (there, one) in before.items()
    )
    model.merge_lora_params({**filled(model), broken: torch.zeros(32, 4)})
    expected = model(IDS).logits
    torch.testing.assert_close(model.unwrap_lora_to_layers()(IDS).logits, expected, rtol=0, atol=0.05)


def test_a_model_of_transformers():
    model = transformers.T5ForConditionalGeneration(copy.deepcopy(T5))
    protocol.apply_lora_to_layers(model, 2)
    assert "lm_head.lora_A.weight" not in protocol.split_lora_params(model)
    assert len(protocol.split_lora_params(model)) == 2 * (2 * 6 + 2 * 10)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_dropped_adapter_leaves_the_weights_that_were_there(case, init, tmp_path):
    model, pattern = case
    before = {name: one.clone() for name, one in model.state_dict().items()}
    if init == "olora" and model.config.model_type == "gpt2":
        with pytest.raises(ValueError, match="is a Conv1D"):
            model.apply_lora_to_layers(4, pattern, init=init)
    else:
        model.apply_lora_to_layers(4, pattern, init=init, rngs=0)
        model.save_pretrained(tmp_path / "adapter")
        model.apply_lora_to_layers(2, pattern, adapter_name="second", rngs=0)
        model.unwrap_lora_to_layers(merge=False)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], one) for name, one in before.items())
    if (tmp_path / "adapter").exists():
        model.load_adapter(tmp_path / "adapter")
        with pytest.raises(ValueError, match="cannot be dropped"):
            model.unwrap_lora_to_layers(merge=False)


def test_an_adapter_that_fails_halfway_leaves_the_weights(monkeypatch):
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    layer = peft.tuners.lora.layer.LoraLayer
    theirs, calls = layer.pissa_init, []

    def fails(self, *args):
        calls.append(1)
        if len(calls) > 2:
            raise ValueError("no more")
        theirs(self, *args)

    monkeypatch.setattr(layer, "pissa_init", fails)
    with pytest.raises(ValueError, match="no more"):
        model.apply_lora_to_layers(2, init="pissa")
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], one) for name, one in before.items())


TIED = {
    "llama": ("AutoModelForCausalLM", LlamaConfig(**SIZES, tie_word_embeddings=True), "lm_head"),
    "bert": ("AutoModelForMaskedLM", BertConfig(**SIZES), "decoder"),
    "gpt2": ("AutoModelForCausalLM", MODELS["gpt2"][1], "lm_head"),
    "t5": ("AutoModelForSeq2SeqLM", T5, "lm_head"),
}


@pytest.mark.parametrize("name", TIED)
def test_a_tied_head_is_not_merged_into(name):
    auto, config, head = TIED[name]
    model = getattr(easytorch, auto).from_config(copy.deepcopy(config)).eval()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    model.apply_lora_to_layers(2, head, rngs=0)
    model.merge_lora_params(filled(model))
    with pytest.raises(ValueError, match="which merging would change or untie"):
        model.unwrap_lora_to_layers()
    model.unwrap_lora_to_layers(merge=False)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], one) for name, one in before.items())


FILES = {
    "modules_to_save": {"modules_to_save": ["lm_head", "norm"]},
    "tokens": {"trainable_token_indices": [5, 9]},
    "ranks": {"rank_pattern": {"layers.0.self_attn.q_proj": 4}, "alpha_pattern": {"layers.1.self_attn.q_proj": 3}},
    "parameters": {"target_parameters": ["model.layers.0.self_attn.o_proj.weight"]},
    "bias": {"lora_bias": True},
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("merge", [True, False])
def test_all_that_pefts_files_hold_is_taken_out(kind, merge, tmp_path):
    torch.manual_seed(0)
    base = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **FILES[kind])
    theirs = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    model = copy.deepcopy(base)
    model.load_adapter(tmp_path)
    with torch.no_grad():
        changed = theirs.eval()(input_ids=IDS).logits
        torch.testing.assert_close(model(IDS).logits, changed, rtol=1e-5, atol=1e-5)
        if kind == "bias" and merge:  # the layers have none that it could be added to
            with pytest.raises(ValueError, match="has none to merge it into"):
                model.unwrap_lora_to_layers()
            torch.testing.assert_close(model(IDS).logits, changed, rtol=1e-5, atol=1e-5)
            return
        model.unwrap_lora_to_layers(merge=merge)
        right = changed if merge else base(IDS).logits
        torch.testing.assert_close(model(IDS).logits, right, rtol=1e-5, atol=1e-5)
    assert model.state_dict().keys() == base.state_dict().keys()


def test_settings_of_other_types():
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    for given, error in (
        ({"lora_pattern": ["q_proj"]}, TypeError),
        ({"alpha": "16"}, TypeError),
        ({"alpha": 0}, ValueError),
        ({"alpha": float("nan")}, ValueError),
        ({"dropout": "no"}, TypeError),
        ({"rngs": 1.5}, TypeError),
        ({"adapter_name": ""}, ValueError),
        ({"adapter_name": "a.b"}, ValueError),
    ):
        with pytest.raises(error, match=next(iter(given))):
            model.apply_lora_to_layers(2, **given)
    assert not getattr(model, "_hf_peft_config_loaded", False)


def test_without_a_pattern_in_a_new_process(monkeypatch):
    """PEFT imports its tables of experts at its first use."""
    monkeypatch.delattr(peft.utils, "transformers_weight_conversion", raising=False)
    monkeypatch.delitem(sys.modules, "peft.utils.transformers_weight_conversion", raising=False)
    model = easytorch.AutoModelForCausalLM.from_config(copy.deepcopy(MODELS["llama"][1])).apply_lora_to_layers(2)
    assert len(model.split_lora_params()) == 2 * 7 * 2  # A and B of seven layers in each of two blocks


TASKS = {
    "AutoModelForSequenceClassification": [
        BertConfig(**SIZES), LlamaConfig(**SIZES, pad_token_id=0), transformers.RobertaConfig(**SIZES), T5,
    ],
    "AutoModelForQuestionAnswering": [BertConfig(**SIZES), T5],
    "AutoModelForTokenClassification": [BertConfig(**SIZES)],
    "AutoModelForImageClassification": [
        transformers.ViTConfig(image_size=8, patch_size=4, num_hidden_layers=1, hidden_size=32, intermediate_size=48,
                               num_attention_heads=4, num_labels=3),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("auto", "config"), [(auto, one) for auto, all_ in TASKS.items() for one in all_])
def test_heads_of_tasks_are_left_out_without_a_pattern(auto, config):
    """They have as many rows as there are labels."""
    model = getattr(easytorch, auto).from_config(copy.deepcopy(config))
    names = set(model.apply_lora_to_layers(4).split_lora_params())
    assert names and not any(re.search(r"score|classifier|classification_head|qa_outputs", name) for name in names)


@pytest.mark.parametrize("source", [easytorch, transformers])
def test_a_model_is_the_same_after_its_adapter(source):
    model = source.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    kept, hooks = set(vars(model)), len(model._forward_pre_hooks)
    protocol.apply_lora_to_layers(model, 2, "q_proj")
    protocol.unwrap_lora_to_layers(model, merge=False)
    assert set(vars(model)) == kept and len(model._forward_pre_hooks) == hooks


def test_mamba_without_a_pattern():
    sizes = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2}
    config = transformers.Mamba2Config(vocab_size=97, num_hidden_layers=2, **sizes)
    model = easytorch.AutoModelForCausalLM.from_config(config)
    assert all("in_proj" in name for name in model.apply_lora_to_layers(2).split_lora_params())


def test_gates_of_one_number_are_left_out_without_a_pattern():
    """A shared expert's gate has a row of its own, which no rank above 1 fits."""
    sizes = {**SIZES, "num_key_value_heads": 4, "num_experts": 4, "moe_intermediate_size": 16}
    model = easytorch.AutoModelForCausalLM.from_config(
        transformers.Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=16)
    )
    names = list(model.apply_lora_to_layers(4).split_lora_params())
    assert any(".shared_expert." in name for name in names)
    assert not any("shared_expert_gate" in name for name in names)
    with pytest.raises(ValueError, match=r"smaller side of .*shared_expert_gate"):
        model.apply_lora_to_layers(4, "shared_expert_gate", adapter_name="second")


def test_the_largest_rank_and_dropout():
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model.apply_lora_to_layers(32, "q_proj", dropout=0.25)
    layer = model.model.layers[1].self_attn.q_proj
    assert layer.lora_A["default"].weight.shape == layer.lora_B["default"].weight.shape == (32, 32)
    assert layer.lora_dropout["default"].p == 0.25


def test_what_an_adapter_adds_is_scaled():
    """alpha / rank times, the rank by default; rslora: alpha / sqrt(rank)."""
    for settings, scale in (
        ({}, 1.0),
        ({"alpha": 8}, 2.0),
        ({"alpha": 8, "rslora": True}, 4.0),
        ({"rslora": True}, 2.0),
    ):
        model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
        model.apply_lora_to_layers(4, "q_proj", **settings)
        assert model.model.layers[0].self_attn.q_proj.scaling["default"] == scale, settings


@pytest.mark.parametrize("other", [{"hidden_size": 48}, {"num_hidden_layers": 3}])
@pytest.mark.parametrize("second", [False, True, "frozen"])
def test_an_adapter_of_another_model_is_refused_whole(other, second, tmp_path):
    """Of other shapes, and of layers that the model lacks, which transformers would leave out with a warning."""
    theirs = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | other))
    theirs.apply_lora_to_layers(2, "q_proj").save_pretrained(tmp_path)
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    if second:
        model.apply_lora_to_layers(2, "q_proj", adapter_name="first", rngs=0).requires_grad_(second is True)
    before = {name: (one.requires_grad, one.clone()) for name, one in model.named_parameters()}
    with pytest.raises(ValueError, match="is of another model than LlamaForCausalLM"):
        model.load_adapter(tmp_path, "new")
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(
        one.requires_grad == before[name][0] and torch.equal(one, before[name][1]) for name, one in after.items()
    )
    assert not second or model.active_adapters() == ["first"]


def test_an_adapter_may_have_the_name_of_a_layer(tmp_path):
    """Its own tensors are found by their places, not by the name; the one that means no adapter is refused."""
    models = [easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)) for _ in range(2)]
    models[0].apply_lora_to_layers(2, "q_proj", rngs=0).save_pretrained(tmp_path / "whole")
    models[1].load_adapter(tmp_path / "whole", "q_proj")
    one, two = models[0].split_lora_params(), models[1].split_lora_params("q_proj")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    file = tmp_path / "whole" / "adapter_model.safetensors"
    save_file(dict(list(load_file(file).items())[1:]), file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lora_A\.up_proj\.weight' is not in it"):
        models[1].load_adapter(tmp_path / "whole", "up_proj")
    for add in (
        lambda: models[1].load_adapter(file.parent, "__base__"),
        lambda: models[1].apply_lora_to_layers(2, adapter_name="__base__"),
    ):
        with pytest.raises(ValueError, match="adapter_name='__base__' stands for no adapter"):
            add()
    assert list(models[1].peft_config) == ["q_proj"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_dora_of_a_file_is_read_whole(name, tmp_path):
    """transformers' own `load_adapter` leaves the magnitudes out."""
    auto, config, pattern = MODELS[name]
    torch.manual_seed(0)
    model = getattr(easytorch, auto).from_config(copy.deepcopy(config)).eval()
    read = copy.deepcopy(model)
    model.apply_lora_to_layers(4, pattern, rngs=0, dora=True, rslora=True)
    model.merge_lora_params(filled(model))
    model.save_pretrained(tmp_path / "one")
    read.load_adapter(tmp_path / "one", adapter_name="a+b")
    read.save_pretrained(tmp_path / "two")
    with torch.no_grad():
        assert torch.equal(read(IDS).logits, model(IDS).logits)
    one, two = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
