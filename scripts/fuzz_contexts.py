"""Every operation under torch's modes and transforms, on random sizes and layouts, against float64.

    python scripts/fuzz_contexts.py --seed 3 --cases 400
    python scripts/fuzz_contexts.py --seed 3 --only 17             one case again
    python scripts/fuzz_contexts.py --contexts vmap,jvp --operations linear,decode

A case is drawn from its seed and number alone: an operation, its sizes (zeros among them), a dtype, the layout of each
tensor (those of sweep_attention.py, and views that torch negates lazily), and a context: inference mode, autocast,
vmap, forward mode, second derivatives, functionalization, make_fx, torch.compile static and dynamic, export saved and
loaded, traces saved and loaded, threads, copies, subclasses, meta and fake tensors. Outputs and derivatives are those
that the definition gives in float64; a call may be refused with a reason, and refusals are counted. The operators in
C++ are chosen at every size here, whatever their tables say. The exit code is 1 where a case fails.
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib
import io
import pickle
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - a script of the checkout
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

from easytorch.kernels.cpu import processor  # noqa: E402
from easytorch.kernels.glu import cpu as glu_cpu  # noqa: E402
from easytorch.kernels.linear import preference  # noqa: E402
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize  # noqa: E402
from easytorch.kernels.rms_norm import cpu as rms_norm_cpu  # noqa: E402
from easytorch.operations import (  # noqa: E402
    AttentionOutput,
    OperationMetadata,
    OperationRegistry,
    UnsupportedOperationError,
)

sweep: Any = importlib.import_module("scripts.sweep_attention")

# relative RMS of outputs and first derivatives; second ones are allowed four times as much
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float64: 1e-10}
AUTOCAST = 6e-2
REFUSALS = (UnsupportedOperationError, NotImplementedError)
# what else says that a derivative or a graph is not to be had: torch of its kernels, torch.compile of our refusals
SAID = (
    "UnsupportedOperationError", "no autograd formula was registered", "_backward is not implemented",
    "marked with @once_differentiable",
)  # fmt: skip


def negated(x: Tensor, rng: random.Random) -> Tensor:
    """A view that torch negates when it is read: the imaginary part of a conjugate."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


LAYOUTS = {**sweep.LAYOUTS, "negated": negated}


class Case(NamedTuple):
    """leaves: what derivatives are taken of, by name. batched: those that vmap may give a dimension more."""

    operation: str
    leaves: dict[str, Tensor]
    settings: dict[str, Any]
    batched: tuple[str, ...]
    backend: str | None
    context: str
    layouts: dict[str, str]
    dtype: torch.dtype

    def __str__(self) -> str:
        shapes = {name: tuple(x.shape) for name, x in self.leaves.items()}
        settings = {n: tuple(x.shape) if isinstance(x, Tensor) else x for n, x in self.settings.items()}
        return (
            f"{self.operation}:{self.backend} {self.context} {self.dtype} {shapes} "
            f"{ {n: x.format if isinstance(x, QuantizedWeight) else x for n, x in settings.items()} } {self.layouts}"
        )


# ------------------------------------------------------------------------------------------------------------ cases

Drawn = tuple[dict[str, Tensor], dict[str, Any], tuple[str, ...]]


class Draw:
    """The tensors and settings of one call, one method an operation."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.generator = torch.Generator().manual_seed(rng.getrandbits(40))

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def size(self, most: int) -> int:
        return 0 if self.rng.random() < 0.03 else self.rng.randint(1, most)

    def lead(self) -> tuple[int, ...]:
        return tuple(self.size(4) for _ in range(self.rng.randint(1, 2)))

    def width(self) -> int:
        return self.rng.choice((8, 16, 32, 64, 130, self.rng.randint(1, 40)))

    def _qkv(self, queries: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        rng = self.rng
        b, s, k = self.size(3), rng.randint(1, rng.choice((9, 80))), rng.randint(1, 2)
        t = rng.choice((s, rng.randint(1, s))) if queries is None else queries
        h, d, dv = k * rng.randint(1, 3), rng.choice((4, 16, 24)), rng.choice((4, 16))
        leaves = {"query": self.randn(b, t, h, d), "key": self.randn(b, s, k, d), "value": self.randn(b, s, k, dv)}
        settings: dict[str, Any] = {"causal": rng.random() < 0.7}
        if rng.random() < 0.3:
            settings["sliding_window"] = rng.randint(1, s)
        if rng.random() < 0.3:
            settings["mask"] = self.rand(b, 1, rng.choice((1, t)), s) < 0.7
        if rng.random() < 0.2:
            leaves["bias"] = self.randn(rng.choice((1, b)), rng.choice((1, h)), t, s)
        return leaves, settings

    def attention(self) -> Drawn:
        leaves, settings = self._qkv(1 if self.rng.random() < 0.3 else None)
        if self.rng.random() < 0.3:
            settings["softcap"] = 3.0
        if self.rng.random() < 0.2:
            leaves["sinks"] = self.randn(leaves["query"].shape[2])
        return leaves, settings, ("query", "key", "value")

    vanilla = flash = ring = blocksparse = attention

    def sdpa(self) -> Drawn:
        leaves, settings = self._qkv()
        return leaves, settings, ("query", "key", "value")

    def decode(self) -> Drawn:
        leaves, settings = self._qkv(1)
        if self.rng.random() < 0.4:
            b, s = leaves["key"].shape[:2]
            settings["lengths"] = torch.randint(0, s + 1, (b,), generator=self.generator)
        return leaves, settings, ("query", "key", "value")

    def _pages(self) -> tuple[int, dict[str, Any], int, int]:
        rng, size = self.rng, self.rng.choice((1, 4, 8))
        contexts = [rng.randint(1, 30) for _ in range(rng.randint(1, 4))]
        rows = [rng.randint(0, min(context, 20)) for context in contexts]
        pages = [-(-context // size) for context in contexts]
        order = list(range(sum(pages) + 1))
        rng.shuffle(order)
        tables = torch.full((len(pages), max(pages)), -1)
        for row, used in enumerate(pages):
            tables[row, :used] = torch.tensor([order.pop() for _ in range(used)])
        settings: dict[str, Any] = {
            "context_lens": torch.tensor(contexts), "block_tables": tables,
            "query_start_loc": torch.tensor([0, *rows]).cumsum(0),
        }  # fmt: skip
        if rng.random() < 0.3:
            settings["sliding_window"] = rng.randint(1, 20)
        return sum(rows), settings, sum(pages) + 1, size

    def ragged_page_attention(self) -> Drawn:
        tokens, settings, count, size = self._pages()
        k, d, dv = self.rng.randint(1, 2), self.rng.choice((8, 16)), self.rng.choice((8, 16))
        h = k * self.rng.randint(1, 3)
        leaves = {
            "query": self.randn(tokens, h, d), "key_pages": self.randn(count, size, k, d),
            "value_pages": self.randn(count, size, k, dv),
        }  # fmt: skip
        return leaves, settings, ()

    def ragged_page_multi_latent_attention(self) -> Drawn:
        tokens, settings, count, size = self._pages()
        leaves = {
            "query": self.randn(tokens, 3, 16), "query_rope": self.randn(tokens, 3, 8),
            "latent_pages": self.randn(count, size, 32), "up_key": self.randn(3, 16, 24) / 5,
            "up_value": self.randn(3, 20, 24) / 5,
        }  # fmt: skip
        return leaves, settings, ()

    def multi_latent_attention(self) -> Drawn:
        b, s = self.size(3), self.rng.randint(1, 30)
        t = self.rng.choice((1, s))
        leaves = {
            "query": self.randn(b, t, 3, 16), "query_rope": self.randn(b, t, 3, 8), "latent": self.randn(b, s, 24),
            "key_rope": self.randn(b, s, 8), "up_key": self.randn(3, 16, 24) / 5, "up_value": self.randn(3, 20, 24) / 5,
        }  # fmt: skip
        return leaves, {"causal": True}, ("query", "query_rope", "latent", "key_rope")

    def rms_norm(self) -> Drawn:
        n = self.width()
        leaves = {"x": self.randn(*self.lead(), n)} | ({"weight": self.randn(n)} if self.rng.random() < 0.8 else {})
        return leaves, {"eps": 1e-5}, ("x",)

    def layer_norm(self) -> Drawn:
        n = self.width()
        return {"x": self.randn(*self.lead(), n), "weight": self.randn(n), "bias": self.randn(n)}, {}, ("x",)

    def swiglu(self) -> Drawn:
        shape = (*self.lead(), self.width())
        return {"gate": self.randn(*shape), "up": self.randn(*shape)}, {}, ("gate", "up")

    def geglu(self) -> Drawn:
        leaves, _, batched = self.swiglu()
        return leaves, {"approximate": self.rng.choice(("none", "tanh"))}, batched

    def rotary(self) -> Drawn:
        b, t, k, d = self.size(3), self.size(12), self.rng.randint(1, 3), self.rng.choice((8, 16, 64))
        r = self.rng.choice((d, d, d // 2))
        angles = self.randn(self.rng.choice((1, b)), t, r // 2).repeat(1, 1, 2)
        leaves = {"query": self.randn(b, t, k * self.rng.randint(1, 2), d), "key": self.randn(b, t, k, d)}
        return leaves, {"cos": angles.cos(), "sin": angles.sin()}, ("query", "key")

    def cross_entropy(self) -> Drawn:
        n, c = self.rng.randint(1, 9), self.rng.randint(2, 40)
        labels = torch.randint(0, c, (n,), generator=self.generator)
        return {"logits": self.randn(n, c)}, {"labels": labels}, ("logits",)

    def fused_linear_cross_entropy(self) -> Drawn:
        n, c, d = self.rng.randint(1, 9), self.rng.randint(2, 40), self.width()
        labels = torch.randint(0, c, (n,), generator=self.generator)
        return {"hidden": self.randn(n, d), "weight": self.randn(c, d) / d**0.5}, {"labels": labels}, ("hidden",)

    def linear(self) -> Drawn:
        n, k = self.width(), self.width()
        leaves = {"x": self.randn(*self.lead(), k), "weight": self.randn(n, k) / k**0.5}
        return leaves | ({"bias": self.randn(n)} if self.rng.random() < 0.5 else {}), {}, ("x",)

    def quantized_matmul(self) -> Drawn:
        n, k = self.rng.choice((8, 24, 33)), self.rng.choice((32, 64, 256))
        kind = self.rng.choice(("int8", "int4", "nf4", "fp8_e4m3fn", "fp8_e5m2"))
        weight = quantize((self.randn(n, k) / k**0.5).float(), kind)
        leaves = {"x": self.randn(*self.lead(), k)} | ({"bias": self.randn(n)} if self.rng.random() < 0.5 else {})
        return leaves, {"weight": weight}, ("x",)

    def grouped_matmul(self) -> Drawn:
        m, k, n, groups = self.size(20), self.width(), self.width(), self.rng.randint(1, 4)
        cuts = sorted(self.rng.randint(0, m) for _ in range(groups))
        sizes = torch.tensor([b - a for a, b in zip([0, *cuts], cuts, strict=False)])
        return {"x": self.randn(m, k), "weight": self.randn(groups, k, n) / k**0.5}, {"group_sizes": sizes}, ()

    def causal_conv1d(self) -> Drawn:
        b, t, d = self.size(3), self.rng.randint(1, 20), self.rng.randint(1, 8)
        leaves = {"x": self.randn(b, t, d), "weight": self.randn(d, 4), "bias": self.randn(d)}
        if self.rng.random() < 0.5:
            leaves["initial_state"] = self.randn(b, d, 3)
        return leaves, {"activation": "silu"}, ("x",)

    def ssm1(self) -> Drawn:
        b, t, d, n = self.rng.randint(1, 3), self.rng.randint(1, 20), self.rng.randint(1, 6), self.rng.randint(1, 4)
        leaves = {
            "x": self.randn(b, t, d), "dt": self.rand(b, t, d), "A": -self.rand(d, n) - 0.1, "B": self.randn(b, t, n),
            "C": self.randn(b, t, n),
        }  # fmt: skip
        if self.rng.random() < 0.5:
            leaves["initial_state"] = self.randn(b, d, n)
        return leaves, {"dt_softplus": True}, ("x", "dt", "B", "C")

    def ssm2(self) -> Drawn:
        b, t, n = self.rng.randint(1, 3), self.rng.randint(1, 20), self.rng.randint(1, 4)
        leaves = {
            "x": self.randn(b, t, 6, 5), "dt": self.rand(b, t, 6), "A": -self.rand(6) - 0.1,
            "B": self.randn(b, t, 2, n), "C": self.randn(b, t, 2, n),
        }  # fmt: skip
        if self.rng.random() < 0.5:
            leaves["initial_state"] = self.randn(b, 6, 5, n)
        return leaves, {"dt_softplus": True}, ("x", "dt", "B", "C")

    def gated_delta_rule(self) -> Drawn:
        b, t = self.rng.randint(1, 3), self.rng.randint(1, 20)
        leaves = {
            "query": self.randn(b, t, 2, 8), "key": self.randn(b, t, 2, 8), "value": self.randn(b, t, 4, 6),
            "g": -self.rand(b, t, 4), "beta": self.rand(b, t, 4),
        }  # fmt: skip
        if self.rng.random() < 0.5:
            leaves["initial_state"] = self.randn(b, 4, 8, 6)
        return leaves, {"use_qk_l2norm": True}, ("query", "key", "value", "g", "beta")


OPERATIONS = sorted(name for name in vars(Draw) if name in OperationRegistry.names())
# one contract; its definition has every derivative
_ATTENTION = ("attention", "flash", "sdpa", "blocksparse", "ring")


def draw(seed: int, number: int, operations: list[str], contexts: list[str]) -> Case:
    rng = random.Random(f"{seed}:{number}")
    operation, context = rng.choice(operations), rng.choice(contexts)
    leaves, settings, batched = getattr(Draw(rng), operation)()
    dtype = rng.choices(list(TOLERANCE), (0.5, 0.25, 0.15, 0.1))[0]
    backends = OperationRegistry.create(operation).backends()
    backend = rng.choice([None, None, None, *(x for x in backends if x not in ("triton", "pallas", "xla"))])
    layouts = {n: rng.choice(list(LAYOUTS)) for n in leaves if rng.random() < 0.5} if rng.random() < 0.6 else {}
    for name, x in leaves.items():
        x = x.to(dtype)
        if layouts.get(name) == "negated" and dtype not in (torch.float32, torch.float64):
            del layouts[name]  # all of torch takes complex numbers of two times 32 and 64 bits only
        layout = layouts.get(name, "plain")
        leaves[name] = negated(x, rng) if layout == "negated" else sweep.laid_out(x, layout, rng)
    settings = {n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in settings.items()}
    return Case(operation, leaves, settings, batched, backend, context, layouts, dtype)


class Call(nn.Module):
    """An operation with settings as a function of its leaves, in their order; the tensors of its result."""

    def __init__(self, case: Case, backend: str | None) -> None:
        super().__init__()
        self.operation = OperationRegistry.create(case.operation, OperationMetadata(backend=backend))
        self.names = list(case.leaves)
        self.settings = dict(case.settings)

    def forward(self, *leaves: Tensor) -> list[Tensor]:
        result = self.operation(**dict(zip(self.names, leaves, strict=True)), **self.settings)
        if isinstance(result, AttentionOutput):
            return [result.attention_outputs]
        fields = list(vars(result).values()) if hasattr(result, "to_dict") else [result]
        return [x for x in tree_leaves(fields) if isinstance(x, Tensor) and x.is_floating_point()]


def definition(case: Case) -> Call:
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in case.settings.items()}
    operation = "vanilla" if case.operation in _ATTENTION else case.operation
    return Call(case._replace(settings=wide, operation=operation), "native")


def scalar(outputs: list[Tensor]) -> Tensor:
    """A number that every output changes, and its gradient too."""
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in outputs]
    return sum((x + probe(x)).square().sum() / max(x.numel(), 1) for x in wide)  # type: ignore[return-value]


def probe(x: Tensor) -> Tensor:
    """Numbers that make the gradient of a norm's output anything but 0."""
    return torch.arange(x.numel(), dtype=x.dtype, device=x.device).cos().view(x.shape)


def directions(leaves: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in leaves]


Function = Callable[..., list[Tensor]]
# what a context computes: "outputs", "gradients" of `scalar`, "second" derivatives along `directions`, "tangents"
Results = dict[str, list[Tensor]]


def gradients(function: Function, leaves: list[Tensor]) -> Results:
    leaves = [x.detach().requires_grad_() for x in leaves]
    outputs = function(*leaves)
    found = _grad(scalar(outputs), leaves)
    return {"outputs": [x.detach() for x in outputs], "gradients": found}


def second(function: Function, leaves: list[Tensor]) -> Results:
    leaves = [x.detach().requires_grad_() for x in leaves]
    first = _grad(scalar(function(*leaves)), leaves, create_graph=True)
    along: Any = sum((g * v).sum() for g, v in zip(first, directions(leaves), strict=True))
    return {"second": _grad(along, leaves)}


def tangents(function: Function, leaves: list[Tensor]) -> Results:
    _, found = torch.autograd.functional.jvp(function_of_tuples(function), tuple(leaves), tuple(directions(leaves)))
    return {"tangents": list(found)}


def function_of_tuples(function: Function) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *leaves: tuple(function(*leaves))


def _grad(number: Tensor, leaves: list[Tensor], **options: Any) -> list[Tensor]:
    """The gradient, zeros where there is none: of a call without tokens nothing may be recorded."""
    if not number.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(number, leaves, allow_unused=True, **options)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def without_repeats(leaves: list[Tensor]) -> list[Tensor]:
    """Forward mode makes tangents in the layout of their tensors, which must not be one where memory repeats."""
    return [x.contiguous() for x in leaves]


EXPECTED = {"outputs": gradients, "gradients": gradients, "second": second, "tangents": tangents}


# --------------------------------------------------------------------------------------------------------- contexts


class Halved(NamedTuple):
    """Results for leaves of half the size: what was captured is run with other numbers than it was captured with."""

    results: Results


def plain(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    return gradients(call, leaves)


def no_grad(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    with torch.no_grad():
        return {"outputs": call(*leaves)}


def inference_mode(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    with torch.inference_mode():
        inside = [x.clone() if rng.random() < 0.5 else x for x in leaves]
        return {"outputs": [x.clone() for x in call(*inside)]}


def autocast(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    def mixed(*leaves: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return call(*leaves)

    if rng.random() < 0.5:
        with torch.no_grad():
            return {"outputs": mixed(*leaves)}
    return gradients(mixed, leaves)


def checkpoint(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    return gradients(lambda *x: torch.utils.checkpoint.checkpoint(call, *x, use_reentrant=False), leaves)


def saved_elsewhere(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    with torch.autograd.graph.save_on_cpu():
        return gradients(call, leaves)


def changed_after(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    """An input that is written to before the backward pass: an error of autograd's, or the right gradients."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    loss = scalar(call(*leaves))
    with torch.no_grad():
        leaves[rng.randrange(len(leaves))].mul_(3)
    try:
        return {"gradients": _grad(loss, leaves)}
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return {}


def second_derivatives(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    return second(call, leaves)


def func_grad(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    argnums = tuple(range(len(leaves)))
    return {"gradients": list(torch.func.grad(lambda *x: scalar(call(*x)), argnums)(*leaves))}


def func_hvp(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    """Forward over reverse; of a symmetric matrix, the product that `second` has."""
    leaves = without_repeats(leaves)
    first = torch.func.grad(lambda *x: scalar(call(*x)), tuple(range(len(leaves))))
    _, found = torch.func.jvp(first, tuple(leaves), tuple(directions(leaves)))
    return {"second": list(found)}


def func_jvp(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    leaves = without_repeats(leaves)
    outputs, found = torch.func.jvp(function_of_tuples(call), tuple(leaves), tuple(directions(leaves)))
    return {"outputs": list(outputs), "tangents": list(found)}


def dual(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    forward_ad, leaves = torch.autograd.forward_ad, without_repeats(leaves)
    with forward_ad.dual_level(), torch.set_grad_enabled(rng.random() < 0.5):
        duals = [forward_ad.make_dual(x, v) for x, v in zip(leaves, directions(leaves), strict=True)]
        parts = [forward_ad.unpack_dual(x) for x in call(*duals)]
    found = [torch.zeros_like(p.primal) if p.tangent is None else p.tangent for p in parts]
    return {"outputs": [p.primal for p in parts], "tangents": found}


def functionalize(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    return {"outputs": list(torch.func.functionalize(function_of_tuples(call))(*leaves))}


def make_fx(call: Call, leaves: list[Tensor], rng: random.Random) -> Halved:
    from torch.fx.experimental.proxy_tensor import make_fx as trace

    graph = trace(call, tracing_mode=rng.choice(("real", "fake", "symbolic")), _allow_non_fake_inputs=True)(*leaves)
    return Halved({"outputs": graph(*(x / 2 for x in leaves))})


def compiled(call: Call, leaves: list[Tensor], rng: random.Random) -> Results | Halved:
    torch._dynamo.reset()
    function = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=rng.choice((None, True, False)))
    kind = rng.choice(("gradients", "no_grad", "inference_mode"))
    if kind == "gradients":
        return gradients(function, leaves)
    with torch.no_grad() if kind == "no_grad" else torch.inference_mode():
        function(*leaves)
        return Halved({"outputs": [x.clone() for x in function(*(x / 2 for x in leaves))]})


def compiled_vmap(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    torch._dynamo.reset()
    mapped = torch.func.vmap(function_of_tuples(call))
    function = torch.compile(lambda *x: mapped(*(y[None] for y in x)), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        return {"outputs": [x[0] for x in function(*leaves)]}


def exported(call: Call, leaves: list[Tensor], rng: random.Random) -> Halved:
    with torch.set_grad_enabled(rng.random() < 0.5):
        program = torch.export.export(call, tuple(leaves))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    with torch.no_grad():
        return Halved({"outputs": torch.export.load(file).module()(*(x / 2 for x in leaves))})


def traced(call: Call, leaves: list[Tensor], rng: random.Random) -> Halved:
    with torch.set_grad_enabled(rng.random() < 0.5):
        trace = torch.jit.trace(function_of_tuples(call), tuple(leaves), check_trace=False)
    file = io.BytesIO()
    torch.jit.save(trace, file)
    file.seek(0)
    found = gradients(lambda *x: list(torch.jit.load(file)(*x)), [x / 2 for x in leaves])
    return Halved(found)


def threads(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    def one(_: int) -> list[Tensor]:
        with torch.no_grad():
            return call(*leaves)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, range(8)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), "threads differ"
    return {"outputs": found[0]}


def copies(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    call = copy.deepcopy(call) if rng.random() < 0.5 else pickle.loads(pickle.dumps(call))
    return gradients(call, [pickle.loads(pickle.dumps(x)) for x in leaves])


class Named(Tensor):
    """A subclass that changes nothing."""


def subclassed(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    inside = [x.as_subclass(Named) if rng.random() < 0.7 else x for x in leaves]
    with torch.no_grad():
        return {"outputs": [x.as_subclass(Tensor) for x in call(*inside)]}


class Wrapped(Tensor):
    """A tensor around another, to which every operation is passed on."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> Wrapped:
        made: Any = Tensor._make_wrapper_subclass(cls, inside.shape, strides=inside.stride(), dtype=inside.dtype)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*tree_map_only(Wrapped, _unwrapped, args), **tree_map_only(Wrapped, _unwrapped, kwargs or {}))
        return tree_map_only(Tensor, Wrapped, found)


def _unwrapped(x: Wrapped) -> Tensor:
    return x.inside


def wrapped(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    with torch.no_grad():  # a wrapper of a tensor that is negated lazily loses its sign in torch
        found = call(*(Wrapped(x.resolve_neg()) for x in leaves))
    return {"outputs": [_unwrapped(x) if isinstance(x, Wrapped) else x for x in found]}


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def watched(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    with Watching():
        return gradients(call, leaves) if rng.random() < 0.5 else no_grad(call, leaves, rng)


def functional_call(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    """The leaves as parameters of a module, which are exchanged for the call."""
    module = nn.Module()
    for name, x in zip(call.names, leaves, strict=True):
        module.register_parameter(name, nn.Parameter(torch.zeros_like(x), requires_grad=rng.random() < 0.7))
    module.forward = lambda: call(*(getattr(module, name) for name in call.names))  # type: ignore[method-assign]
    with torch.set_grad_enabled(rng.random() < 0.5):
        found = torch.func.functional_call(module, dict(zip(call.names, leaves, strict=True)), ())
    return {"outputs": [x.detach() for x in found]}


def shapes(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    """On meta and fake tensors: the shapes and dtypes of what runs."""
    with torch.no_grad():
        found = call(*leaves)
    if rng.random() < 0.5:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            others = call(*(mode.from_tensor(x) for x in leaves))
    else:
        if any(isinstance(x, QuantizedWeight) for x in call.settings.values()):
            return {}
        there = copy.copy(call)
        there.settings = tree_map_only(Tensor, lambda x: x.to("meta"), call.settings)
        others = there(*(torch.empty_like(x, device="meta") for x in leaves))
    for a, b in zip(found, others, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{a.shape} {a.dtype}, {b.shape} {b.dtype} without numbers"
    return {"outputs": found}


def mapped(call: Call, leaves: list[Tensor], rng: random.Random) -> Results:
    raise AssertionError("`check` does it")


CONTEXTS: dict[str, Callable[..., Results | Halved]] = {
    one.__name__: one
    for one in (
        plain, no_grad, inference_mode, autocast, checkpoint, saved_elsewhere, changed_after, second_derivatives,
        func_grad, func_hvp, func_jvp, dual, functionalize, make_fx, compiled, compiled_vmap, exported, traced, threads,
        copies, subclassed, wrapped, watched, functional_call, shapes, mapped,
    )
}  # fmt: skip


def check_mapped(case: Case, rng: random.Random) -> Iterator[str]:
    """vmap over some leaves, at any dimension, of outputs and of gradients, against a loop."""
    dims = [
        rng.randrange(x.dim() + 1) if name in case.batched and (rng.random() < 0.7) else None
        for name, x in case.leaves.items()
    ]
    if all(dim is None for dim in dims):
        dims = [0 if name in case.batched else None for name in case.leaves]
    leaves = list(case.leaves.values())
    stacks = [x if d is None else torch.stack([x, x.flip(0) / 2], d) for x, d in zip(leaves, dims, strict=True)]
    rows = [[x if d is None else x.select(d, i) for x, d in zip(stacks, dims, strict=True)] for i in range(2)]
    call, defined = Call(case, case.backend), definition(case)
    if rng.random() < 0.5:
        found: Any = torch.func.vmap(function_of_tuples(call), in_dims=tuple(dims))(*stacks)
        kind = "outputs"
    else:
        gradient = torch.func.grad(lambda *x: scalar(call(*x)), tuple(range(len(leaves))))
        found, kind = torch.func.vmap(gradient, in_dims=tuple(dims))(*stacks), "gradients"
    expected = [gradients(defined, [x.double().contiguous() for x in row])[kind] for row in rows]
    yield from compare(case, {kind: list(found)}, {kind: [torch.stack(pair) for pair in zip(*expected, strict=True)]})


# --------------------------------------------------------------------------------------------------------- checking


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def compare(case: Case, found: Results, expected: Results) -> Iterator[str]:
    for kind, got_all in found.items():
        largest = max((_rms(x) for x in expected[kind]), default=0.0)
        for place, (got, want) in enumerate(zip(got_all, expected[kind], strict=True)):
            tolerance = AUTOCAST if case.context == "autocast" else TOLERANCE[case.dtype]
            tolerance *= {"outputs": 1, "gradients": 3, "tangents": 3, "second": 12}[kind]
            if "expanded" in case.layouts.values() and kind != "outputs":
                tolerance *= 8
            if got.shape != want.shape:
                yield f"{kind} {place} is {tuple(got.shape)}, not {tuple(want.shape)}"
            elif not got.isfinite().all():
                yield f"{kind} {place} has numbers that are not finite"
            elif (error := _rms(got - want)) > tolerance * max(_rms(want), 0.02 * largest, 1e-6):
                yield f"{kind} {place} is off by {error:.1e}, it is {_rms(want):.1e}"


def check(case: Case, rng: random.Random) -> Iterator[str]:
    """The failures of the case; raises one of `REFUSALS` where it is refused."""
    if case.context == "mapped":
        if case.batched and all(case.leaves[name].dim() and case.leaves[name].shape[0] for name in case.batched):
            yield from check_mapped(case, rng)
        return
    found = CONTEXTS[case.context](Call(case, case.backend), list(case.leaves.values()), rng)
    wide = [x.double().contiguous() for x in case.leaves.values()]
    if isinstance(found, Halved):
        found, wide = found.results, [(x / 2).double().contiguous() for x in case.leaves.values()]
    expected: Results = {}
    for kind in found:
        if kind not in expected:
            expected |= EXPECTED[kind](definition(case), wide)
    yield from compare(case, found, expected)


def outcome(case: Case, rng: random.Random, refused: collections.Counter[str] | None = None) -> list[str] | None:
    """The failures of the case; None where it is refused, with the reason counted in `refused`."""
    try:
        return list(check(case, rng))
    except REFUSALS as error:
        refusal: Exception = error
    except Exception as error:
        if not any(text in str(error) for text in SAID):
            raise
        refusal = error
    if refused is not None:
        refused[f"{case.operation}:{case.backend} {case.context}: {str(refusal)[:160]}"] += 1
    return None


def choose_cpp_everywhere(set_: Callable[[Any, str, Any], None] = setattr) -> None:
    """So that small cases reach the operators in C++, which the tables leave to larger ones."""
    set_(processor, "AVX2", True)
    set_(preference, "FEW_ROWS", dict.fromkeys(preference.FEW_ROWS, (16, 1)))
    for module in (rms_norm_cpu, glu_cpu):
        set_(module, "SMALLEST_ROW", 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--only", type=int, help="this case alone, with its traceback")
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--contexts", default=",".join(CONTEXTS))
    parser.add_argument("--refusals", action="store_true", help="print what was refused")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    choose_cpp_everywhere()
    operations, contexts = options.operations.split(","), options.contexts.split(",")
    failed, refused, ran = 0, collections.Counter(), collections.Counter()
    started = time.monotonic()
    for number in [options.only] if options.only is not None else range(options.cases):
        case = draw(options.seed, number, operations, contexts)
        try:
            problems = outcome(case, random.Random(f"{options.seed}:{number}:context"), refused)
        except Exception as error:
            if options.only is not None:
                raise
            problems = [f"{type(error).__name__}: {str(error)[:400]}"]
        ran[case.context] += problems is not None
        if problems:
            failed += 1
            flags = "".join(
                f" --{name} {given}"
                for name, given in (("operations", options.operations), ("contexts", options.contexts))
                if given != parser.get_default(name)
            )
            print(f"FAILED --seed {options.seed} --only {number}{flags}: {case}", *problems, sep="\n    ", flush=True)
    if options.refusals:
        print(*(f"{count} refused: {what}" for what, count in sorted(refused.items())), sep="\n")
    print(
        f"{failed} of {sum(ran.values()) + sum(refused.values())} failed, {sum(refused.values())} refused, "
        f"{time.monotonic() - started:.0f} s; ran {dict(ran)}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
