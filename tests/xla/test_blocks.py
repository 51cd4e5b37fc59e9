"""Families of the building blocks on xla: a step of training, and eight tokens of two programs.

Of encoder-decoders the encoder and the decoder's first step are the first program.

Llama (the decoder) and BERT (the encoder) are in test_models.py and test_generation.py.
"""

from __future__ import annotations

import copy
import importlib

import pytest
import torch

from easytorch.generation import generate_tokens
from easytorch.operations.dispatch.check import relative_rms_error
from tests.models.families import FAMILIES, LANGUAGE

IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 90, 17], [4, 4, 90, 12, 60, 7, 31, 6, 88, 23]])
GENERATES = {"experts": "qwen3_moe", "latent": "deepseek_v3", "recurrent": "mamba2", "delta": "qwen3_next"}
SEQ2SEQ = {
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}
LARGER = {"t5": 0.5, "bart": 0.3, "whisper": 0.3}  # noise of the weights: with less all tokens are the same
TRAINS = {"tower": "vit", "experts": "qwen3_moe"}  # a minute each is compiling, so not every block's


def made(family):
    torch.manual_seed(0)
    name = SEQ2SEQ.get(family) or LANGUAGE[family]
    model_class = getattr(importlib.import_module(f"easytorch.models.{family}"), name)
    model = model_class(FAMILIES[family].config(**dict.fromkeys(FAMILIES[family].dropouts, 0.0))).eval()
    scale = LARGER.get(family, 0.1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(scale * torch.randn_like(weight))
    return model


def inputs(family):
    if family == "vit":
        pixels = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": pixels, "labels": torch.tensor([1, 0])}
    return {"input_ids": IDS, "labels": IDS}


def step(model, given):
    """Logits, loss and gradients, on the host."""
    device = next(model.parameters()).device
    output = model(**{name: tensor.to(device) for name, tensor in given.items()})
    output.loss.backward()
    grads = {name: weight.grad.cpu() for name, weight in model.named_parameters() if weight.grad is not None}
    return output.logits.detach().cpu(), output.loss.detach().cpu(), grads


@pytest.mark.parametrize("block", TRAINS)
def test_a_step_of_training_equals_the_cpu(block):
    model = made(TRAINS[block])
    on_xla = copy.deepcopy(model).to("xla")
    logits, loss, grads = step(model, inputs(TRAINS[block]))
    got_logits, got_loss, got_grads = step(on_xla, inputs(TRAINS[block]))
    assert relative_rms_error(got_logits, logits) < 1e-5
    assert abs(float(got_loss - loss)) < 1e-4 * float(loss)
    assert got_grads.keys() == grads.keys() and len(grads) > 10
    for name, grad in grads.items():
        scale = grad.square().mean().sqrt().clamp(min=1e-3)
        assert float((got_grads[name] - grad).square().mean().sqrt() / scale) < 1e-4, name


@pytest.mark.parametrize("block", GENERATES)
def test_eight_tokens_are_two_programs(block, count_programs):
    model = made(GENERATES[block])
    on_xla = copy.deepcopy(model).to("xla")

    def generate(one):
        return torch.stack(list(generate_tokens(one, IDS, max_new_tokens=8, eos_token_id=-1)), dim=1)

    wanted, found = generate(model), []
    assert count_programs(lambda: found.append(generate(on_xla))) == 2, "the prompt's program and a step's"
    assert torch.equal(found[0], wanted)


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_eight_tokens_of_an_encoder_decoder_are_two_programs(family, count_programs):
    """The rows of a text have their padding; a text of another length in the same bucket compiles nothing."""
    model = made(family)
    on_xla = copy.deepcopy(model).to("xla")
    mask = torch.ones_like(IDS)
    mask[1, 7:] = 0
    source, longer = (IDS, mask), (IDS[:, [*range(10), 4, 2]], None)
    if family == "whisper":
        shape = (2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        source, longer = ((torch.randn(shape, generator=torch.Generator().manual_seed(n)), None) for n in (1, 2))
    encoded = []
    on_xla.get_encoder().register_forward_hook(lambda *_: encoded.append(1))

    def generate(one, given, new=8):
        return torch.stack(list(generate_tokens(one, *given, max_new_tokens=new, eos_token_id=-1)), dim=1)

    wanted, found = generate(model, source), []
    assert count_programs(lambda: found.append(generate(on_xla, source))) == 2, "the first token's and a step's"
    assert torch.equal(found[0], wanted) and len(wanted.unique()) > 1 and encoded == [1]
    wanted = generate(model, longer, 20)
    assert count_programs(lambda: found.append(generate(on_xla, longer, 20))) == 0
    assert torch.equal(found[1], wanted)
