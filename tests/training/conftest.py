"""A text of a few kilobytes and the settings of a run that takes a second."""

from __future__ import annotations

import json
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


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TINY = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "tie_word_embeddings": True, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory) -> Path:
    """A folder with a tiny Llama and a tokenizer of bytes that has a chat template."""
    import torch
    import transformers

    from easytorch.training.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("pretrained")
    tokenizer = train_tokenizer([TEXT], 257)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **TINY)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def datasets_of(tmp_path_factory) -> dict[str, str]:
    """JSON lines of conversations ("sft") and of preferences ("dpo"), of unlike lengths."""
    folder, words = tmp_path_factory.mktemp("data"), TEXT.split()
    chat, pairs = [], []
    for number in range(24):
        question, answer = words[number % len(words)], " ".join(words[: number % 3 + 1])
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        chat.append({"messages": turns if number % 4 else [*turns, *turns]})
        others = [word for word in words if word != answer]
        pairs.append({"prompt": f"{question} ", "chosen": answer, "rejected": others[(number * 5) % len(others)]})
    found = {}
    for name, examples in (("sft", chat), ("dpo", pairs)):
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, examples)), encoding="utf-8")
        found[name] = str(path)
    return found


@pytest.fixture
def finetuning(pretrained, datasets_of, tmp_path) -> Callable[..., TrainingConfig]:
    """`finetuning(task, name, **changes)`: the config of a tiny run on conversations or preferences."""

    def make(kind: str, name: str = "run", **changes: Any) -> TrainingConfig:
        values: dict[str, Any] = {
            "dataset": datasets_of[kind], "task": kind, "output": str(tmp_path / name), "model": str(pretrained),
            "block_size": 96, "batch_size": 4, "steps": 4, "save_every": 2, "warmup_steps": 1, "learning_rate": 5e-3,
            "eval_every": 2, "eval_fraction": 0.1, "device": "cpu",
        }  # fmt: skip
        return TrainingConfig(**{**values, **changes})

    return make
