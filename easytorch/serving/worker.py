"""`EngineWorker`: a thread that owns an engine, called from the tasks of an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from easytorch.generation.engine import Engine, RequestOutput, SamplingParams
from easytorch.generation.engine.structured import StructuredText
from easytorch.serving.arrivals import Arrivals
from easytorch.serving.errors import APIError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Listener(NamedTuple):
    """Who waits for a request's outputs."""

    loop: asyncio.AbstractEventLoop
    arrivals: Arrivals
    place: int


Delivery = tuple[Listener, RequestOutput | APIError]


class EngineWorker:
    """max_queue: requests, running and waiting, beyond which new ones are refused (429)."""

    def __init__(self, engine: Engine, *, max_queue: int) -> None:
        self.engine, self.max_queue = engine, max_queue
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._stopped = False
        self._compiling = 0
        # Of commands and `_ended`: whoever gives a command after the thread's last look at them is answered at once.
        self._lock = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._loop, name="easytorch-engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; requests that still run get an error."""

        def stop() -> None:
            self._stopped = True

        self._give(stop)
        self._thread.join()

    def call(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Runs `function` in the engine's thread, between two steps; `APIError` (503) where that has ended."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._ended:
                    raise _ended()
                future.set_result(function())
            except Exception as error:  # the boundary of the thread: raised where the future is awaited
                future.set_exception(error)

        self._give(run)
        return future

    def _give(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended:
                self._commands.put(command)
                return
        command()

    async def generate(
        self, make_prompts: Callable[[], Sequence[Any]], params: SamplingParams, timeout: float
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt * n + index of the continuation, output) as they come; closing it aborts the rest.
        params.output_kind: DELTA, or FINAL_ONLY, which wakes nobody before the end.

        make_prompts: returns the prompts; called in the engine's thread, to which the tokenizer belongs. The first item
        is yielded once all requests are accepted: before it `ValueError` for a request that the engine refuses, and
        `APIError` for a full queue. After `timeout` seconds it raises `APIError`.
        """
        loop = asyncio.get_running_loop()
        arrived = Arrivals()
        ids: list[str] = []
        late = APIError(504, f"the request did not end within {timeout:g} seconds", code="timeout")
        end = loop.time() + timeout
        structure = await self._compiled(params, timeout, late)

        def add() -> None:
            prompts = make_prompts()
            total = len(prompts) * params.n
            if total > self.max_queue:
                raise APIError(
                    400, f"{len(prompts)} prompts with n={params.n} are {total} requests, and the limit is "
                    f"{self.max_queue}: send fewer at once",
                )  # fmt: skip
            if len(self._listeners) + total > self.max_queue:
                raise APIError(
                    429, f"{len(self._listeners)} requests are running or queued, and {total} more would exceed "
                    f"the limit of {self.max_queue}: try again later", code="rate_limit_exceeded",
                )  # fmt: skip
            for number, prompt in enumerate(prompts):
                for index in range(params.n):
                    ids.append(self.engine.add_request(prompt, params, index=index, structure=structure))
                    self._listeners[ids[-1]] = Listener(loop, arrived, number * params.n + index)

        def drop() -> None:
            if self._ended:  # it has ended them itself
                return
            for request_id in ids:
                self.engine.abort(request_id)
                self._listeners.pop(request_id, None)

        timer = loop.call_at(end, arrived.put, 0, late)
        try:
            await asyncio.wrap_future(self.call(add))
            left = len(ids)
            while left:
                place, output = await arrived.get()
                if output.outputs[0].finish_reason == "abort":
                    raise APIError(400, f"the structured output cannot continue: {output.outputs[0].stop_reason}")
                left -= output.finished
                yield place, output
        finally:
            timer.cancel()
            # after `add`, of which it takes back what a refusal or a cancellation left
            self._give(drop)

    async def _compiled(self, params: SamplingParams, timeout: float, late: APIError) -> StructuredText | None:
        """The grammar of a request, compiled in threads of its own: a large one takes seconds, in which the engine's
        thread takes steps for the other requests. Those that wait for it are as limited as those in the engine."""
        if params.structured_outputs is None:
            return None
        if self._compiling >= self.max_queue:
            raise APIError(
                429, f"{self._compiling} structured outputs are being compiled: try again later",
                code="rate_limit_exceeded",
            )  # fmt: skip
        self._compiling += 1
        try:
            compiling = asyncio.to_thread(self.engine.structured_outputs.compile, params.structured_outputs)
            return await asyncio.wait_for(compiling, timeout)
        except TimeoutError as error:
            raise late from error
        finally:
            self._compiling -= 1

    def _loop(self) -> None:
        try:
            self._run_steps()
        finally:
            with self._lock:
                self._ended = True
            while not self._commands.empty():
                self._commands.get()()
            self._fail(APIError(503, "the server is stopping") if self._stopped else _ended())

    def _run_steps(self) -> None:
        while not self._stopped:
            self._run_commands()
            if self._stopped:
                break
            try:
                outputs = self.engine.step()
            except Exception:  # the boundary of the thread: the server keeps running, and its requests get the error
                logger.exception("a step of the engine failed; its requests are ended")
                self._fail(APIError(500, "a step of the engine failed; see the server's log"))
                outputs = []
            found: list[Delivery] = []
            for output in outputs:
                listeners = self._listeners
                listener = (listeners.pop if output.finished else listeners.get)(output.request_id, None)
                if listener is not None:
                    found.append((listener, output))
            _deliver(found)

    def _run_commands(self) -> None:
        """Runs the queued commands, and waits for one where no request is running."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_unfinished_requests)
            except queue.Empty:
                return
            command()
            if self._stopped:
                return

    def _fail(self, error: APIError) -> None:
        listeners = [*self._listeners.values()]
        self._listeners.clear()
        _deliver([(listener, error) for listener in listeners])
        self.engine.abort_all()


def _ended() -> APIError:
    return APIError(503, "the engine's thread has ended; see the server's log")


def _deliver(found: Sequence[Delivery]) -> None:
    """Wakes each event loop once for all outputs of a step: to wake one takes as long as to sample a token."""
    for loop in {listener.loop for listener, _ in found}:
        if not loop.is_closed():
            own = [(listener.arrivals, listener.place, output) for listener, output in found if listener.loop is loop]
            loop.call_soon_threadsafe(_put, own)


def _put(own: Iterable[tuple[Arrivals, int, RequestOutput | APIError]]) -> None:
    for arrivals, place, output in own:
        arrivals.put(place, output)
