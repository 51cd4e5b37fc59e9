"""Every attention against its definition in float64, on random calls of all sizes, features and layouts.

    python scripts/sweep_attention.py --seed 7 --cases 400            every implementation on each case that it takes
    python scripts/sweep_attention.py --seed 7 --only 123 --guard     one case again, tensors against a page's end

A case is drawn from its seed and number alone: lengths of 1 to 4100, padding left, right, on both sides or with holes,
windows, documents, chunks, prefixes, and tensors that are strided, transposed, expanded, sliced or overlapping views
inside memory full of NaN. An implementation may refuse a call; what it does not refuse must be right. --guard places
every tensor where the next byte is not mapped: reading past its end ends the process.
TRITON_INTERPRET=1 adds the Triton kernels, on small cases; --implementations flash:xla pallas adds those of jax.
Exits 1 where a case fails, or where the automatic choice never chose one of its implementations.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - a script of the checkout
from torch import Tensor  # noqa: E402

from easytorch.kernels.attention.call import AttentionCall  # noqa: E402
from easytorch.kernels.attention.contract import band_of, visible  # noqa: E402
from easytorch.kernels.blocksparse import native as blocksparse_native  # noqa: E402
from easytorch.kernels.cpu import library, processor  # noqa: E402
from easytorch.kernels.decode import native as decode_native  # noqa: E402
from easytorch.kernels.multi_latent import native as latent_native  # noqa: E402
from easytorch.kernels.ragged_page import native as ragged_native  # noqa: E402
from easytorch.operations import OperationMetadata, OperationRegistry, UnsupportedOperationError  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# output and gradients, relative RMS; two roundings lie between a gradient and its inputs
TOLERANCE = {torch.float64: (1e-11, 1e-11), torch.float32: (2e-5, 2e-5), torch.bfloat16: (8e-3, 1.6e-2)}
SCORES = 6 << 20  # B H T S of a case; the definition takes some ten arrays of them
SMALL = 20_000  # scores of a case for an interpreter
# what the automatic choice on a CPU must have chosen at least once
CHOICES = {"sdpa:aten", "flash:aten", "blocksparse:aten", "vanilla:native", "decode:aten"}
# and without a gradient, where the operators in C++ are there and this CPU is one that they are preferred on
CHOICES_IN_CPP = {"flash:cpu", "decode:cpu"}


class Case(NamedTuple):
    """tensors: differentiable, by name. features: the rest of the call. layouts: of those and of the gradient."""

    kind: str
    tensors: dict[str, Tensor]
    features: dict[str, Any]
    dtype: torch.dtype
    layouts: dict[str, str]
    scores: int

    def __str__(self) -> str:
        shapes = {name: tuple(x.shape) for name, x in self.tensors.items()}
        features = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in self.features.items()}
        return f"{self.kind} {self.dtype} {shapes} {features} layouts {self.layouts}"


# ---------------------------------------------------------------------------------------------------------- layouts


def plain(x: Tensor, rng: random.Random) -> Tensor:
    return x.clone()


def strided(x: Tensor, rng: random.Random) -> Tensor:
    """Another number between any two of the last dimension."""
    return _nan(*x.shape, rng.choice((2, 3))).select(-1, 0).copy_(x)


def transposed(x: Tensor, rng: random.Random) -> Tensor:
    """Two dimensions in each other's order, or all in a random one."""
    order = list(range(x.dim()))
    if x.dim() > 2 and rng.random() < 0.6:
        order[1], order[2] = 2, 1
    else:
        rng.shuffle(order)
    inverse = [order.index(i) for i in range(x.dim())]
    return x.permute(order).contiguous().permute(inverse)


def sliced(x: Tensor, rng: random.Random) -> Tensor:
    """A slice of something larger in every dimension."""
    starts, steps = [rng.randint(0, 3) for _ in x.shape], [rng.choice((1, 1, 2)) for _ in x.shape]
    steps[-1:] = [1] * len(steps[-1:])
    whole = _nan(*(start + size * step + 2 for start, size, step in zip(starts, x.shape, steps, strict=True)))
    index = tuple(slice(a, a + n * s, s) for a, n, s in zip(starts, x.shape, steps, strict=True))
    return whole.to(x.dtype)[index].copy_(x)


def expanded(x: Tensor, rng: random.Random) -> Tensor:
    """One or more dimensions of stride 0, which therefore hold equal numbers."""
    dims = [i for i in range(x.dim()) if rng.random() < 0.4] or [rng.randrange(max(x.dim(), 1))]
    one = x
    for dim in dims:
        one = one.narrow(dim, 0, min(1, x.shape[dim]))
    return one.clone().expand(x.shape)


def overlapping(x: Tensor, rng: random.Random) -> Tensor:
    """Windows over one line of numbers: each row begins with what the one before has second."""
    strides, size = [1] * x.dim(), max(x.numel(), 1)
    strides[:-2] = [max(1, x.stride(i)) for i in range(x.dim() - 2)]
    line = x.flatten()[:size] if x.numel() else x.new_zeros(1)
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True) if n)
    line = torch.cat([line, line.new_zeros(max(0, reach - line.numel()))])
    return line.as_strided(x.shape, strides)


LAYOUTS: dict[str, Callable[[Tensor, random.Random], Tensor]] = {
    layout.__name__: layout for layout in (plain, strided, transposed, sliced, expanded, overlapping)
}


def laid_out(x: Tensor, layout: str, rng: random.Random) -> Tensor:
    """A view in that layout; its numbers are those of x, but for the layouts whose numbers must repeat."""
    if x.dim() == 0:
        return x
    return LAYOUTS[layout](x.double(), rng).to(x.dtype) if layout in ("plain",) else _keeping(x, layout, rng)


def _keeping(x: Tensor, layout: str, rng: random.Random) -> Tensor:
    view = LAYOUTS[layout](x.double(), rng)
    storage = view.as_strided((view.untyped_storage().nbytes() // 8,), (1,), 0)
    narrow = (
        torch.where(storage.isnan(), 0.0, storage).to(x.dtype) if not x.is_floating_point() else storage.to(x.dtype)
    )
    return narrow.as_strided(view.shape, view.stride(), view.storage_offset())


def _nan(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), dtype=torch.float64)


_PAGES: list[mmap.mmap] = []


def guarded(x: Tensor) -> Tensor:
    """The same view in memory that ends where a page that nobody may read begins."""
    size = mmap.PAGESIZE
    length = x.untyped_storage().nbytes()
    reach = 1 + x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True) if n)
    if x.numel() == 0:
        return x
    length = reach * x.element_size()
    pages = -(-length // size)
    memory = mmap.mmap(-1, (pages + 1) * size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + pages * size), size, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    start = pages * size - length
    flat = torch.frombuffer(memory, dtype=x.dtype, count=reach, offset=start)
    flat.copy_(x.detach().as_strided((reach,), (1,), 0))
    _PAGES.append(memory)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


# ------------------------------------------------------------------------------------------------------------ cases


def draw(seed: int, number: int, small: bool = False) -> Case:
    rng = random.Random(f"{seed}:{number}")
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    kind = rng.choices(("attention", "decode", "latent", "paged", "varlen"), (0.66, 0.1, 0.08, 0.08, 0.08))[0]
    dtype = rng.choices((torch.float32, torch.bfloat16, torch.float64), (0.5, 0.4, 0.1))[0]
    case = _Draw(rng, generator, dtype, small)
    tensors, features = getattr(case, kind)()
    layouts = {}
    if rng.random() < 0.6:
        names = [*tensors, *(name for name, x in features.items() if isinstance(x, Tensor) and x.dim()), "grad"]
        layouts = {name: rng.choice(list(LAYOUTS)) for name in names if rng.random() < 0.6}
    everything = {**tensors, **features}
    for name, layout in layouts.items():
        if name == "grad" or (name in _TABLES and layout in ("expanded", "overlapping")):
            continue  # the numbers of a table say something
        view = laid_out(everything[name], layout, rng)
        (tensors if name in tensors else features)[name] = view
    return Case(kind, tensors, features, dtype, layouts, case.scores)


# what says where numbers lie, and pools, whose pages that are not used are NaN
_TABLES = {
    "key_pages", "value_pages",
    "context_lens", "block_tables", "query_start_loc", "lengths", "prefix_length", "cu_seqlens_q", "cu_seqlens_k",
}  # fmt: skip


class _Draw:
    """The tensors and features of one case, one method a kind."""

    def __init__(self, rng: random.Random, generator: torch.Generator, dtype: torch.dtype, small: bool) -> None:
        self.rng, self.generator, self.dtype, self.small = rng, generator, dtype, small
        self.scores = 0

    def randn(self, *shape: int) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return x.to(self.dtype)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def length(self) -> int:
        if self.small:
            return self.rng.randint(1, 70)
        low, high = self.rng.choices(((1, 1), (2, 70), (71, 600), (601, 1500), (1501, 4100)), (2, 30, 34, 24, 10))[0]
        return self.rng.randint(low, high)

    def sizes(self, length: int | None = None) -> tuple[int, int, int, int, int, int, int]:
        rng = self.rng
        t = self.length() if length is None else length
        s = t if self.chance(0.65) and length is None else self.length()
        most = (SMALL if self.small else SCORES) // (t * s)
        b = rng.randint(1, max(1, min(3, most)))
        k = rng.randint(1, max(1, min(4, most // b)))
        group = rng.randint(1, max(1, min(4, most // (b * k))))
        d = rng.choice((rng.randint(1, 40), 16, 32, 64))
        dv = d if self.chance(0.7) else rng.randint(1, 40)
        self.scores = b * k * group * t * s
        return b, t, s, k * group, k, d, dv

    def attention(self, length: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        b, t, s, h, k, d, dv = self.sizes(length)
        tensors = {"query": self.randn(b, t, h, d), "key": self.randn(b, s, k, d), "value": self.randn(b, s, k, dv)}
        features = self.band(s)
        if self.chance(0.5):
            features["mask"] = self.padding(b, h, t, s)
        if self.chance(0.25):
            features |= self.documents(b, t, s)
        if self.chance(0.12):
            features["chunk_size"] = self.rng.randint(1, s)
        if self.chance(0.12):
            features["prefix_length"] = self.rng.choice(
                (self.rng.randint(0, s), torch.randint(0, s + 1, (b,), generator=self.generator))
            )
        if self.chance(0.12):
            shape = [n if self.chance(0.6) else 1 for n in (b, h, t, s)]
            tensors["bias"] = self.randn(*shape)
            if self.chance(0.3):
                hidden = torch.rand(shape, generator=self.generator) < 0.4
                tensors["bias"] = tensors["bias"].masked_fill(hidden, float("-inf"))
            self.large_rows(tensors)
        self.scalars(tensors, features, h)
        if self.chance(0.1):
            features |= {"dropout_prob": 0.3, "seed": self.rng.getrandbits(40)}
        return tensors, features

    def large_rows(self, tensors: dict[str, Tensor]) -> None:
        """Sometimes rows that a bias raises or lowers throughout by more than any score: they attend to all alike."""
        own = random.Random(self.generator.initial_seed())
        if own.random() < 0.3:
            lowest = torch.finfo(torch.float32 if self.dtype == torch.float64 else self.dtype).min
            rows = torch.tensor([own.random() < 0.4 for _ in range(tensors["bias"].shape[2])])
            tensors["bias"] = torch.where(rows[:, None], own.choice((lowest, -1e30, 1e30)), tensors["bias"])

    def band(self, keys: int) -> dict[str, Any]:
        features: dict[str, Any] = {"causal": self.chance(0.7)}
        if self.chance(0.4):
            side = self.rng.choice((keys // 8, keys // 2, 2 * keys, 3))
            sides = (self.rng.choice((None, side, self.rng.randint(0, keys))), self.rng.choice((None, 0, side)))
            features["sliding_window"] = self.rng.choice((max(1, side), sides))
        return features

    def scalars(self, tensors: dict[str, Tensor], features: dict[str, Any], heads: int) -> None:
        if self.chance(0.1):
            features["softcap"] = self.rng.choice((1.5, 30.0, 100.0))
        if self.chance(0.1):
            tensors["sinks"] = self.randn(heads)
        if self.chance(0.15):
            features["softmax_scale"] = self.rng.uniform(0.05, 0.5)

    def padding(self, b: int, h: int, t: int, s: int) -> Tensor:
        place = torch.arange(s)
        own = torch.tensor([self.rng.randint(0, s) for _ in range(b)])[:, None]
        rest = torch.tensor([self.rng.randint(0, s // 2) for _ in range(b)])[:, None]
        if self.chance(0.3):  # the same for all
            own, rest = own[:1], rest[:1]
        seen = {
            "left": place >= own,
            "right": place < own,
            "both": (place >= rest) & (place < s - rest // 2),
            "holes": torch.rand(own.shape[0], s, generator=self.generator) < self.rng.choice((0.05, 0.5, 0.95)),
            "nothing": torch.zeros(own.shape[0], s, dtype=torch.bool),
            "rows": place >= own,
        }
        kind = self.rng.choices(list(seen), (4, 2, 2, 2, 0.3, 2))[0]
        mask = seen[kind][:, None, None]
        if kind == "rows":
            rows = torch.rand(t, generator=self.generator) < 0.7
            mask = mask & rows[:, None]
        if self.chance(0.15):
            mask = mask & (torch.rand(1, h, 1, 1, generator=self.generator) < 0.8)
        return mask

    def documents(self, b: int, t: int, s: int) -> dict[str, Tensor]:
        def ids(length: int) -> Tensor:
            drawn = torch.randint(0, self.rng.choice((2, 4, 9)), (b, length), generator=self.generator)
            return drawn.sort(-1).values if kind == "sorted" else drawn

        kind = self.rng.choice(("sorted", "sorted", "pieces"))
        keys = ids(s)
        queries = keys.clone() if t == s else ids(t)
        if self.chance(0.3):  # padding: a segment of queries that no key has
            queries[:, : self.rng.randint(0, t)] = -1
        return {"query_segment_ids": queries, "key_segment_ids": keys}

    def decode(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, features = self.attention(length=1)
        features = {n: x for n, x in features.items() if n not in ("chunk_size", "prefix_length")}
        if self.chance(0.6):
            b, s = tensors["key"].shape[:2]
            features["lengths"] = torch.randint(0, s + 1, (b,), generator=self.generator)
        return tensors, features

    def latent(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        length = 1 if self.chance(0.4) else None
        b, t, s, h, _, d, dv = self.sizes(length)
        width, rope = self.rng.choice((16, 32, 40)), self.rng.choice((8, 16))
        up = self.chance(0.5)
        tensors = {
            "query": self.randn(b, t, h, d if up else width), "query_rope": self.randn(b, t, h, rope),
            "latent": self.randn(b, s, width), "key_rope": self.randn(b, s, rope),
        }  # fmt: skip
        if up:  # as wide as a model's: what is multiplied out stays near 1
            tensors |= {"up_key": self.randn(h, d, width) * width**-0.5, "up_value": self.randn(h, dv, width) * 0.2}
        features = self.band(s)
        if self.chance(0.4):
            features["mask"] = self.padding(b, h, t, s)
        if self.chance(0.2):
            features |= self.documents(b, t, s)
        self.scalars(tensors, features, h)
        return tensors, features

    def paged(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        _, _, _, h, k, d, dv = self.sizes()
        b, size = self.rng.randint(1, 5), self.rng.choice((1, 7, 16))
        longest = 70 if self.small else 600
        contexts = [self.rng.randint(1, longest) for _ in range(b)]
        lengths = [1 if self.chance(0.5) else self.rng.randint(0, context) for context in contexts]
        self.scores = h * max(a * c for a, c in zip(lengths, contexts, strict=True))
        pages = [-(-context // size) for context in contexts]
        order = list(range(sum(pages) + 2))
        self.rng.shuffle(order)
        tables = torch.full((b, max(pages) + 1), -1)
        for row, used in enumerate(pages):
            tables[row, :used] = torch.tensor([order.pop() for _ in range(used)])
        pools = [self.randn(sum(pages) + 2, size, k, width) for width in (d, dv)]
        for pool in pools:
            pool[order] = float("nan")
        starts = torch.tensor([0, *lengths]).cumsum(0)
        tensors = {
            "query": self.randn(int(starts[-1]) + self.rng.randint(0, 2), h, d), "key_pages": pools[0],
            "value_pages": pools[1],
        }  # fmt: skip
        features: dict[str, Any] = self.band(longest // 2)
        self.scalars(tensors, features, h)
        integers = self.rng.choice((torch.int32, torch.int64))
        features |= {
            "context_lens": torch.tensor(contexts).to(integers), "block_tables": tables.to(integers),
            "query_start_loc": starts.to(integers),
        }  # fmt: skip
        return tensors, features

    def varlen(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        _, _, _, h, k, d, dv = self.sizes()
        longest = 12 if self.small else self.rng.choice((20, 400))
        rows = [self.rng.randint(0, longest) for _ in range(self.rng.randint(1, 6))]
        columns = rows if self.chance(0.5) else [self.rng.randint(0, longest) for _ in rows]
        extra = self.rng.randint(0, 3)
        t, s = sum(rows) + extra, sum(columns) + extra
        self.scores = h * t * s
        tensors = {"query": self.randn(1, t, h, d), "key": self.randn(1, s, k, d), "value": self.randn(1, s, k, dv)}
        features = self.band(longest)
        self.scalars(tensors, features, h)
        if self.chance(0.3):
            features |= {"dropout_prob": 0.3, "seed": self.rng.getrandbits(40)}
        for name, lengths in (("cu_seqlens_q", rows), ("cu_seqlens_k", columns)):
            features[name] = torch.tensor([0, *lengths]).cumsum(0)
        return tensors, features


# -------------------------------------------------------------------------------------------------- implementations


def define_attention(query: Tensor, key: Tensor, value: Tensor, **features: Any) -> Tensor:
    return blocksparse_native.attention(query, key, value, **features)[0]


def define_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool = False,
    sliding_window: Any = None, **features: Any,
) -> Tensor:  # fmt: skip
    """One mask for all sequences."""
    mask = torch.zeros(query.shape[1], key.shape[1], dtype=torch.bool)
    ends = [x.tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
    for i in range(len(ends[0]) - 1):
        rows, columns = (slice(x[i], x[i + 1]) for x in ends)
        own = mask[rows, columns]
        left, right = band_of(causal, sliding_window)
        seen = visible(AttentionCall(left=left, right=right), *own.shape, own.device)
        mask[rows, columns] = True if seen is None else seen
    return define_attention(query, key, value, mask=mask, **features)


def define_latent(**call: Any) -> Tensor:
    return latent_native.multi_latent_attention(**call)[0]


DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    "attention": define_attention,
    "decode": decode_native.decode,
    "latent": define_latent,
    "paged": ragged_native.ragged_page_attention,
    "varlen": define_varlen,
}
# the operation of each kind, and what it may be forced to
OPERATIONS: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "attention": (
        "attention", (None, "sdpa", "flash:aten", "flash:native", "blocksparse:aten", "blocksparse:native", "vanilla"),
    ),
    "decode": ("decode", (None, "aten", "native")),
    "latent": ("multi_latent_attention", ("aten",)),
    "paged": ("ragged_page_attention", ("aten",)),
    "varlen": ("flash", ("aten", "native")),
}  # fmt: skip
# what is run without gradients: the operators in C++, and the automatic choice, which may be one of them
INFERENCE: dict[str, tuple[str | None, ...]] = {
    "attention": (None, "flash:cpu"), "decode": (None, "cpu"), "latent": (None,), "paged": (None, "cpu"),
    "varlen": (None, "cpu"),
}  # fmt: skip
TRITON = {"attention": ("flash:triton", "blocksparse:triton"), "decode": ("triton",), "paged": ("triton",)}


def implementations(case: Case, asked: list[str]) -> list[tuple[str, str, str | None]]:
    """(name, operation, what it is forced to) for a case; `asked` are beyond those of ATen and plain torch.

    Those named "inference" are run without gradients.
    """
    operation, forces = OPERATIONS[case.kind]
    rows: list[tuple[str, str, str | None]] = [(f"{operation} {force}", operation, force) for force in forces]
    rows += [(f"inference {operation} {force}", operation, force) for force in INFERENCE[case.kind]]
    if case.kind == "attention" and not {"chunk_size", "prefix_length"} & set(case.features):
        rows += [(f"ring {force}", "ring", force) for force in ("aten", "native")]
    if case.kind == "attention" and "flash:xla" in asked and case.scores <= SMALL:
        rows.append(("flash:xla", "attention", "flash:xla"))
    if case.kind == "varlen" and "flash:xla" in asked and case.scores <= SMALL:
        rows.append(("varlen xla", "flash", "xla"))
    if INTERPRETED and case.scores <= SMALL and case.dtype == torch.float32:
        rows += [(f"{operation} {force}", operation, force) for force in TRITON.get(case.kind, ())]
        rows += [("ring triton", "ring", "triton")] if ("ring aten", "ring", "aten") in rows else []
    return rows


class Result(NamedTuple):
    problems: list[str]
    refused: list[str]
    chosen: list[str]
    ran: list[str]


def check(case: Case, asked: list[str] = [], *, guard: bool = False, seed: int = 0) -> Result:  # noqa: B006 - read only
    """The problems of each implementation with the case."""
    problems, refused, ran, chosen = [], [], [], []
    expected = None
    for name, operation, force in implementations(case, asked):
        implementation = OperationRegistry.create(operation, OperationMetadata(backend=force))
        training = not name.startswith("inference ")
        tensors = {n: (guarded(x) if guard else x).detach().requires_grad_(training) for n, x in case.tensors.items()}
        features = {n: guarded(x) if guard and isinstance(x, Tensor) else x for n, x in case.features.items()}
        args = [tensors.pop(n) for n in list(tensors)[:3]]
        call = {**tensors, **features}
        leaves = [*args, *tensors.values()]
        try:
            if force is None:
                choice = implementation.choose(*args, **call)
                chosen.append(f"{choice.implementation}:{choice.backend}")
            output = implementation(*args, **call).attention_outputs
        except UnsupportedOperationError as refusal:
            if force is None:
                problems.append(f"{name}: refused: {refusal}")
            refused.append(f"{name}: {refusal}")
            continue
        grad = _grad(output, case, seed)
        if guard:
            grad = guarded(grad)
        if output.requires_grad:
            found = torch.autograd.grad(output, leaves, grad, allow_unused=True)
        else:
            found = (None,) * len(leaves)
        if expected is None:
            expected = _definition(case, grad)
        ran.append(name)
        problems += [f"{name}: {problem}" for problem in _compare(case, output, found, expected, grad)]
    return Result(problems, refused, chosen, ran)


def _grad(output: Tensor, case: Case, seed: int) -> Tensor:
    rng = random.Random(f"grad {seed}")
    values = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    layout = case.layouts.get("grad", "plain")
    return laid_out(values.to(output.dtype), layout, rng)


def _definition(case: Case, grad: Tensor, rounding: float = 0.0) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients in float64, of tensors that are off by so much of themselves."""
    generator = torch.Generator().manual_seed(3)

    def widened(x: Tensor) -> Tensor:
        x = x.detach().to(torch.float64, copy=True).contiguous()
        return x * (1 + rounding * (torch.rand(x.shape, generator=generator, dtype=x.dtype) - 0.5))

    wide = {n: widened(x).requires_grad_() for n, x in case.tensors.items()}
    grad = widened(grad)
    features = {n: x.contiguous() if isinstance(x, Tensor) else x for n, x in case.features.items()}
    output = DEFINITIONS[case.kind](**wide, **features)
    gradients = torch.autograd.grad(output, list(wide.values()), grad, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(wide.values(), gradients, strict=True)]
    return output.detach(), zeros


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _compare(case: Case, output: Tensor, found: Any, expected: tuple[Tensor, list[Tensor]], grad: Tensor) -> list[str]:
    problems: list[str] = []
    rounded = None
    pairs = [("output", output.detach(), expected[0])]
    pairs += [
        (f"gradient of {n}", g, w) for n, g, w in zip(case.tensors, found, expected[1], strict=True) if g is not None
    ]
    for place, (name, got, want) in enumerate(pairs):
        tolerance = TOLERANCE[case.dtype][min(place, 1)]
        if place and "expanded" in case.layouts.values():  # equal numbers cancel more
            tolerance *= 8
        if got.shape != want.shape or got.dtype != case.dtype:
            problems.append(f"{name} is {got.dtype} {tuple(got.shape)}, not {tuple(want.shape)}")
        elif not got.isfinite().all():
            problems.append(f"{name} has {int((~got.isfinite()).sum())} numbers that are not finite")
        elif name == "output" and (got[want == 0] != 0).any() and (want.flatten(-1).norm(dim=-1) == 0).any():
            empty = (want == 0).all(-1)
            if (got[empty] != 0).any():
                problems.append("a row that sees nothing is not zeros")
        if problems or want.numel() == 0:
            continue
        error, scale, eps = _rms(got.double() - want), _rms(want), torch.finfo(case.dtype).eps
        if error <= tolerance * scale or (
            scale < 1e-8 and error < min(256 * eps, 0.1)
        ):  # a sum that cancels leaves rounding
            continue
        if rounded is None:
            rounded = _definition(case, grad, rounding=eps)
        wrong = (rounded[0] if place == 0 else rounded[1][list(case.tensors).index(name.split()[-1])]) - want
        if error > tolerance * scale + 4 * _rms(wrong):
            problems.append(f"{name} is off by {error:.1e}, it is {scale:.1e}, rounding makes {_rms(wrong):.1e}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--small", action="store_true", help="only sizes that an interpreter can do")
    parser.add_argument("--guard", action="store_true", help="tensors end where memory does")
    parser.add_argument("--implementations", nargs="*", default=[], choices=["flash:xla"])
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    numbers = [options.only] if options.only is not None else range(options.first, options.first + options.cases)
    failed, chosen, ran = 0, collections.Counter(), collections.Counter()
    started = time.monotonic()
    for number in numbers:
        case = draw(options.seed, number, options.small or INTERPRETED)
        if options.verbose:
            print(f"case {number}: {case}", flush=True)
        result = check(case, options.implementations, guard=options.guard, seed=number)
        chosen.update(result.chosen)
        ran.update(result.ran)
        if result.problems:
            failed += 1
            print(f"FAILED --seed {options.seed} --only {number}: {case}", *result.problems, sep="\n    ", flush=True)
    many = options.only is None and not options.small and not INTERPRETED and options.cases >= 200
    in_cpp = library.missing() is None and processor.AVX2
    missing = (CHOICES | CHOICES_IN_CPP if in_cpp else CHOICES) - set(chosen) if many else set()
    if missing:
        print(f"the automatic choice never chose {', '.join(sorted(missing))}: more cases, or other sizes")
    print(f"{failed} of {len(numbers)} cases failed, {time.monotonic() - started:.0f} s")
    print(f"ran {dict(ran)}; chosen {dict(chosen)}")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
