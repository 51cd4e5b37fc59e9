"""Training computes the loss of the hidden states: transformers' numbers, and logits only where they are read."""

from __future__ import annotations

import importlib
import pickle

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import easytorch
from easytorch.layers import deferred_logits
from easytorch.layers.deferred_logits import DeferredLogits
from tests.models.families import CAUSAL, FAMILIES

IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 90, 17], [4, 4, 90, 12, 60, 7, 31, 6, 88, 23]])
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
SCALED = (
    "mamba", "mamba2", "falcon_h1", "granitemoehybrid", "nemotron_h", "gemma2", "gemma3_text", "cohere", "cohere2",
    "granite", "granitemoe", "phi", "opt", "mixtral", "llama",
)  # fmt: skip


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch) -> None:
    monkeypatch.setattr(deferred_logits, "SMALLEST", 0)


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """How often deferred logits were computed."""
    times, materialize = [], DeferredLogits.materialize
    monkeypatch.setattr(DeferredLogits, "materialize", lambda self: (times.append(1), materialize(self))[1])
    return times


def models(make_pair, family="llama", **changes):
    row = FAMILIES[family]
    config = row.config(**dict.fromkeys(row.dropouts, 0.0) | changes)
    ours, theirs = make_pair(CAUSAL[family], config, row.reference)
    return ours.train(), theirs.train()


def compare(ours, theirs, field="logits", **inputs) -> None:
    """Loss and every gradient; ours without logits."""
    outputs = [model(**inputs) for model in (ours, theirs)]
    assert isinstance(outputs[0].__dict__[field], DeferredLogits) and not isinstance(outputs[1], type(outputs[0]))
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss, **TOLERANCE, equal_nan=True)
    for output in outputs:
        (output.loss + (output.get("mc_loss") or 0.0)).backward()
    for (name, given), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(given.grad, expected.grad, **TOLERANCE, equal_nan=True, msg=name)
    torch.testing.assert_close(getattr(outputs[0], field), outputs[1][field], **TOLERANCE)
    assert list(outputs[0]) == [name for name in outputs[1] if name in outputs[0]]


@pytest.mark.parametrize("family", SCALED)
def test_loss_and_gradients(family, make_pair) -> None:
    labels = IDS.masked_fill(torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.3, -100)
    compare(*models(make_pair, family), input_ids=IDS, labels=labels)


@pytest.mark.parametrize("more", [
    {"num_items_in_batch": 7},
    {"num_items_in_batch": torch.tensor(7)},
    {"ignore_index": 90},
    {"shift_labels": IDS.flip(0)},
    {"shift_labels": IDS.flip(0).masked_fill(IDS > 50, -100), "num_items_in_batch": 3},
    {"labels": torch.full_like(IDS, -100)},
], ids=str)  # fmt: skip
def test_keywords_of_the_loss(more, make_pair) -> None:
    compare(*models(make_pair, tie_word_embeddings=True), **{"input_ids": IDS, "labels": IDS} | more)


def test_router_losses_join(make_pair) -> None:
    compare(*models(make_pair, "mixtral"), input_ids=IDS, labels=IDS, output_router_logits=True)


def test_bfloat16_is_as_exact_as_transformers(make_pair) -> None:
    ours, theirs = models(make_pair)
    exact = theirs.double()(IDS, labels=IDS).loss
    errors = [(model.bfloat16()(IDS, labels=IDS).loss - exact).abs() for model in (ours, theirs)]
    assert errors[0] <= 1.3 * errors[1] + 1e-3


def test_logits_are_computed_once_and_when_they_are_read(make_pair, computed) -> None:
    ours, theirs = models(make_pair)
    expected = theirs(IDS, labels=IDS).logits
    output = ours(IDS, labels=IDS)
    assert output["loss"] is output.loss is output[0] and "logits" in output
    assert list(output) == list(theirs(IDS, labels=IDS)) and not computed
    logits = output.logits
    assert type(logits) is torch.Tensor and output["logits"] is output[1] is output.get("logits") is logits
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    torch.testing.assert_close(ours(IDS, labels=IDS).to_tuple()[1], expected, **TOLERANCE)
    torch.testing.assert_close(ours(IDS, labels=IDS, return_dict=False)[1], expected, **TOLERANCE)
    torch.testing.assert_close(pickle.loads(pickle.dumps(ours(IDS, labels=IDS))).logits.detach(), expected.detach())


def test_a_loss_of_the_logits_reaches_the_weights(make_pair) -> None:
    ours, theirs = models(make_pair)
    for model in (ours, theirs):
        output = model(IDS, labels=IDS)
        (output.loss + output.logits.square().mean()).backward()
    for given, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(given.grad, expected.grad, **TOLERANCE)


def test_an_output_that_is_rebuilt_keeps_them_deferred(make_pair, computed) -> None:
    """As accelerate does for mixed precision, torch for DDP with a static graph."""
    output = models(make_pair)[0](IDS, labels=IDS)
    leaves, spec = pytree.tree_flatten(output)
    again = [type(output)(dict(output.items())), pytree.tree_unflatten(leaves, spec)]
    assert not computed
    for other in again:
        assert torch.equal(other.logits, output.logits) and torch.equal(other.loss, output.loss)
    stand_in = dict(models(make_pair)[0](IDS, labels=IDS).items())["logits"]
    assert stand_in.shape == (2, 10, 97) and torch.argmax(stand_in, dim=-1).shape == (2, 10)
    assert torch.cat([stand_in, stand_in]).shape == (4, 10, 97) and stand_in[0, 0].shape == (97,)


@pytest.mark.parametrize("change", ["evaluation", "no gradients", "hook", "head", "loss", "keep", "finish"])
def test_what_needs_the_logits_forms_them(change, make_pair) -> None:
    """In evaluation, and where something else than transformers' loss takes them, or listens."""
    ours, theirs = models(make_pair)
    seen, inputs = [], {"input_ids": IDS, "labels": IDS}
    if change == "evaluation":
        ours.eval()
    elif change == "hook":
        ours.lm_head.register_forward_hook(lambda *args: seen.append(args[2].shape))
    elif change == "head":
        ours.lm_head = nn.Sequential(ours.lm_head)
    elif change == "loss":
        ours.loss_function = theirs.loss_function = lambda logits, labels, **_: logits.square().mean()
    elif change == "keep":
        inputs |= {"logits_to_keep": torch.arange(10)}
    elif change == "finish":
        ours.__class__ = type("Halved", (type(ours),), {"finish_logits": lambda self, logits: logits / 2})
    with torch.set_grad_enabled(change != "no gradients"):
        output, expected = ours(**inputs), theirs(**inputs)
    assert type(output) is type(expected)
    if change == "finish":
        torch.testing.assert_close(output.logits * 2, expected.logits, **TOLERANCE)
    else:
        torch.testing.assert_close(output.loss, expected.loss, **TOLERANCE)
    assert not seen or seen == [(2, 10, 97)]


def test_small_models_form_them(make_pair, monkeypatch) -> None:
    monkeypatch.setattr(deferred_logits, "SMALLEST", 2 * 10 * 97 + 1)
    ours, _ = models(make_pair)
    assert type(ours(IDS, labels=IDS).__dict__["logits"]) is torch.Tensor


def test_trainer_trains_and_evaluates(make_pair, tmp_path) -> None:
    from transformers import Trainer, TrainingArguments

    losses = []
    for model in models(make_pair):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=2,
            report_to=[], save_strategy="no", use_cpu=True, logging_strategy="no", disable_tqdm=True, seed=1,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(3, 1)]
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows, eval_dataset=rows,
            compute_metrics=lambda result: {"shape": list(result.predictions.shape)},
        )  # fmt: skip
        trained = trainer.train().training_loss
        evaluated = trainer.evaluate()
        assert evaluated["eval_shape"] == [6, 10, 97]
        losses.append((trained, evaluated["eval_loss"]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_checkpointing_and_compiling(make_pair) -> None:
    ours, theirs = models(make_pair)
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    compare(ours, theirs, input_ids=IDS, labels=IDS)
    compiled = torch.compile(models(make_pair)[0], backend="eager")
    torch.testing.assert_close(compiled(IDS, labels=IDS).loss, theirs(IDS, labels=IDS).loss, **TOLERANCE)


def test_labels_outside_of_the_vocabulary_are_named() -> None:
    model = easytorch.AutoModelForCausalLM.from_config(FAMILIES["llama"].config()).train()
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.96 or ignore_index = -100, got .* to 97"):
        model(IDS, labels=IDS.clone().fill_(97))


def test_the_loss_of_every_decoder_finishes_logits_as_its_head_does() -> None:
    for family, name in CAUSAL.items():
        kind = getattr(importlib.import_module(f"easytorch.models.{family}"), name)
        owner = next(one for one in kind.__mro__ if "finish_logits" in vars(one))
        assert "logits_finish" in vars(owner), f"{family}: {owner.__name__} changes logits that training never forms"


WORDS = {
    "bert": ("BertForMaskedLM", "BertLMHeadModel"), "roberta": ("RobertaForMaskedLM", "RobertaForCausalLM"),
    "electra": ("ElectraForMaskedLM", "ElectraForCausalLM"), "distilbert": ("DistilBertForMaskedLM",),
    "mpnet": ("MPNetForMaskedLM",), "modernbert": ("ModernBertForMaskedLM",), "deberta_v2": ("DebertaV2ForMaskedLM",),
    "bart": ("BartForCausalLM",), "whisper": ("WhisperForCausalLM",),
}  # fmt: skip


def without_dropout(model: nn.Module) -> nn.Module:
    """In training mode, but that nothing is dropped."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in WORDS.items() for name in names])
def test_losses_of_words(family, name, make_pair) -> None:
    """Of the labelled positions alone, whose number differs from that of all."""
    row = FAMILIES[family]
    more = {"is_decoder": True} if "CausalLM" in name or "LMHead" in name else {}
    rates = {one: 0.0 for one in vars(row.config()) if "dropout" in one and one not in more}
    config = row.config(**more | rates)
    ours, theirs = map(without_dropout, make_pair(name, config, row.reference))
    labels = IDS.masked_fill(torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.7, -100)
    compare(ours, theirs, input_ids=IDS, labels=labels)
    compare(ours, theirs, input_ids=IDS, labels=torch.full_like(IDS, -100))


SOME = IDS.masked_fill(torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.7, -100)


def test_loss_of_bert_pretraining(make_pair) -> None:
    """Of words and of the next sentence; either alone is no loss, as in transformers."""
    row = FAMILIES["bert"]
    ours, theirs = map(without_dropout, make_pair("BertForPreTraining", row.config(), row.reference))
    sentence = torch.tensor([1, 0])
    for labels in (SOME, IDS, torch.full_like(IDS, -100)):
        given = {"input_ids": IDS, "labels": labels, "next_sentence_label": sentence}
        compare(ours, theirs, "prediction_logits", **given)
    for alone in ({"labels": SOME}, {"next_sentence_label": sentence}):
        output, expected = (model(IDS, **alone) for model in (ours, theirs))
        assert output.loss is None and list(output) == list(expected)
    output = ours(IDS, labels=SOME, next_sentence_label=sentence)
    parts = [part.shape for part in output.to_tuple()]
    assert parts == [(), (*IDS.shape, ours.config.vocab_size), (2, 2)]
    again = pickle.loads(pickle.dumps(output))
    assert torch.equal(again.prediction_logits, output.prediction_logits)
    shapes = []
    ours.cls.seq_relationship.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    output = ours(IDS, labels=SOME, next_sentence_label=sentence)
    assert isinstance(output.__dict__["prediction_logits"], torch.Tensor) and shapes == [(2, 2)]


def test_loss_of_gpt2_double_heads(make_pair) -> None:
    """Words and choices, of (B, choices, T)."""
    row = FAMILIES["gpt2"]
    config = row.config(**dict.fromkeys(row.dropouts, 0.0), summary_first_dropout=0.0)
    ours, theirs = map(without_dropout, make_pair("GPT2DoubleHeadsModel", config, row.reference))
    given = {"input_ids": torch.stack([IDS, IDS.flip(1)], 1), "labels": torch.stack([SOME, IDS], 1)}
    compare(ours, theirs, **given)
    compare(ours, theirs, **given, mc_labels=torch.tensor([1, 0]), mc_token_ids=torch.tensor([[3, 9], [9, 4]]))
    ours.lm_head.register_forward_hook(lambda *args: None)
    assert isinstance(ours(**given).__dict__["logits"], torch.Tensor)


def test_loss_of_words_by_the_embedding(make_pair) -> None:
    """DeBERTa's head of `legacy=False`, whose matrix is the embedding's: its gradient is of both uses."""
    row = FAMILIES["deberta_v2"]
    config = row.config(legacy=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ours, theirs = map(without_dropout, make_pair("DebertaV2ForMaskedLM", config, row.reference))
    compare(ours, theirs, input_ids=IDS, labels=SOME)
    compare(ours, theirs, input_ids=IDS, labels=torch.full_like(IDS, -100))
    shapes = []
    dense = ours.lm_predictions.lm_head.dense
    hook = dense.register_forward_hook(lambda module, args, output: shapes.append(output.shape[:2]))
    assert isinstance(ours(IDS, labels=SOME).__dict__["logits"], torch.Tensor) and shapes == [IDS.shape]
    hook.remove()
    ours.set_input_embeddings(nn.Sequential(ours.get_input_embeddings()))
    assert ours.word_parameters() == (None, None)


def test_a_hook_of_the_words_head_sees_every_position(make_pair) -> None:
    ours, _ = make_pair("BertForMaskedLM", FAMILIES["bert"].config(), FAMILIES["bert"].reference)
    shapes = []
    ours.train().cls.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    output = ours(IDS, labels=IDS)
    assert isinstance(output.__dict__["logits"], torch.Tensor) and shapes == [(*IDS.shape, ours.config.vocab_size)]


@pytest.mark.parametrize(
    ("family", "name", "part"),
    [("bert", "BertForMaskedLM", "cls.predictions"), ("bert", "BertForMaskedLM", "cls.predictions.transform"),
     ("roberta", "RobertaForCausalLM", "lm_head"), ("roberta", "RobertaForMaskedLM", "lm_head.layer_norm"),
     ("electra", "ElectraForMaskedLM", "generator_predictions"), ("distilbert", "DistilBertForMaskedLM", "activation"),
     ("mpnet", "MPNetForMaskedLM", "lm_head.dense"), ("modernbert", "ModernBertForMaskedLM", "head.norm"),
     ("deberta_v2", "DebertaV2ForMaskedLM", "cls.predictions.transform.LayerNorm")],
)  # fmt: skip
def test_a_hook_within_the_words_head_sees_every_position(family, name, part, make_pair) -> None:
    """Not those of the labelled tokens alone."""
    more = {"is_decoder": True} if "CausalLM" in name else {}
    ours, _ = make_pair(name, FAMILIES[family].config(**more), FAMILIES[family].reference)
    shapes = []
    ours.train().get_submodule(part).register_forward_hook(lambda module, args, output: shapes.append(output.shape[:2]))
    output = ours(IDS, labels=IDS.masked_fill(IDS > 20, -100))
    assert isinstance(output.__dict__["logits"], torch.Tensor) and shapes == [IDS.shape]


def test_a_loss_that_replaces_that_of_words_is_called() -> None:
    """Of ModernBERT, which asks for it, as transformers' class."""
    model = easytorch.AutoModelForMaskedLM.from_config(FAMILIES["modernbert"].config()).train()
    seen = []

    def own(logits, labels, **kwargs):
        seen.append(logits.shape)
        return logits.sum() * 0 + 3

    model.loss_function = own
    assert model(IDS, labels=IDS).loss == 3 and seen == [(*IDS.shape, model.config.vocab_size)]
    del model._loss_function
    ignored = model(IDS, labels=IDS, ignore_index=5).loss
    torch.testing.assert_close(ignored, model(IDS, labels=IDS.masked_fill(IDS == 5, -100)).loss)
