"""Stage 3: a small Llama, trained with torchrun on the documentation that ships with Python."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import torch

import easytorch
from easytorch.cli.demo.stage import Demo
from easytorch.training import TrainingConfig, latest_checkpoint, launch
from easytorch.training.metrics import read_metrics, series

PROCESSES = 2
TOLERANCE = 1e-4


def run(demo: Demo) -> Path:
    """Trains and returns the folder of the checkpoint."""
    corpus = demo.output / "python-topics.txt"
    corpus.write_text(python_topics(), encoding="utf-8")
    config = settings(corpus, demo.output / "llama", quick=demo.quick)
    demo.say(
        f"$ torchrun --standalone --nproc-per-node {PROCESSES} scripts/train.py --config {config.output}/training.json"
    )
    launch(config, PROCESSES)
    output = Path(config.output)
    checkpoint = latest_checkpoint(output)
    assert checkpoint is not None
    demo.made("Trained Llama", checkpoint)
    demo.made("Loss curve", output / "loss.png")
    _check_loss(demo, output / "metrics.jsonl")
    _check_loads(demo, checkpoint)
    return checkpoint


def settings(corpus: Path, output: Path, *, quick: bool) -> TrainingConfig:
    """A model and a number of steps that two cores finish in about two minutes, or in seconds when `quick`.

    Measured on this text at equal tokens: steps of 512 tokens and a vocabulary of 4096 end at 1.05 nats a character,
    steps of 1024 and 2048 at 1.19; a peak rate of 4e-3 learns more slowly than 1.2e-3.
    """
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    if not quick:
        size = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8}
    return TrainingConfig(
        text=(str(corpus),),
        output=str(output),
        model={
            "model_type": "llama",
            **size,
            "num_key_value_heads": size["num_attention_heads"] // 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        },
        vocab_size=1024 if quick else 4096,
        block_size=64 if quick else 128,
        batch_size=8 if quick else 4,
        steps=60 if quick else 1000,
        learning_rate=3e-3 if quick else 1.2e-3,
        warmup_steps=10 if quick else 50,
        eval_every=30 if quick else 100,
        log_every=10 if quick else 50,
    )


def python_topics() -> str:
    """The language reference's topics as `help()` shows them: about half a megabyte of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _check_loss(demo: Demo, metrics: Path) -> None:
    lines = read_metrics(metrics)
    losses, held_out = ([value for _, value in series(lines, name)] for name in ("loss", "eval_loss"))
    for what, first, last in (
        ("training loss falls, mean of the first and last five steps", fmean(losses[:5]), fmean(losses[-5:])),
        ("loss on held-out text falls, first and last evaluation", held_out[0], held_out[-1]),
    ):
        demo.check(what, f"{first:.3f} -> {last:.3f}", last < first)


def _check_loads(demo: Demo, checkpoint: Path) -> None:
    """transformers' own class reads the checkpoint and computes the same logits."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ours = easytorch.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    inputs = tokenizer("The import statement combines two operations;", return_tensors="pt")
    with torch.no_grad():
        got, expected = ours(**inputs).logits, theirs(**inputs).logits
    difference = float((got - expected).abs().max())
    demo.check(
        "logits of the checkpoint against transformers.AutoModelForCausalLM, max abs difference",
        f"{difference:.2e} (allowed {TOLERANCE:.0e})",
        difference < TOLERANCE,
    )
