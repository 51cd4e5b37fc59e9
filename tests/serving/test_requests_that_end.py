"""Clients that go, queues that are full, steps that fail, a server that stops: the application by itself, no sockets.

A gate holds the engine where a test wants it, so that nothing depends on how fast it is.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time

import openai
import pytest

from easytorch.generation.engine import LLM, CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams
from easytorch.serving.app import create_app
from easytorch.serving.errors import APIError
from easytorch.serving.events import EventStream
from easytorch.serving.worker import EngineWorker
from tests.serving.conftest import serving

BODY = {"model": "small", "prompt": "the class", "temperature": 0, "max_tokens": 20, "ignore_eos": True}


class Gate:
    """Lets `free` steps of an engine run, and the rest once it is open."""

    def __init__(self, engine, free: int) -> None:
        self.open, self.aborted, self._free = threading.Event(), threading.Event(), free
        self._step, self._abort = engine.step, engine.abort
        engine.step, engine.abort = self.step, self.abort

    def step(self):
        if self._free == 0 and not self.open.wait(0.01):
            return []
        self._free = max(0, self._free - 1)
        return self._step()

    def abort(self, request_id):
        if found := self._abort(request_id):
            self.aborted.set()
        return found


class Client:
    """One request of an ASGI application; `gone` is set when the client goes."""

    def __init__(self, app, body, path="/v1/completions") -> None:
        self.gone, self.begun, self.sent, self._given = asyncio.Event(), asyncio.Event(), [], False
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "query_string": b"", "headers": headers, "scheme": "http", "root_path": "",
        }  # fmt: skip
        self._body = json.dumps(body).encode()
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self):
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.sent.append(message)
        if message.get("body"):
            self.begun.set()

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def text(self):
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def in_loop(app, scenario):
    async def run():
        async with app.router.lifespan_context(app):
            await asyncio.wait_for(scenario(), 300)

    asyncio.run(run())


def all_free(engine):
    stats = engine.stats()
    return stats.free_pages == stats.num_pages and not engine.has_unfinished_requests


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_pages(stream, make_engine):
    engine = make_engine()
    gate, app = Gate(engine, free=2), create_app("small", engine=engine)

    async def scenario():
        client = Client(app, BODY | {"stream": stream, "n": 3})
        if stream:
            await client.begun.wait()
        else:  # until the engine has it
            while not await asyncio.wrap_future(app.state.worker.call(lambda: engine.has_unfinished_requests)):
                await asyncio.sleep(0)
        client.gone.set()
        await client.task
        # what the engine's thread does next comes after the abort
        assert await asyncio.wrap_future(app.state.worker.call(lambda: all_free(engine)))
        assert gate.aborted.is_set()
        gate.open.set()
        other = Client(app, BODY)
        await other.task
        assert other.status == 200 and json.loads(other.text)["usage"]["completion_tokens"] == 20

    in_loop(app, scenario)


def test_what_a_slow_client_does_not_read_is_not_kept(make_engine):
    """What it has not read is one output with all new tokens, and not one for each."""
    worker = EngineWorker(make_engine(), max_queue=4)
    kind = RequestOutputKind.DELTA
    params = SamplingParams(n=2, max_tokens=20, temperature=0, ignore_eos=True, logprobs=1, output_kind=kind)

    async def main():
        outputs = worker.generate(lambda: ["the class"], params, 60)
        first = await anext(outputs)
        while await asyncio.wrap_future(worker.call(lambda: worker.engine.has_unfinished_requests)):
            pass
        return [first, *[one async for one in outputs]]

    worker.start()
    try:
        found = asyncio.run(main())
    finally:
        worker.stop()
    assert len(found) <= 3
    completion, whole = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=1), worker.engine
    (expected,) = LLM(whole.model, whole.tokenizer, max_memory=1 << 21).generate("the class", completion)
    for place in (0, 1):
        parts = [output.outputs[0] for at, output in found if at == place]
        assert [token for part in parts for token in part.token_ids] == expected.outputs[0].token_ids
        assert "".join(part.text for part in parts) == expected.outputs[0].text
        assert [[*one] for part in parts for one in part.logprobs] == [[*one] for one in expected.outputs[0].logprobs]
        assert [part.finish_reason for part in parts[-1:]] == ["length"]


def test_a_full_queue_is_429_and_the_others_go_on(make_engine):
    engine = make_engine()
    gate, app = Gate(engine, free=1), create_app("small", engine=engine, max_queue=3)

    async def scenario():
        first = Client(app, BODY | {"n": 2, "stream": True})
        await first.begun.wait()
        second = Client(app, BODY | {"n": 2})
        await second.task
        assert second.status == 429 and (b"retry-after", b"1") in second.sent[0]["headers"]
        error = json.loads(second.text)["error"]
        assert error["type"] == "rate_limit_error" and "2 requests are running or queued" in error["message"]
        gate.open.set()
        await first.task
        assert first.text.rstrip().endswith("[DONE]")
        for _ in range(2):  # what has ended counts no more
            third = Client(app, BODY | {"n": 3, "max_tokens": 2})
            await third.task
            assert third.status == 200

    in_loop(app, scenario)


class OneByOne:
    """An engine that ends one request a step, the last one once it is open."""

    def __init__(self) -> None:
        self.open, self.left = threading.Event(), []

    @property
    def has_unfinished_requests(self):
        return bool(self.left)

    def add_request(self, prompt, params, index, structure):
        self.left.append(prompt)
        return prompt

    def abort(self, request_id):
        return request_id in self.left

    def abort_all(self):
        self.left.clear()

    def step(self):
        if len(self.left) == 1 and not self.open.wait(0.01):
            return []
        done = CompletionOutput(0, "", [1], None, "length", None)
        return [RequestOutput(self.left.pop(0), None, [0], [done], True, 0)]


def test_a_choice_that_has_ended_makes_room_while_the_others_run():
    engine = OneByOne()
    worker = EngineWorker(engine, max_queue=2)

    async def run():
        both = worker.generate(lambda: ["a", "b"], SamplingParams(), 60)
        assert (await anext(both))[0] == 0
        third = worker.generate(lambda: engine.open.set() or ["c"], SamplingParams(), 60)
        assert [output.request_id async for _, output in third] == ["c"]
        assert (await anext(both))[0] == 1

    worker.start()
    try:
        asyncio.run(run())
    finally:
        worker.stop()


def test_the_events_of_a_client_that_went_are_closed_at_once():
    closed, sending = [], asyncio.Event()

    async def data():
        try:
            yield "a token"
        finally:
            closed.append(True)

    async def receive():
        await sending.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body":
            sending.set()
            await asyncio.Event().wait()  # a client that reads nothing

    async def run():
        events = data()  # held here: the garbage collector does not close it
        await EventStream(events)({"type": "http"}, receive, send)
        assert closed

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_is_ended(stream, make_engine):
    engine = make_engine()
    gate, app = Gate(engine, free=0), create_app("small", engine=engine, request_timeout=0.05)

    async def scenario():
        client = Client(app, BODY | {"stream": stream})
        await client.task
        assert client.status == 504 and "not end within 0.05 seconds" in client.text
        assert await asyncio.wrap_future(app.state.worker.call(lambda: all_free(engine)))
        gate.open.set()

    in_loop(app, scenario)


def compiling(engine, compile_, request_timeout=2):
    """Its grammars are compiled by `compile_`, and none is kept: as when more than are kept are in use at once."""
    engine.structured_outputs._compiled = compile_
    return create_app("small", engine=engine, max_queue=2, request_timeout=request_timeout)


CHOICE = BODY | {"ignore_eos": False, "n": 2, "structured_outputs": {"choice": ["class", "name"]}}


def test_grammars_are_not_compiled_in_the_thread_of_the_steps(make_engine):
    engine, threads = make_engine(), []

    def compile_(source):
        threads.append(threading.current_thread().name)
        return engine.structured_outputs._compile(source)

    app = compiling(engine, compile_, request_timeout=60)

    async def scenario():
        client = Client(app, CHOICE)
        await client.task
        texts = [choice["text"] for choice in json.loads(client.text)["choices"]]
        assert len(texts) == 2 and set(texts) <= {"class", "name"}

    in_loop(app, scenario)
    assert len(threads) == 1 and threads[0] != "easytorch-engine"


def test_a_grammar_that_takes_too_long_is_a_timeout_and_the_others_go_on(make_engine):
    engine, done = make_engine(), threading.Event()

    def compile_(source):
        done.wait(60)
        raise ValueError("given up")

    app = compiling(engine, compile_)

    async def scenario():
        slow = [Client(app, CHOICE) for _ in range(2)]
        while app.state.worker._compiling < 2:
            await asyncio.sleep(0)
        third, other = Client(app, CHOICE), Client(app, BODY | {"max_tokens": 1})
        await asyncio.gather(third.task, other.task, *(client.task for client in slow))
        assert [client.status for client in slow] == [504, 504]
        assert third.status == 429 and other.status == 200
        again = Client(app, CHOICE)
        done.set()
        await again.task
        assert again.status == 400 and "given up" in again.text

    in_loop(app, scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_step_that_fails_is_told_and_the_server_lives(stream, make_engine, caplog):
    engine = make_engine()
    app = create_app("small", engine=engine)
    inner, left = engine._run, [1, 1]

    def failing(*args):
        if args[0] and not left.pop():
            raise RuntimeError("out of memory, say")
        return inner(*args)

    left.insert(0, 0)  # after two steps
    engine._run = failing

    async def scenario():
        client = Client(app, BODY | {"stream": stream})
        await client.task
        if stream:  # 200 was sent: the error is an event
            last = [line for line in client.text.split("\n") if line][-1]
            assert client.status == 200 and "a step of the engine failed" in last
        else:
            assert client.status == 500 and json.loads(client.text)["error"]["type"] == "server_error"
        assert "Traceback" not in client.text and "out of memory" not in client.text
        engine._run = inner
        other = Client(app, BODY)
        await other.task
        assert other.status == 200 and all_free(engine)

    in_loop(app, scenario)
    assert "out of memory, say" in caplog.text


def test_what_still_runs_when_the_server_stops_is_told(make_engine):
    engine = make_engine()
    Gate(engine, free=1)
    app = create_app("small", engine=engine)

    async def run():
        async with app.router.lifespan_context(app):
            client = Client(app, BODY | {"stream": True})
            await client.begun.wait()
        await client.task
        assert "the server is stopping" in client.text
        assert not app.state.worker.alive and all_free(engine)

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_thread_has_ended_answers(make_engine):
    engine = make_engine()
    app = create_app("small", engine=engine)
    step = engine.step

    def ended():
        raise SystemExit

    async def scenario():
        engine.step = ended
        clients = [Client(app, BODY)]
        await clients[0].task
        engine.step = step
        while app.state.worker.alive:
            await asyncio.sleep(0.001)
        clients += [Client(app, BODY | {"stream": stream}) for stream in (True, False)]
        for client in clients:
            await client.task
            assert client.status == 503 and "thread has ended" in client.text
        with pytest.raises(APIError, match="thread has ended"):
            await asyncio.wrap_future(app.state.worker.call(engine.stats))
        assert all_free(engine)

    in_loop(app, scenario)


def test_many_clients_half_of_whom_go(make_engine, model, tokenizer):
    engine = make_engine(max_batch_tokens=64, max_requests=8)
    app = create_app("small", engine=engine)
    prompts = [f"the class {'name ' * (i % 7)}{i}" for i in range(24)]
    right = {}
    for prompt in prompts:
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=12, ignore_eos=True)
        right[prompt] = list(make_engine().stream(prompt, params))[-1].outputs[0].text

    async def scenario():
        body = {"model": "small", "temperature": 0.7, "seed": 1, "max_tokens": 12, "ignore_eos": True}
        clients = [Client(app, body | {"prompt": prompt, "stream": i % 3 == 0}) for i, prompt in enumerate(prompts)]
        for i, client in enumerate(clients):
            if i % 2:
                if i % 4 == 1:
                    await asyncio.sleep(0.001 * i)
                client.gone.set()
        await asyncio.gather(*(client.task for client in clients))
        for i, (prompt, client) in enumerate(zip(prompts, clients, strict=True)):
            if i % 2:
                continue
            assert client.status == 200
            if i % 3:
                text = json.loads(client.text)["choices"][0]["text"]
            else:
                events = [line.removeprefix("data: ") for line in client.text.split("\n\n")]
                pieces = [json.loads(event)["choices"] for event in events if event and event != "[DONE]"]
                text = "".join(choice["text"] for choices in pieces for choice in choices)
            assert text == right[prompt]
        assert await asyncio.wrap_future(app.state.worker.call(lambda: all_free(engine)))
        assert app.state.worker._listeners == {}

    in_loop(app, scenario)


def test_sigterm_lets_requests_come_to_their_end(make_engine):
    """By its handler: a thread's server, as here, gets no signals."""
    engine = make_engine()
    gate, app = Gate(engine, free=1), create_app("small", engine=engine)
    http = openai.DefaultHttpxClient(trust_env=False, timeout=300)
    with serving(app) as (url, server):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
        stream = client.completions.create(**{name: BODY[name] for name in BODY if name != "ignore_eos"}, stream=True)
        pieces = [next(iter(stream)).choices[0].text]
        server.handle_exit(signal.SIGTERM, None)
        while any(one.is_serving() for one in server.servers):  # until no one else is let in
            time.sleep(0.01)
        assert not gate.aborted.is_set()
        gate.open.set()
        pieces += [chunk.choices[0].text for chunk in stream]
    alone = make_engine().stream(BODY["prompt"], SamplingParams(temperature=0, max_tokens=20))
    assert "".join(pieces) == list(alone)[-1].outputs[0].text
