"""The loop is held to one written out by hand: AdamW, clipping, schedule, accumulation and dropout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from easytorch.training import train
from easytorch.training.data import step_indices
from easytorch.training.loop import dropout_seed
from easytorch.training.metrics import read_metrics, series

DROPOUT = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.3, "embd_pdrop": 0.2,
    "attn_pdrop": 0.0,
}  # fmt: skip


def by_hand(config, steps):
    """The losses, gradient norms and weights of the run, from the weights of an untrained one."""
    start = dataclasses.replace(config, output=config.output + "-start", learning_rate=0.0, steps=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(train(start).checkpoint).train()
    tokens = np.load(Path(config.output) / "data" / "tokens.npy")
    blocks = torch.from_numpy(tokens[: len(tokens) // config.block_size * config.block_size].astype(np.int64))
    blocks = blocks.view(-1, config.block_size)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(config.beta1, config.beta2),
    )
    losses, norms = [], []
    for step in range(steps):
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / config.warmup_steps)
            left = 1 - max(0, step - config.warmup_steps) / (config.steps - config.warmup_steps)
            group["lr"] = config.learning_rate * warm * left
        torch.manual_seed(dropout_seed(config.seed, step, 0))
        batch = blocks[step_indices(step, config.batch_size, len(blocks), config.seed)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([parameter.grad.square().sum() for parameter in model.parameters()]).sum().sqrt()
        for parameter in model.parameters():
            parameter.grad *= min(1.0, config.grad_clip / float(norm)) if config.grad_clip else 1.0
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return losses, norms, model.state_dict()


@pytest.mark.parametrize(("clip", "model"), [(0.05, {}), (0.0, {"model": DROPOUT})], ids=["clipped", "dropout"])
def test_every_number_is_that_of_a_loop_by_hand(settings, clip, model):
    config = settings(
        steps=6, eval_fraction=0.0, schedule="linear", warmup_steps=2, weight_decay=0.3, beta1=0.7, beta2=0.8,
        learning_rate=0.02, grad_clip=clip, seed=5, **model,
    )  # fmt: skip
    result = train(config)
    losses, norms, weights = by_hand(config, 6)
    lines = read_metrics(Path(config.output) / "metrics.jsonl")
    assert [value for _, value in series(lines, "loss")] == pytest.approx(losses, rel=1e-4)
    assert [value for _, value in series(lines, "gradient_norm")] == pytest.approx(norms, rel=1e-3)
    assert min(norms) > 0.05  # clipping has something to do
    trained = transformers.AutoModelForCausalLM.from_pretrained(result.checkpoint).state_dict()
    for name, expected in weights.items():
        assert float((trained[name] - expected).norm() / expected.norm()) < 1e-3, name


def test_a_resumed_run_drops_out_what_an_uninterrupted_one_does(settings):
    """Dropout is a function of seed and step: without that, a resumed run draws other masks."""
    complete = settings("complete", model=DROPOUT, steps=6, save_every=3, eval_fraction=0.1, eval_every=2)
    train(complete)
    broken = dataclasses.replace(complete, output=complete.output + "-broken")
    train(broken)
    for path in (Path(broken.output) / "checkpoint-6").iterdir():
        path.unlink()
    (Path(broken.output) / "checkpoint-6").rmdir()
    torch.rand(17)
    train(dataclasses.replace(broken, resume=True))
    files = [Path(config.output) / "checkpoint-6" / "model.safetensors" for config in (complete, broken)]
    assert files[0].read_bytes() == files[1].read_bytes()
    metrics = [series(read_metrics(Path(c.output) / "metrics.jsonl"), "eval_loss") for c in (complete, broken)]
    assert metrics[0] == metrics[1] and len(metrics[0]) == 3


def test_the_seed_decides_the_first_weights_and_dropout(settings):
    runs = {seed: settings(f"{seed}", model=DROPOUT, seed=seed, steps=2, eval_fraction=0.0) for seed in (0, 1)}
    again = dataclasses.replace(runs[0], output=runs[0].output + "-again")
    found = []
    for config in (runs[0], again, runs[1]):
        train(config)
        found.append(series(read_metrics(Path(config.output) / "metrics.jsonl"), "loss"))
    assert found[0] == found[1] != found[2]


def test_every_seed_step_and_rank_draws_its_own_dropout():
    drawn = {dropout_seed(seed, step, rank) for seed in (0, 1, 7) for step in range(50) for rank in range(8)}
    assert len(drawn) == 3 * 50 * 8
    torch.manual_seed(dropout_seed(2**40, 10**6, 63))  # torch takes 64 bits


def test_the_held_out_loss_is_the_mean_of_the_held_out_blocks(settings):
    """Without dropout, of all blocks alike, in pieces that do not divide them; the last blocks of the text."""
    config = settings(model=DROPOUT, steps=1, eval_fraction=0.158, eval_every=1, micro_batch_size=4)
    result = train(config)
    ((_, found),) = series(read_metrics(Path(config.output) / "metrics.jsonl"), "eval_loss")
    tokens = np.load(Path(config.output) / "data" / "tokens.npy")
    count = len(tokens) // config.block_size
    blocks = torch.from_numpy(tokens[: count * config.block_size].astype(np.int64)).view(count, -1)
    held_out = blocks[-max(1, round(count * config.eval_fraction)) :]
    piece = config.share(1)[1]
    assert len(held_out) > piece > 1 and len(held_out) % piece, "pieces of unlike sizes"
    model = transformers.AutoModelForCausalLM.from_pretrained(result.checkpoint).eval()
    with torch.no_grad():
        losses = [float(model(input_ids=one[None], labels=one[None]).loss) for one in held_out]
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-4)
