"""Chat completions and completions: the engine's outputs as OpenAI's objects, complete or as a stream of events."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from easytorch.generation.engine import CompletionOutput, Logprob, RequestOutput
from easytorch.serving.arrivals import Together
from easytorch.serving.errors import APIError
from easytorch.serving.token_bytes import token_bytes

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]


class Kind(Protocol):
    """The differences between chat completions and completions."""

    prefix: str
    object: str
    chunk_object: str

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]: ...

    def opening(self, index: int, output: RequestOutput) -> dict[str, Any] | None: ...

    def piece(self, index: int, completion: CompletionOutput) -> dict[str, Any]: ...


class Chat:
    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, top_logprobs: int, tokenizer: Any) -> None:
        self._top_logprobs, self._tokenizer = top_logprobs, tokenizer

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        completion = output.outputs[0]
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {
            "index": index, "message": message, "logprobs": self._logprobs(completion),
            "finish_reason": completion.finish_reason,
        }  # fmt: skip

    def opening(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index, "delta": {"content": completion.text} if completion.text else {},
            "logprobs": self._logprobs(completion), "finish_reason": completion.finish_reason,
        }  # fmt: skip

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        content = []
        for token, given in zip(completion.token_ids, completion.logprobs, strict=True):
            # the chosen token is included, and need not be among the likeliest
            best = sorted(given, key=lambda one: given[one].rank)[: self._top_logprobs]
            tops = [self._token(one, given[one]) for one in best]
            content.append(self._token(token, given[token]) | {"top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: Logprob) -> dict[str, Any]:
        text = _text(logprob)
        return {"token": text, "logprob": _number(logprob), "bytes": token_bytes(self._tokenizer, token, text)}


class Completions:
    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, echoes: Sequence[str] | None, tokenizer: Any) -> None:
        """echoes: the prompts' texts, where the response begins with them; one for each choice."""
        self._echoes, self._tokenizer = echoes, tokenizer
        self._offsets: dict[int, int] = {}  # characters before the next token of each choice

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        completion = output.outputs[0]
        whole = self.piece(index, completion)
        whole["text"] = self._echo(index) + whole["text"]
        if whole["logprobs"] is not None and (prompt := self._prompt_logprobs(index, output)) is not None:
            whole["logprobs"] = {name: values + whole["logprobs"][name] for name, values in prompt.items()}
        return whole

    def opening(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        if self._echoes is None:
            return None
        logprobs = self._prompt_logprobs(index, output)
        return {"index": index, "text": self._echo(index), "logprobs": logprobs, "finish_reason": None}

    def piece(self, index: int, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index, "text": completion.text, "logprobs": self._logprobs(index, completion),
            "finish_reason": completion.finish_reason,
        }  # fmt: skip

    def _echo(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[index]

    def _logprobs(self, index: int, completion: CompletionOutput) -> dict[str, Any] | None:
        """Those of new tokens."""
        if completion.logprobs is None:
            return None
        before = self._offsets.get(index, len(self._echo(index)))
        found = [(_text(given[token]), _number(given[token]), given)
                 for token, given in zip(completion.token_ids, completion.logprobs, strict=True)]  # fmt: skip
        *offsets, self._offsets[index] = itertools.accumulate((len(text) for text, _, _ in found), initial=before)
        return _lists(found, offsets)

    def _prompt_logprobs(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        """Those of the prompt's tokens; null for the first, before which nothing stands."""
        if output.prompt_logprobs is None:
            return None
        echo, special = self._echo(index), set(self._tokenizer.all_special_ids)
        found, offsets, before = [], [], 0
        for token, given in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
            text = self._tokenizer.decode([token]) if given is None else _text(given[token])
            found.append((text, None if given is None else _number(given[token]), given))
            offsets.append(before)
            # a token that the tokenizer put before the text is none of its characters
            before += 0 if token in special and not echo.startswith(text, before) else len(text)
        return _lists(found, offsets)


def _lists(
    found: Sequence[tuple[str, float | None, Mapping[int, Logprob] | None]], offsets: Sequence[int]
) -> dict[str, Any]:
    """For each token its text, log probability and the likeliest -> the legacy API's parallel lists."""
    tops = [None if given is None else {_text(one): _number(one) for one in given.values()} for _, _, given in found]
    return {
        "tokens": [text for text, _, _ in found], "token_logprobs": [value for _, value, _ in found],
        "top_logprobs": tops, "text_offset": [*offsets],
    }  # fmt: skip


def _text(logprob: Logprob) -> str:
    return logprob.decoded_token or ""


def _number(logprob: Logprob) -> float:
    """The log probability; JSON has no infinity for a token that the model rules out, and OpenAI writes -9999.0."""
    return max(logprob.logprob, -9999.0)


async def without_scores(outputs: Outputs) -> Outputs:
    """Of requests that echo their prompts and generate nothing, without the log probabilities that were computed."""
    try:
        async for place, output in outputs:
            yield place, replace(output, prompt_logprobs=None)
    finally:
        await outputs.aclose()


class Usage:
    """The token usage of a request; a prompt counts once, whatever the number of continuations."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._last: dict[int, RequestOutput] = {}
        self._made = 0

    def update(self, place: int, output: RequestOutput) -> None:
        """output: its new tokens, or all of them at the end."""
        self._last[place] = output
        self._made += len(output.outputs[0].token_ids)

    def body(self) -> dict[str, Any]:
        prompts = [output for place, output in self._last.items() if place % self._n == 0]
        given, made = sum(len(output.prompt_token_ids) for output in prompts), self._made
        cached = sum(output.num_cached_tokens for output in prompts)
        return {
            "prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip


def head(kind: Kind, model: str, object_: str) -> dict[str, Any]:
    return {"id": f"{kind.prefix}{uuid.uuid4().hex}", "object": object_, "created": int(time.time()), "model": model}


async def answer(kind: Kind, model: str, outputs: Outputs, n: int) -> dict[str, Any]:
    """The complete response, once every continuation has ended."""
    usage, last = Usage(n), dict[int, RequestOutput]()
    async for place, output in outputs:
        usage.update(place, output)
        last[place] = output
    choices = [kind.choice(place, last[place]) for place in sorted(last)]
    return head(kind, model, kind.object) | {"choices": choices, "usage": usage.body()}


async def stream(kind: Kind, model: str, outputs: Outputs, n: int, *, include_usage: bool) -> AsyncGenerator[str, None]:
    """The data of events, a token or a few each; an error after the first is an event, as the status has been sent."""
    begin = head(kind, model, kind.chunk_object)
    if include_usage:
        begin |= {"usage": None}
    usage, waiting = Usage(n), dict[int, Together | None]()
    before = f'{json.dumps(begin)[:-1]}, "choices": ['

    def event(choice: Mapping[str, Any]) -> str:
        return f"{before}{json.dumps(choice)}]}}"

    try:
        async for place, output in outputs:
            usage.update(place, output)
            if place not in waiting:
                waiting[place] = None
                if (opening := kind.opening(place, output)) is not None:
                    yield event(opening)
            if (together := waiting[place]) is None:
                together = Together(output)
            else:
                together.add(output)
            # log probabilities wait for the text of their tokens
            ready = bool(output.outputs[0].text) or output.finished
            waiting[place] = None if ready else together
            if ready:
                yield event(kind.piece(place, together.output().outputs[0]))
        if include_usage:
            yield json.dumps(begin | {"choices": [], "usage": usage.body()})
        yield "[DONE]"
    except APIError as error:
        yield json.dumps(error.body())
    finally:
        await outputs.aclose()
