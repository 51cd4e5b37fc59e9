"""Memory-bound operations: norms, gated linear units, rotary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.registry import Calls, Shape, Tensors, bench, nbytes, ours

PASSES = (False, True)
# the hidden states of a prompt of a small and of an 8B model, of one token, and of nearly nothing
HIDDEN = ("T2048 N4096", "T512 N1024")
TINY_HIDDEN = ("T1 N4096", "T4 N64", "T63 N60")
GPU_HIDDEN = ("T16384 N4096", "T16384 N8192")


def llama_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The body of transformers' LlamaRMSNorm."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rms_norm(tensors: Tensors, s: Shape) -> Calls:
    x, weight = tensors.randn(s["T"], s["N"]), tensors.randn(s["N"])
    torchs = {
        "F.rms_norm": lambda: F.rms_norm(x, (s["N"],), weight, 1e-6),
        "LlamaRMSNorm": lambda: llama_rms_norm(x, weight, 1e-6),
    }
    return Calls(*ours("rms_norm", x, weight, 1e-6), torchs, moved=2 * nbytes(x), moved_backward=3 * nbytes(x))


def _layer_norm(tensors: Tensors, s: Shape) -> Calls:
    x, weight, bias = tensors.randn(s["T"], s["N"]), tensors.randn(s["N"]), tensors.randn(s["N"])
    torchs = {"F.layer_norm": lambda: F.layer_norm(x, (s["N"],), weight, bias)}
    return Calls(*ours("layer_norm", x, weight, bias, 1e-5), torchs, moved=2 * nbytes(x), moved_backward=3 * nbytes(x))


def _swiglu(tensors: Tensors, s: Shape) -> Calls:
    gate, up = tensors.randn(s["T"], s["N"]), tensors.randn(s["T"], s["N"])
    torchs = {"F.silu": lambda: F.silu(gate) * up}
    return Calls(*ours("swiglu", gate, up), torchs, moved=3 * nbytes(gate), moved_backward=5 * nbytes(gate))


def _geglu(tensors: Tensors, s: Shape) -> Calls:
    gate, up = tensors.randn(s["T"], s["N"]), tensors.randn(s["T"], s["N"])
    torchs = {"F.gelu": lambda: F.gelu(gate, approximate="tanh") * up}
    return Calls(*ours("geglu", gate, up, "tanh"), torchs, moved=3 * nbytes(gate), moved_backward=5 * nbytes(gate))


def llama_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, heads_at: int) -> tuple[Tensor, Tensor]:
    """The body of transformers' apply_rotary_pos_emb."""
    cos, sin = cos.unsqueeze(heads_at), sin.unsqueeze(heads_at)

    def half(x: Tensor) -> Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-second, first), dim=-1)

    return query * cos + half(query) * sin, key * cos + half(key) * sin


def _rotary(tensors: Tensors, s: Shape) -> Calls:
    query = tensors.randn(s["B"], s["T"], s["H"], s["D"])
    key = tensors.randn(s["B"], s["T"], s.get("KV", s["H"]), s["D"])
    angles = torch.rand(1, s["T"], s["D"] // 2, device=query.device).mul(6.0).repeat(1, 1, 2)
    cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
    lying = [t.transpose(1, 2).contiguous() for t in (query, key)]

    def transposed() -> tuple[Tensor, Tensor]:
        q, k = llama_rotary(*lying, cos, sin, 1)
        return q.transpose(1, 2), k.transpose(1, 2)

    torchs = {"transformers": lambda: llama_rotary(query, key, cos, sin, 2), "transformers, BHTD": transposed}
    both = nbytes(query, key)
    return Calls(*ours("rotary", query, key, cos, sin), torchs, moved=2 * both, moved_backward=2 * both)


WIDE, TINY_WIDE, GPU_WIDE = ("T1024 N14336", "T512 N2816"), ("T1 N14336", "T4 N64", "T63 N60"), ("T16384 N14336",)
TURNED = ("B1 T2048 H32 KV8 D128", "B4 T512 H16 D64")
TINY_TURNED = ("B1 T1 H32 KV8 D128", "B8 T1 H32 KV8 D128", "B1 T16 H4 D64")

for _name, _make, _shapes, _tiny, _gpu in (
    ("rms_norm", _rms_norm, HIDDEN, TINY_HIDDEN, GPU_HIDDEN),
    ("layer_norm", _layer_norm, HIDDEN, TINY_HIDDEN, GPU_HIDDEN),
    ("swiglu", _swiglu, WIDE, TINY_WIDE, GPU_WIDE),
    ("geglu", _geglu, WIDE, TINY_WIDE, GPU_WIDE),
    ("rotary", _rotary, TURNED, TINY_TURNED, ("B4 T4096 H32 KV8 D128",)),
):
    bench(_name, shapes=_shapes, tiny=_tiny, backward=PASSES)(_make)
    bench(_name, shapes=_gpu, backward=PASSES, devices=("cuda",))(_make)
