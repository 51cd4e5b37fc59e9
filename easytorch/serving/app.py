"""The routes of OpenAI's API, for a language model or an encoder."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import functools
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from easytorch.generation.engine import Engine, SamplingParams
from easytorch.serving.chat import chat_prompt, checked_text
from easytorch.serving.completions import Chat, Completions, Kind, Outputs, answer, stream, without_scores
from easytorch.serving.embedder import Embedder
from easytorch.serving.errors import APIError, add_handlers
from easytorch.serving.events import EventStream, until_disconnect
from easytorch.serving.limits import Limits
from easytorch.serving.lingering import LingeringClose
from easytorch.serving.metrics import CountResponses, text
from easytorch.serving.page import page
from easytorch.serving.schemas import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, SamplingRequest
from easytorch.serving.worker import EngineWorker


def create_app(
    model_name: str,
    *,
    engine: Engine | None = None,
    embedder: Embedder | None = None,
    api_key: str | None = None,
    max_body: int = 8 << 20,
    max_queue: int = 1024,
    request_timeout: float = 600.0,
) -> FastAPI:
    """An ASGI application. engine: for chat and completions; embedder: for embeddings; one of them.

    max_body: bytes of a request. max_queue: the limit of running and queued requests, beyond which new ones get 429.
    request_timeout: seconds, after which a request is ended (504, or an error in its stream).
    """
    if (engine is None) == (embedder is None):
        raise ValueError("give either an engine or an embedder")
    server = _Server(model_name, engine, embedder, max_queue, request_timeout)
    app = FastAPI(title="EasyTorch", lifespan=server.lifespan, docs_url="/docs", redoc_url=None)
    add_handlers(app)
    app.add_api_route("/", page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/health", server.health, methods=["GET"])
    app.add_api_route("/health", server.health, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/metrics", server.metrics, methods=["GET"])
    app.add_api_route("/v1/models", server.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", server.model, methods=["GET"])
    app.add_api_route("/v1/chat/completions", server.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", server.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/embeddings", server.embeddings, methods=["POST"], response_model=None)
    paths = frozenset(getattr(route, "path", "") for route in app.routes)
    app.add_middleware(Limits, api_key=api_key, max_body=max_body)
    app.add_middleware(CountResponses, counts=server.responses, paths=paths)
    app.add_middleware(LingeringClose)
    app.state.worker = server.worker
    return app


class _Server:
    def __init__(
        self, name: str, engine: Engine | None, embedder: Embedder | None, max_queue: int, request_timeout: float
    ) -> None:
        self.name, self.embedder, self.timeout = name, embedder, request_timeout
        self.created = int(time.time())
        self.worker = None if engine is None else EngineWorker(engine, max_queue=max_queue)
        self.responses: Counter[tuple[str, int]] = Counter()
        self._embedding: concurrent.futures.ThreadPoolExecutor | None = None
        self._embeddings_left = max_queue

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        if self.worker is not None:
            self.worker.start()
        self._embedding = concurrent.futures.ThreadPoolExecutor(1, "easytorch-embedder")
        try:
            yield
        finally:
            if self.worker is not None:
                await asyncio.to_thread(self.worker.stop)
            self._embedding.shutdown(wait=True, cancel_futures=True)

    async def health(self) -> Response:
        if self.worker is not None and not self.worker.alive:
            raise APIError(503, "the engine's thread has ended; see the server's log")
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        stats = None if self.worker is None else await asyncio.wrap_future(self.worker.call(self.worker.engine.stats))
        return PlainTextResponse(text(stats, self.responses), media_type="text/plain; version=0.0.4")

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._model())

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        engine = self._engine(body.model)
        make = functools.partial(chat_prompt, engine.tokenizer, body.messages, body.chat_template_kwargs)
        return await self._answer(
            body, Chat(body.top_logprobs or 0, engine.tokenizer), lambda: [make()], _params(body), request
        )

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        engine = self._engine(body.model)
        prompts, params = body.prompts(), _params(body)
        echoes: list[str] = []

        def make() -> list[Any]:
            given = [engine.tokens_of(one) for one in prompts]
            tokens = [engine.truncated(one, params) for one in given]
            if body.echo:
                texts = (
                    prompt if isinstance(prompt, str) and len(kept) == len(complete) else engine.tokenizer.decode(kept)
                    for prompt, complete, kept in zip(prompts, given, tokens, strict=True)
                )
                echoes.extend(text for text in texts for _ in range(body.n))
            return tokens

        kind = Completions(echoes if body.echo else None, engine.tokenizer)
        return await self._answer(body, kind, make, params, request)

    async def embeddings(self, body: EmbeddingRequest, request: Request) -> Response:
        self._check_model(body.model)
        if self.embedder is None or self._embedding is None:
            raise APIError(400, f"{self.name} generates text and has no embeddings; serve an encoder")
        if body.dimensions is not None:
            raise APIError(400, "dimensions: this server does not shorten vectors; leave it out", param="dimensions")
        if self._embeddings_left == 0:
            raise APIError(429, "too many requests are running or queued: try again later", code="rate_limit_exceeded")
        self._embeddings_left -= 1
        try:
            inputs = [checked_text(one) if isinstance(one, str) else one for one in body.inputs()]
            loop = asyncio.get_running_loop()
            vectors, tokens = await asyncio.wait_for(
                loop.run_in_executor(self._embedding, self.embedder, inputs), self.timeout
            )
        except ValueError as error:
            raise APIError(400, str(error), param="input") from error
        except TimeoutError as error:
            raise APIError(504, f"the request did not end within {self.timeout:g} seconds", code="timeout") from error
        finally:
            self._embeddings_left += 1
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": usage})

    async def _answer(
        self,
        body: SamplingRequest,
        kind: Kind,
        make_prompts: Callable[[], Sequence[Any]],
        params: SamplingParams,
        request: Request,
    ) -> Response:
        assert self.worker is not None
        outputs = self.worker.generate(make_prompts, params, self.timeout)
        if isinstance(body, CompletionRequest) and body.prompt_only and body.logprobs is None:
            outputs = without_scores(outputs)
        try:
            if body.stream:
                # wait for the first token: until then a refusal can still set the status
                begun = await until_disconnect(request.receive, _with_first_output(outputs))
                if begun is not None:
                    usage = body.stream_options is not None and body.stream_options.include_usage
                    return EventStream(stream(kind, self.name, begun, params.n, include_usage=usage))
            else:
                found = await until_disconnect(request.receive, answer(kind, self.name, outputs, params.n))
                await outputs.aclose()
                if found is not None:
                    return JSONResponse(found)
        except ValueError as error:
            raise APIError(400, str(error)) from error
        return Response(status_code=499)  # the client has disconnected: nobody reads it

    def _engine(self, model: str) -> Engine:
        self._check_model(model)
        if self.worker is None:
            raise APIError(400, f"{self.name} computes embeddings and generates no text; serve a causal language model")
        return self.worker.engine

    def _check_model(self, name: str) -> None:
        if name != self.name:
            message = f"the model {name!r} is not served here; {self.name!r} is"
            raise APIError(404, message, param="model", code="model_not_found")

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "easytorch"}


def _params(body: ChatCompletionRequest | CompletionRequest) -> SamplingParams:
    try:
        return body.params()
    except ValueError as error:
        raise APIError(400, str(error)) from error


async def _with_first_output(outputs: Outputs) -> Outputs:
    """`outputs`, after waiting for the first."""
    first = await anext(outputs)

    async def all_of_them() -> Outputs:
        try:
            yield first
            async for one in outputs:
                yield one
        finally:
            await outputs.aclose()

    return all_of_them()


def _encoded(vector: Sequence[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
