"""Stage 4: the trained checkpoint, reloaded, writes text with a KV cache."""

from __future__ import annotations

import time
from pathlib import Path

import torch

import easytorch
from easytorch.cli.demo.stage import Demo
from easytorch.cli.generate import echo
from easytorch.generation import generate_tokens, stream_text

PROMPT = "When an exception is raised,"


def run(demo: Demo, checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    # One token of a small model is too little work for two threads, which mostly wait for each other.
    torch.set_num_threads(1)
    model = easytorch.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    demo.say(f'$ easytorch generate {checkpoint} --prompt "{PROMPT}" --temperature 0.7 --top-p 0.9 --seed 0\n')
    count = 40 if demo.quick else 160
    pieces = stream_text(
        model, tokenizer, PROMPT, max_new_tokens=count, temperature=0.7, top_p=0.9, seed=0, eos_token_id=[]
    )
    demo.console.print(PROMPT, end="", style="bold", highlight=False)
    start = time.perf_counter()
    list(echo(pieces))
    seconds = time.perf_counter() - start
    demo.say(f"\n\n{count} tokens in {seconds:.1f} s, {count / seconds:.0f} tokens/s")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    tokens = [int(token[0]) for token in generate_tokens(model, ids, max_new_tokens=24, eos_token_id=[])]
    same = sum(a == b for a, b in zip(tokens, _without_cache(model, ids, len(tokens)), strict=True))
    demo.check(
        "greedy tokens with the cache against recomputing the whole text",
        f"{same} of {len(tokens)} equal",
        same == len(tokens),
    )


@torch.no_grad()
def _without_cache(model: torch.nn.Module, ids: torch.Tensor, count: int) -> list[int]:
    for _ in range(count):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, -count:].tolist()
