"""Generate text from a prompt, streamed to the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "float16", "bfloat16")


def command(
    model: Annotated[str, typer.Argument(help="A model folder or hub id, torch or Flax.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What the text begins with; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the likeliest tokens that hold this much.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, xla, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"Of the weights: {', '.join(DTYPES)} (as stored).")] = "auto",
    attn_implementation: Annotated[str | None, typer.Option(help="Force an attention: vanilla, sdpa, flash.")] = None,
) -> None:
    """Generate text from a prompt with a KV cache, streamed to the terminal as it comes."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}", param_hint="--dtype")

    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    import easytorch
    from easytorch.generation import stream_text

    logging.disable_progress_bar()
    forced = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    place = find_device(device)
    weights = "auto" if dtype == "auto" else getattr(torch, dtype)
    loaded = easytorch.AutoModelForCausalLM.from_pretrained(model, dtype=weights, **forced).to(place).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = sys.stdin.read() if prompt == "-" else prompt
    pieces = stream_text(
        loaded, tokenizer, text, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        seed=seed,
    )  # fmt: skip
    typer.echo(text, nl=False)
    start = time.perf_counter()
    written = "".join(echo(pieces))
    seconds = time.perf_counter() - start
    count = len(tokenizer(written, add_special_tokens=False)["input_ids"])
    typer.echo()
    typer.echo(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s on {place}", err=True)


def echo(pieces: Iterable[str]) -> Iterable[str]:
    """Write each piece to standard output as it comes, and pass it on."""
    for piece in pieces:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
        yield piece


def find_device(name: str) -> torch.device:
    """`name` as a device; "auto" is the GPU where there is one, else the CPU."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] == "xla":
        import torch_xla

        return torch_xla.device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is not a device; give auto, cpu, cuda, cuda:1 or xla") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name}: torch {torch.__version__} sees no GPU here; use --device cpu")
    return device
