"""What BART and mBART have beside the other encoder-decoders: a bias of logits, LayerDrop, the decoder alone."""

from __future__ import annotations

import pytest
import torch

from tests.models.families import FAMILIES

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 90, 17], [4, 4, 90, 12, 60, 7, 31, 6, 88, 23]])


def test_the_bias_of_the_logits(make_pair, monkeypatch) -> None:
    """With the logits, in the loss without them, and with more tokens or fewer."""
    monkeypatch.setattr("easytorch.layers.deferred_logits.SMALLEST", 0)
    ours, theirs = make_pair("BartForConditionalGeneration", FAMILIES["bart"].config(dropout=0.0))
    bias = torch.randn(1, 97, generator=torch.Generator().manual_seed(0))
    for model in (ours, theirs):
        model.final_logits_bias.copy_(bias)
        model.train()
    outputs = [model(IDS, labels=IDS) for model in (ours, theirs)]
    for name in ("loss", "logits"):
        torch.testing.assert_close(outputs[0][name], outputs[1][name], **TOLERANCE)
    for count in (101, 90):
        for model in (ours, theirs):
            model.resize_token_embeddings(count, mean_resizing=False)
        assert torch.equal(ours.final_logits_bias, theirs.final_logits_bias)


@pytest.mark.parametrize("family, name", [("bart", "BartModel"), ("mbart", "MBartModel")])
def test_layers_are_left_out_as_in_transformers(family, name, make_pair) -> None:
    outputs = []
    for rate in (0.5, 1.0):
        config = FAMILIES[family].config(dropout=0.0, encoder_layerdrop=rate, decoder_layerdrop=rate)
        pair = make_pair(name, config)
        for model in pair:
            torch.manual_seed(3)
            with torch.no_grad():
                outputs.append([model.train()(IDS)[0] for _ in range(4)])
        with torch.no_grad():  # and in training alone
            torch.testing.assert_close(*(model.eval()(IDS)[0] for model in pair), **TOLERANCE)
    for given, expected in zip(outputs[0] + outputs[2], outputs[1] + outputs[3], strict=True):
        torch.testing.assert_close(given, expected, **TOLERANCE)
    assert any(not torch.equal(*pair) for pair in zip(outputs[0], outputs[2], strict=True))


@pytest.mark.parametrize("family, name", [("bart", "BartForCausalLM"), ("mbart", "MBartForCausalLM")])
def test_the_decoder_alone(family, name, make_pair) -> None:
    ours, theirs = make_pair(name, FAMILIES[family].config())
    encoder = {"encoder_hidden_states": torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(5))}
    encoder["encoder_attention_mask"] = torch.tensor([[1] * 4 + [0] * 3, [1] * 7])
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    for given in ({}, encoder):
        with torch.no_grad():
            expected = theirs(IDS, **given).logits
            torch.testing.assert_close(ours(IDS, **given).logits, expected, **TOLERANCE)
            kept = ours(IDS, **given, logits_to_keep=2).logits
            first = ours(IDS[:, :6], **given, use_cache=True)
            rest = ours(IDS[:, 6:], **given, past_key_values=first.past_key_values, use_cache=True)
        torch.testing.assert_close(kept, expected[:, -2:], **TOLERANCE)
        torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), expected, **TOLERANCE)
    assert torch.equal(*(model.generate(IDS, **settings) for model in (ours, theirs)))
