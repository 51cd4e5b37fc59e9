"""A text of a few kilobytes and the settings of a run that takes a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from easytorch.training import TrainingConfig

TEXT = "the class statement binds a name to an object and the function returns its value when it is called"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Sentences that a tiny model learns something of in ten steps."""
    words = TEXT.split()
    lines = [" ".join(words[(i * 7 + j * j) % len(words)] for j in range(9)) + "." for i in range(400)]
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def settings(corpus: Path, tmp_path: Path) -> Callable[..., TrainingConfig]:
    """`settings(name, **changes)`: the config of a tiny run into the folder `name`."""

    def make(name: str = "run", **changes: Any) -> TrainingConfig:
        values: dict[str, Any] = {
            "text": (str(corpus),),
            "output": str(tmp_path / name),
            "model": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            "vocab_size": 300,
            "block_size": 32,
            "batch_size": 8,
            "steps": 10,
            "learning_rate": 5e-3,
            "warmup_steps": 2,
            "eval_every": 5,
            "device": "cpu",
        }
        return TrainingConfig(**{**values, **changes})

    return make


@pytest.fixture
def partly_unused() -> dict[str, Any]:
    """A model whose loss does not depend on its attention to an encoder, which has no gradient then."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "add_cross_attention": True}
    return {"model_type": "gpt2", **sizes, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
