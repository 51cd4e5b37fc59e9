"""`Request`: the state of one continuation of a prompt in the engine."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from easytorch.generation.engine.outputs import CompletionOutput, FinishReason, Generated, Logprob, RequestOutput
from easytorch.generation.engine.params import RequestOutputKind, SamplingParams
from easytorch.generation.engine.stop import StoppedText
from easytorch.generation.engine.structured import StructuredText


@dataclass(eq=False)
class Request:
    """tokens: prompt and output. computed: the number of tokens whose keys and values are in `pages` after the
    scheduled step. hashes: one for each full page of tokens. max_length: the number of tokens at which it ends. slot:
    its index among the running requests. prompt_logprobs: of the prompt's tokens that have been scored so far.
    returned: the numbers of output tokens and characters that an output has had."""

    request_id: str
    prompt: str | None
    prompt_length: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    max_length: int
    end_tokens: frozenset[int]
    stop_tokens: frozenset[int]
    text: StoppedText | None
    bad_words: tuple[tuple[int, ...], ...] = ()
    structure: StructuredText | None = None
    index: int = 0
    slot: int = -1
    computed: int = 0
    cached: int | None = None
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    returned: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.prompt_tokens = self.tokens[: self.prompt_length]  # of all outputs

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def unscored(self) -> range:
        """The positions of the prompt whose logits are still to be read for `params.prompt_logprobs`: those of a
        position score the token after it."""
        if self.params.prompt_logprobs is None:
            return range(0)
        return range(len(self.prompt_logprobs) - 1, self.prompt_length - 1)

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def ends_with(self, tokens: tuple[int, ...]) -> bool:
        """Whether these are its last output tokens."""
        count = len(tokens)
        return count <= self.generated and tuple(self.tokens[len(self.tokens) - count :]) == tokens

    def append(self, token: int, logprobs: dict[int, Logprob] | None) -> None:
        """Appends a token, and sets `finish_reason` where the request ends with it."""
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        early = self.generated < self.params.min_tokens
        ends = token in self.end_tokens or token in self.stop_tokens
        # the text of an end token that skip_special_tokens does not know is no part of the answer
        matched = self.text.push(token, search=not early) if self.text is not None and not ends else None
        if self.structure is not None:
            self.structure.push(token)
        # before the end token, the only one that a grammar which cannot go on still allows
        if self.structure is not None and (error := self.structure.error) is not None:
            self.finish_reason, self.stop_reason = "abort", error
        elif ends:
            self.finish_reason = "stop"
            self.stop_reason = None if token in self.end_tokens else token
        elif matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
        elif self.structure is not None and self.structure.finished:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_length:
            self.finish_reason = "length"
        if self.text is not None and self.finish_reason is not None:
            matched = self.text.finish(search=not early and self.stop_reason is None)
            if matched is not None:
                self.finish_reason, self.stop_reason = "stop", matched

    def output(self) -> RequestOutput | None:
        """What `params.output_kind` has of this step; None for nothing. Takes the time of the new tokens alone."""
        finished, kind = self.finish_reason is not None, self.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        delta = kind is RequestOutputKind.DELTA
        before = self.returned if delta else (0, 0)
        after = self.generated, 0 if self.text is None else self.text.shown
        known: dict[str, Any] = {
            "index": self.index,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if delta or finished:
            text, token_ids, logprobs = self._between(before, after)
            completion = CompletionOutput(text=text, token_ids=token_ids, logprobs=logprobs, **known)
        else:
            completion = CompletionOutput.when_read(functools.partial(self._between, before, after), **known)
        prompt_logprobs = self.prompt_logprobs if self.params.prompt_logprobs is not None else None
        if delta and self.returned != (0, 0) and prompt_logprobs is not None:
            prompt_logprobs = []
        self.returned = after
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_tokens,
            outputs=[completion],
            finished=finished,
            num_cached_tokens=self.cached or 0,
            prompt_logprobs=prompt_logprobs,
        )

    def _between(self, before: tuple[int, int], after: tuple[int, int]) -> Generated:
        """What was generated between two numbers of tokens and characters."""
        (first, start), (last, end) = before, after
        text = "" if self.text is None else self.text.part(start, end)
        tokens = self.tokens[self.prompt_length + first : self.prompt_length + last]
        return text, tokens, self.logprobs[first:last] if self.params.logprobs is not None else None


def token_sequences(tokenizer: Any, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word at the beginning of a text and after a space, as vLLM takes its bad words."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(found)


def decode_token(tokenizer: Any, token: int) -> str | None:
    if tokenizer is None:
        return None
    text: str = tokenizer.decode([token])
    return text
