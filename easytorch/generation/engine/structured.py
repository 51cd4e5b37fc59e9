"""Structured outputs: a request's text follows a JSON schema, a regular expression, a choice or a grammar.

llguidance (https://github.com/guidance-ai/llguidance) compiles them to automata over a tokenizer's tokens. At each step
the engine masks the tokens that the grammar does not allow.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
# How many compiled grammars are cached: requests of one application use the same few.
_CACHE_SIZE = 64
# Of how many first tokens it is tried whether the grammar goes on after them; the first that does ends it.
_MOST_PROBED = 256


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The grammar that the text must match, by vLLM's names; exactly one of them.

    json: a JSON schema, as a dict or as text. json_object: any JSON object. regex: a regular expression that the whole
    text matches, in the syntax of Rust's crate `regex`. choice: one of these strings. grammar: a context-free grammar
    in llguidance's dialect of Lark, which begins at `start`.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"structured outputs take one of {', '.join(_KINDS)}; given: {', '.join(given) or 'none'}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name}={value!r} must be a string that is not empty")
        if self.choice is not None and (
            isinstance(self.choice, str)
            or not self.choice
            or not all(isinstance(one, str) and one for one in self.choice)
        ):
            raise ValueError(f"choice={self.choice!r} must be a list of strings, none of them empty")
        if self.json is not None:
            _schema(self.json)

    @functools.cached_property
    def source(self) -> str:
        """The grammar that llguidance reads; equal for specifications that are equal."""
        from llguidance import LLMatcher

        if self.json is not None or self.json_object:
            schema = {"type": "object"} if self.json is None else _schema(self.json)
            return str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        if self.regex is not None:
            return str(LLMatcher.grammar_from_regex(self.regex))
        if self.choice is not None:
            # one lexeme: as rules of their own, more than 2,000 with a common beginning pass llguidance's limits
            return str(
                LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, self.choice)))
            )
        return str(LLMatcher.grammar_from_lark(self.grammar or ""))


class StructuredText:
    """The state of a request's text in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """Whether the text is complete: no token can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why llguidance stopped, for example because the grammar has too many states."""
        return _error_of(self._matcher)

    def allowed(self, size: int) -> Tensor:
        """A boolean mask (size,) of the tokens that may come next; the end token where the text may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[:size].astype(np.bool_))

    def push(self, token: int) -> None:
        self._matcher.consume_token(token)

    def copy(self) -> StructuredText:
        return StructuredText(self._matcher.deep_copy())


class StructuredOutputs:
    """Compiles grammars for one tokenizer, thread-safely.

    vocabulary: the number of logits. end_tokens: any of them may follow a complete text.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._end_tokens = tokenizer, vocabulary, end_tokens
        self._lock = threading.Lock()
        self._pending: dict[str, concurrent.futures.Future[Any]] = {}
        self._pending_lock = threading.Lock()
        self._compiled = functools.lru_cache(maxsize=_CACHE_SIZE)(self._compile)

    def compile(self, params: StructuredOutputsParams) -> StructuredText:
        """The initial state of a request's text; `ValueError` for a grammar that cannot be compiled."""
        return StructuredText(self._compiled_once(params.source).deep_copy())

    def _compiled_once(self, source: str) -> Any:
        """Compiled by the first thread that asks for it; the others wait for its matcher, or its error."""
        with self._pending_lock:
            future = self._pending.get(source)
            first = future is None
            if future is None:
                future = self._pending[source] = concurrent.futures.Future()
        if first:
            try:
                future.set_result(self._compiled(source))
            except BaseException as error:  # raised below, here and where the others wait
                future.set_exception(error)
            finally:
                with self._pending_lock:
                    del self._pending[source]
        return future.result()

    @functools.cached_property
    def _automaton(self) -> Any:
        from llguidance.hf import from_tokenizer
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            kind = "no tokenizer" if self._tokenizer is None else f"a {type(self._tokenizer).__name__}"
            raise ValueError(f"structured outputs need a fast tokenizer, and the engine has {kind}")
        size = max(self._vocabulary, len(self._tokenizer))
        return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=sorted(self._end_tokens) or None)

    def _compile(self, source: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            automaton = self._automaton
        matcher = LLMatcher(automaton, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if (error := _error_of(matcher)) is None:
            # The first mask builds most of the lexer, in seconds for some: here, not in a step that all requests share.
            mask = matcher.compute_bitmask()
            error = _error_of(matcher) or self._error_after_first_token(matcher, mask)
        if error is not None:
            raise ValueError(f"the structured output cannot be compiled: {error}")
        return matcher

    def _error_after_first_token(self, matcher: Any, mask: bytes) -> str | None:
        """Why no text gets past its first token, as where more rules may follow than llguidance's limit for a row.

        mask: a bit for each token that `matcher` allows."""
        bits = np.frombuffer(mask, dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self._vocabulary])
        tokens = [int(token) for token in allowed if int(token) not in self._end_tokens]
        if len(tokens) < len(allowed) or len(tokens) > _MOST_PROBED:  # the empty text matches
            return None
        error = None
        for token in tokens:
            probe = matcher.deep_copy()
            probe.consume_token(token)
            if (error := _error_of(probe)) is None:
                return None
        return error


def _error_of(matcher: Any) -> str | None:
    """llguidance's error, in one line."""
    if not matcher.is_error():
        return None
    text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return text.replace("NoExtensionBias", "no text of this tokenizer's tokens can match it")


def _schema(given: Any) -> Any:
    """A JSON schema as an object; `ValueError` for invalid JSON and for anything but an object."""
    schema = given
    if isinstance(given, str):
        try:
            schema = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"the JSON schema is not valid JSON: {error}") from error
        except RecursionError as error:
            raise ValueError("the JSON schema is nested too deeply") from error
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema is an object, not {type(schema).__name__}")
    try:
        json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema cannot be written as JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("the JSON schema is nested too deeply") from error
    return schema
