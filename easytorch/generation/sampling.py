"""From logits to tokens: pure tensor functions, and `Sampler`, which holds the state between steps.

The random numbers are a function of (seed, step, row, token), not of a generator's hidden state: a seed gives the same
tokens on every device, a row's tokens do not depend on the other rows, and a compiled decode step needs only a counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from easytorch.kernels.random.counter import LOW, counter_hash

# Below it sampling is greedy, as in vLLM: quotients of logits overflow long before the temperature is 0.
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen. The filters apply in the order of transformers: penalty, temperature, top-k, top-p.

    temperature: divides the logits; 0, and what is below 1e-5, takes the most probable token (greedy).
    top_k: keep the k most probable tokens. top_p: keep the fewest tokens whose probabilities add up to top_p.
    repetition_penalty: divides positive and multiplies negative logits of tokens that occurred (arXiv:1909.05858).
    seed: of the random numbers; None draws one from torch's default generator.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}; None keeps every token")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not self.repetition_penalty > 0.0:
            raise ValueError(f"repetition_penalty must be positive, got {self.repetition_penalty}; 1 is none")

    @property
    def greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE


def keep_top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """(B, V) -> (B, V): -inf below the k-th largest logit of each row; ties with it stay."""
    least = torch.topk(logits, min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < least, float("-inf"))


def keep_top_p(logits: torch.Tensor, top_p: float | torch.Tensor) -> torch.Tensor:
    """(B, V) -> (B, V): -inf outside the smallest set of tokens whose probability reaches top_p; one always stays."""
    ordered, order = torch.sort(logits)
    dropped = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    last = torch.arange(logits.shape[-1], device=logits.device) == logits.shape[-1] - 1
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped & ~last), float("-inf"))


def keep_min_p(logits: torch.Tensor, min_p: float | torch.Tensor) -> torch.Tensor:
    """(B, V) -> (B, V): -inf for tokens less than min_p times as likely as the likeliest one of the row."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), float("-inf"))


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float | torch.Tensor) -> torch.Tensor:
    """(B, V), seen (B, V) boolean -> (B, V)."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def gumbel_noise(
    seed: torch.Tensor, step: torch.Tensor, shape: tuple[int, int], rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Standard Gumbel noise (B, V) in float32: argmax(logits + noise) is distributed as softmax(logits).

    seed, step: int64, of one element or (B, 1), on the device of the result. rows (B,): what stands for the number of
    each row. Of the hash 23 bits are used, so that every value lies strictly between 0 and 1 in float32.
    """
    every, columns = (torch.arange(n, device=seed.device) for n in shape)
    state = counter_hash(seed, step, (every if rows is None else rows)[:, None], columns)
    uniform = ((state >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


class Sampler:
    """Picks the next token of each row; a row that met an end token gives `pad_token_id` from then on.

    Every quantity that changes is a tensor on `device` and changes in place, so each call is the same graph: traced by
    torch_xla, or captured by CUDA from the second call on.
    """

    def __init__(
        self,
        config: SamplingConfig,
        prompt: torch.Tensor,
        prompt_mask: torch.Tensor,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        device: torch.device,
    ) -> None:
        """prompt (B, T) int64 and prompt_mask (B, T), nonzero at real tokens, may be on any device."""
        self.config = config
        self.pad_token_id = pad_token_id
        self.eos = torch.tensor(list(eos_token_ids), dtype=torch.int64).to(device) if eos_token_ids else None
        self.finished = torch.zeros(prompt.shape[0], dtype=torch.bool).to(device)
        self.prompt, self.prompt_mask = prompt.to(device), prompt_mask.to(device=device, dtype=torch.bool)
        self.seen: torch.Tensor | None = None
        seed = torch.randint(0, 2**31 - 1, ()).item() if config.seed is None else config.seed
        # shape (1,): torch_xla compiles the scalars 0 and 1 into the program as constants, so seed 1 would recompile
        self.seed = torch.tensor([int(seed) & LOW]).to(device)
        self.step = torch.tensor([0]).to(device)
        scalars = (config.temperature, config.top_p or 1.0, config.repetition_penalty)
        self.temperature, self.top_p, self.penalty = (torch.tensor([value]).to(device) for value in scalars)

    @property
    def constants(self) -> tuple[Any, ...]:
        """What a captured call of it holds as it was: everything but its tensors."""
        config = self.config
        filters = (config.greedy, config.top_k, config.top_p is not None and config.top_p < 1.0)
        ends = 0 if self.eos is None else len(self.eos)
        return (*filters, config.repetition_penalty != 1.0, ends, self.pad_token_id)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that a call reads and writes after its first, by the names of the attributes."""
        names = ("eos", "finished", "seen", "seed", "step", "temperature", "top_p", "penalty")
        return {name: value for name in names if isinstance(value := getattr(self, name), torch.Tensor)}

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, V) -> tokens (B,) int64."""
        config, logits = self.config, logits.to(torch.float32)
        if config.repetition_penalty != 1.0:
            if self.seen is None:
                none = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
                self.seen = none.scatter_add(1, self.prompt, self.prompt_mask.to(torch.int64)) > 0
            logits = penalize_repetition(logits, self.seen, self.penalty)
        if not config.greedy:
            logits = logits / self.temperature
            if config.top_k is not None:
                logits = keep_top_k(logits, config.top_k)
            if config.top_p is not None and config.top_p < 1.0:
                logits = keep_top_p(logits, self.top_p)
            logits = logits + gumbel_noise(self.seed, self.step, (logits.shape[0], logits.shape[1]))
        return self.follow(torch.argmax(logits, dim=-1))

    def follow(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens (B,) that were chosen -> those of each row, padding where it has ended."""
        if self.eos is not None:
            tokens = torch.where(self.finished, self.pad_token_id, tokens)
            self.finished |= (tokens[:, None] == self.eos).any(dim=-1)
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        self.step += 1
        return tokens
