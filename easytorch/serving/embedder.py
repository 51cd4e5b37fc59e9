"""`Embedder`: unit vectors of texts, from the pooled outputs of an encoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

Pooling = Literal["mean", "cls"]
_BATCH = 32


class Embedder:
    """pooling: the mean of the tokens' outputs, or the first one's."""

    def __init__(self, model: Any, tokenizer: Any, pooling: Pooling = "mean") -> None:
        self.model, self.tokenizer, self.pooling = model, tokenizer, pooling
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]
        longest = [getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length]
        self.longest: int = min(one for one in longest if one is not None)

    def __call__(self, inputs: Sequence[str | Sequence[int]]) -> tuple[list[list[float]], int]:
        """The vectors, and how many tokens the inputs had. `ValueError` for what cannot be embedded."""
        rows = [self._tokens(one) for one in inputs]
        # sorted by length, to reduce padding
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        vectors: dict[int, list[float]] = {}
        for first in range(0, len(order), _BATCH):
            part = order[first : first + _BATCH]
            found = self._embed([rows[row] for row in part]).tolist()
            vectors.update(zip(part, found, strict=True))
        return [vectors[row] for row in range(len(rows))], sum(map(len, rows))

    def _tokens(self, one: str | Sequence[int]) -> list[int]:
        tokens: list[int] = list(self.tokenizer(one)["input_ids"] if isinstance(one, str) else one)
        if not tokens or (isinstance(one, str) and not one):
            raise ValueError("an input is empty")
        if len(tokens) > self.longest:
            raise ValueError(f"an input has {len(tokens)} tokens, and this model takes {self.longest}")
        if (highest := max(tokens)) >= self._vocabulary:
            raise ValueError(f"an input has token {highest}; tokens are from 0 to {self._vocabulary - 1}")
        return tokens

    @torch.inference_mode()
    def _embed(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        longest, padding, device = max(map(len, rows)), self.tokenizer.pad_token_id or 0, self.model.device
        ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
        hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.to(torch.float32)
        pooled = hidden[:, 0]
        if self.pooling == "mean":
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(pooled, dim=-1)


def pooling_of(folder: str) -> Pooling:
    """The pooling of sentence-transformers' `1_Pooling/config.json` if the folder has one; else the mean."""
    path = Path(folder) / "1_Pooling" / "config.json"
    if not path.is_file():
        return "mean"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(mode := settings.get("pooling_mode"), str):
        asked = {mode}
    else:
        known = {name.removeprefix("pooling_mode_"): value for name, value in settings.items() if value is True}
        asked = {
            {"cls_token": "cls", "mean_tokens": "mean"}.get(name, name) for name in known if name != "include_prompt"
        }
    if asked == {"cls"}:
        return "cls"
    if asked == {"mean"}:
        return "mean"
    raise ValueError(f"{path}: pools by {', '.join(sorted(asked)) or 'nothing'}; this server supports mean and cls")
