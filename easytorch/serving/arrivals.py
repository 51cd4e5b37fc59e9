"""`Arrivals`: the outputs of a request's continuations, on their way from the engine's thread to a task."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from easytorch.generation.engine import CompletionOutput, Logprob, RequestOutput
from easytorch.serving.errors import APIError


class Arrivals:
    """What came since a place was last read, as one output, and an error after all of them.

    Used by the event loop alone. Of a reader who is slower than the engine it keeps the new text and tokens, and not an
    output for each.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Together] = {}
        self._error: APIError | None = None
        self._some = asyncio.Event()

    def put(self, place: int, output: RequestOutput | APIError) -> None:
        if isinstance(output, APIError):
            self._error = self._error or output
        elif (together := self._waiting.get(place)) is None:
            self._waiting[place] = Together(output)
        else:
            together.add(output)
        self._some.set()

    async def get(self) -> tuple[int, RequestOutput]:
        """The place that has waited longest; raises the error where there is none left."""
        await self._some.wait()
        if not self._waiting:
            assert self._error is not None
            raise self._error
        place = next(iter(self._waiting))
        output = self._waiting.pop(place).output()
        if not self._waiting and self._error is None:
            self._some.clear()
        return place, output


class Together:
    """Consecutive outputs of new tokens (`RequestOutputKind.DELTA`) of one continuation, as one."""

    def __init__(self, first: RequestOutput) -> None:
        self._first = self._last = first
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None

    def add(self, output: RequestOutput) -> None:
        if self._last is self._first:
            self._extend(self._first.outputs[0])
        self._extend(output.outputs[0])
        self._last = output

    def _extend(self, completion: CompletionOutput) -> None:
        self._texts.append(completion.text)
        self._tokens += completion.token_ids
        if completion.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += completion.logprobs

    def output(self) -> RequestOutput:
        if self._last is self._first:
            return self._first
        completion = replace(
            self._last.outputs[0], text="".join(self._texts), token_ids=self._tokens, logprobs=self._logprobs
        )
        return replace(self._last, outputs=[completion], prompt_logprobs=self._first.prompt_logprobs)
