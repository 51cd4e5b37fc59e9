"""What encoder-decoder families share: caches, generate, files, Flax, precision, masks, and what is refused."""

from __future__ import annotations

import copy
import importlib
import inspect

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import easytorch
from easytorch.bridge.errors import CheckpointError
from easytorch.protocol.conversion import to_flax
from tests.models.families import FAMILIES, HEADS, LANGUAGE, SEQ2SEQ

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 90, 17], [4, 4, 90, 12, 60, 7, 31, 6, 88, 23]])
MASK = torch.tensor([[0] * 3 + [1] * 7, [1] * 8 + [0] * 2])
SAID = torch.tensor([[7, 41, 9, 22, 63, 80, 15], [50, 3, 77, 14, 29, 61, 8]])
SAID_MASK = torch.tensor([[0] * 2 + [1] * 5, [1] * 7])


@pytest.fixture(params=SEQ2SEQ)
def family(request):
    return request.param


def models(make_pair, family, head=None, **changes):
    row = FAMILIES[family]
    return make_pair(head or LANGUAGE[family], row.config(**changes), row.reference)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_steps_through_a_cache_equal_one_pass(kind, family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    config = ours.config
    caches = [DynamicCache(config=config) for _ in range(2)]
    if kind == "static":
        caches = [StaticCache(config=config, max_cache_len=length) for length in (12, IDS.shape[1])]
    held = EncoderDecoderCache(*caches)
    with torch.no_grad():
        expected = theirs(IDS, attention_mask=MASK, decoder_input_ids=SAID).logits
        encoded = ours.get_encoder()(IDS, attention_mask=MASK)
        given = {"encoder_outputs": encoded, "attention_mask": MASK, "past_key_values": held, "use_cache": True}
        parts = (SAID[:, :3], SAID[:, 3:5], *SAID[:, 5:].split(1, 1))
        steps = [ours(decoder_input_ids=part, **given).logits for part in parts]
    torch.testing.assert_close(torch.cat(steps, 1), expected, **TOLERANCE)


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_a_decoder_of_fewer_layers_than_the_encoder_generates(family, settings, make_pair) -> None:
    """transformers makes the cache by the encoder's number of layers."""
    ours, theirs = make_pair(LANGUAGE[family], FAMILIES[family].config(num_decoder_layers=1))
    settings = settings | {"max_new_tokens": 5, "do_sample": False}
    tokens = [model.generate(IDS, attention_mask=MASK, **settings) for model in (ours, theirs)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("settings", [
    {"do_sample": False},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": True, "top_k": 20},
    {"do_sample": False, "cache_implementation": "static"},
    {"do_sample": False, "use_cache": False},
], ids=str)  # fmt: skip
def test_generate_gives_transformers_tokens(settings, family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    tokens = []
    for model in (ours, theirs):
        torch.manual_seed(7)
        tokens.append(model.generate(IDS, attention_mask=MASK, max_new_tokens=12, min_new_tokens=12, **settings))
    assert torch.equal(*tokens) and tokens[0].shape == (2, 13)


def test_masks_of_both_halves(family, make_pair) -> None:
    """(B, T) of each dtype and side, a row that sees nothing, and (B, 1, T, S) of any pattern."""
    ours, theirs = models(make_pair, family)
    nothing = MASK * torch.tensor([[0], [1]])
    pattern = torch.rand(2, 1, 10, 10, generator=torch.Generator().manual_seed(0)) > 0.4
    for mask, said in ((MASK, SAID_MASK), (MASK.bool(), None), (MASK.float(), SAID_MASK.bool()), (nothing, SAID_MASK)):
        given = {"attention_mask": mask, "decoder_attention_mask": said, "decoder_input_ids": SAID}
        with torch.no_grad():
            torch.testing.assert_close(ours(IDS, **given).logits, theirs(IDS, **given).logits, **TOLERANCE)
    encoders = [model.get_encoder() for model in (ours, theirs)]
    added = torch.zeros(pattern.shape).masked_fill(~pattern, torch.finfo(torch.float32).min)
    for mask in (pattern | torch.eye(10, dtype=torch.bool), added):
        with torch.no_grad():
            given, expected = (one(IDS, attention_mask=mask).last_hidden_state for one in encoders)
        torch.testing.assert_close(given, expected, **TOLERANCE)


def test_new_embeddings_reach_both_halves(family, make_pair) -> None:
    ours, theirs = models(make_pair, family, FAMILIES[family].heads[0])
    with torch.no_grad():
        before = ours(IDS, decoder_input_ids=SAID)
        for model in (ours, theirs):
            new = copy.deepcopy(model.get_input_embeddings())
            new.weight.mul_(-0.5)
            model.set_input_embeddings(new)
            assert all(half.embed_tokens is new for half in (model.get_encoder(), model.get_decoder()))
        found, expected = (model(IDS, decoder_input_ids=SAID) for model in (ours, theirs))
    for name in ("encoder_last_hidden_state", "last_hidden_state"):
        torch.testing.assert_close(found[name], expected[name], **TOLERANCE)
        assert not torch.allclose(found[name], before[name])


def test_embeddings_and_encoder_outputs_that_are_given(family, make_pair) -> None:
    ours, theirs = models(make_pair, family, FAMILIES[family].heads[0])
    embeds = {"inputs_embeds": theirs.get_input_embeddings()(IDS).detach()}
    embeds["decoder_inputs_embeds"] = theirs.get_input_embeddings()(SAID).detach()
    with torch.no_grad():
        torch.testing.assert_close(ours(**embeds)[0], theirs(**embeds)[0], **TOLERANCE)
        expected = theirs(IDS, decoder_input_ids=SAID)
        first = ours(IDS, decoder_input_ids=SAID)
        encoded = first.encoder_last_hidden_state
        for outputs in ((encoded,), transformers.modeling_outputs.BaseModelOutput(last_hidden_state=encoded)):
            again = ours(encoder_outputs=outputs, decoder_input_ids=SAID)
            torch.testing.assert_close(again[0], expected[0], **TOLERANCE)
        assert isinstance(ours(IDS, decoder_input_ids=SAID, return_dict=False), tuple)
    for wrong in ({}, {"input_ids": IDS, "inputs_embeds": embeds["inputs_embeds"]}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            ours(**wrong, decoder_input_ids=SAID)


def test_files_go_both_ways(family, make_pair, tmp_path) -> None:
    ours, theirs = models(make_pair, family)
    for saved, library in ((ours, transformers), (theirs, easytorch)):
        saved.save_pretrained(tmp_path / library.__name__)
        loaded = library.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / library.__name__)
        weights = loaded.state_dict()
        assert weights.keys() == saved.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in saved.state_dict().items())
    assert type(loaded) is type(ours)
    with torch.no_grad():  # what is in no file is made anew on the meta device
        assert torch.equal(loaded(IDS, labels=SAID).logits, ours(IDS, labels=SAID).logits)


def test_a_language_model_loads_under_every_head(family, make_pair, tmp_path) -> None:
    _, theirs = models(make_pair, family)
    theirs.save_pretrained(tmp_path)
    module, expected = importlib.import_module(f"easytorch.models.{family}"), theirs.base_model.state_dict()
    for head in FAMILIES[family].heads:
        weights = getattr(module, head).from_pretrained(tmp_path).base_model.state_dict()
        shared = weights.keys() & expected.keys()
        assert any("encoder" in name or "decoder" in name for name in shared), head
        assert all(torch.equal(weights[name], expected[name]) for name in shared), head


def test_a_weight_that_is_missing_or_left_over_is_an_error(family, make_pair, tmp_path) -> None:
    ours, _ = models(make_pair, family)
    weights = ours.state_dict()
    name = next(name for name in weights if "decoder" in name and "0" in name)
    kept = {other: tensor for other, tensor in weights.items() if other != name}
    for state, words in ((kept, "is missing"), (weights | {f"{name}2": weights[name]}, "has no place for it")):
        with pytest.raises(CheckpointError, match=words):
            type(ours).from_pretrained(None, config=ours.config, state_dict=state)


def test_initial_weights_are_those_of_transformers(family) -> None:
    """Every head: the same names in the same order, which optimizer states follow, and the same distributions."""
    module = importlib.import_module(f"easytorch.models.{family}")
    for head in FAMILIES[family].heads:
        made = []
        for source in (transformers, module):
            torch.manual_seed(3)
            model = getattr(source, head)(FAMILIES[family].config())
            made.append(dict(model.named_parameters()))
        assert list(made[0]) == list(made[1]), head
        for name in made[0]:
            expected, given = (one[name].std(correction=0).item() for one in made)
            assert (given == 0) == (expected == 0), name
            assert given == pytest.approx(expected, rel=0.4, abs=0.01), name


def test_flax_and_back(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    tree = ours.to_flax()
    back = type(ours).from_flax(ours.config, tree).state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.state_dict().items())
    assert _paths(tree) == _paths(to_flax(theirs))


def _paths(tree, prefix=()) -> set[tuple[object, ...]]:
    found: set[tuple[object, ...]] = set()
    for name, value in tree.items():
        found |= _paths(value, (*prefix, name)) if hasattr(value, "items") else {(*prefix, name, value.shape)}
    return found


def test_bfloat16_is_as_exact_as_transformers(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    said = {"decoder_input_ids": SAID}
    with torch.no_grad():
        exact = theirs.double()(IDS, **said).logits
        errors = [(model.bfloat16()(IDS, **said).logits - exact).square().mean().sqrt() for model in (ours, theirs)]
    assert errors[0] <= 1.3 * errors[1]


def test_the_loss_without_logits(family, make_pair, monkeypatch) -> None:
    """In training: the loss and every gradient of transformers' class, and logits that are formed when read."""
    monkeypatch.setattr("easytorch.layers.deferred_logits.SMALLEST", 0)
    quiet = dict.fromkeys(FAMILIES[family].dropouts, 0.0)
    ours, theirs = models(make_pair, family, **quiet)
    labels = SAID.masked_fill(SAID_MASK == 0, -100)
    outputs = [model.train()(IDS, attention_mask=MASK, labels=labels) for model in (ours, theirs)]
    assert isinstance(outputs[0].__dict__["logits"], easytorch.layers.deferred_logits.DeferredLogits)
    for name in ("loss", "logits"):
        torch.testing.assert_close(outputs[0][name], outputs[1][name], **TOLERANCE)
    for output in outputs:
        output.loss.backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def test_what_a_decoder_reads_of_labels(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    labels = SAID.masked_fill(SAID_MASK.flip(0) == 0, -100).masked_fill(SAID == 8, -100)
    assert torch.equal(*(model.prepare_decoder_input_ids_from_labels(labels) for model in (ours, theirs)))


@pytest.mark.parametrize("family, head", [(family, head) for family, head in HEADS if family in SEQ2SEQ])
def test_arguments_stand_in_the_order_of_transformers(family, head) -> None:
    ours = getattr(importlib.import_module(f"easytorch.models.{family}"), head)
    switches = {"kwargs", "output_attentions", "output_hidden_states", "return_dict"}
    given, expected = (
        [name for name in inspect.signature(one.forward).parameters if name not in switches]
        for one in (ours, getattr(transformers, head))
    )
    assert given == expected


@pytest.mark.parametrize("problem, labels", [
    ("regression", torch.tensor([0.3, -1.0])),
    ("multi_label_classification", torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])),
    ("single_label_classification", torch.tensor([2, 0])),
])  # fmt: skip
def test_every_problem_type(problem, labels, family, make_pair) -> None:
    head = next(head for head in FAMILIES[family].heads if "SequenceClassification" in head)
    count = 1 if problem == "regression" else 3
    for named in (None, problem):
        ours, theirs = models(make_pair, family, head, num_labels=count, problem_type=named)
        ids = torch.cat([IDS, torch.full((2, 1), ours.config.eos_token_id)], 1)
        output, expected = ours(ids, labels=labels), theirs(ids, labels=labels)
        torch.testing.assert_close(output.loss, expected.loss, **TOLERANCE)
        assert ours.config.problem_type == theirs.config.problem_type
    for wrong, words in ((IDS, "at least one <eos>"), (torch.cat([ids[:1], ids[1:].flip(1) * 0 + 7]), "same number")):
        with pytest.raises(ValueError, match=words):
            ours(wrong)
    with pytest.raises(ValueError, match="both must read as many"):
        ours(ids, decoder_input_ids=SAID)
    with pytest.raises(NotImplementedError, match="takes no inputs_embeds"):
        ours(inputs_embeds=torch.zeros(1, 2, 32))


def test_every_head_that_transformers_has_is_native(family) -> None:
    row = FAMILIES[family]
    module = importlib.import_module(getattr(transformers, row.heads[0]).__module__)
    theirs = {
        name
        for name, one in vars(module).items()
        if isinstance(one, type)
        and issubclass(one, transformers.PreTrainedModel)
        and one.config_class is row.config_class
        and one.forward is not transformers.PreTrainedModel.forward
        and hasattr(transformers, name)
    }
    assert theirs == set(row.heads)


def test_plans_are_transformers(family) -> None:
    module = importlib.import_module(f"easytorch.models.{family}")
    for head in FAMILIES[family].heads:
        with torch.device("meta"):
            made = [getattr(source, head)(FAMILIES[family].config()) for source in (module, transformers)]
        for plan in ("_tp_plan", "_pp_plan", "_no_split_modules", "all_tied_weights_keys", "base_model_prefix"):
            assert getattr(made[0], plan) == getattr(made[1], plan), (head, plan)
        assert made[0].config_class is made[1].config_class is FAMILIES[family].config_class
        assert getattr(made[0], "_keep_in_fp32_modules", None) == getattr(made[1], "_keep_in_fp32_modules", None)


@pytest.mark.parametrize(
    "family, rate", [(family, rate) for family in SEQ2SEQ for rate in FAMILIES[family].dropouts], ids=str
)
def test_each_dropout_acts_and_only_in_training(family, rate, make_pair) -> None:
    quiet = dict.fromkeys(FAMILIES[family].dropouts, 0.0)
    for changes, random in ((quiet, False), (quiet | {rate: 0.5}, True)):
        model, _ = models(make_pair, family, **changes)
        with torch.no_grad():
            assert torch.equal(model(IDS, labels=SAID).logits, model(IDS, labels=SAID).logits)
            model.train()
            assert torch.equal(model(IDS, labels=SAID).logits, model(IDS, labels=SAID).logits) != random


def test_under_autocast(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    with torch.no_grad():
        exact = copy.deepcopy(theirs).double()(IDS, labels=SAID).logits
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [model(IDS, attention_mask=torch.ones_like(IDS), labels=SAID).logits for model in (ours, theirs)]
    errors = [(output - exact).square().mean().sqrt() for output in outputs]
    assert outputs[0].dtype == outputs[1].dtype and errors[0] <= 1.3 * errors[1]


def test_an_activation_that_does_not_exist_is_refused_by_name(family) -> None:
    config = FAMILIES[family].config()
    for name in ("dense_act_fn", "activation_function"):
        if name in vars(config):
            setattr(config, name, "nosuch")
    with pytest.raises(ValueError, match=r"no activation is called 'nosuch'; known: .*gelu"):
        easytorch.AutoModelForSeq2SeqLM.from_config(config)


@pytest.mark.parametrize("family, changes, words", [
    ("t5", {"relative_attention_num_buckets": 3}, "t5: config.relative_attention_num_buckets=3 must be 4 or more"),
    ("mt5", {"relative_attention_max_distance": 4}, "mt5: config.relative_attention_max_distance=4 must exceed half"),
    ("t5", {"d_kv": 0}, "t5: config.head_dim=0 must be an integer of 1 or more"),
    ("bart", {"decoder_attention_heads": 5}, r"hidden size \(32\) is not a multiple of the number of .*heads \(5\)"),
    ("mbart", {"encoder_ffn_dim": 0}, "mbart: config.encoder_ffn_dim=0 must be an integer of 1 or more"),
    ("bart", {"pad_token_id": 97}, "bart: config.pad_token_id=97 is not among the config.vocab_size=97 tokens"),
    ("t5", {"d_ff": 0}, "t5: config.d_ff=0 must be an integer of 1 or more"),
    ("t5", {"num_decoder_layers": -1}, "t5: config.num_decoder_layers=-1 must be an integer of 0 or more"),
])  # fmt: skip
def test_what_a_family_does_not_carry(family, changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        easytorch.AutoModelForSeq2SeqLM.from_config(FAMILIES[family].config(**changes))


def test_a_head_that_is_not_the_embedding_stays_its_own(make_pair, tmp_path) -> None:
    """T5 1.1's checkpoints have a head of their own beside a config that calls it tied."""
    ours, theirs = models(make_pair, "t5", tie_word_embeddings=False)
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn(97, 32, generator=torch.Generator().manual_seed(4)))
    theirs.save_pretrained(tmp_path)
    loaded = type(ours).from_pretrained(tmp_path)
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, theirs.lm_head.weight)
    assert torch.equal(again.lm_head.weight, theirs.lm_head.weight) and not torch.equal(
        *(getattr(loaded, name).weight for name in ("lm_head", "shared"))
    )
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS, labels=SAID).logits, again(IDS, labels=SAID).logits, **TOLERANCE)


def test_half_precision_with_a_wide_output_projection(make_pair, tmp_path) -> None:
    """transformers keeps T5's `wo` in float32 where the model is float16."""
    ours, _ = models(make_pair, "t5")
    ours.save_pretrained(tmp_path)
    loaded = [
        library.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
        for library in (importlib.import_module("easytorch.models.t5"), transformers)
    ]
    names = [{name: weight.dtype for name, weight in one.named_parameters()} for one in loaded]
    assert names[0] == names[1] and torch.float32 in names[0].values()
    with torch.no_grad():
        given, expected = (one(IDS, labels=SAID).logits for one in loaded)
    assert given.dtype == expected.dtype
    torch.testing.assert_close(given, expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("part", [0, 1])
def test_sums_beyond_float16_are_cut(part, make_pair) -> None:
    """T5's residuals overflow float16 after attention or the feed-forward network: finite, as in transformers."""
    encoders = [model.encoder.half() for model in models(make_pair, "t5")]
    for encoder in encoders:
        last = encoder.block[-1].layer[part]
        weight = last.SelfAttention.o.weight if part == 0 else last.DenseReluDense.wo.weight
        with torch.no_grad():
            weight.copy_(torch.where(weight > 0, 3e4, -3e4))
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2)).half()
    with torch.no_grad():
        blocks = [encoder.block[-1](states) for encoder in encoders]
    found, expected = (one[0] if isinstance(one, tuple) else one for one in blocks)
    assert found.isfinite().all() and expected.isfinite().all()
    assert float(found.abs().max()) > 6e4
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=40.0)
