"""`easytorch serve` under faults: clients that are killed, requests that make no sense, and SIGTERM.

    python scripts/check_server.py                                  100 clients, 400 mutated requests
    python scripts/check_server.py --clients 20 --mutations 50 --seed 3

It serves a small model in a process of its own and talks to it over sockets. Half of the clients reset their connection
at a random moment: within the request, while it waits, or within the answer. The others must get the text that the
engine gives alone; afterwards no page, request or file descriptor may be left. A request that makes no sense must get a
4xx with OpenAI's error body, and a mutated one that or an answer. After SIGTERM running streams must come to their end.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NAME, MAX_BODY = "small", 50_000
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
SETTINGS = {"model": NAME, "temperature": 0.7, "seed": 1, "ignore_eos": True}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "binds a name"}], "max_tokens": 4}
COMPLETION = {"model": NAME, "prompt": "the class", "max_tokens": 4}
# Of a request, what has the wrong type, size or meaning. A mutated field gets one of them.
WILD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 2**31, 10**30, -(10**30), 0.5, -0.5, 1e308, float("nan"), float("inf"), "", "x", "\ud800",
    "\0", "x" * 5000, [], [[]], [None], [-1], [0], [10**9], [1.5], ["x"], [1], [True], [[0], "x"], {}, {"x": 1},
    {"type": "x"}, {"0": 1e9}, {"-1": 0}, {"role": "user"}, [{"role": "user", "content": 3}], [{"role": None}],
    [[[[[[]]]]]],
)  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "min_tokens", "stop",
    "stop_token_ids", "allowed_token_ids", "bad_words",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "structured_outputs", "stream",
    "stream_options", "logprobs", "top_logprobs", "echo", "best_of", "suffix", "tools", "response_format", "user",
    "chat_template_kwargs", "metadata", "nonsense",
)  # fmt: skip


class Answer:
    """The response to one request; status 0: the connection ended before one."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        found = re.match(rb"HTTP/1\.\d (\d+)", head)
        self.status = int(found[1]) if found else 0

    def text(self, stream: bool) -> str:
        """The text of a completion, or of the events of one."""
        if not stream:
            return str(json.loads(self.body)["choices"][0]["text"])
        events = [event.removeprefix("data: ") for event in self.body.decode().split("\n\n") if event]
        assert events[-1] == "[DONE]", events[-1]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    def fault(self, statuses: range) -> str | None:
        """What is wrong with a refusal; None where it is as OpenAI's API states errors."""
        if self.status not in statuses:
            return f"status {self.status}: {self.body[:200]!r}"
        if b"Traceback" in self.body:
            return f"a traceback: {self.body[:200]!r}"
        try:
            error = json.loads(self.body)["error"]
        except (ValueError, KeyError, TypeError):
            return f"status {self.status} without an error object: {self.body[:200]!r}"
        whole = set(error) == {"message", "type", "param", "code"} and bool(error["message"])
        return None if whole else f"an error without its fields: {error}"


def request_of(body: bytes, path: str = "/v1/completions", method: str = "POST", length: Any = None) -> bytes:
    """HTTP 1.0, whose answers end with their connection."""
    head = f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


class Server:
    """A process of `easytorch serve`."""

    def __init__(self, folder: Path) -> None:
        options = {
            "port": 0, "served-model-name": NAME, "max-body": MAX_BODY / 2**20, "max-requests": 16,
            "max-batch-tokens": 64, "max-memory": 0.001, "drain-timeout": 120,
        }  # fmt: skip
        given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        self.log = folder / "server.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "easytorch", "serve", str(folder / "model"), *given],
                stdout=log, stderr=log, env=environment,
            )  # fmt: skip
        self.port = 0
        while not self.port:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended:\n{self.log.read_text()}")
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", self.log.read_text()):
                self.port = int(found[1])
            time.sleep(0.05)

    async def ask(self, raw: bytes, *, dies_after: tuple[int, float, int] | None = None) -> Answer:
        """The answer to the bytes of a request. dies_after: (bytes sent, seconds, bytes read), then it is reset."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            if dies_after is None:
                writer.write(raw)
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                return Answer(head + await (reader.read() if length is None else reader.readexactly(int(length[1]))))
            sent, seconds, read = dies_after
            writer.write(raw[:sent])
            await asyncio.sleep(seconds)
            return Answer(await reader.readexactly(read) if read else b"")
        except (ConnectionResetError, asyncio.IncompleteReadError):
            return Answer(b"")
        finally:
            writer.transport.abort()

    async def metrics(self) -> dict[str, str]:
        answer = await self.ask(request_of(b"", "/metrics", "GET"))
        lines = answer.body.decode().splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    def descriptors(self) -> int | None:
        """Open files and sockets of the process, where the system tells (Linux)."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        return len(list(folder.iterdir())) if folder.exists() else None

    async def leaks(self, descriptors: int | None) -> list[str]:
        """What is left of requests that have ended, after up to 30 seconds."""
        found = ["not asked"]
        end = time.monotonic() + 30
        while found and time.monotonic() < end:
            values = await self.metrics()
            found = [
                f"{name} is {values[f'easytorch_{name}']}"
                for name in ("requests_running", "requests_waiting") if values[f"easytorch_{name}"] != "0"
            ]  # fmt: skip
            if values["easytorch_pages_free"] != values["easytorch_pages"]:
                found.append(f"{values['easytorch_pages_free']} of {values['easytorch_pages']} pages are free")
            if descriptors is not None and (now := self.descriptors() or 0) > descriptors:
                found.append(f"{now} open files, {descriptors} before")
            await asyncio.sleep(0.1)
        return found


def write_model(folder: Path) -> tuple[Any, Any]:
    """A small model and its tokenizer, saved as the server reads them."""
    import torch
    import transformers

    import easytorch
    from easytorch.training.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["the class statement binds a name to an object"] * 5, 300)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.5, bos_token_id=0, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    model = easytorch.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


async def killed_clients(server: Server, model: Any, tokenizer: Any, count: int, draw: random.Random) -> list[str]:
    """`count` clients at once, every second of which is killed."""
    from easytorch.generation.engine import LLM, SamplingParams

    prompts = [f"the class {'name ' * draw.randrange(12)}{place}" for place in range(count)]
    lengths = [draw.randrange(4, 60) for _ in prompts]
    sampling = {name: value for name, value in SETTINGS.items() if name != "model"}
    params = [SamplingParams(**sampling, max_tokens=length) for length in lengths]
    right = [output.outputs[0].text for output in LLM(model, tokenizer, max_memory=1 << 22).generate(prompts, params)]
    before = server.descriptors()

    async def client(place: int) -> tuple[Answer, bool]:
        stream = draw.random() < 0.5
        body = SETTINGS | {"prompt": prompts[place], "max_tokens": lengths[place], "stream": stream}
        raw, dies = request_of(json.dumps(body).encode()), None
        if place % 2:
            dies = draw.choice([
                (draw.randrange(len(raw)), draw.random(), 0),  # within the request
                (len(raw), draw.random() * 3, 0),  # while it waits, or within the answer
                (len(raw), 0.0, draw.randrange(1, 400)),  # within the answer
            ])  # fmt: skip
        await asyncio.sleep(draw.random() * 0.5)
        return await server.ask(raw, dies_after=dies), stream

    start = time.perf_counter()
    answers = await asyncio.gather(*map(client, range(count)))
    seconds = time.perf_counter() - start
    wrong = []
    for place, (answer, stream) in enumerate(answers):
        if place % 2:
            continue
        if answer.status != 200:
            wrong.append(f"client {place}: status {answer.status}: {answer.body[:200]!r}")
        elif (text := answer.text(stream)) != right[place]:
            wrong.append(f"client {place}: {text!r} in place of {right[place]!r}")
    left = await server.leaks(before)
    print(f"clients: {count} in {seconds:.1f} s, {count // 2} killed, {len(wrong)} of the others wrong, left: {left}")
    return wrong + left


def senseless() -> list[tuple[str, bytes]]:
    """(what it is, the bytes of a request) that must be refused."""
    completions = [
        ("cut off", b'{"model": "small", '), ("nothing", b""), ("no UTF-8", b"\xff\xfe"), ("text", b'"text"'),
        ("deep", b"[" * 5000), ("deeper", b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}"), ("a list", b"[]"),
        ("a huge number", b'{"model": "small", "prompt": "x", "seed": ' + b"9" * 5000 + b"}"),
    ]  # fmt: skip
    changes: dict[str, dict[str, Any]] = {
        "an empty prompt": {"prompt": ""}, "an empty list": {"prompt": []}, "no tokens": {"prompt": [[]]},
        "an empty one of two": {"prompt": ["x", ""]}, "outside the vocabulary": {"prompt": [10**6]},
        "a negative token": {"prompt": [-1]}, "too long": {"prompt": "the class " * 200}, "n": {"n": 10**6},
        "too many new tokens": {"max_tokens": 10**9}, "no new token": {"max_tokens": 0}, "top_p": {"top_p": 2},
        "temperature": {"temperature": -1}, "top_k": {"top_k": -5}, "bias": {"logit_bias": {"10000000": 1}},
        "stop": {"stop": [""]}, "a stop token": {"stop_token_ids": [10**9]}, "unknown": {"temprature": 1},
        "seed": {"seed": "x"}, "logprobs": {"logprobs": 10**6}, "another model": {"model": "large"},
        "penalty": {"repetition_penalty": 0},
    }  # fmt: skip
    completions += [(what, json.dumps(COMPLETION | change).encode()) for what, change in changes.items()]
    found = [(what, request_of(body)) for what, body in completions]
    good = json.dumps(COMPLETION).encode()
    found += [
        ("too large", request_of(json.dumps(COMPLETION | {"prompt": "x" * MAX_BODY}).encode())),
        ("too large by its word", request_of(good, length=10**12)), ("no length", request_of(good, length="x")),
        ("a negative length", request_of(good, length=-5)), ("no such path", request_of(good, "/v1/nothing")),
        ("no such method", request_of(b"", method="DELETE")), ("embeddings", request_of(
            json.dumps({"model": NAME, "input": "x"}).encode(), "/v1/embeddings")),
        ("no messages", request_of(json.dumps(CHAT | {"messages": []}).encode(), "/v1/chat/completions")),
        ("an image", request_of(json.dumps(CHAT | {"messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}).encode(),
            "/v1/chat/completions")),
    ]  # fmt: skip
    return found


async def bad_requests(server: Server, mutations: int, draw: random.Random) -> list[str]:
    """Those of `senseless`, and requests with one to three fields changed to what lies about."""
    before, wrong = server.descriptors(), []
    for what, raw in senseless():
        answer = await server.ask(raw)
        no_http = answer.status == 400 and b"Invalid HTTP request" in answer.body  # uvicorn's, which no route sees
        if not no_http and (fault := answer.fault(range(400, 500))) is not None:
            wrong.append(f"{what}: {fault}")
    statuses: collections.Counter[int] = collections.Counter()
    for _ in range(mutations):
        path, body = draw.choice([("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
        change = {draw.choice(FIELDS): draw.choice(WILD) for _ in range(draw.choice([1, 1, 2, 3]))}
        answer = await server.ask(request_of(json.dumps(body | change).encode(), path))
        statuses[answer.status] += 1
        if answer.status != 200 and (fault := answer.fault(range(400, 500))) is not None:
            wrong.append(f"{path} with {str(change)[:200]}: {fault}")
        elif b"Traceback" in answer.body:
            wrong.append(f"{path} with {str(change)[:200]}: a traceback")
    left = await server.leaks(before)
    counts = dict(sorted(statuses.items()))
    print(f"bad requests: {len(senseless())} senseless, {mutations} mutated {counts}, left: {left}")
    return wrong + left


async def draining(server: Server) -> list[str]:
    """SIGTERM while streams run: they come to their end, nobody else is let in, and the process ends by itself."""
    body = SETTINGS | {"prompt": "the class", "max_tokens": 100, "stream": True}
    raw = request_of(json.dumps(body).encode())
    alone = (await server.ask(raw)).text(True)
    running = [asyncio.create_task(server.ask(raw)) for _ in range(8)]
    while int((await server.metrics())["easytorch_requests_running"]) < 8 and not all(one.done() for one in running):
        await asyncio.sleep(0)
    server.process.send_signal(signal.SIGTERM)
    answers = await asyncio.gather(*running)
    wrong = [f"a stream of a draining server: {one.body[-200:]!r}" for one in answers if one.text(True) != alone]
    status = await asyncio.to_thread(server.process.wait, 120)
    if status not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
        wrong.append(f"the server ended with status {status}")
    complete = sum(one.text(True) == alone for one in answers)
    print(f"SIGTERM: {complete} of {len(answers)} streams complete, status {status}")
    return wrong


async def run(server: Server, model: Any, tokenizer: Any, given: argparse.Namespace) -> list[str]:
    draw = random.Random(given.seed)
    await server.ask(request_of(json.dumps(COMPLETION).encode()))  # what a first request sets up stays open
    wrong = await killed_clients(server, model, tokenizer, given.clients, draw)
    wrong += await bad_requests(server, given.mutations, draw)
    wrong += await draining(server)
    log = server.log.read_text()
    return wrong + [f"the server's log has a traceback:\n{log[-3000:]}"] * ("Traceback" in log)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--mutations", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="check_server") as temporary:
        folder = Path(temporary)
        model, tokenizer = write_model(folder / "model")
        server = Server(folder)
        try:
            wrong = asyncio.run(run(server, model, tokenizer, given))
        finally:
            server.process.kill()
            server.process.wait()
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
