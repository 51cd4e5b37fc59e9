"""Compares the tokens that a model generates over every cache with those of transformers' own class over the same.

    python scripts/check_caches.py [--models llama lfm2 ...] [--caches static fp8 ...] [--ways greedy beams ...]

Every model runs natively or as a class of transformers loaded by us, over each of transformers' caches, by name and as
`past_key_values`, and over ours, in each way of generating, for one prompt and for a left-padded batch. Where
transformers refuses a case, ours must refuse it too. A cache of ours in few bits is compared with transformers' class
over that cache, and one in full precision with transformers' dynamic one. Exit status 1 where one differs.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # of this checkout, installed or not

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import (  # noqa: E402
    DynamicCache,
    EncoderDecoderCache,
    LogitsProcessor,
    LogitsProcessorList,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer  # noqa: E402

import easytorch  # noqa: E402
from easytorch import protocol  # noqa: E402
from easytorch.cache import RaggedPagesCache  # noqa: E402
from easytorch.cache_names import CACHE, STATES  # noqa: E402

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"initializer_range": 0.3}  # else tokens repeat, whatever a cache holds
GROUPED = SIZES | {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
HYBRID = EXPERTS | {"shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"vocab_size": 97, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8}
BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 97,
    "initializer_factor": 8.0,
}
SLIDING = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, Any] = {
    # native
    "llama": transformers.LlamaConfig(**GROUPED),
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=4),
    "gemma2": transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=4, layer_types=SLIDING),
    "gpt_oss": transformers.GptOssConfig(
        **GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, layer_types=SLIDING
    ),
    "deepseek_v3": transformers.DeepseekV3Config(**SIZES, **LATENT),
    "qwen3_next": transformers.Qwen3NextConfig(**GROUPED, head_dim=8, **LINEAR, **HYBRID),
    "mamba2": transformers.Mamba2Config(**MAMBA, n_groups=1, initializer_range=0.3),
    "t5": transformers.T5Config(**T5, decoder_start_token_id=0),
    "bloom": transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3),
    # transformers' own classes
    "apertus": transformers.ApertusConfig(**GROUPED),
    "cwm": transformers.CwmConfig(**GROUPED, head_dim=8, sliding_window=4, layer_types=SLIDING),
    "bamba": transformers.BambaConfig(**GROUPED, **BAMBA),
    "lfm2": transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "pegasus": transformers.PegasusConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, init_std=0.3,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=0, pad_token_id=0,
    ),
}  # fmt: skip
BATCH = torch.tensor([[5, 9, 33, 71, 8, 2, 17, 60], [0, 0, 0, 12, 60, 3, 12, 60]])
PROMPTS = {"one": (BATCH[:1], torch.ones_like(BATCH[:1])), "padded": (BATCH, (BATCH != 0).long())}
NEW, ROOM = 9, 48
# way of generating: the arguments, how many sequences a row has
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({}, 1),
    "beams": ({"num_beams": 3}, 3),
    "sampled": ({"do_sample": True, "top_k": 20}, 1),
    "sampled_beams": ({"do_sample": True, "num_beams": 2}, 2),
    "several": ({"do_sample": True, "num_return_sequences": 2}, 2),
    "chunks": ({"prefill_chunk_size": 3}, 1),
    "lookup": ({"prompt_lookup_num_tokens": 3}, 1),
    "assisted": ({}, 1),
    "turns": ({}, 1),
    # all that a caller can hand in and get back
    "outputs": ({"do_sample": True, "top_k": 20, "return_dict_in_generate": True, "output_scores": True,
                 "output_logits": True, "repetition_penalty": 1.3}, 1),
}  # fmt: skip
SPECULATIVE = ("lookup", "assisted")  # whose tokens are those of greedy decoding
# transformers' `cache_implementation`
NAMES = ("dynamic", "static", "offloaded", "offloaded_static", "quantized")
EXACT, FEW_BITS = ("ours_static", "ours_dynamic", "pages"), ("ours_int8", "ours_int4", "ours_nf4", "ours_fp8")


class Case(NamedTuple):
    model: str
    cache: str
    way: str
    prompt: str


@functools.cache
def models_of(name: str, seed: int = 0) -> tuple[Any, Any]:
    """(ours, transformers' own) of the same weights."""
    torch.manual_seed(seed)
    sequences = CONFIGS[name].is_encoder_decoder
    kind = "AutoModelForSeq2SeqLM" if sequences else "AutoModelForCausalLM"
    theirs = getattr(transformers, kind).from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.float32).eval()
    ours = getattr(easytorch, kind).from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.float32).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def few_bits(kind: str, model: Any, rows: int) -> Any:
    return protocol.init_cache(model, rows, ROOM, kind=kind, group_size=8, residual_length=4)


def pages(model: Any, rows: int) -> RaggedPagesCache:
    metadata = protocol.create_paged_metadata(model, 1.0, 4, ROOM)
    return protocol.init_ragged_pages(model, dataclasses.replace(metadata, num_pages=rows * ROOM // 4 + 1))


def around(model: Any, cache: Any) -> Any:
    encoder = model.config.is_encoder_decoder and not isinstance(cache, EncoderDecoderCache)
    return EncoderDecoderCache(cache, DynamicCache(config=model.config)) if encoder else cache


CACHES: dict[str, Callable[[Any, int], Any]] = {
    "default": lambda model, rows: None,
    "DynamicCache": lambda model, rows: around(model, DynamicCache(config=model.config)),
    "DynamicCache_without_config": lambda model, rows: around(model, DynamicCache()),
    "StaticCache": lambda model, rows: around(model, StaticCache(config=model.config, max_cache_len=ROOM)),
    "QuantizedCache_fp8": lambda model, rows: around(model, QuantizedCache("fp8", model.config)),
    "ours_static": lambda model, rows: protocol.init_cache(model, rows, ROOM, kind="static"),
    "ours_dynamic": lambda model, rows: protocol.init_cache(model, rows, ROOM, kind="dynamic"),
    "pages": pages,
    **{f"ours_{kind}": functools.partial(few_bits, kind) for kind in ("int8", "int4", "nf4", "fp8")},
}


class Watcher(LogitsProcessor, BaseStreamer):
    """A logits processor and a streamer, which keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        self.seen += [input_ids.clone(), scores.clone()]
        return scores.masked_fill(torch.arange(scores.shape[1]) % 5 == 0, -1e4)

    def put(self, value: Tensor) -> None:
        self.seen.append(value.clone())

    def end(self) -> None:
        self.seen.append(torch.zeros(()))


class EightEven(StoppingCriteria):
    """A row stops at its eighth even token."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return (input_ids % 2 == 0).sum(dim=1) >= 8


def generate(model: Any, cache: str, case: Case, assistant: Any) -> list[Tensor]:
    """The tokens of one model over one cache, and what else the way of generating gives."""
    ids, mask = PROMPTS[case.prompt]
    arguments, each = WAYS[case.way]
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | arguments
    if case.way == "assisted":
        settings["assistant_model"] = assistant
    if cache in NAMES:
        settings["cache_implementation"] = cache
        if cache == "quantized":
            settings["cache_config"] = {"backend": "fp8"}
    else:
        made = CACHES[cache](model, each * len(ids))
        if made is not None:
            settings[STATES if "mamba" in type(model).__name__.lower() else CACHE] = made
    torch.manual_seed(3)
    if case.way == "outputs":
        watcher = Watcher()
        settings |= {"logits_processor": LogitsProcessorList([watcher])}
        settings |= {
            "stopping_criteria": StoppingCriteriaList([EightEven()]),
            "streamer": watcher if len(ids) == 1 else None,
        }
        found = model.generate(ids, attention_mask=mask, **settings)
        kept = type(found).__name__.encode() + b" " + " ".join(found.keys()).encode()
        return [found.sequences, *found.scores, *found.logits, *watcher.seen, torch.tensor(list(kept))]
    tokens: Tensor = model.generate(ids, attention_mask=mask, **settings)
    if case.way == "turns":  # the next turn of a chat over the cache of the first
        more = torch.cat([tokens, BATCH[: len(ids), -3:]], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(ids), more.shape[1] - mask.shape[1])], dim=1)
        tokens = model.generate(more, attention_mask=mask, **settings)
    return [tokens]


def attempt(model: Any, cache: str, case: Case, assistant: Any) -> list[Tensor] | str:
    """What is generated, or the error's type and first line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return generate(model, cache, case, assistant)
    except Exception as error:  # whatever transformers raises is compared
        lines = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"


def check(case: Case) -> tuple[str, str]:
    """("equal" | "refused" | "WRONG", what was seen) of one case."""
    ours, theirs = models_of(case.model)
    assistants = models_of(case.model, seed=1)
    found = attempt(ours, case.cache, case, assistants[0])
    reference = "DynamicCache" if case.cache in EXACT else case.cache
    right = attempt(theirs, reference, case, assistants[1])
    if isinstance(found, str) and isinstance(right, str) and found.split(":")[0] == right.split(":")[0]:
        return "refused", found
    if isinstance(found, str) or isinstance(right, str):
        if isinstance(found, str) and case.cache in EXACT + FEW_BITS and any(words in found for words in REFUSALS):
            return "refused", found
        return "WRONG", f"ours {shown(found)}, transformers {shown(right)}"
    if not same(found, right):
        return "WRONG", f"ours {shown(found)}, transformers {shown(right)}"
    if case.way in SPECULATIVE:
        greedy = attempt(ours, case.cache, case._replace(way="greedy"), None)
        if isinstance(greedy, str) or not same(found, greedy):
            return "WRONG", f"{shown(found)}, and greedy decoding {shown(greedy)}"
    return "equal", ""


def same(found: list[Tensor], right: list[Tensor]) -> bool:
    """Equal tokens; scores and logits that differ by rounding alone."""
    return len(found) == len(right) and all(
        one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-3, atol=1e-3)
        for one, other in zip(found, right, strict=True)
    )


# What caches of ours are documented not to take.
REFUSALS = (
    "cannot be cropped",
    "is for layers of full attention",
    "whose keys lie in no pages",
    "pages hold keys and values",
)


def shown(result: list[Tensor] | str) -> str:
    return result if isinstance(result, str) else f"{result[0].tolist()} and {len(result) - 1} more"


def cases(models: list[str], caches: list[str], ways: list[str]) -> list[Case]:
    return [
        Case(model, cache, way, prompt)
        for model in models
        for cache in caches
        for way in ways
        for prompt in PROMPTS
        if not (way in SPECULATIVE and prompt == "padded")  # of one row, as transformers has them
        # a cache of one's own alone outlives a call, and that of an encoder is for one text
        and not (way == "turns" and (cache in NAMES or cache == "default" or CONFIGS[model].is_encoder_decoder))
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CONFIGS), choices=CONFIGS)
    parser.add_argument("--caches", nargs="+", default=[*CACHES, *NAMES], choices=[*CACHES, *NAMES])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--verbose", action="store_true", help="also what was refused, and why")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    counts = {"equal": 0, "refused": 0, "WRONG": 0}
    for name in options.models:
        before = dict(counts)
        for case in cases([name], options.caches, options.ways):
            verdict, words = check(case)
            counts[verdict] += 1
            if verdict == "WRONG" or (options.verbose and verdict == "refused"):
                print(f"{verdict} {case.model} {case.cache} {case.way} {case.prompt}: {words}", flush=True)
        print(name, {verdict: counts[verdict] - before[verdict] for verdict in counts}, flush=True)
    print(counts)
    return int(counts["WRONG"] > 0 or counts["equal"] == 0)


if __name__ == "__main__":
    sys.exit(main())
