"""What GPT-2 alone has: ids of token types, and attention to an encoder."""

from __future__ import annotations

import pytest
import torch
import transformers

import easytorch
from tests.models.families import FAMILIES

IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44], [4, 4, 90, 12, 60, 7, 31, 6]])
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def encoder() -> dict[str, torch.Tensor]:
    """Five states of an encoder, the last two of the first row padding."""
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, 3:] = 0
    return {"encoder_hidden_states": torch.randn(2, 5, 32), "encoder_attention_mask": mask}


def test_attention_to_an_encoder(make_pair, encoder) -> None:
    models = make_pair("GPT2LMHeadModel", FAMILIES["gpt2"].config(add_cross_attention=True), "eager")
    given, expected = (model(IDS, **encoder, labels=IDS, output_attentions=True) for model in models)
    assert set(given) == set(expected)
    torch.testing.assert_close(given.logits, expected.logits, **TOLERANCE)
    for kind in ("attentions", "cross_attentions"):
        for one, other in zip(given[kind], expected[kind], strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)
    gradients = []
    for model, output in zip(models, (given, expected), strict=True):
        output.loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, **TOLERANCE)


def test_keys_of_the_encoder_are_made_once(make_pair, encoder) -> None:
    ours, theirs = make_pair("GPT2LMHeadModel", FAMILIES["gpt2"].config(add_cross_attention=True))
    with torch.no_grad():
        expected = theirs(IDS, **encoder).logits
        first = ours(IDS[:, :5], **encoder, use_cache=True)
        other = encoder | {"encoder_hidden_states": torch.zeros(2, 5, 32)}  # what is not read any more
        rest = ours(IDS[:, 5:], **other, past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), expected, **TOLERANCE)


def test_an_encoder_needs_cross_attention(make_pair, encoder) -> None:
    ours, _ = make_pair("GPT2LMHeadModel", FAMILIES["gpt2"].config())
    with pytest.raises(ValueError, match=r"config\.add_cross_attention=True"):
        ours(IDS, **encoder)


@pytest.mark.parametrize("name", ["GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification"])
def test_token_types(make_pair, name) -> None:
    ours, theirs = make_pair(name, FAMILIES["gpt2"].config())
    types = torch.randint(0, 97, IDS.shape)
    with torch.no_grad():
        torch.testing.assert_close(
            ours(IDS, token_type_ids=types)[0], theirs(IDS, token_type_ids=types)[0], **TOLERANCE
        )


def test_masks_of_old_checkpoints_are_left_behind(make_pair, tmp_path) -> None:
    """They held the causal mask of each layer and the number it fills in, and no name of the base model."""
    from safetensors.torch import load_file, save_file

    ours, _ = make_pair("GPT2LMHeadModel", FAMILIES["gpt2"].config())
    ours.save_pretrained(tmp_path)
    old = {name.removeprefix("transformer."): w for name, w in load_file(tmp_path / "model.safetensors").items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = type(ours).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in ours.state_dict().items())


def test_generate_takes_token_types(make_pair) -> None:
    ids = torch.tensor([[5, 9, 33, 71]])
    ours, theirs = make_pair("GPT2LMHeadModel", FAMILIES["gpt2"].config())
    given = {"token_type_ids": torch.tensor([[1, 1, 2, 2]]), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(ours.generate(ids, **given), theirs.generate(ids, **given))


def test_the_likeliest_token_needs_no_logits():
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)
    model = easytorch.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([[5, 9, 33], [71, 8, 12]])
    with torch.no_grad():
        assert torch.equal(model.likeliest_token(input_ids=ids), model(ids).logits[:, -1].argmax(-1))
