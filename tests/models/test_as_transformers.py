"""What code written for transformers' own Llama and BERT finds on the native ones: plans, buffers, hooks, arguments."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator

import pytest
import torch
import transformers

import easytorch
from easytorch.bridge.errors import CheckpointError
from easytorch.cache_names import CACHE
from easytorch.kernels.rotary.frequencies import inverse_frequencies
from easytorch.layers.attention import SAID_TO_BATCHING
from easytorch.models._bert_encoder import BertEmbeddings
from easytorch.protocol.batching import generate_batch
from tests.models.families import FAMILIES, LANGUAGE
from tests.models.image_text_families import image_text_inputs

IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60]])
# Left to itself, continuous batching takes most of the machine's memory for its cache, and the time to clear it.
SMALL_CACHE = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"])
def test_plans_of_parallelism_are_transformers(make_pair, llama_config, name, tied) -> None:
    ours, theirs = make_pair(name, llama_config(tie_word_embeddings=tied))
    for plan in ("_tp_plan", "_pp_plan", "_fsdp_plan"):
        assert getattr(ours, plan) == getattr(theirs, plan)
    if name == "LlamaForCausalLM":
        assert ours._tp_plan["lm_head"] == "colwise_gather_output" and ours._fsdp_plan["lm_head"] == "keep_full_weight"


@pytest.mark.parametrize("kind", ["yarn", "llama3", "longrope"])
def test_rope_without_the_trained_length_takes_that_of_the_config(kind) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    given = inverse_frequencies(rope, head_dim=8, max_position_embeddings=64)
    named = rope | {"original_max_position_embeddings": 64}
    expected = inverse_frequencies(named, head_dim=8, max_position_embeddings=64)
    assert torch.equal(given.inverse, expected.inverse) and given.attention_factor == expected.attention_factor
    other = inverse_frequencies(rope | {"original_max_position_embeddings": 16}, head_dim=8, max_position_embeddings=64)
    assert kind == "longrope" or not torch.equal(given.inverse, other.inverse)


def test_yarn_set_after_the_config_was_made(make_pair, llama_config) -> None:
    config = llama_config()
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    ours, theirs = make_pair("LlamaForCausalLM", config)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("asked", [{"": "eager"}, {"": "vanilla"}, "flex_attention"])
def test_attention_by_dict_and_flex(make_pair, llama_config, asked) -> None:
    ours, theirs = make_pair("LlamaForCausalLM", llama_config())
    model = easytorch.AutoModelForCausalLM.from_config(llama_config(), attn_implementation=asked).eval()
    model.load_state_dict(theirs.state_dict())
    assert model.config._attn_implementation == (asked[""] if isinstance(asked, dict) else asked)
    if isinstance(asked, dict):
        with torch.no_grad():
            torch.testing.assert_close(model(IDS).logits, theirs(IDS).logits, rtol=1e-5, atol=1e-5)
    ours.set_attn_implementation(asked)
    assert ours.config._attn_implementation == model.config._attn_implementation


def test_generate_batch(make_pair, llama_config) -> None:
    ours, theirs = make_pair("LlamaForCausalLM", llama_config(), attn_implementation="easytorch")
    settings = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [[5, 9, 33], [4, 4, 90, 12, 60], [7]]
    results = [
        {tuple(one.prompt_ids): one.generated_tokens for one in found.values()}
        for found in (
            model.generate_batch(prompts, generation_config=settings, continuous_batching_config=SMALL_CACHE)
            for model in (ours, theirs)
        )
    ]
    assert results[0] == results[1] and len(results[0]) == 3
    assert ours.config._attn_implementation == "easytorch"
    ours.set_attn_implementation("vanilla")
    with pytest.raises(ValueError, match=r"generate_batch runs with .*'vanilla'"):
        ours.generate_batch(prompts, generation_config=settings, continuous_batching_config=SMALL_CACHE)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_generate_batch_with_softcap_and_sinks(family, make_pair) -> None:
    """Which PyTorch's own attention has not, and the automatic choice has: by name it is refused."""
    row = FAMILIES[family]
    ours, theirs = make_pair(LANGUAGE[family], row.config(), row.reference, attn_implementation="easytorch")
    settings = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts, batched = [[5, 9, 33], [4, 4, 90, 12, 60]], {"continuous_batching_config": SMALL_CACHE}
    results = [
        {tuple(one.prompt_ids): one.generated_tokens for one in found.values()}
        for found in (model.generate_batch(prompts, generation_config=settings, **batched) for model in (ours, theirs))
    ]
    assert results[0] == results[1] and len(results[0]) == 2
    assert not SAID_TO_BATCHING
    ours.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="finished 0 of 2 requests"):
        ours.generate_batch(prompts, generation_config=settings, **batched)


def test_generate_batch_raises_what_went_wrong(make_pair, llama_config) -> None:
    ours, _ = make_pair("LlamaForCausalLM", llama_config())

    def broken(module, args):
        raise FloatingPointError("the fourth layer")

    ours.lm_head.register_forward_pre_hook(broken)
    settings = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with pytest.raises(RuntimeError, match="generate_batch finished 0 of 2 requests"):
        ours.generate_batch([[5, 9], [4]], generation_config=settings, continuous_batching_config=SMALL_CACHE)


def test_generate_batch_notices_results_that_are_missing(make_pair, llama_config) -> None:
    """transformers returns fewer than it was asked for where its thread ended, and no error with them."""
    ours, _ = make_pair("LlamaForCausalLM", llama_config())
    with pytest.raises(RuntimeError, match=r"finished 0 of 2 requests of LlamaForCausalLM .*: see the log"):
        generate_batch(ours, lambda inputs: {}, [[5, 9], [4]])


def test_a_shape_that_differs_is_a_runtime_error_too(llama_config, tmp_path) -> None:
    easytorch.AutoModelForCausalLM.from_config(llama_config()).save_pretrained(tmp_path)
    for kind in (RuntimeError, CheckpointError, ValueError):
        with pytest.raises(kind, match="ignore_mismatched_sizes=True"):
            easytorch.AutoModelForCausalLM.from_pretrained(tmp_path, config=llama_config(vocab_size=50))


def test_buffers_of_bert(make_pair, bert_config, tmp_path) -> None:
    ours, theirs = make_pair("BertModel", bert_config())
    ours.save_pretrained(tmp_path)
    for model in (ours, easytorch.AutoModel.from_pretrained(tmp_path)):
        given, expected = dict(model.named_buffers()), dict(theirs.named_buffers())
        assert set(given) == set(expected)
        assert all(torch.equal(given[name], expected[name]) for name in expected)
    alone = BertEmbeddings(bert_config())  # outside a model nothing sets them later
    assert torch.equal(alone.position_ids, theirs.embeddings.position_ids)


@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel", "BertForNextSentencePrediction"]
)
def test_hooks_see_what_they_see_in_transformers(make_pair, bert_config, name) -> None:
    config = bert_config(is_decoder=name == "BertLMHeadModel")
    seen: list[dict] = []
    for model in make_pair(name, config):
        calls: dict = {}

        def note(module, args, kwargs, output, calls=calls, model=model):
            where = next(name for name, one in model.named_modules() if one is module)
            calls[where] = (sorted(kwargs.keys() & {"hidden_states", "attention_mask"}), type(output).__name__)

        for path in ("cls", "bert.encoder.layer.0.attention"):
            model.get_submodule(path).register_forward_hook(note, with_kwargs=True)
        model(IDS)
        seen.append(calls)
    assert seen[0] == seen[1] and set(seen[0]) == {"cls", "bert.encoder.layer.0.attention"}


def test_llama_attention_is_called_by_keyword(make_pair, llama_config) -> None:
    for model in make_pair("LlamaForCausalLM", llama_config()):
        calls = []
        layer = model.model.layers[0].self_attn

        def note(module, args, kwargs, calls=calls):
            calls.append((args, set(kwargs)))

        layer.register_forward_pre_hook(note, with_kwargs=True)
        model(IDS)
        args, names = calls[0]
        assert args == () and {"hidden_states", "attention_mask", "position_embeddings", CACHE} <= names


def test_native_classes_stand_beside_transformers(make_pair, llama_config) -> None:
    """docs/architecture.md: `isinstance` names transformers.PreTrainedModel, or the native class."""
    ours, theirs = make_pair("LlamaForCausalLM", llama_config())
    assert isinstance(ours, transformers.PreTrainedModel) and not isinstance(ours, transformers.LlamaForCausalLM)
    assert isinstance(ours.to_torch(), transformers.LlamaForCausalLM) and type(ours).__name__ == type(theirs).__name__


def test_eps_of_every_norm_is_that_of_the_config(make_pair, llama_config, bert_config) -> None:
    """Small activations, where eps is what counts."""
    for name, config in (
        ("LlamaModel", llama_config(rms_norm_eps=0.3)),
        ("BertModel", bert_config(layer_norm_eps=0.3)),
    ):
        ours, theirs = make_pair(name, config)
        with torch.no_grad():
            torch.testing.assert_close(ours(IDS)[0], theirs(IDS)[0], rtol=1e-5, atol=1e-5)
        plain = type(ours)(type(config)(**{**config.to_dict(), "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-12})).eval()
        plain.load_state_dict(ours.state_dict())
        with torch.no_grad():
            assert (plain(IDS)[0] - ours(IDS)[0]).abs().max() > 1e-2


def _set_eps(config: transformers.PreTrainedConfig, values: Iterator[float]) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            _set_eps(value, values)
        elif "eps" in name and isinstance(value, float):
            setattr(config, name, next(values))


def _eps_of(model: torch.nn.Module) -> dict[str, float]:
    found = {name: getattr(one, "eps", getattr(one, "variance_epsilon", None)) for name, one in model.named_modules()}
    return {name: eps for name, eps in found.items() if isinstance(eps, float)}


def test_eps_of_every_norm_of_every_family_is_that_of_transformers() -> None:
    compared = 0
    for family, row in FAMILIES.items():
        made = []
        for source in (importlib.import_module(f"easytorch.models.{family}"), transformers):
            config = row.config()
            _set_eps(config, itertools.count(0.25, 0.125))
            with torch.device("meta"):
                made.append(_eps_of(getattr(source, row.heads[0])(config)))
        ours, theirs = made
        same = ours.keys() & theirs.keys()
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}, family
        compared += len(same)
    assert compared > 300


def test_the_dropout_of_llama_acts_and_only_in_training(make_pair, llama_config) -> None:
    for model in make_pair("LlamaForCausalLM", llama_config(attention_dropout=0.5)):
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, model(IDS).logits)
            model.train()
            assert not torch.allclose(model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", ["LlamaModel", "BertModel"])
def test_attention_for_parts_that_are_not_there(make_pair, llama_config, bert_config, name) -> None:
    config = llama_config() if name == "LlamaModel" else bert_config()
    ours, _ = make_pair(name, config)
    with pytest.raises(ValueError, match=r"names \['vision_config'\]; \w+Config has the parts \[''\]"):
        ours.set_attn_implementation({"vision_config": "eager"})
    with pytest.raises(ValueError, match=r"names \['nosuch'\]"):
        easytorch.AutoModel.from_config(config, attn_implementation={"nosuch": "eager"})


def test_each_dropout_of_bert_acts_and_only_in_training(make_pair, bert_config) -> None:
    """Each rate alone makes training random: attention, the three kinds of hidden dropout, the classifier's."""
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    for name, rate in quiet.items():
        assert rate == 0.0
        ours, theirs = make_pair("BertForSequenceClassification", bert_config(**quiet | {name: 0.5}))
        for model in (ours, theirs):
            with torch.no_grad():
                torch.testing.assert_close(model(IDS).logits, model(IDS).logits)
                model.train()
                assert not torch.allclose(model(IDS).logits, model(IDS).logits), name
    ours, _ = make_pair("BertModel", bert_config(**dict.fromkeys(quiet, 0.0) | {"hidden_dropout_prob": 0.5}))
    layer = ours.encoder.layer[0].train()
    states = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    for module, inputs in (
        (layer.attention.output, (states, states)),
        (layer.output, (torch.randn(1, 3, 37, generator=torch.Generator().manual_seed(1)), states)),
        (ours.embeddings.train(), (IDS, None, None, None, 0)),
    ):
        assert not torch.allclose(module(*inputs), module(*inputs))
    ours, _ = make_pair("BertModel", bert_config(**quiet | {"attention_probs_dropout_prob": 0.5}))
    attention = ours.encoder.layer[0].attention.train()
    assert not torch.allclose(attention(states)[0], attention(states)[0])
    assert torch.equal(attention.eval()(states)[0], attention(states)[0])


@pytest.mark.parametrize(
    "family", ["llama4_text", "phi", "starcoder2", "gpt_neox", "clip", "siglip", "vit", "dinov2", "qwen2_vl", "bert"]
)
def test_activations_have_transformers_names(family) -> None:
    """So that hooks and replacements by name find them."""
    row, made = FAMILIES[family], []
    for source in (importlib.import_module(f"easytorch.models.{family}"), transformers):
        with torch.device("meta"):
            made.append(dict(getattr(source, row.heads[0])(row.config()).named_modules()))
    ends = ("act", "act_fn", "activation", "activation_fn")
    ours, theirs = ({name for name in one if name.split(".")[-1] in ends} for one in made)
    assert ours == theirs and ours


# Attributes of transformers' modules that ours have otherwise, on purpose.
OTHERWISE = {
    ("Exaone4Attention", "sliding_window"),  # None in the layers without a window, as everywhere else
    ("HunYuanDenseV1MLP", "layer_idx"),  # always None
    ("MBartAttention", "layer_idx"), ("WhisperAttention", "layer_idx"),  # None in the encoder: ours have a number
    ("Gemma4VisionAttention", "layer_type"), ("Qwen3VLTextAttention", "layer_type"),  # the same
    ("Qwen3VLMoeTextAttention", "layer_type"),
    ("Conv2d", "padding"), ("Unfold", "stride"),  # the same numbers, written otherwise
}  # fmt: skip


def _plain(module: torch.nn.Module) -> dict[str, object]:
    """The numbers, strings and configs that a module of transformers holds."""
    found = {}
    for name, value in vars(module).items():
        plain = isinstance(value, int | float | str | transformers.PreTrainedConfig | None)
        if isinstance(value, list | tuple):
            plain = all(isinstance(one, int | float | str) for one in value)
        if plain and not name.startswith("_") and name != "training":
            found[name] = type(value) if isinstance(value, transformers.PreTrainedConfig) else value
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_attributes_have_transformers_names_and_values(family) -> None:
    """What other libraries read: sizes, rates, scales, and the config, of every module of the first and last class."""
    row, differing, compared = FAMILIES[family], {}, 0
    for head in {row.heads[0], row.heads[-1]}:
        with torch.device("meta"):
            ours = getattr(importlib.import_module(f"easytorch.models.{family}"), head)(row.config())
            theirs = getattr(transformers, head)(row.config())
        native = dict(ours.named_modules())
        for path, module in theirs.named_modules():
            if path not in native:  # activations and dropout that ours call as functions
                continue
            for name, value in _plain(module).items():
                given = getattr(native[path], name, AttributeError)
                given = type(given) if isinstance(given, transformers.PreTrainedConfig) else given
                close = isinstance(value, float) and given == pytest.approx(value, rel=1e-12)
                compared += 1
                if not close and given != value and (type(module).__name__, name) not in OTHERWISE:
                    differing[f"{head} {path}.{name}"] = given, value
    assert not differing and compared > 20


def test_names_of_transformers_are_the_attributes_themselves() -> None:
    """What is set by one name is read by the other, and used; a size that nothing reads is only kept."""
    config = FAMILIES["qwen3_moe"].config()
    model = importlib.import_module("easytorch.models.qwen3_moe").Qwen3MoeForCausalLM(config).eval()
    router = model.model.layers[1].mlp.gate
    before = model(IDS).logits
    router.norm_topk_prob = not router.norm_topk_prob
    assert router.normalized is router.norm_topk_prob and not torch.equal(model(IDS).logits, before)
    attention = model.model.layers[0].self_attn
    attention.hidden_size = 7
    assert attention.hidden_size == 7 and model.config.hidden_size != 7
    assert model.model.layers[1].self_attn.hidden_size == model.config.hidden_size
    bound = importlib.import_module("easytorch.models.gemma2").Gemma2ForCausalLM(FAMILIES["gemma2"].config()).eval()
    before = bound(IDS).logits
    for layer in bound.model.layers:
        layer.self_attn.attn_logit_softcapping = 1e-3
    assert not torch.allclose(bound(IDS).logits, before)


@pytest.mark.parametrize(
    ("family", "head", "name"),
    [("granite", "GraniteForCausalLM", "model.embedding_multiplier"), ("cohere", "CohereForCausalLM", "logit_scale"),
     ("falcon_h1", "FalconH1ForCausalLM", "model.lm_head_multiplier"),
     ("falcon_h1", "FalconH1ForCausalLM", "model.layers.0.attention_in_multiplier"),
     ("falcon_h1", "FalconH1ForCausalLM", "model.layers.1.attn_out_multiplier"),
     ("falcon_h1", "FalconH1ForCausalLM", "model.layers.0.ssm_out_multiplier"),
     ("falcon_h1", "FalconH1ForCausalLM", "model.layers.0.self_attn.key_multiplier"),
     ("opt", "OPTForCausalLM", "model.decoder.layers.0.self_attn.scaling"),
     ("gemma4_text", "Gemma4ForCausalLM", "model.per_layer_input_scale"),
     ("gemma4_text", "Gemma4ForCausalLM", "model.per_layer_model_projection_scale"),
     ("qwen3_next", "Qwen3NextForCausalLM", "model.layers.1.mlp.gate.norm_topk_prob"),
     ("cohere", "CohereForCausalLM", "model.layers.0.input_layernorm.variance_epsilon")],
)  # fmt: skip
def test_a_multiplier_that_is_set_is_used(make_pair, family, head, name) -> None:
    given, results = torch.arange(3, 9)[None], []
    owner, _, attribute = name.rpartition(".")
    for model in make_pair(head, FAMILIES[family].config()):
        setattr(model.get_submodule(owner), attribute, 0.25)
        with torch.no_grad():
            results.append(model(given).logits)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_a_folder_that_is_not_there_is_an_os_error(llama_config, tmp_path) -> None:
    kind = importlib.import_module("easytorch.models.llama").LlamaForCausalLM
    kind(llama_config()).save_pretrained(tmp_path)
    for folder, where in ((tmp_path / "no" / "folder", {}), (tmp_path, {"subfolder": "none"})):
        for one in (kind, transformers.LlamaForCausalLM):
            with pytest.raises(OSError):
                one.from_pretrained(folder, **where)


@pytest.mark.parametrize("name", ["Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"])
def test_a_hook_of_the_merger_s_layers_is_called(make_pair, name) -> None:
    family = "qwen2_vl" if name.startswith("Qwen2VL") else "qwen2_5_vl"
    given, results = image_text_inputs(name), []
    for model in make_pair(name, FAMILIES[family].config()):
        model.get_submodule("model.visual.merger.mlp").register_forward_hook(lambda module, args, output: 2 * output)
        with torch.no_grad():
            results.append(model(**given).logits)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["CLIPModel", "Gemma4Model", "Llama4ForConditionalGeneration", "Qwen3VLMoeModel"])
def test_weights_drawn_anew_by_apply(name) -> None:
    """Each part by the rules of its own class, as transformers'."""
    family = next(family for family, row in FAMILIES.items() if name in row.heads)
    spread = []
    for source in (importlib.import_module(f"easytorch.models.{family}"), transformers):
        model = getattr(source, name)(FAMILIES[family].config())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        model.apply(model._init_weights)
        spread.append({path: (one.std(correction=0), one.mean()) for path, one in model.named_parameters()})
    assert spread[0].keys() == spread[1].keys()
    for path, (std, mean) in spread[1].items():
        found, middle = spread[0][path]
        drawn = std > 1e-5
        assert (0.5 * std < found < 2 * std) if drawn else (found < 1e-5 and abs(middle - mean) < 1e-5), path


def test_a_hook_of_deberta_s_first_layer_sees_what_is_before_the_convolution(make_pair) -> None:
    config = FAMILIES["deberta_v2"].config(conv_kernel_size=3)
    seen, states = [], []
    for model in make_pair("DebertaV2Model", config, "eager"):
        for index in (0, 1):
            model.encoder.layer[index].register_forward_hook(
                lambda module, args, output: seen.append(output[0] if isinstance(output, tuple) else output)
            )
        with torch.no_grad():
            states.append(model(IDS, output_hidden_states=True).hidden_states)
    torch.testing.assert_close(seen[:2], seen[2:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(list(states[0]), list(states[1]), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(seen[0], states[0][1], atol=1e-3)
