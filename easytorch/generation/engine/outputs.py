"""`RequestOutput`: the state of a request for users, after a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """The log probability of one token at one position. rank: 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None = None


# Text, tokens and log probabilities by token id, one dict for each token.
Generated = tuple[str, list[int], list[dict[int, Logprob]] | None]


@dataclass(frozen=True)
class CompletionOutput:
    """The continuation generated so far, or what a step added to it (`RequestOutputKind.DELTA`). text: "" without a
    tokenizer. logprobs: by token id, one dict for each token.

    stop_reason: the stop string or stop token that ended it; None for the model's end token and for a structured text
    that is complete; the reason where a grammar that cannot continue aborted it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None

    @classmethod
    def when_read(cls, read: Callable[[], Generated], **known: Any) -> Self:
        """One whose text, tokens and log probabilities are copied from the request's when they are first asked for: an
        output of all tokens at each token would take the square of their number."""
        made = object.__new__(cls)
        made.__dict__.update(known, _read=read)
        return made

    def __getattr__(self, name: str) -> Any:
        # reached where the attribute is missing; two threads may read it at once
        read = self.__dict__.get("_read")
        if name not in _READ or read is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self.__dict__.update(zip(_READ, read(), strict=True))
        return self.__dict__[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, one.name) for one in fields(self))


_READ = ("text", "token_ids", "logprobs")


@dataclass(frozen=True)
class RequestOutput:
    """One request after a step. num_cached_tokens: prompt tokens served from the prefix cache. prompt_logprobs: one
    dict for each token of the prompt, None for the first; None where they were not asked for; of outputs of new tokens
    (`RequestOutputKind.DELTA`) the first has all of them, and the others have []."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
