"""Serve a model over HTTP with OpenAI's API."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from easytorch.cli.generate import DTYPES, check_causal, find_device

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_GIB = 1 << 30
_MIB = 1 << 20


def command(
    model: Annotated[str, typer.Argument(help="A model folder or hub id: a causal language model, or an encoder.")],
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free port.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="EASYTORCH_API_KEY", help="API key required from every request but /health and the page."),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Model name in requests; MODEL by default.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"Dtype of the weights: {', '.join(DTYPES)} (as stored).")] = "auto",
    max_memory: Annotated[float | None, typer.Option(min=0.001, help="GiB for the KV cache.")] = None,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens in one step.")] = 2048,
    max_requests: Annotated[int, typer.Option(min=1, help="Maximum requests that run at once; others wait.")] = 256,
    max_model_length: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of a request, prompt and output.")
    ] = None,
    prefix_reuse: Annotated[bool, typer.Option(help="Share the keys and values of common prompt prefixes.")] = True,
    enforce_eager: Annotated[bool, typer.Option(help="On a GPU, decode without CUDA graphs.")] = False,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto: the dtype of the weights, and no other.")] = "auto",
    max_queue: Annotated[
        int, typer.Option(min=1, help="Limit of running and queued requests; beyond it new ones get 429.")
    ] = 1024,
    max_body: Annotated[float, typer.Option(min=0.001, help="Maximum request body, in MiB.")] = 8.0,
    request_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds after which a request is aborted.")
    ] = 600.0,
    drain_timeout: Annotated[int, typer.Option(min=1, help="Seconds that running requests have after SIGTERM.")] = 60,
) -> None:
    """Serve a model over HTTP: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, /health, /metrics."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}", param_hint="--dtype")
    if api_key == "":
        raise typer.BadParameter("the key is empty; leave the option out to require none", param_hint="--api-key")

    import torch
    from transformers import AutoConfig

    from easytorch.auto.tokenizer import load_tokenizer
    from easytorch.generation.engine import Engine
    from easytorch.serving.app import create_app
    from easytorch.serving.embedder import Embedder, pooling_of
    from easytorch.serving.run import make_server

    place = find_device(device)
    weights = "auto" if dtype == "auto" else getattr(torch, dtype)

    def load() -> dict[str, Any]:
        if generates(AutoConfig.from_pretrained(model)):
            loaded = _load("AutoModelForCausalLM", model, weights, place)
            return {
                "engine": Engine(
                    loaded, load_tokenizer(model), max_memory=None if max_memory is None else int(max_memory * _GIB),
                    max_batch_tokens=max_batch_tokens, max_requests=max_requests, max_model_length=max_model_length,
                    prefix_reuse=prefix_reuse, enforce_eager=enforce_eager, kv_cache_dtype=kv_cache_dtype,
                )
            }  # fmt: skip
        encoder = _load("AutoModel", model, weights, place)
        return {"embedder": Embedder(encoder, load_tokenizer(model), pooling_of(model))}

    app = create_app(
        served_model_name or model, api_key=api_key, max_body=int(max_body * _MIB), max_queue=max_queue,
        request_timeout=request_timeout, **in_thread_of_its_own(load),
    )  # fmt: skip
    make_server(app, host, port, drain_timeout=drain_timeout).run()


def in_thread_of_its_own(function: Callable[[], T]) -> T:
    """function's result, or its error, from a thread that has ended.

    Each thread that calls torch has its own pool of OpenMP threads, until it ends. Were this process to keep one of
    loading beside that of the engine's thread, libgomp would count more threads than cores, and each parallel region of
    a step would sleep and be woken, where it spins otherwise (28 waits a step of 4 layers in place of 2).
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised where the result is awaited
            future.set_exception(error)

    thread = threading.Thread(target=run, name="easytorch-load", daemon=True)
    thread.start()
    found = future.result()
    thread.join()
    return found


def generates(config: Any) -> bool:
    """Whether a checkpoint is a causal language model; `ValueError` if it is neither that nor an encoder."""
    names = config.architectures or []
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} has an encoder and a decoder; this serves causal models and encoders")
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return True
    if any(name.endswith("ForConditionalGeneration") for name in names):
        raise ValueError(f"{names[0]} reads images beside text; this serves models of text alone")
    return False


def _load(auto: str, model: str, weights: Any, place: torch.device) -> Any:
    import easytorch

    loaded, info = getattr(easytorch, auto).from_pretrained(model, dtype=weights, output_loading_info=True, strict=True)
    if auto == "AutoModelForCausalLM":
        check_causal(loaded, info["missing_keys"], model)
    return loaded.to(place).eval()
