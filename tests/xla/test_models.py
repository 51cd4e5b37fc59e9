"""Native BERT and Llama on xla: forward, backward and an optimizer step equal the CPU's."""

from __future__ import annotations

import copy

import pytest
import torch

from easytorch.operations.dispatch.check import relative_rms_error

# Relative RMS in float32: the two backends sum in different orders. Gradients pass through more sums than logits do.
FORWARD, GRADIENT = 1e-5, 5e-5


def bert():
    from transformers import BertConfig

    from easytorch.models.bert import BertForMaskedLM

    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
    )  # fmt: skip
    return BertForMaskedLM(config)


def llama():
    from transformers import LlamaConfig

    from easytorch.models.llama import LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=32, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(padding):
    ids = torch.randint(1, 99, (3, 17), generator=torch.Generator().manual_seed(1))
    labels = torch.where(torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.7, ids, -100)
    mask = torch.ones_like(ids)
    if padding:
        mask[1, 9:] = 0
        mask[2, :5] = 0
        labels = torch.where(mask.bool(), labels, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def optimizers(parameters):
    # eps far above the gradients' rounding: Adam's first step is otherwise the sign of a gradient that may be noise
    return {
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3),
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    }


def train(model, inputs, optimizer, steps=2):
    """Logits and gradients of the first step, loss of each, weights after the last; all on the host."""
    device = next(model.parameters()).device
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    optimizer = optimizers(list(model.parameters()))[optimizer]()
    first, losses = None, []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(**inputs)
        output.loss.backward()
        if first is None:
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            first = output.logits.detach(), grads
        optimizer.step()
        losses.append(output.loss.detach())
        if device.type == "xla":
            import torch_xla

            torch_xla.sync()

    def host(tensors):
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}

    return first[0].cpu(), host(first[1]), torch.stack(losses).cpu(), host(dict(model.named_parameters()))


@pytest.mark.parametrize(("padding", "optimizer"), [(False, "sgd"), (True, "adamw")], ids=["full-sgd", "padded-adamw"])
@pytest.mark.parametrize("make", [bert, llama])
def test_training_steps_equal_the_cpu(make, padding, optimizer):
    torch.manual_seed(0)
    model = make().train()
    inputs = batch(padding)
    on_xla = copy.deepcopy(model).to("xla")
    logits, grads, losses, weights = train(model, inputs, optimizer)
    got_logits, got_grads, got_losses, got_weights = train(on_xla, inputs, optimizer)

    # a padded query sees keys that are not defined by the contract of the models; its logits are nobody's
    rows = inputs["attention_mask"].bool()
    assert relative_rms_error(got_logits[rows], logits[rows]) < FORWARD
    assert losses[1] < losses[0]
    assert relative_rms_error(got_losses, losses) < FORWARD
    assert grads.keys() == got_grads.keys() and len(grads) > 10
    for name, grad in grads.items():
        assert error(got_grads[name], grad, least=1e-3) < GRADIENT, name
    for name, weight in weights.items():
        assert error(got_weights[name], weight, least=1e-2) < GRADIENT, name


def error(got, want, least):
    """Relative RMS error, of at least `least`: the gradient of a key's bias is zero but for rounding."""
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt().clamp(min=least))


@pytest.mark.parametrize("make", [bert, llama])
def test_steps_are_one_program(make, count_programs):
    """The first step has a program of its own, since it makes the optimizer's state; the later ones share another."""
    torch.manual_seed(0)
    model = make().to("xla").train()
    inputs = {name: tensor[:1] for name, tensor in batch(False).items()}  # a shape no other test has compiled
    assert count_programs(lambda: train(model, inputs, "sgd", steps=4)) <= 3
    assert count_programs(lambda: train(model, inputs, "sgd", steps=4)) == 0


def test_tied_weights_stay_tied_on_xla():
    model = bert().to("xla")
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
