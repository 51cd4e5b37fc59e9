"""`TrainingConfig`: everything a training run depends on, as plain data that JSON and flags can carry."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16")
SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """A causal language model trained on text files.

    text: UTF-8 files, each one document.
    output: folder that receives `checkpoint-<step>/`, `metrics.jsonl`, `loss.png` and the tokenized text.
    model: the architecture, as its transformers config (`{"model_type": "llama", "hidden_size": 256, ...}`; vocabulary
        and special tokens come from the tokenizer), or the folder or hub id of a pretrained model to train further.
    vocab_size: of the byte-level BPE tokenizer trained on the text; 257 means plain bytes (256 and end-of-text). It is
        not used when `model` is pretrained and so has a tokenizer.
    block_size: tokens in a training sequence; documents are packed into blocks without padding.
    batch_size: sequences in one optimizer step, over all processes. It does not change what is learnt by how many
        processes there are: each takes its share.
    micro_batch_size: sequences a process holds at a time; the rest of its share is accumulated. None means all.
    learning_rate, min_learning_rate: peak and final rate of `schedule`, after `warmup_steps` of linear warm-up.
    weight_decay: applies to matrices; norms and biases are not decayed.
    dtype: "bfloat16" runs forward and backward under autocast; weights and optimizer stay float32.
    eval_fraction: share of the blocks held out, measured every `eval_every` steps and at the end.
    save_every: steps between checkpoints, 0 for only the last; the newest `keep_checkpoints` stay.
    resume: continue from the newest checkpoint of `output`, to exactly what an uninterrupted run would give.
    device: "auto" (CUDA or ROCm if there is one, else CPU), "cpu" or "cuda".
    """

    text: tuple[str, ...]
    output: str
    model: dict[str, Any] | str = field(default_factory=lambda: {"model_type": "llama"})
    vocab_size: int = 4096
    block_size: int = 256
    batch_size: int = 16
    micro_batch_size: int | None = None
    steps: int = 1000
    learning_rate: float = 1e-3
    min_learning_rate: float = 0.0
    schedule: str = "cosine"
    warmup_steps: int = 50
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    attn_implementation: str | None = None
    eval_fraction: float = 0.05
    eval_every: int = 100
    log_every: int = 10
    save_every: int = 0
    keep_checkpoints: int = 2
    resume: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("text names no file to train on")
        for name in ("vocab_size", "block_size", "batch_size", "steps", "eval_every", "log_every", "keep_checkpoints"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("warmup_steps", "save_every", "learning_rate", "min_learning_rate", "weight_decay", "grad_clip"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        self._require("vocab_size", self.vocab_size >= 257, "at least 257 (the bytes and end-of-text)")
        self._require("block_size", self.block_size >= 2, "at least 2 (a token and the one it predicts)")
        self._require("eval_fraction", 0 <= self.eval_fraction < 1, "in [0, 1)")
        self._require("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._require("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        self._require("device", self.device in ("auto", "cpu", "cuda"), "auto, cpu or cuda")
        if self.micro_batch_size is not None:
            self._require("micro_batch_size", self.micro_batch_size >= 1, "at least 1")
        if isinstance(self.model, dict) and "model_type" not in self.model:
            raise ValueError(
                f'model needs a "model_type", as in {{"model_type": "llama"}}; it has {sorted(self.model)}'
            )

    def _require(self, name: str, holds: bool, accepted: str) -> None:
        if not holds:
            raise ValueError(f"{name} must be {accepted}, got {getattr(self, name)!r}")

    def share(self, processes: int) -> tuple[int, int]:
        """(sequences a process takes of a batch, sequences it holds at a time); `ValueError` if they do not divide."""
        if self.batch_size % processes:
            raise ValueError(f"batch_size {self.batch_size} does not divide over {processes} processes")
        share = self.batch_size // processes
        micro = share if self.micro_batch_size is None else self.micro_batch_size
        if share % micro:
            raise ValueError(
                f"micro_batch_size {micro} does not divide the {share} sequences a process takes of a batch"
            )
        return share, micro

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingConfig:
        """From the names above; an unknown one is an error."""
        known = [item.name for item in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown training settings {', '.join(unknown)}; known: {', '.join(known)}")
        missing = [name for name in ("text", "output") if name not in values]
        if missing:
            raise ValueError(f"training needs {' and '.join(missing)}")
        text = values["text"]
        return cls(**{**values, "text": (text,) if isinstance(text, str) else tuple(text)})
