"""Log probabilities of tokens, with the likeliest of their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from easytorch.generation.engine.outputs import Logprob
from easytorch.generation.engine.request import decode_token


def logprobs_of(
    logits: Tensor, tokens: Sequence[int], most: Sequence[int | None], tokenizer: Any
) -> list[dict[int, Logprob] | None]:
    """logits (B, V), a token of each row -> the token's log probability and the `most` likeliest of its row, by token;
    None where `most` is None."""
    found: list[dict[int, Logprob] | None] = [None] * len(tokens)
    rows = [row for row, count in enumerate(most) if count is not None]
    if not rows:
        return found
    wanted = logits if len(rows) == len(logits) else logits[rows]
    own = wanted.float().log_softmax(dim=-1)
    chosen = own.gather(1, own.new_tensor([tokens[row] for row in rows]).long()[:, None])
    ranks = ((own > chosen).sum(dim=1) + 1).tolist()
    values, best = own.topk(min(max(most[row] or 0 for row in rows), own.shape[1]), dim=1)
    for row, value, rank, likeliest in zip(
        rows, chosen[:, 0].tolist(), ranks, zip(values.tolist(), best.tolist(), strict=True), strict=True
    ):
        given = {tokens[row]: Logprob(value, rank, decode_token(tokenizer, tokens[row]))}
        for place, (other_value, other) in enumerate(list(zip(*likeliest, strict=True))[: most[row]]):
            given.setdefault(other, Logprob(other_value, place + 1, decode_token(tokenizer, other)))
        found[row] = given
    return found
