"""What encoder families share: files, Flax, precision, masks, arguments by position, and what is refused."""

from __future__ import annotations

import copy
import importlib
import inspect

import pytest
import torch
import transformers

import easytorch
from easytorch.protocol.conversion import to_flax
from tests.models.families import CAUSAL_ENCODERS, ENCODERS, FAMILIES, HEADS, LANGUAGE

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 90, 17], [4, 4, 90, 12, 60, 7, 31, 6, 88, 23]])


@pytest.fixture(params=ENCODERS)
def family(request):
    return request.param


def models(make_pair, family, head=None, **changes):
    row = FAMILIES[family]
    return make_pair(head or LANGUAGE[family], row.config(**changes), row.reference)


def test_files_go_both_ways(family, make_pair, tmp_path) -> None:
    ours, theirs = models(make_pair, family)
    for saved, library in ((ours, transformers), (theirs, easytorch)):
        saved.save_pretrained(tmp_path / library.__name__)
        loaded = library.AutoModelForMaskedLM.from_pretrained(tmp_path / library.__name__)
        weights = loaded.state_dict()
        assert weights.keys() == saved.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in saved.state_dict().items())
    assert type(loaded) is type(ours)
    with torch.no_grad():  # what is in no file is made anew on the meta device
        assert torch.equal(loaded(IDS).logits, ours(IDS).logits)


def test_a_language_model_loads_under_every_head(family, make_pair, tmp_path) -> None:
    _, theirs = models(make_pair, family)
    theirs.save_pretrained(tmp_path)
    module, expected = importlib.import_module(f"easytorch.models.{family}"), theirs.base_model.state_dict()
    for head in FAMILIES[family].heads:
        weights = getattr(module, head).from_pretrained(tmp_path).base_model.state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items()), head


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


def _paths(tree, prefix=()) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for name, value in tree.items():
        found |= _paths(value, (*prefix, name)) if hasattr(value, "items") else {(*prefix, name, value.shape)}
    return found


def test_bfloat16_is_as_exact_as_transformers(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    with torch.no_grad():
        exact = theirs.double()(IDS).logits
        errors = [(model.bfloat16()(IDS).logits - exact).square().mean().sqrt() for model in (ours, theirs)]
    assert errors[0] <= 1.3 * errors[1]


def test_masks_of_every_kind(family, make_pair) -> None:
    """(B, T) of each dtype and side, and (B, 1, T, T) of any pattern, boolean or added to the scores."""
    ours, theirs = models(make_pair, family, FAMILIES[family].heads[0])
    sides = torch.ones_like(IDS)
    sides[0, :3], sides[1, 8:] = 0, 0
    pattern = torch.rand(2, 1, 10, 10, generator=torch.Generator().manual_seed(0)) > 0.4
    pattern |= torch.eye(10, dtype=torch.bool)
    added = torch.zeros(pattern.shape).masked_fill(~pattern, torch.finfo(torch.float32).min)
    with torch.no_grad():
        for mask in (sides, sides.bool(), sides.float()):
            expected = theirs(IDS, attention_mask=sides)[0]
            torch.testing.assert_close(ours(IDS, attention_mask=mask)[0], expected, **TOLERANCE)
        if family == "deberta_v2":  # whose mask is one of tokens, in transformers too
            given = ours(IDS, attention_mask=sides[:, None, None])[0]
            torch.testing.assert_close(given, theirs(IDS, attention_mask=sides)[0], **TOLERANCE)
            with pytest.raises(ValueError, match=r"\(2, 1, 10, 10\) must be \(batch, tokens\), \(2, 10\) here"):
                ours(IDS, attention_mask=pattern)
            return
        expected = theirs(IDS, attention_mask=added)[0]
        for mask in (pattern, added):
            torch.testing.assert_close(ours(IDS, attention_mask=mask)[0], expected, **TOLERANCE)


def test_embeddings_and_positions_that_are_given(family, make_pair) -> None:
    ours, theirs = models(make_pair, family, FAMILIES[family].heads[0])
    embeds = theirs.get_input_embeddings()(IDS)
    positions = torch.arange(20, 10, -1)[None]
    inputs = [{"inputs_embeds": embeds}, {"input_ids": IDS, "position_ids": positions}]
    if "token_type_ids" in inspect.signature(theirs.forward).parameters:
        inputs.append({"input_ids": IDS, "token_type_ids": (IDS > 20).long(), "position_ids": positions.repeat(2, 1)})
    with torch.no_grad():
        for given in inputs:
            torch.testing.assert_close(ours(**given)[0], theirs(**given)[0], **TOLERANCE)
    for wrong in ({}, {"input_ids": IDS, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            ours(**wrong)


@pytest.mark.parametrize("family, head", [(family, head) for family, head in HEADS if family in ENCODERS])
def test_arguments_stand_in_the_order_of_transformers(family, head) -> None:
    ours = getattr(importlib.import_module(f"easytorch.models.{family}"), head)
    switches = {"kwargs", "output_attentions", "output_hidden_states", "return_dict"}
    given, expected = (
        [name for name in inspect.signature(one.forward).parameters if name not in switches]
        for one in (ours, getattr(transformers, head))
    )
    assert given == expected


def test_too_many_arguments_by_position() -> None:
    model = easytorch.AutoModelForMaskedLM.from_config(FAMILIES["distilbert"].config())
    assert model(IDS, torch.ones_like(IDS), None, IDS).loss > 0
    with pytest.raises(TypeError, match=r"takes at most 5 arguments by position \(input_ids, .*\), 6 were given"):
        model(IDS, None, None, None, None, IDS)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'attention_mask'"):
        model(IDS, None, attention_mask=IDS)


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
        output, expected = ours(IDS, labels=labels), theirs(IDS, labels=labels)
        torch.testing.assert_close(output.loss, expected.loss, **TOLERANCE)
        torch.testing.assert_close(output.logits, expected.logits, **TOLERANCE)  # DeBERTa's of one label are flat
        assert ours.config.problem_type == theirs.config.problem_type


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


@pytest.mark.parametrize(
    "family, rate", [(family, rate) for family in ENCODERS for rate in FAMILIES[family].dropouts], ids=str
)
def test_each_dropout_acts_and_only_in_training(family, rate, make_pair) -> None:
    quiet = dict.fromkeys(FAMILIES[family].dropouts, 0.0)
    for changes, random in ((quiet, False), (quiet | {rate: 0.5}, True)):
        model, _ = models(make_pair, family, **changes)
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, model(IDS).logits)
            model.train()
            assert torch.equal(model(IDS).logits, model(IDS).logits) != random


def test_deberta_drops_distances_out(make_pair) -> None:
    """By hidden_dropout_prob, for each layer anew, and in training alone."""
    model, _ = models(make_pair, "deberta_v2", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0)
    encoder = model.base_model.encoder
    attention, states = encoder.layer[0].attention.self, torch.ones(2, 4, 6, 8)
    positions = encoder.positions(states)
    for training in (True, False):
        attention.train(training)
        one, other = (attention.position_bias(states, states, positions) for _ in range(2))
        assert torch.equal(one, other) != training


def test_what_labels_say_to_deberta(make_pair) -> None:
    """Without a problem_type: classes, of which negative ones count for nothing, shares of classes, or numbers."""
    for labels, count in (
        (torch.tensor([1, 2]), 3), (torch.tensor([-1, 2]), 3), (torch.tensor([0, -100]), 3),
        (torch.tensor([-1, -1]), 3), (torch.tensor([0.5, -2]), 1),
        (torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]]), 3),
    ):  # fmt: skip
        ours, theirs = models(make_pair, "deberta_v2", "DebertaV2ForSequenceClassification", num_labels=count)
        losses = [model(IDS, labels=labels).loss for model in (ours, theirs)]
        torch.testing.assert_close(*losses, **TOLERANCE, msg=lambda text, labels=labels: f"{labels}: {text}")


@pytest.mark.parametrize("head", ["DebertaV2ForSequenceClassification", "DebertaV2ForMultipleChoice"])
def test_rates_of_debertas_heads(head, make_pair) -> None:
    for changes in ({}, {"cls_dropout": 0.3}, {"cls_dropout": 0.0, "pooler_dropout": 0.2}):
        ours, theirs = models(make_pair, "deberta_v2", head, **{"hidden_dropout_prob": 0.1, **changes})
        rates = [(model.dropout.p, model.pooler.dropout.p) for model in (ours, theirs)]
        assert rates[0] == rates[1], changes


def test_what_padding_attends_to_in_deberta(make_pair) -> None:
    """All keys alike, as in transformers, whose scores of padding are all the lowest number."""
    ours, theirs = models(make_pair, "deberta_v2")
    mask = torch.ones_like(IDS)
    mask[0, 6:], mask[1, :3] = 0, 0
    with torch.no_grad():
        given, expected = (one(IDS, attention_mask=mask, output_attentions=True).attentions for one in (ours, theirs))
    for found, right in zip(given, expected, strict=True):
        torch.testing.assert_close(found, right, **TOLERANCE)


@pytest.mark.parametrize("family", CAUSAL_ENCODERS)
def test_an_encoder_generates_as_a_decoder(family, make_pair) -> None:
    ours, theirs = models(make_pair, family, CAUSAL_ENCODERS[family], is_decoder=True, bos_token_id=1, eos_token_id=-1)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    ids = IDS * mask
    for settings in ({}, {"num_beams": 3}):
        given, expected = (
            model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, **settings)
            for model in (ours, theirs)
        )
        assert torch.equal(given, expected)


@pytest.mark.parametrize("family", CAUSAL_ENCODERS)
def test_cross_attention(family, make_pair) -> None:
    changes = {"is_decoder": True, "add_cross_attention": True}
    ours, theirs = models(make_pair, family, CAUSAL_ENCODERS[family], **changes)
    encoder = {"encoder_hidden_states": torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(5))}
    encoder["encoder_attention_mask"] = torch.tensor([[1] * 4 + [0] * 3, [1] * 7])
    with torch.no_grad():
        expected = theirs(IDS, **encoder).logits
        torch.testing.assert_close(ours(IDS, **encoder).logits, expected, **TOLERANCE)
        first = ours(IDS[:, :6], **encoder, use_cache=True)
        rest = ours(IDS[:, 6:], **encoder, past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), expected, **TOLERANCE)


def test_a_config_that_cannot_be_carried_is_refused_by_name(family) -> None:
    acts = dict.fromkeys(("hidden_act", "hidden_activation", "activation"), "nosuch")
    config = FAMILIES[family].config()
    for name in acts:
        if name in vars(config):
            setattr(config, name, "nosuch")
    with pytest.raises(ValueError, match=r"no activation is called 'nosuch'; known: .*gelu"):
        easytorch.AutoModelForMaskedLM.from_config(config)
    config = FAMILIES[family].config()
    config.num_attention_heads = 5
    with pytest.raises(
        ValueError, match=r"hidden size \(32\) is not a multiple of the number of attention heads \(5\)"
    ):
        easytorch.AutoModel.from_config(config)


@pytest.mark.parametrize("family, head, changes, words", [
    ("bert", "BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
    ("electra", "ElectraModel", {"position_embedding_type": "relative_key_query"}, "'relative_key_query'"),
    ("xlm_roberta", "XLMRobertaModel", {"position_embedding_type": "relative_key"}, "'relative_key'"),
    ("roberta", "RobertaModel", {"pad_token_id": None}, "roberta: config.pad_token_id is None"),
    ("roberta", "RobertaModel", {"pad_token_id": 60}, "pad_token_id=60 is not among the .*embeddings=40 pos"),
    ("electra", "ElectraForMultipleChoice", {"summary_type": "attn"}, "summary_type='attn' is not carried"),
    ("mpnet", "MPNetModel", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets=16"),
    ("deberta_v2", "DebertaV2Model", {"position_buckets": 78}, "config.position_buckets=78 needs to be 2 or more"),
    ("deberta_v2", "DebertaV2Model", {"attention_head_size": 6}, "config.attention_head_size=6 must be"),
    ("deberta_v2", "DebertaV2ForMaskedLM", {"legacy": False, "embedding_size": 8}, "config.embedding_size=8 is not"),
    ("distilbert", "DistilBertForQuestionAnswering", {"num_labels": 3}, "num_labels should be 2, but it is 3"),
])  # fmt: skip
def test_what_a_family_does_not_carry(family, head, changes, words) -> None:
    module = importlib.import_module(f"easytorch.models.{family}")
    with pytest.raises(ValueError, match=words):
        getattr(module, head)(FAMILIES[family].config(**changes))


def test_positions_may_be_more_or_fewer(make_pair) -> None:
    """DistilBERT's resize_position_embeddings; transformers' own fails where they are sinusoidal."""
    for sinusoidal in (False, True):
        ours, _ = make_pair("DistilBertForMaskedLM", FAMILIES["distilbert"].config(sinusoidal_pos_embds=sinusoidal))
        before = copy.deepcopy(ours.get_position_embeddings().weight.data)
        for count in (50, 12):
            ours.resize_position_embeddings(count)
            after = ours.get_position_embeddings().weight
            assert after.shape == (count, 32) and ours.config.max_position_embeddings == count
            assert sinusoidal or torch.equal(after[:12], before[:12])
            assert ours(IDS).logits.isfinite().all()
