"""`SamplingParams`: the sampling settings of a request, by vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from easytorch.generation.engine.structured import StructuredOutputsParams
from easytorch.generation.sampling import LEAST_TEMPERATURE

MOST_LOGPROBS = 20  # OpenAI's bound


class RequestOutputKind(Enum):
    """What the outputs of a request hold, by vLLM's names. CUMULATIVE: all tokens so far. DELTA: those since the output
    before. FINAL_ONLY: all tokens, in one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends. The defaults are vLLM's.

    n: how many continuations. The i-th has the seed `seed + i`; they share the prompt's pages.
    temperature: divides the logits; 0, and what is below 1e-5, takes the likeliest token (greedy).
    top_k: keep the k likeliest tokens; 0 or -1 keep all. top_p: keep the fewest that hold this much probability.
    min_p: keep tokens at least min_p times as likely as the likeliest.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens generated before, once and for each time.
    repetition_penalty: divides positive and multiplies negative logits of tokens of the prompt and the output.
    logit_bias: added to the logits of these tokens.
    allowed_token_ids: no other tokens. bad_words: strings whose last token is not chosen after their others, with and
    without a space before them; needs a tokenizer.
    seed: equal seeds give equal tokens, whatever else runs; None draws one.
    max_tokens: generate at most this many; None: as many as the engine's max_model_length leaves. 0, with
    prompt_logprobs: none.
    min_tokens: no end token or stop token before this many.
    stop: strings that end the text, which are left out of it unless include_stop_str_in_output.
    stop_token_ids: further end tokens. ignore_eos: the model's end tokens do not end the request.
    logprobs: return the log probability of each token and of this many of the likeliest, by the model's distribution
    before penalties, biases and temperature. prompt_logprobs: likewise of each token of the prompt but the first;
    cached pages of its prefix are computed again for them.
    structured_outputs: the text follows a JSON schema, a regular expression, a choice or a grammar, and ends where it
    is complete; needs the package llguidance (extra `serve`).
    truncate_prompt_tokens: keep the last so many tokens of the prompt; -1: as many as max_model_length leaves beside
    max_tokens. detokenize: False returns tokens without text; not with stop strings.
    skip_reading_prefix_cache: compute the prompt, whatever pages of its prefix are cached; others may share its own.
    output_kind: what the outputs of `Engine.step` and `Engine.stream` hold; `LLM` returns the final ones in any case.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_reading_prefix_cache: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stop_strings: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        for name, least, most in (
            ("temperature", 0.0, math.inf),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = _number(name, getattr(self, name))
            if not least <= value <= most or value == math.inf:
                bounds = f"between {least:g} and {most:g}" if most < math.inf else f"finite and at least {least:g}"
                raise ValueError(f"{name}={value!r} must be {bounds}")
        for name, most in (("top_p", 1.0), ("repetition_penalty", math.inf)):
            value = _number(name, getattr(self, name))
            if not 0.0 < value <= most or value == math.inf:
                raise ValueError(f"{name}={value!r} must be above 0 and {'finite' if most > 1 else 'at most 1'}")
        _integer("n", self.n, 1)
        _integer("top_k", self.top_k, -1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            # without a new token there is something to do where the prompt is scored
            _integer("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _integer(name, count, 0)
                if count > MOST_LOGPROBS:
                    raise ValueError(f"{name}={count} must be at most {MOST_LOGPROBS}")
        if self.seed is not None:
            _integer("seed", self.seed, None)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in _list(name, getattr(self, name)):
                _integer(name, token, 0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: no token could be chosen")
        for word in _list("bad_words", self.bad_words):
            if not isinstance(word, str) or not word.strip():
                raise ValueError(f"bad_words={self.bad_words!r} must be strings, none of them empty")
        if not isinstance(self.logit_bias, Mapping | None):
            raise ValueError(f"logit_bias={self.logit_bias!r} must be a dict of biases by token")
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token, 0)
            if not -100 <= _number("logit_bias", bias) <= 100:
                raise ValueError(f"logit_bias of token {token} is {bias!r}; it must be between -100 and 100")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(_list("stop", self.stop))
        for one in stop:
            if not isinstance(one, str) or not one:
                raise ValueError(f"stop={self.stop!r} must be strings, none of them empty")
        object.__setattr__(self, "stop_strings", stop)
        for name in (
            "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize",
            "skip_reading_prefix_cache",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if stop and not self.detokenize:
            raise ValueError("stop strings are searched for in the text: leave detokenize=False or stop out")
        if (kept := self.truncate_prompt_tokens) is not None and (type(kept) is not int or (kept < 1 and kept != -1)):
            raise ValueError(f"truncate_prompt_tokens={kept!r} must be an int of at least 1, or -1")
        if not isinstance(self.output_kind, RequestOutputKind):
            kinds = ", ".join(map(str, RequestOutputKind))
            raise ValueError(f"output_kind={self.output_kind!r} must be one of {kinds}")
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                kind = type(self.structured_outputs).__name__
                raise ValueError(f"structured_outputs must be StructuredOutputsParams, not {kind}")
            if self.min_tokens or self.ignore_eos:
                name = "min_tokens" if self.min_tokens else "ignore_eos"
                raise ValueError(
                    f"{name} and structured_outputs: the structure determines where the text ends; leave {name} out"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{name}={value!r} must be a number")
    return value


def _list(name: str, value: Any) -> Sequence[Any]:
    """A list or tuple, [] for None: an iterator would be at its end when it is read again."""
    if value is not None and (isinstance(value, str | bytes) or not isinstance(value, Sequence)):
        raise ValueError(f"{name}={value!r} must be a list")
    return value or ()


def _integer(name: str, value: Any, least: int | None) -> None:
    if type(value) is not int or (least is not None and value < least):
        raise ValueError(f"{name}={value!r} must be an int{'' if least is None else f' of at least {least}'}")
