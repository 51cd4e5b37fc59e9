"""A class is tried before its attention becomes ours, and only the loaded instance changes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import transformers as t
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import easytorch
from easytorch.auto import trial
from easytorch.auto.comparison import difference, in_float64, is_rounding
from easytorch.auto.tiny import configs_in, shrunken
from easytorch.auto.trial import try_attention

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
GQA = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
IDS = torch.tensor([[5, 9, 33, 71, 8, 20, 21], [4, 4, 90, 12, 60, 3, 3]])
MASK = torch.tensor([[1] * 7, [0] * 2 + [1] * 5])


def mistral(**changes) -> t.MistralConfig:
    return t.MistralConfig(**GQA | changes)


class ForgetsPadding(t.MistralForCausalLM):
    """Puts padding into the mask for transformers' eager and sdpa only."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        if self.config._attn_implementation not in ("eager", "sdpa"):
            attention_mask = None
        return super().forward(input_ids, attention_mask=attention_mask, **kwargs)


class ForgetsGradients(t.MistralForCausalLM):
    """The same numbers, and other gradients."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        if self.config._attn_implementation != "sdpa":
            output.logits = output.logits + output.logits.detach() - output.logits
            output.logits.requires_grad_(torch.is_grad_enabled())
        return output


class ForgetsTheCache(t.MistralForCausalLM):
    """Wrong where one token follows a cache."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        if self.config._attn_implementation != "sdpa" and input_ids.shape[1] == 1:
            output.logits = output.logits * 1.01
        return output


@pytest.mark.parametrize("model_class, case", [
    (ForgetsPadding, "padding"), (ForgetsGradients, "gradients"), (ForgetsTheCache, "decoding"),
])  # fmt: skip
def test_a_class_that_gives_other_numbers_keeps_transformers_attention(model_class, case, caplog) -> None:
    class Config(t.MistralConfig):
        model_type = f"mistral-{case}"

    model_class.config_class = Config
    easytorch.AutoModelForCausalLM.register(Config, model_class, exist_ok=True)
    model = easytorch.AutoModelForCausalLM.from_config(Config(**GQA)).eval()
    report = model.easytorch_report
    assert case in report.reason and "gives other numbers" in report.reason and case in caplog.text
    assert model.config._attn_implementation == "sdpa" and model(IDS).logits.shape == (2, 7, 97)
    assert report.called == () and len(report.not_replaced) == 2
    for name in ("easytorch", "vanilla", "flash"):
        with pytest.raises(ValueError, match=rf"'{name}' cannot be obeyed: .*{case}"):
            easytorch.AutoModelForCausalLM.from_config(Config(**GQA), attn_implementation=name)


def test_a_class_that_cannot_be_tried_keeps_transformers_attention() -> None:
    class Demanding(t.MistralForCausalLM):
        def forward(self, input_ids, something_else, **kwargs):
            raise NotImplementedError

    found = try_attention(Demanding, mistral())  # although the model inside it could be run
    assert not found.plugged and "Demanding could not be run" in found.reason
    found = try_attention(t.AutoformerModel, t.AutoformerConfig())
    assert not found.plugged and "could not be tried" in found.reason


def test_one_trial_serves_configs_that_differ_in_sizes(monkeypatch) -> None:
    tried = []
    monkeypatch.setattr(trial, "_TRIALS", {})
    monkeypatch.setattr(trial, "_try", lambda model_class, config: tried.append(model_class) or trial.Trial())
    large = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    for layers in (2, 30):  # both shrink to the same
        try_attention(t.MistralForCausalLM, t.MistralConfig(**large, num_hidden_layers=layers))
    assert len(tried) == 1
    try_attention(t.MistralModel, t.MistralConfig(**large))
    try_attention(t.MistralForCausalLM, t.MistralConfig(**large, sliding_window=None))
    assert len(tried) == 3


def test_a_trial_leaves_no_trace() -> None:
    torch.manual_seed(3)
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            found = trial._TRIALS.pop((t.MistralModel, ""), None) or try_attention(
                t.MistralModel, mistral(vocab_size=61)
            )
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(dtype)
    assert found.plugged == {""} and torch.equal(torch.get_rng_state(), state)
    assert not t.MistralModel.__dict__.get("easytorch_report")


@pytest.mark.usefixtures("without_native_families")
def test_loading_changes_the_instance_and_not_its_class() -> None:
    classes = [t.GPT2LMHeadModel, t.GPT2Model, t.GPT2PreTrainedModel, t.PreTrainedModel]
    config = t.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    first = t.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    first.set_attn_implementation("eager")  # transformers itself then keeps on the class what it found
    before = [set(vars(one)) for one in classes]
    model = easytorch.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    assert [set(vars(one)) for one in classes] == before
    assert type(model) is t.GPT2LMHeadModel and model.config._attn_implementation == "easytorch"
    assert config._attn_implementation in (None, "sdpa")
    other = t.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    assert other.config._attn_implementation == "sdpa" and not hasattr(other, "to_flax")
    # the config of a plugged model builds transformers' own model again, and one of ours
    assert easytorch.AutoModelForCausalLM.from_config(model.config).config._attn_implementation == "easytorch"


@pytest.mark.parametrize("native", [False, True])
def test_a_config_shared_with_other_models_keeps_their_attention(native, request) -> None:
    if not native:
        request.getfixturevalue("without_native_families")
    config = mistral()
    theirs = t.AutoModelForCausalLM.from_config(config)
    ours = easytorch.AutoModelForCausalLM.from_config(config)
    assert ours.config._attn_implementation == "easytorch"
    assert config._attn_implementation == theirs.config._attn_implementation == "sdpa"
    assert t.AutoModelForCausalLM.from_config(config).config._attn_implementation == "sdpa"


def test_the_bridge_of_an_instance_is_copied_pickled_and_let_go() -> None:
    model = easytorch.AutoModel.from_config(mistral()).eval()
    names = set(model.transform_fn(model.state_dict()))
    again = pickle.loads(pickle.dumps(model))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for one in (again, twin):
            one.embed_tokens.weight.zero_()
            tree = one.to_flax()
            assert not tree["embed_tokens"]["embedding"].any() and set(tree) == names
    assert model.to_flax()["embed_tokens"]["embedding"].any()
    loaded = model.from_flax(model.config, model.to_flax())
    torch.testing.assert_close(loaded(IDS)[0], model(IDS)[0])
    model(IDS)
    transform, ghost, state = model.pure_transform_fn, weakref.ref(model), dict(model.state_dict())
    gc.collect()
    gc.disable()
    try:
        del model, loaded
        assert ghost() is None, "a cycle keeps the weights of a deleted model"
    finally:
        gc.enable()
    assert set(transform(state)) == names


@pytest.mark.usefixtures("without_native_families")
def test_a_dict_of_attentions_names_the_parts() -> None:
    vision = t.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
    )
    config = t.LlavaConfig(text_config=t.LlamaConfig(**GQA), vision_config=vision, image_token_index=96)
    load = easytorch.AutoModel.from_config
    model = load(copy.deepcopy(config), attn_implementation={"text_config": "vanilla", "vision_config": "eager"})
    assert model.config.text_config._attn_implementation == "vanilla"
    assert model.config.vision_config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=r"names \['audio_config'\]; LlavaConfig has the parts .*'vision_config'"):
        load(copy.deepcopy(config), attn_implementation={"audio_config": "vanilla"})
    model = load(copy.deepcopy(config), attn_implementation={"": "eager"})
    assert model.config._attn_implementation == "eager" and "asked for" in model.easytorch_report.reason
    model = load(copy.deepcopy(config), attn_implementation="flash")
    assert model.config.text_config._attn_implementation == "easytorch_tiled"


def test_a_class_of_eager_attention_gets_its_mask() -> None:
    """Its mask is added, always there, and all there is: `is_causal` and booleans mean nothing to it."""
    config = shrunken(t.PegasusXConfig())
    ours = easytorch.AutoModel.from_config(copy.deepcopy(config)).eval()
    assert ours.config._attn_implementation == "easytorch_eager_mask"
    theirs = t.AutoModel.from_config(copy.deepcopy(config)).eval()
    theirs.load_state_dict(ours.state_dict())
    ids = torch.arange(20, 38).view(2, 9)
    with torch.no_grad():
        for inputs in ({}, {"attention_mask": torch.tensor([[1] * 9, [0] * 4 + [1] * 5])}):
            given, expected = (one(ids, decoder_input_ids=ids, **inputs)[0] for one in (ours, theirs))
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
    assert len(ours.easytorch_report.called) >= 2
    assert ours.to_torch().config._attn_implementation == "eager"


class Mixer(torch.nn.Module):
    """Attention whose class does not say so, with a bias that is added to eager's mask."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config, self.is_causal = config, True
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, hidden, mask):
        query, key, value = self.qkv(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, softmax_attention)
        distance = torch.arange(hidden.shape[1]) - torch.arange(hidden.shape[1])[:, None]
        return self.out(attend(self, query, key, value, mask + 0.1 * distance, scaling=0.5)[0].flatten(2))


def softmax_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    scores = query @ key.transpose(-1, -2) * scaling + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), scores


class MixerLM(t.PreTrainedModel):
    """A user's own: it builds its mask itself, and knows eager attention alone."""

    config_class = t.MistralConfig
    _supports_attention_backend = True

    def __init__(self, config) -> None:
        super().__init__(config)
        self.embed, self.mixer = torch.nn.Embedding(config.vocab_size, 32), Mixer(config)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        hidden, length = self.embed(input_ids), input_ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None].bool()
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(hidden.dtype).min)
        return BaseModelOutput(last_hidden_state=self.mixer(hidden, mask))


def test_a_class_of_ones_own_is_known_by_what_it_calls() -> None:
    """Its attention has another name; a row of padding that sees nothing is the mean of all, as eager has it."""
    from easytorch.auto.recognition import is_attention

    torch.manual_seed(0)
    ours, theirs = (MixerLM._from_config(mistral(), attn_implementation="eager").eval() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    derived = type("Routed", (t.models.mistral.modeling_mistral.MistralAttention,), {})
    assert is_attention(ours.mixer) and not is_attention(ours.embed) and is_attention(derived(ours.config, 0))
    found = try_attention(MixerLM, ours.config)
    assert found.plugged == {""} and found.reason is None
    ours.config._attn_implementation_internal = "easytorch_eager_mask"
    for mask in (None, MASK):
        given, expected = (one(IDS, attention_mask=mask)[0] for one in (ours, theirs))
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


def test_difference() -> None:
    one = torch.ones(4)
    assert difference([one], [one]) is None
    assert "off by" in difference([one * 1.001], [one])
    assert "shapes" in difference([one], [one, one]) and "shapes" in difference([one[:2]], [one])
    bad = torch.tensor([1.0, 1.0, 1.0, float("nan")])
    assert "not finite" in difference([bad], [one]) and difference([one], [bad]) is None


def test_rounding_is_told_from_other_numbers() -> None:
    exact = torch.full((64,), 1.0, dtype=torch.float64)
    theirs, ours = (exact + 1e-3 * torch.randn(64)).float(), exact.float()
    assert difference([ours], [theirs]) is not None and is_rounding([ours], [theirs], [exact], [exact])
    assert not is_rounding([ours], [theirs], [exact * 1.01], [exact])  # it stays in float64
    assert not is_rounding([ours * 1.1], [theirs], [exact], [exact])  # float32 alone, and more than theirs
    assert not is_rounding([ours[:2]], [ours], [exact[:2]], [exact])
    assert is_rounding([ours * 100], [-theirs], [exact], [exact])  # no digit of theirs is right: float64 decides
    assert not is_rounding([ours * 100], [-theirs], [exact * 1.01], [exact])


def test_a_model_is_in_float64_for_a_while() -> None:
    model = t.MistralModel(mistral()).eval()
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    with torch.no_grad(), in_float64(model, {"inputs_embeds": torch.randn(1, 3, 32), "attention_mask": MASK}) as inputs:
        assert {value.dtype for value in inputs.values()} == {torch.float64, torch.int64}
        assert model(inputs_embeds=inputs["inputs_embeds"])[0].dtype == torch.float64
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])


def test_rounding_takes_no_attention_away() -> None:
    """Gradients of CLAP's audio tower are off by 1e-4 in transformers' own float32; VideoPrism's keys have biases."""
    assert "text_model" in try_attention(t.ClapModel, t.ClapConfig()).plugged
    assert try_attention(t.VideoPrismVisionModel, t.VideoPrismVisionConfig()).plugged == {""}


def test_small_configs_keep_what_makes_an_architecture() -> None:
    config = shrunken(t.Gemma2Config())
    assert config.hidden_size <= 300 and config.num_attention_heads * config.head_dim <= 256
    assert {"sliding_attention", "full_attention"} <= set(config.layer_types) and config.sliding_window == 4
    assert (
        config.num_hidden_layers == len(config.layer_types) and config.num_key_value_heads < config.num_attention_heads
    )
    config = shrunken(t.LlavaConfig())
    vision, text = config.vision_config, config.text_config
    assert config.image_token_index < text.vocab_size <= 320
    assert vision.image_size % vision.patch_size == 0 and len(list(configs_in(config))) == 3
    assert t.LlavaConfig().text_config.hidden_size == 4096  # the defaults are left alone
    config = shrunken(t.GPTNeoXConfig())  # a quarter of 12 numbers would turn
    assert config.hidden_size // config.num_attention_heads * config.rope_parameters["partial_rotary_factor"] // 1 == 4


@pytest.mark.usefixtures("without_native_families")
def test_attention_is_switched_by_every_name_or_refused() -> None:
    model = easytorch.AutoModelForCausalLM.from_config(mistral()).eval()
    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK).logits
        for name, kept in {
            "flash": "easytorch_tiled", "vanilla": "vanilla", "sdpa": "sdpa", "eager": "eager", "easytorch": "easytorch"
        }.items():  # fmt: skip
            for asked in (name, {"": name}):
                model.set_attn_implementation(asked)
                assert model.config._attn_implementation == kept == model.easytorch_report.attention
                torch.testing.assert_close(model(IDS, attention_mask=MASK).logits[MASK == 1], expected[MASK == 1])
                assert len(model.easytorch_report.called) == (0 if name in ("sdpa", "eager") else 2)
    for unknown in ("nosuch", {"": "nosuch"}, {"vision_config": "eager"}, {"": "vanilla", "nosuch": "vanilla"}):
        words = r"unknown; EasyTorch has 'easytorch', 'vanilla' and 'flash', transformers .*'sdpa'|has the parts \[''\]"
        with pytest.raises(ValueError, match=words):
            model.set_attn_implementation(unknown)
        with pytest.raises(ValueError, match=words):
            easytorch.AutoModelForCausalLM.from_config(mistral(), attn_implementation=unknown)
        assert model.config._attn_implementation == "easytorch"
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.set_attn_implementation("vanilla")
        assert (twin.config._attn_implementation, model.config._attn_implementation) == ("vanilla", "easytorch")


def test_attention_that_was_not_tried_is_not_switched_on() -> None:
    ours = easytorch.AutoModel.from_config(shrunken(t.PegasusXConfig()))
    ours.set_attn_implementation("eager")
    ours.set_attn_implementation("easytorch")
    assert ours.config._attn_implementation == "easytorch_eager_mask"  # and not the one with boolean masks
    falcon = easytorch.AutoModelForCausalLM.from_config(shrunken(t.FalconConfig()))
    with pytest.raises(ValueError, match="'flash' cannot be obeyed: FalconForCausalLM computes attention by itself"):
        falcon.set_attn_implementation("flash")
    assert falcon.config._attn_implementation == "sdpa"


def test_a_small_config_is_not_made_smaller_than_attention_can_be() -> None:
    """Heads of one number have no half to turn: a small model of a user was refused our attention for that."""
    for config in (t.Qwen2VLConfig(), t.MistralConfig()):
        twice = shrunken(shrunken(config))
        for part in configs_in(twice):
            heads = getattr(part, "num_heads", None) or getattr(part, "num_attention_heads", None)
            if heads is not None:
                assert (getattr(part, "embed_dim", None) or part.hidden_size) // heads >= 4, part


def test_the_text_of_a_config_with_images_is_tried() -> None:
    config = t.Emu3Config(text_config=shrunken(t.Emu3TextConfig()).to_dict())
    model = easytorch.AutoModelForCausalLM.from_config(config).eval()
    model(IDS)
    assert type(model) is t.Emu3ForCausalLM and model.easytorch_report.reason is None
    assert model.easytorch_report.called == model.easytorch_report.layers


def test_weights_of_no_numbers_do_not_stop_a_trial() -> None:
    """DINOv3 without register tokens has a weight (1, 0, width)."""
    assert try_attention(t.DINOv3ViTModel, t.DINOv3ViTConfig(num_register_tokens=0)).plugged == {""}
