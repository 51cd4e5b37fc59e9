"""Attention: the cases of the speed table, against SDPA in its variants and the eager definition of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.registry import Calls, Reach, Shape, Tensors, bench, nbytes
from easytorch.operations import Choice, OperationRegistry

Call = Callable[[], Tensor]

TINY = ("B1 H4 T16 D64", "B1 H8 KV2 T63 D60", "B2 H8 T128 D64")
SPEED = ("B1 H16 T1024 D64", "B1 H32 KV8 T4096 D128")


def heads(tensors: Tensors, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """query (B, T, H, D), key and value (B, S, KV, D); S is T and KV is H unless the shape names them."""
    kv, keys = s.get("KV", s["H"]), s.get("S", s["T"])
    query = tensors.randn(s["B"], s["T"], s["H"], s["D"])
    key, value = (tensors.randn(s["B"], keys, kv, s["D"]) for _ in range(2))
    return query, key, value


def ours(query: Tensor, key: Tensor, value: Tensor, name: str = "attention", **features: Any) -> tuple[Call, Choice]:
    operation = OperationRegistry.create(name)
    choice = operation.choose(query, key, value, **features)
    return lambda: operation(query, key, value, **features).attention_outputs, choice


def sdpa(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> dict[str, Call]:
    """SDPA's variants. The layout it likes best is (B, H, T, D): it is also given tensors that lie so."""
    gqa = query.shape[2] != key.shape[2]
    views = [t.transpose(1, 2) for t in (query, key, value)]
    lying = [t.contiguous() for t in views]

    def call(tensors: list[Tensor], kernel: SDPBackend | None = None) -> Call:
        def run() -> Tensor:
            return F.scaled_dot_product_attention(*tensors, enable_gqa=gqa, **kwargs).transpose(1, 2)

        def run_with(kernel: SDPBackend) -> Tensor:
            with sdpa_kernel(kernel):
                return run()

        return run if kernel is None else lambda: run_with(kernel)

    if query.device.type == "cpu":
        return {"sdpa": call(lying), "sdpa, BTHD": call(views)}
    # a mask leaves ATen's flash kernel out; the choice is ATen's in every case, and cuDNN is asked for by name too
    names = {"sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
    if "attn_mask" not in kwargs:
        names["sdpa flash"] = SDPBackend.FLASH_ATTENTION
    return {"sdpa": call(lying), **{name: call(lying, kernel) for name, kernel in names.items()}}


def eager(
    query: Tensor, key: Tensor, value: Tensor, *, seen: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Call:  # fmt: skip
    """As transformers' eager attentions: scores in the inputs' dtype, the softmax in float32."""
    groups, scale = query.shape[2] // key.shape[2], query.shape[3] ** -0.5
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    hidden = None if seen is None else ~seen

    def run() -> Tensor:
        keys, values = (t if groups == 1 else t.repeat_interleave(groups, dim=1) for t in (k, v))
        scores = torch.matmul(q, keys.transpose(2, 3)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        if sinks is not None:
            scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights if sinks is None else weights[..., :-1], values).transpose(1, 2)

    return run


def causal_mask(query: Tensor, key: Tensor, window: int | None = None) -> Tensor:
    """(T, S): the keys each query sees, the last `window` of them."""
    length, keys = query.shape[1], key.shape[1]
    seen = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
    return seen if window is None else seen & ~seen.tril(keys - length - window)


def work(query: Tensor, key: Tensor, causal: bool) -> dict[str, float]:
    """Multiplications and additions: two products forward, five backward; half of each under causal."""
    product = 2.0 * query.numel() * key.shape[1] * (0.5 if causal else 1.0)
    return {"flops": 2 * product, "flops_backward": 5 * product}


@bench(
    "attention", "long prefill causal", shapes=SPEED[1:],
    reach={("float32", False): 0.60, ("bfloat16", False): 0.55}, devices=("cpu",),
)  # fmt: skip
def long_prefill(tensors: Tensors, s: Shape) -> Calls:
    return prefill(tensors, s)


@bench(
    "attention", "prefill causal", shapes=SPEED[:1], tiny=TINY,
    reach={("float32", False): 0.75, ("bfloat16", False): 0.60}, devices=("cpu",),
)  # fmt: skip
def prefill(tensors: Tensors, s: Shape) -> Calls:
    q, k, v = heads(tensors, s)
    return Calls(*ours(q, k, v, causal=True), sdpa(q, k, v, is_causal=True), **work(q, k, True))


@bench("attention", "full", shapes=("B1 H16 T1024 D64", "B4 H12 T384 D64"), tiny=TINY, devices=("cpu",))
def full(tensors: Tensors, s: Shape) -> Calls:
    q, k, v = heads(tensors, s)
    return Calls(*ours(q, k, v), sdpa(q, k, v), **work(q, k, False))


@bench(
    "attention", "training causal", shapes=("B1 H16 T1024 D64",), tiny=TINY, backward=(True,),
    reach={("float32", True): 0.70, ("bfloat16", True): 0.95}, devices=("cpu",),
)  # fmt: skip
def training(tensors: Tensors, s: Shape) -> Calls:
    return prefill(tensors, s)


@bench(
    "attention", "decode", shapes=("B8 H32 KV8 T1 S4096 D128",), tiny=("B1 H8 T1 S64 D64", "B1 H32 KV8 T1 S128 D128"),
    reach={("float32", False): 0.25, ("bfloat16", False): 0.07},
)  # fmt: skip
def decode(tensors: Tensors, s: Shape) -> Calls:
    q, k, v = heads(tensors, s)
    return Calls(*ours(q, k, v, causal=True), sdpa(q, k, v), moved=nbytes(q, q, k, v))


FEATURES = {("float32", False): Reach(ratio=0.30, of="eager"), ("bfloat16", False): Reach(ratio=0.30, of="eager")}
FEATURE_TINY = ("B1 H4 T16 D64", "B2 H8 KV2 T128 D64")


@bench(
    "attention", "causal, window 512", shapes=("B1 H8 T4096 D64", "B1 H16 KV8 T4096 D128"), tiny=FEATURE_TINY,
    reach=FEATURES,
)  # fmt: skip
def window(tensors: Tensors, s: Shape) -> Calls:
    q, k, v = heads(tensors, s)
    seen = causal_mask(q, k, 512)
    return Calls(
        *ours(q, k, v, causal=True, sliding_window=512),
        {**sdpa(q, k, v, attn_mask=seen), "eager": eager(q, k, v, seen=seen)},
    )


@bench("attention", "causal, softcap 50", shapes=("B1 H8 KV4 T2048 D128",), tiny=FEATURE_TINY, reach=FEATURES)
def softcap(tensors: Tensors, s: Shape) -> Calls:
    q, k, v = heads(tensors, s)
    torchs = {"eager": eager(q, k, v, seen=causal_mask(q, k), softcap=50.0)}
    return Calls(*ours(q, k, v, causal=True, softcap=50.0), torchs, **work(q, k, True))


@bench("attention", "causal, sinks", shapes=("B1 H16 KV2 T2048 D64",), tiny=FEATURE_TINY, reach=FEATURES)
def sinks(tensors: Tensors, s: Shape) -> Calls:
    q, k, v = heads(tensors, s)
    extra = tensors.randn(s["H"])
    torchs = {"eager": eager(q, k, v, seen=causal_mask(q, k), sinks=extra)}
    return Calls(*ours(q, k, v, causal=True, sinks=extra), torchs, **work(q, k, True))


@bench("attention", "causal, 8 segments", shapes=("B1 H8 T4096 D64",), tiny=FEATURE_TINY, reach=FEATURES)
def segments(tensors: Tensors, s: Shape) -> Calls:
    """A row of eight packed documents of uneven lengths."""
    q, k, v = heads(tensors, s)
    ends = torch.tensor([0.05, 0.22, 0.30, 0.45, 0.60, 0.71, 0.93], device=q.device).mul(s["T"]).long()
    ids = torch.bucketize(torch.arange(s["T"], device=q.device), ends, right=True).expand(s["B"], -1)
    seen = causal_mask(q, k) & (ids[:, None, :, None] == ids[:, None, None, :])
    return Calls(
        *ours(q, k, v, causal=True, query_segment_ids=ids, key_segment_ids=ids),
        {**sdpa(q, k, v, attn_mask=seen), "eager": eager(q, k, v, seen=seen)},
    )


@bench("attention", "mask", shapes=("B2 H16 T1024 D64",), tiny=FEATURE_TINY)
def padding(tensors: Tensors, s: Shape) -> Calls:
    """A batch padded on the right, as models give it: a boolean mask (B, 1, 1, S)."""
    q, k, v = heads(tensors, s)
    lengths = torch.linspace(s["T"] // 2, s["T"], s["B"], device=q.device).long()
    mask = (torch.arange(s["T"], device=q.device) < lengths[:, None])[:, None, None, :]
    return Calls(*ours(q, k, v, mask=mask), sdpa(q, k, v, attn_mask=mask))


GPU_LENGTHS = tuple(f"B{16384 // t} H16 T{t} D{d}" for d in (64, 128) for t in (1024, 2048, 4096, 8192, 16384))
GPU_REACH: dict[tuple[str, bool], Reach | float] = {("bfloat16", False): 1.0, ("bfloat16", True): 1 / 0.9}


def _flash(causal: bool) -> None:
    name = "causal" if causal else "full"

    @bench("flash", name, shapes=GPU_LENGTHS, dtypes=("bfloat16",), backward=(False, True), devices=("cuda",),
           reach=GPU_REACH)  # fmt: skip
    def flash(tensors: Tensors, s: Shape) -> Calls:
        q, k, v = heads(tensors, s)
        torchs = sdpa(q, k, v, is_causal=causal)
        return Calls(*ours(q, k, v, name="flash", causal=causal), torchs, **work(q, k, causal))


_flash(causal=True)
_flash(causal=False)
