"""Torch's own samples of its operations (OpInfo) through the front-end, compared with float64.

    python scripts/frontend_opinfo.py --backend xla                 # every sample of the operations in the core set
    python scripts/frontend_opinfo.py --op cumsum --op nn.functional.pad --backend numpy
    python scripts/frontend_opinfo.py --all --limit 4               # all of torch's operations, four samples each
    python scripts/frontend_opinfo.py --backend xla --write         # and docs/frontend-coverage.md

An operation is in the core set if what torch dispatches for its first sample is core ATen only, or one of its overloads
is. A sample matches if every output has the shape and dtype that torch gives in float32, and is as near to float64's as
1e-4 relative or 1e-5 absolute, or as near as torch's own within a factor of four. Of operations that draw random
numbers or leave memory undefined only shapes and dtypes are compared.
"""

from __future__ import annotations

import argparse
import collections
import copy
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from easytorch import frontend
from easytorch.backends import Backend, Op, Shape
from easytorch.backends.dtypes import dtype_of
from easytorch.frontend import UnsupportedOpError, lower_graph
from easytorch.frontend.decompositions import decompositions
from easytorch.frontend.rng import fresh_state, is_random
from easytorch.frontend.routing import backend_of

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "frontend-coverage.md"
# Values that no two programs agree on.
UNDEFINED = ("empty", "new_empty", "rand", "bernoulli", "multinomial", "normal", "dropout", "uniform", "exponential")
UNDEFINED += ("cauchy", "geometric", "log_normal", "rrelu", "gumbel")
# Of a product with random vectors: the signs of singular vectors, and what more than q of them leave out.
UNDEFINED += ("lowrank",)


def core_overloads() -> set[torch._ops.OpOverload]:
    """Every overload that torch tags as core ATen."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space == "aten" and hasattr(torch.ops.aten, packet):
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if operation is not None and torch.Tag.core in operation.tags:
                found.add(operation)
    return found


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: set[torch._ops.OpOverload] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.add(func)
        return func(*args, **(kwargs or {}))


class Call(torch.nn.Module):
    """One call of an operation, whose tensors are the inputs and all else is fixed."""

    def __init__(self, info: OpInfo, sample: SampleInput) -> None:
        super().__init__()
        self.function = info.op
        self.writes = False
        leaves, self.spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.leaves = leaves
        self.tensors = tuple(leaves[place].detach() for place in self.places)

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            # An operation that writes in place has its input for itself.
            leaves[place] = tensor.clone() if self.writes else tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    def in_float64(self) -> Any:
        """Torch's results in float64 and complex128."""

        def wide(leaf: Any) -> Any:
            if isinstance(leaf, torch.dtype):
                return {torch.float32: torch.float64, torch.complex64: torch.complex128}.get(leaf, leaf)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.detach().to(torch.promote_types(leaf.dtype, torch.float64)) if _floats(leaf) else leaf.clone()

        args, kwargs = pytree.tree_unflatten([wide(leaf) for leaf in self.leaves], self.spec)
        return self.function(*args, **kwargs)


def _floats(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclass
class Tally:
    """One operation's samples."""

    name: str
    matched: int = 0
    total: int = 0
    failures: collections.Counter[str] = field(default_factory=collections.Counter)


def samples(info: OpInfo, dtype: torch.dtype, limit: int | None) -> Iterator[SampleInput]:
    """The dense samples torch has; with a limit spread over all of them."""
    found = [sample for sample in info.sample_inputs("cpu", dtype, requires_grad=False) if _is_dense(sample.input)]
    if limit is not None and len(found) > limit:
        found = [found[number * len(found) // limit] for number in range(limit)]
    return iter(found)


def _is_dense(given: Any) -> bool:
    tensors = (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))
    return all(tensor.layout is torch.strided for tensor in tensors)


def in_core(info: OpInfo, core: set[torch._ops.OpOverload]) -> bool:
    """Whether the operation is core ATen, or torch runs its first sample as such."""
    # The jiterator is for CUDA alone.
    if torch.float32 not in info.dtypes or info.name.startswith("jiterator"):
        return False
    names = {operation._schema.name.removeprefix("aten::") for operation in core}
    if {info.name, info.name.removeprefix("nn.functional."), info.aten_name} & names:
        return True
    sample = next(samples(info, torch.float32, 1), None)
    if sample is None:
        return False
    recorder = _Recorder()
    with recorder:
        info.op(sample.input, *sample.args, **sample.kwargs)
    return bool(recorder.operations) and recorder.operations <= core


def exported(call: Call, backend: str) -> Any:
    """The results of the operation as a module, through `frontend.compile`."""
    fresh = copy.deepcopy(call.tensors)
    return frontend.compile(call, fresh, backend=backend)(*fresh)


def traced(call: Call, backend: str) -> Any:
    """The results of its functional graph, as AOTAutograd would make it and `torch.compile` lowers it."""
    try:
        return run_functional(call, copy.deepcopy(call.tensors), backend_of(backend))
    except UnsupportedOpError:
        # Decompositions that write in place are functional only where torch.export, or AOTAutograd, traces them.
        return exported(call, backend)


def run_functional(function: Callable[..., Any], tensors: Sequence[torch.Tensor], backend: Backend) -> list[Any]:
    """The leaves of what `function` gives for `tensors`, from its functional graph on `backend`."""
    functional = torch.func.functionalize(lambda *given: pytree.tree_leaves(function(*given)), remove="mutations")
    with torch.no_grad():
        graph = make_fx(functional, decomposition_table=decompositions(), tracing_mode="fake")(*tensors)
    builder = backend.builder("sample")
    shapes = [Shape(dtype_of(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
    parameters = [builder.parameter(f"x{number}", shape) for number, shape in enumerate(shapes)]
    values = lower_graph(graph, builder, parameters)
    computed = [value for value in values if isinstance(value, Op)]
    if not computed:
        return values
    executable = builder.compile(*computed)
    inputs = [backend.buffer_from_torch(tensor) for tensor in tensors]
    if is_random(executable):
        inputs.append(fresh_state(backend))
    outputs = iter(executable.execute(inputs))
    return [backend.buffer_to_torch(next(outputs)) if isinstance(value, Op) else value for value in values]


def chosen(names: Sequence[str] | None, everything: bool = False) -> list[OpInfo]:
    """The operations of these names, or all, or the core set."""
    from torch.testing._internal.common_methods_invocations import op_db

    if names or everything:
        wanted = [info for info in op_db if everything or info.name in names]
        # The jiterator is for CUDA alone.
        return [info for info in wanted if not info.name.startswith("jiterator")]
    core = core_overloads()
    return [info for info in op_db if in_core(info, core)]


def check(
    info: OpInfo, sample: SampleInput, backend: str, dtype: torch.dtype, run: Callable[[Call, str], Any] = traced
) -> str | None:
    """Why the sample does not match; None if it does."""
    call = Call(info, sample)
    given = copy.deepcopy(call.tensors)
    expected = call(*given)
    call.writes = any(tensor._version for tensor in given)
    try:
        actual = run(call, backend)
    except Exception as error:  # the boundary of a report: whatever goes wrong with a sample is what it lists
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    try:
        wide = call.in_float64() if dtype in (torch.float32, torch.complex64) else expected
    except RuntimeError:
        # It reads memory around its input, which the copy in float64 has not.
        wide = expected
    undefined = any(word in info.name for word in UNDEFINED)
    leaves = (pytree.tree_leaves(part) for part in (actual, expected, wide))
    for ours, theirs, exact in itertools.zip_longest(*leaves):
        reason = _difference(ours, theirs, exact, undefined, dtype)
        if reason is not None:
            return reason
    return None


def _difference(ours: Any, theirs: Any, exact: Any, undefined: bool, dtype: torch.dtype) -> str | None:
    if not isinstance(theirs, torch.Tensor):
        return None if ours == theirs else f"{ours!r} where torch gives {theirs!r}"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{ours.dtype}{list(ours.shape)} where torch gives {theirs.dtype}{list(theirs.shape)}"
    if undefined or not theirs.numel():
        return None
    ours, theirs, exact = (part.detach().resolve_conj().resolve_neg() for part in (ours, theirs, exact))
    if not _floats(theirs):
        wrong = ours.ne(theirs)
        return f"{int(wrong.sum())} of {wrong.numel()} integers differ" if bool(wrong.any()) else None
    kind = torch.complex128 if theirs.is_complex() else torch.float64
    ours, theirs, exact = (part.to(kind) for part in (ours, theirs, exact))
    loose = {torch.bfloat16: (2e-2, 1e-2), torch.float16: (2e-3, 1e-3)}.get(dtype, (1e-4, 1e-5))
    if torch.allclose(ours, exact, rtol=loose[0], atol=loose[1], equal_nan=True):
        return None
    # Where float64 is far from what float32 can hold, torch's own float32 is the measure.
    if torch.allclose(ours, theirs, rtol=loose[0], atol=loose[1], equal_nan=True):
        return None
    ours_off, theirs_off = (float(torch.nan_to_num((part - exact).abs(), nan=0).max()) for part in (ours, theirs))
    same = torch.equal(torch.isnan(ours), torch.isnan(theirs))
    if same and ours_off <= 4 * theirs_off:
        return None
    return f"values differ by up to {ours_off:.2g}, torch's float32 by {theirs_off:.2g}"


def full_name(info: OpInfo) -> str:
    """The operation's name, with its variant's."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def sweep(
    infos: Iterable[OpInfo],
    backend: str,
    dtype: torch.dtype,
    limit: int | None,
    run: Callable[[Call, str], Any] = traced,
) -> Iterator[Tally]:
    """Every operation's tally, as soon as it is there. Its samples do not depend on what ran before."""
    for info in infos:
        tally = Tally(full_name(info))
        if dtype not in info.dtypes:
            continue
        torch.manual_seed(0)
        for sample in samples(info, dtype, limit):
            reason = check(info, sample, backend, dtype, run)
            tally.total += 1
            tally.matched += reason is None
            if reason is not None:
                tally.failures[reason] += 1
        yield tally


def page(results: dict[str, list[Tally]], limit: int | None, everything: bool) -> str:
    """docs/frontend-coverage.md."""
    lines = [
        "# What of ATen the front-end runs",
        "",
        f"Torch {torch.__version__.split('+')[0]}'s own samples (OpInfo, float32, forward) of "
        + ("all its operations," if everything else "the operations in the core ATen set,"),
        "with float64 as the oracle: written by `scripts/frontend_opinfo.py --write`, whose docstring says what",
        "matches."
        + ("" if limit is None else f" Of each operation at most {limit} samples, spread over all, were run."),
        f"All {len(core_overloads())} core overloads have a lowering (`tests/frontend/test_core_aten.py`).",
        "",
        "| Backend | Samples | Match | Operations | In all samples |",
        "|---|---|---|---|---|",
    ]
    for backend, tallies in results.items():
        matched, total = (sum(getattr(tally, name) for tally in tallies) for name in ("matched", "total"))
        complete = sum(tally.matched == tally.total for tally in tallies)
        share = f"{matched} ({100 * matched / max(total, 1):.2f} %)"
        lines.append(f"| {backend} | {total} | {share} | {len(tallies)} | {complete} |")
    operations: dict[str, dict[str, Tally]] = {}
    for backend, tallies in results.items():
        for tally in tallies:
            operations.setdefault(tally.name, {})[backend] = tally
    failing = {name: found for name, found in operations.items() if any(tally.failures for tally in found.values())}
    if failing:
        lines += ["", f"| Operation | Samples | {' | '.join(results)} | Reasons of the others |"]
        lines += ["|---|---|" + "---|" * len(results) + "---|"]
    for name, found in failing.items():
        counts = " | ".join(str(found[backend].matched) if backend in found else "" for backend in results)
        # The backends mostly give the same reasons.
        reasons = collections.Counter[str]()
        for tally in found.values():
            reasons |= tally.failures
        text = "; ".join(f"{count}x {reason}".replace("|", "/") for reason, count in reasons.items())
        lines.append(f"| `{name}` | {max(tally.total for tally in found.values())} | {counts} | {text[:400]} |")
    rest = [
        f"`{name}` {max(tally.total for tally in operations[name].values())}" for name in operations.keys() - failing
    ]
    lines += ["", f"All samples of: {', '.join(sorted(rest))}."]
    return "\n".join(lines) + "\n"


def stored(path: Path | None) -> dict[tuple[str, str], Tally]:
    """The tallies that an earlier run left, by backend and operation."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    found = {}
    for result in map(json.loads, lines):
        backend = result.pop("backend")
        found[backend, result["name"]] = Tally(**result | {"failures": collections.Counter(result["failures"])})
    return found


def main() -> int:
    """Returns 1 if fewer than 97 % match."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", help="only operations of this name; may be repeated")
    parser.add_argument("--limit", type=int, help="at most so many samples of an operation")
    parser.add_argument("--backend", action="append", help="xla (default), numpy, torch, ...; may be repeated")
    parser.add_argument("--dtype", default="float32", help="torch's name of the type of the samples")
    parser.add_argument("--all", action="store_true", help="all of torch's operations, not only the core set")
    parser.add_argument("--export", action="store_true", help="through torch.export, ten times slower")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th operation, from the K-th")
    parser.add_argument("--out", type=Path, help="results, one JSON object a line; a later run goes on from there")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    infos = chosen(options.op, options.all)
    run = exported if options.export else traced
    first, step = map(int, options.part.split("/"))
    earlier = stored(options.out)
    results: dict[str, list[Tally]] = {}
    for backend in options.backend or ["xla"]:
        started = time.perf_counter()
        results[backend] = []
        for info in infos[first::step]:
            known = earlier.get((backend, full_name(info)))
            if known is not None:
                results[backend].append(known)
                continue
            for tally in sweep([info], backend, getattr(torch, options.dtype), options.limit, run):
                results[backend].append(tally)
                print(f"{tally.name:45} {tally.matched:4} / {tally.total}", flush=True)
                for reason, count in tally.failures.items():
                    print(f"    {count}x {reason[:300]}")
                if options.out:
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    with options.out.open("a") as file:
                        file.write(json.dumps({"backend": backend, **vars(tally)}) + "\n")
        matched, total = (sum(getattr(tally, name) for tally in results[backend]) for name in ("matched", "total"))
        if options.write:
            PAGE.write_text(page(results, options.limit, options.all))
        seconds = time.perf_counter() - started
        print(f"{backend}: {matched} of {total} samples match, {100 * matched / max(total, 1):.2f} %, {seconds:.0f} s")
    return int(matched < 0.97 * total)


if __name__ == "__main__":
    sys.exit(main())
