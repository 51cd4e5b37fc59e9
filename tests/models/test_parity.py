"""Every head against transformers' own class: outputs, losses and every gradient, in fp32."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.modeling_outputs import ModelOutput

from easytorch.layers.heads import text_config_of
from easytorch.models.bert import BertModel
from tests.models.families import DECODERS, FAMILIES, HEADS, IMAGE_TEXT, LANGUAGE, TOWERS
from tests.models.tower_families import TWO_TOWERS, tensors, tower_inputs, tower_labels

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def labels_for(name: str, batch: dict) -> dict[str, torch.Tensor]:
    if tower_inputs(name) is not None:
        return tower_labels(name)
    tokens = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    if name == "BertForPreTraining":
        return {"labels": tokens, "next_sentence_label": torch.tensor([0, 1])}
    if name == "GPT2DoubleHeadsModel":
        return {"labels": torch.stack([tokens, tokens.flip(0)], dim=1), "mc_labels": torch.tensor([1, 0])}
    if name.endswith("ForConditionalGeneration"):
        return {"labels": batch["input_ids"].flip(0)[:, 2:].masked_fill(batch["attention_mask"][:, 2:] == 0, -100)}
    if "QuestionAnswering" in name:
        return {"start_positions": torch.tensor([4, 1]), "end_positions": torch.tensor([6, 30])}
    if "SequenceClassification" in name or "NextSentence" in name or "MultipleChoice" in name:
        return {"labels": torch.tensor([1, 0])}
    if "TokenClassification" in name or name == "ElectraForPreTraining":
        return {"labels": tokens.clamp(max=1)}
    return {} if name.endswith("Model") and "LMHead" not in name else {"labels": tokens}


def inputs_for(name: str, batch: dict) -> dict[str, torch.Tensor]:
    if (of_tower := tower_inputs(name)) is not None:
        return of_tower
    if "MultipleChoice" in name or name == "GPT2DoubleHeadsModel":
        return {key: torch.stack([value, value.flip(0)], dim=1) for key, value in batch.items()}
    arguments = inspect.signature(getattr(transformers, name).forward).parameters
    if "decoder_input_ids" not in arguments:
        return dict(batch)
    if "SequenceClassification" in name:  # which reads the last of the end tokens, as many in every row
        ends = torch.tensor([[4, 9], [1, 6]])
        end = getattr(transformers, name).config_class().eos_token_id
        return dict(batch) | {"input_ids": batch["input_ids"].scatter(1, ends, end)}
    if "QuestionAnswering" in name:  # whose decoder reads what the encoder reads
        return dict(batch)
    return dict(batch) | {"decoder_input_ids": batch["input_ids"].flip(0)[:, 2:]}


def assert_same(ours, theirs, rows: torch.Tensor | None = None) -> None:
    """Every tensor of two outputs; only at `rows`, a mask of their first dimensions, where one is given."""
    assert set(ours) == set(theirs)
    for key, expected in theirs.items():
        given = ours[key]
        if isinstance(expected, tuple):
            assert_same(dict(enumerate(given)), dict(enumerate(expected)), rows)
        elif isinstance(expected, ModelOutput):
            assert_same(given, expected, rows)
        elif isinstance(expected, torch.Tensor):
            if rows is not None and expected.shape[: rows.dim()] == rows.shape:
                given, expected = given[rows], expected[rows]
            scale = max(1.0, expected.abs().max().item()) if expected.is_floating_point() and expected.numel() else 1.0
            # of the scale: numbers of 9 in hidden states are 8e-6 off those of float64, transformers' as ours
            torch.testing.assert_close(given, expected, rtol=TOLERANCE["rtol"], atol=scale * TOLERANCE["atol"])


def seen(family: str, batch: dict) -> torch.Tensor | None:
    """The positions that are compared: of those that see nothing eager attention takes the mean of all values.

    In an encoder padding sees the tokens, so that there are none; nor are there without attention.
    """
    row = FAMILIES[family]
    unseen = row.reference == "eager" and family in DECODERS and row.attentions
    return batch["attention_mask"].bool() if unseen else None


@pytest.mark.parametrize("family, name", HEADS)
def test_outputs_loss_and_gradients(family, name, batch, make_pair) -> None:
    row = FAMILIES[family]
    ours, theirs = make_pair(name, row.config(), row.reference)
    inputs = inputs_for(name, batch)
    labels = labels_for(name, batch)
    rows = seen(family, batch)
    if rows is not None and "CausalLM" in name:
        labels["labels"][:, 1:][~rows[:, :-1]] = -100  # what a position of padding would predict
    outputs = [model(**inputs, **labels, output_hidden_states=True) for model in (ours, theirs)]
    assert_same(*outputs, rows)
    if not labels and tower_inputs(name) is not None:
        outputs = [{"loss": sum(one.square().mean() for one in tensors(output))} for output in outputs]
    elif not labels:
        real = inputs["attention_mask"][:, -outputs[0].last_hidden_state.shape[1] :].bool()
        outputs = [{"loss": output.last_hidden_state[real].square().mean()} for output in outputs]
    for output in outputs:
        (output["loss"] + output.get("mc_loss", 0.0)).backward()
    expected = {key: weight.grad for key, weight in theirs.named_parameters() if weight.grad is not None}
    given = {key: weight.grad for key, weight in ours.named_parameters() if weight.grad is not None}
    assert given.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(given[key], gradient, **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in TWO_TOWERS])
def test_attentions_and_hidden_states_have_transformers_names_and_values(family, batch, make_pair):
    ours, theirs = make_pair(FAMILIES[family].heads[0], FAMILIES[family].config(), "eager")
    attentions = FAMILIES[family].attentions
    kwargs = {"output_attentions": True} if attentions else {}
    kwargs["output_hidden_states"] = True
    unpadded = inputs_for(FAMILIES[family].heads[0], {"input_ids": batch["input_ids"].clamp(min=3)})
    if family in IMAGE_TEXT:  # whose inputs are padded
        del unpadded["attention_mask"]
    with torch.no_grad():
        output, expected = ours(**unpadded, **kwargs), theirs(**unpadded, **kwargs)
    both = output.get("encoder_last_hidden_state") is not None
    halves = ("encoder_", "decoder_") if both else ("",)
    for half in halves:
        assert len(output.get(f"{half}attentions", ())) == attentions
        assert len(output[f"{half}hidden_states"]) == 1 + text_config_of(ours.config).num_hidden_layers
    assert len(output.get("cross_attentions", ())) == (attentions if both else 0)
    assert_same(output, expected)
    for name in kwargs:  # one without the other: an output has places for what was asked alone
        with torch.no_grad():
            assert_same(ours(**unpadded, **{name: True}), theirs(**unpadded, **{name: True}))
    assert isinstance(ours(**unpadded, return_dict=False), tuple)


@pytest.mark.parametrize(
    "family", [name for name, row in FAMILIES.items() if row.attentions and name not in TWO_TOWERS]
)
def test_what_is_recorded_is_what_the_output_is_made_of(family, batch):
    """Attentions and hidden states of a padded batch have gradients."""
    head = FAMILIES[family].heads[0]
    model = getattr(importlib.import_module(f"easytorch.models.{family}"), head)
    model = model._from_config(FAMILIES[family].config(), attn_implementation="eager")
    output = model(**inputs_for(head, batch), output_attentions=True, output_hidden_states=True)
    recorded = [name for name in output if name.endswith(("attentions", "hidden_states")) and name[:5] != "image"]
    asked = [one for name in recorded for one in output[name]]
    output[0].double().square().mean().backward(inputs=[one for one in asked if one.requires_grad], retain_graph=True)
    # the last state of an encoder is behind what is read of it
    assert all(one.grad is not None for name in recorded for one in output[name][:-1])


@pytest.mark.parametrize(
    "family, changes", [(family, changes) for family in FAMILIES for changes in FAMILIES[family].variants], ids=str
)
def test_config_variants(family, changes, batch, make_pair) -> None:
    row = FAMILIES[family]
    ours, theirs = make_pair(LANGUAGE[family], row.config(**changes), row.reference)
    inputs = inputs_for(LANGUAGE[family], batch)
    with torch.no_grad():
        outputs = [model(**inputs) for model in (ours, theirs)]
    if family not in TOWERS:
        outputs = [{"": output.logits} for output in outputs]
    assert_same(*outputs, seen(family, batch))


@pytest.mark.parametrize("problem, labels", [
    ("regression", torch.tensor([0.3, -1.0])),
    ("multi_label_classification", torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])),
    ("single_label_classification", torch.tensor([2, 0])),
])  # fmt: skip
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForSequenceClassification"])
def test_every_problem_type(name, problem, labels, batch, make_pair, bert_config, llama_config) -> None:
    make = bert_config if name.startswith("Bert") else llama_config
    ours, theirs = make_pair(name, make(num_labels=1 if problem == "regression" else 3))
    output, expected = ours(**batch, labels=labels), theirs(**batch, labels=labels)
    torch.testing.assert_close(output.loss, expected.loss, **TOLERANCE)
    assert ours.config.problem_type == theirs.config.problem_type == problem


ROPE = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "rope_theta": 500.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 500.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("rope", ROPE)
def test_rope_types_below_and_above_the_trained_length(rope, make_pair, llama_config) -> None:
    ours, theirs = make_pair("LlamaForCausalLM", llama_config(rope_parameters=ROPE[rope], max_position_embeddings=24))
    torch.manual_seed(2)
    for length in (9, 40, 12):
        ids = torch.randint(3, 97, (1, length))
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, **TOLERANCE)


def test_a_partial_rotation_in_a_family_of_whole_heads(make_pair, llama_config) -> None:
    """transformers passes over the factor for the default type, and fails in the first forward for the others."""
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    ours, theirs = make_pair("LlamaForCausalLM", llama_config(rope_parameters=rope))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, **TOLERANCE)
    with pytest.raises(
        ValueError, match=r"llama rotates whole heads: rope type 'linear' with partial_rotary_factor=0.5"
    ):
        type(ours)(llama_config(rope_parameters=rope | {"rope_type": "linear", "factor": 2.0}))


def test_packed_sequences_by_position_ids_do_not_see_each_other(make_pair, llama_config) -> None:
    ours, theirs = make_pair("LlamaForCausalLM", llama_config())
    torch.manual_seed(3)
    ids = torch.randint(3, 97, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    with torch.no_grad():
        packed = ours(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(packed, theirs(ids, position_ids=positions, use_cache=False).logits, **TOLERANCE)
        torch.testing.assert_close(packed[:, 5:8], ours(ids[:, 5:8]).logits, **TOLERANCE)


def test_inputs_embeds_logits_to_keep_and_a_4d_mask(make_pair, llama_config) -> None:
    ours, theirs = make_pair("LlamaForCausalLM", llama_config())
    torch.manual_seed(4)
    ids = torch.randint(3, 97, (2, 6))
    embeds = theirs.get_input_embeddings()(ids)
    mask = torch.full((2, 1, 6, 6), torch.finfo(torch.float32).min).triu(2)
    rows, marked = torch.tensor([[0, 3], [2, 5]]), torch.rand(2, 6) > 0.5
    for kwargs in ({"inputs_embeds": embeds}, {"input_ids": ids, "attention_mask": mask}):
        with torch.no_grad():
            every = theirs(**kwargs).logits
        for keep, expected in (
            (0, every),
            (2, every[:, -2:]),
            (torch.tensor([1, 4]), every[:, [1, 4]]),
            (rows, torch.take_along_dim(every, rows[..., None], dim=1)),
            (marked, every[marked]),
        ):
            with torch.no_grad():
                torch.testing.assert_close(ours(**kwargs, logits_to_keep=keep).logits, expected, **TOLERANCE)
    with pytest.raises(ValueError, match="exactly one"):
        ours(input_ids=ids, inputs_embeds=embeds)


def test_bert_options(batch, make_pair, bert_config) -> None:
    ours, theirs = make_pair("BertModel", bert_config(chunk_size_feed_forward=1, hidden_act="relu"))
    kwargs = {
        "token_type_ids": torch.tensor([[0] * 5 + [1] * 6] * 2),
        "position_ids": torch.arange(11).flip(0)[None],
    }
    with torch.no_grad():
        assert_same(ours(**batch, **kwargs), theirs(**batch, **kwargs))


@pytest.mark.parametrize("cross", [False, True])
def test_bert_as_a_decoder_with_cache(cross, batch, make_pair, bert_config) -> None:
    ours, theirs = make_pair("BertLMHeadModel", bert_config(is_decoder=True, add_cross_attention=cross), "eager")
    torch.manual_seed(5)
    encoder = {}
    if cross:
        encoder = {"encoder_hidden_states": torch.randn(2, 7, 32), "encoder_attention_mask": torch.ones(2, 7)}
        encoder["encoder_attention_mask"][0, 4:] = 0
    ids = batch["input_ids"].clamp(min=3)
    with torch.no_grad():
        expected = theirs(ids, **encoder, output_attentions=True)
        given = ours(ids, **encoder, output_attentions=True)
        torch.testing.assert_close(given.logits, expected.logits, **TOLERANCE)
        assert len(given.attentions) == 2 and len(given.cross_attentions or ()) == (2 if cross else 0)
        for kind in ("attentions", "cross_attentions"):
            for one, other in zip(given[kind] or (), expected[kind] or (), strict=True):
                torch.testing.assert_close(one, other, **TOLERANCE)
        first = ours(ids[:, :6], **encoder, use_cache=True)
        rest = ours(ids[:, 6:], **encoder, past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), expected.logits, **TOLERANCE)


def test_bert_attends_to_an_encoder_beside_a_cache_that_has_no_place_for_it(batch, make_pair, bert_config) -> None:
    ours, _ = make_pair("BertLMHeadModel", bert_config(is_decoder=True, add_cross_attention=True))
    torch.manual_seed(5)
    ids, encoder = batch["input_ids"].clamp(min=3), torch.randn(2, 7, 32)
    cache = DynamicCache(config=ours.config)
    with torch.no_grad():
        expected = ours(ids, encoder_hidden_states=encoder, use_cache=False).logits
        parts = [
            ours(part, encoder_hidden_states=encoder, past_key_values=cache, use_cache=True).logits
            for part in (ids[:, :6], ids[:, 6:])
        ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, **TOLERANCE)


def test_cross_attention_must_be_configured(batch, make_pair, bert_config) -> None:
    ours, _ = make_pair("BertLMHeadModel", bert_config(is_decoder=True))
    with pytest.raises(ValueError, match="add_cross_attention"):
        ours(**batch, encoder_hidden_states=torch.randn(2, 7, 32))
    with pytest.raises(ValueError, match="is_decoder=True"):
        BertModel(bert_config(add_cross_attention=True))
