"""Generate text from a prompt, streamed to the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DTYPES = ("auto", "float32", "float16", "bfloat16")


def command(
    model: Annotated[str, typer.Argument(help="A model folder or hub id, torch or Flax.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to continue; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy decoding.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the fewest tokens with this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed, for repeatable sampling.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, xla, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"Dtype of the weights: {', '.join(DTYPES)} (as stored).")] = "auto",
    attn_implementation: Annotated[str | None, typer.Option(help="Force an attention: vanilla, sdpa, flash.")] = None,
) -> None:
    """Generate text from a prompt with a KV cache, streamed to the terminal."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}", param_hint="--dtype")

    import torch
    from transformers.utils import logging

    import easytorch
    from easytorch.auto.tokenizer import load_tokenizer
    from easytorch.generation.text import decode_incrementally, stream_tokens

    logging.disable_progress_bar()
    forced = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    place = find_device(device)
    weights = "auto" if dtype == "auto" else getattr(torch, dtype)
    loaded, info = easytorch.AutoModelForCausalLM.from_pretrained(
        model, dtype=weights, output_loading_info=True, strict=True, **forced
    )
    check_causal(loaded, info["missing_keys"], model)
    loaded = loaded.to(place).eval()
    tokenizer = load_tokenizer(model)
    text = sys.stdin.read() if prompt == "-" else prompt
    tokens = stream_tokens(
        loaded, tokenizer, text, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        seed=seed,
    )  # fmt: skip
    typer.echo(text, nl=False)
    start = time.perf_counter()
    ids: list[int] = []
    for _ in echo(decode_incrementally(tokenizer, _kept(tokens, ids))):
        pass
    seconds = time.perf_counter() - start
    count = len(ids)
    typer.echo()
    typer.echo(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s on {place}", err=True)


def echo(pieces: Iterable[str]) -> Iterable[str]:
    """Write each piece to standard output, and yield it."""
    for piece in pieces:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
        yield piece


def _kept(tokens: Iterable[int], ids: list[int]) -> Iterable[int]:
    """`tokens`, each put into `ids` as it passes: text does not tell how many tokens made it."""
    for token in tokens:
        ids.append(token)
        yield token


def check_causal(model: PreTrainedModel, missing: Collection[str], source: str) -> None:
    """`ValueError` when the checkpoint has no language model's head, or reads text in both directions."""
    saved = (model.config.architectures or [type(model).__name__])[0]
    # Only where the class differs too: GPT-NeoX's config says is_decoder=False of a decoder.
    reads_ahead = getattr(model.config, "is_decoder", None) is False and saved != type(model).__name__
    if missing or reads_ahead:
        why = f"it has no {min(missing)!r}" if missing else "it reads text in both directions"
        raise ValueError(
            f"{source}: holds {saved}, which cannot generate: {why}; give a causal language model's checkpoint"
        )


def find_device(name: str) -> torch.device:
    """`name` as a device; "auto" is the GPU where there is one, else the CPU."""
    import torch

    from easytorch import tpu_platform

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] in tpu_platform.LIBRARIES:
        return tpu_platform.find_device(name)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is not a device; give auto, cpu, cuda, cuda:1, xla or tpu") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name}: torch {torch.__version__} sees no GPU here; use --device cpu")
    return device
