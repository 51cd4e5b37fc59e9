"""ModernBERT beside what test_encoders.py has: batches without their padding, and its kinds of masks and heads."""

from __future__ import annotations

import pytest
import torch

from easytorch.layers.documents import LEAST_PADDING, documents_of
from easytorch.models.modernbert import ModernBertAttention, ModernBertModel
from tests.models.families import FAMILIES

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
LENGTHS = (96, 40, 9, 64, 1)


@pytest.fixture
def padded() -> dict[str, torch.Tensor]:
    """Rows of LENGTHS tokens, padded on the right: more padding than LEAST_PADDING."""
    mask = torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS)[:, None]
    assert (~mask).sum() > LEAST_PADDING
    ids = torch.randint(3, 97, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    return {"input_ids": ids, "attention_mask": mask.long()}


@pytest.fixture
def pair(make_pair):
    return make_pair("ModernBertModel", FAMILIES["modernbert"].config(max_position_embeddings=128))


def rows_seen(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> set[int]:
    """How many rows the attention's products had."""
    seen: set[int] = set()
    forward = ModernBertAttention.forward

    def noted(self, hidden_states, *args, **kwargs):
        seen.add(hidden_states.shape[0] * hidden_states.shape[1])
        return forward(self, hidden_states, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(ModernBertAttention, "forward", noted)
        model(**inputs)
    return seen


@pytest.mark.parametrize("implementation", ["easytorch", "sdpa", "eager", "vanilla", "flash"])
def test_padding_is_left_out(implementation, padded, pair) -> None:
    ours, theirs = pair
    ours.set_attn_implementation(implementation)
    real = padded["attention_mask"].bool()
    embeds = theirs.get_input_embeddings()(padded["input_ids"]).detach()
    positions = torch.arange(96).flip(0)[None]
    with torch.no_grad():
        for changes in ({}, {"position_ids": positions}, {"input_ids": None, "inputs_embeds": embeds}):
            given, expected = (model(**padded | changes).last_hidden_state for model in (ours, theirs))
            torch.testing.assert_close(given[real], expected[real], **TOLERANCE)
            assert not given[~real].any()
    assert rows_seen(ours, padded) == {sum(LENGTHS)}


def test_padding_stays_where_something_would_change(padded, pair) -> None:
    ours, theirs = pair
    every, mask = len(LENGTHS) * LENGTHS[0], padded["attention_mask"]
    few = torch.ones_like(mask)
    few[0, -3:] = 0
    holes = mask.clone()
    holes[0, 5] = 0
    for kept in (mask.flip(1), few, holes, mask * torch.tensor([[1], [1], [0], [1], [1]])):
        assert rows_seen(ours, padded | {"attention_mask": kept}) == {every}
    with torch.no_grad():
        for kwargs in ({"output_hidden_states": True}, {"output_attentions": True}):
            given, expected = (model(**padded, **kwargs) for model in pair)
            assert given.last_hidden_state.shape == expected.last_hidden_state.shape
            for one in given.get("hidden_states", ()):
                assert one.shape == (len(LENGTHS), LENGTHS[0], 32)
    assert documents_of(mask, ()) is None  # gradients are recorded here
    given, expected = (model(**padded).last_hidden_state for model in (ours, theirs))
    torch.testing.assert_close(given, expected, **TOLERANCE)


def test_hooks_see_batches(padded, pair) -> None:
    ours, _ = pair
    shapes: list[torch.Size] = []
    handle = ours.layers[1].mlp.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    with torch.no_grad():
        ours(**padded)
        handle.remove()
        assert shapes == [(len(LENGTHS), LENGTHS[0], 32)]
    assert rows_seen(ours, padded) == {sum(LENGTHS)}


def test_a_window_without_padding_makes_no_mask(pair) -> None:
    ours, theirs = pair
    ids = torch.randint(3, 97, (2, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for mask in (None, torch.ones_like(ids)):
            assert set(ours.make_masks(ours.embeddings(ids, None), mask).values()) == {None}
            given, expected = (model(ids, attention_mask=mask).last_hidden_state for model in (ours, theirs))
            torch.testing.assert_close(given, expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["ModernBertForSequenceClassification", "ModernBertForMultipleChoice"])
def test_the_mean_of_the_tokens(name, batch, make_pair) -> None:
    ours, theirs = make_pair(name, FAMILIES["modernbert"].config(classifier_pooling="mean"))
    if "Choice" in name:
        batch = {key: torch.stack([value, value.flip(0)], dim=1) for key, value in batch.items()}
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch).logits, theirs(**batch).logits, **TOLERANCE)
        assert ours(batch["input_ids"]).logits.isfinite().all()


def test_sparse_predictions(batch, make_pair) -> None:
    ours, theirs = make_pair("ModernBertForMaskedLM", FAMILIES["modernbert"].config(sparse_prediction=True))
    labels = batch["input_ids"].masked_fill(torch.arange(11) % 3 > 0, -100)
    given, expected = (model(**batch, labels=labels) for model in (ours, theirs))
    torch.testing.assert_close(given.logits, expected.logits, **TOLERANCE)
    torch.testing.assert_close(given.loss, expected.loss, **TOLERANCE)


def test_what_it_does_not_carry() -> None:
    config = FAMILIES["modernbert"].config()
    for types, words in (
        (["full_attention", "chunked_attention"], "names chunked_attention; this family has full_attention, sliding"),
        (["full_attention"], "1 entries for num_hidden_layers=2"),
    ):
        config.layer_types = types
        with pytest.raises(ValueError, match=words):
            ModernBertModel(config)
