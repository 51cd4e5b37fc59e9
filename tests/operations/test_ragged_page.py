"""ragged_page_attention: prefill and decode over pages, against dense attention of each sequence in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import library
from easytorch.kernels.ragged_page import grouped
from easytorch.kernels.ragged_page.write import write_page, write_pages
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.attention.ragged_page import RaggedPageAttention
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from easytorch.operations.dispatch.output import AttentionOutput

BACKENDS = ["native", "aten"]
FORWARD = BACKENDS if library.missing() is not None else [*BACKENDS, "cpu"]  # without gradients too


class Batch(NamedTuple):
    query: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor


def operation(backend: str | None = None, **metadata: Any) -> OperationImpl:
    return OperationRegistry.create("ragged_page_attention", OperationMetadata(backend=backend, **metadata))


def make(
    lengths: list[int], contexts: list[int], *, heads: int = 6, kv_heads: int = 2, dim: int = 60, value_dim: int = 60,
    page_size: int = 7, extra: int = 0, dtype: torch.dtype = torch.float32, index: torch.dtype = torch.int32,
) -> Batch:  # fmt: skip
    """Pages in random order, table entries that are not in use -1, and NaN in what is not in use of the pages."""
    pages = [-(-context // page_size) for context in contexts]
    count = sum(pages) + 3
    order = torch.randperm(count).tolist()
    tables = torch.full((len(lengths), max([*pages, 1]) + 1), -1, dtype=index)
    for row, used in enumerate(pages):
        tables[row, :used] = torch.tensor([order.pop() for _ in range(used)], dtype=index)
    pools = [torch.randn(count, page_size, kv_heads, width, dtype=dtype) for width in (dim, value_dim)]
    for pool in pools:
        pool[order] = float("nan")
        for row, context in enumerate(contexts):  # nor are the slots behind the last key
            if context % page_size:
                pool[tables[row, pages[row] - 1], context % page_size :] = float("nan")
    starts = torch.tensor([0, *lengths]).cumsum(0)
    query = torch.randn(int(starts[-1]) + extra, heads, dim, dtype=dtype)
    return Batch(query, *pools, torch.tensor(contexts, dtype=index), tables, starts.to(index))


def dense(batch: Batch, **features: Any) -> torch.Tensor:
    """Each query row by itself, in float64: another way to write the same, apart from the definition."""
    query, keys, values = (tensor.double() for tensor in batch[:3])
    heads, dim, size = *query.shape[1:], keys.shape[1]
    window = features.get("sliding_window")
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (None, None)
    causal, cap, sinks = features.get("causal", True), features.get("softcap"), features.get("sinks")
    scale = features.get("softmax_scale") or dim**-0.5
    output = query.new_zeros(*query.shape[:2], values.shape[3])
    starts = batch.query_start_loc.tolist()
    for b, context in enumerate(batch.context_lens.tolist()):
        for row in range(starts[b], starts[b + 1]):
            own = context - (starts[b + 1] - row)
            low = 0 if left is None else max(0, own - left)
            high = own if causal else context - 1
            high = high if right is None else min(high, own + right)
            places = [(int(batch.block_tables[b, j // size]), j % size) for j in range(low, min(high, context - 1) + 1)]
            if not places:
                continue
            page, slot = (torch.tensor(x) for x in zip(*places, strict=True))
            for head in range(heads):
                kv_head = head // (heads // keys.shape[2])
                scores = keys[page, slot, kv_head] @ query[row, head] * scale
                scores = scores if cap is None else cap * (scores / cap).tanh()
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double().reshape(1)])
                weights = scores.softmax(0)[: len(places)]
                output[row, head] = weights @ values[page, slot, kv_head]
    return output


MIXED = ([1, 5, 1, 0, 9, 1], [20, 9, 1, 5, 9, 43])
CASES: dict[str, tuple[Callable[[], Batch], dict[str, Any]]] = {
    "mixed": (lambda: make(*MIXED, extra=2), {}),
    "decode": (lambda: make([1] * 5, [1, 40, 7, 8, 22]), {}),
    "prefill": (lambda: make([63], [63]), {}),
    "chunked_prefill": (lambda: make([20, 7], [33, 21]), {}),
    "not_causal": (lambda: make(*MIXED), {"causal": False}),
    "window": (lambda: make(*MIXED), {"sliding_window": 6}),
    "window_sides": (lambda: make(*MIXED), {"sliding_window": (4, 2), "causal": False}),
    "softcap": (lambda: make(*MIXED), {"softcap": 1.5}),
    "sinks": (lambda: make(*MIXED), {"sinks": torch.linspace(-2, 2, 6)}),
    "value_dim": (lambda: make(*MIXED, value_dim=36), {"softmax_scale": 0.3}),
    "one_key_head": (lambda: make(*MIXED, kv_heads=1, page_size=16), {}),
    "everything": (
        lambda: make(*MIXED, kv_heads=3, dim=32, value_dim=20, page_size=1, index=torch.int64, extra=1),
        {"softcap": 3.0, "sinks": torch.linspace(-1, 1, 6), "sliding_window": 8, "softmax_scale": 0.5},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", FORWARD)
def test_equals_dense_attention(backend: str, name: str) -> None:
    build, features = CASES[name]
    batch = build()
    output = operation(backend)(*batch, **features).attention_outputs
    assert output.dtype == torch.float32
    assert relative_rms_error(output, dense(batch, **features)) <= TOLERANCE[torch.float32]
    assert (output[int(batch.query_start_loc[-1]) :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(backend: str, dtype: torch.dtype) -> None:
    for features in ({}, {"softcap": 2.0}):
        batch = make(*MIXED, dtype=dtype)
        output = operation(backend)(*batch, **features).attention_outputs
        assert output.dtype == dtype
        assert relative_rms_error(output, dense(batch, **features)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", FORWARD)
def test_num_seqs(backend: str) -> None:
    """What the tensors hold of the sequences past num_seqs is not read."""
    batch = make(*MIXED, extra=3)
    expected = dense(batch)
    owned = int(batch.query_start_loc[4])
    expected[owned:] = 0
    starts, lens, tables = batch.query_start_loc.clone(), batch.context_lens.clone(), batch.block_tables.clone()
    starts[5:], lens[4:], tables[4:] = -7, 10**6, -5
    for count in (4, torch.tensor([4]), torch.tensor(4, dtype=torch.int32)):
        output = operation(backend)(*batch[:3], lens, tables, starts, count).attention_outputs
        assert relative_rms_error(output, expected) <= TOLERANCE[torch.float32]
    assert (operation(backend)(*batch, num_seqs=0).attention_outputs == 0).all()


@pytest.mark.parametrize("backend", FORWARD)
def test_pages_behind_the_window_are_not_read(backend: str) -> None:
    batch = make([1, 2], [40, 30])
    batch.block_tables[:, :2] = -1  # freed
    window = {"sliding_window": 10}
    output = operation(backend)(*batch, **window).attention_outputs
    assert relative_rms_error(output, dense(batch, **window)) <= TOLERANCE[torch.float32]
    with pytest.raises(ValueError, match=r"block_tables\[0, 0\] is -1, a page in use"):
        operation(backend)(*batch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend: str) -> None:
    batch = make(*MIXED, value_dim=20, extra=1)
    batch = batch._replace(key_pages=batch.key_pages.nan_to_num(), value_pages=batch.value_pages.nan_to_num())
    sinks = torch.randn(6)
    grad = torch.randn(batch.query.shape[0], 6, 20)
    results = []
    for dtype, run in ((torch.float32, operation(backend)), (torch.float64, dense)):
        leaves = [x.to(dtype).requires_grad_() for x in (*batch[:3], sinks)]
        output = run(*leaves[:3], *batch[3:], sinks=leaves[3], softcap=2.0) if run is not dense else dense(
            Batch(*leaves[:3], *batch[3:]), sinks=leaves[3], softcap=2.0
        )  # fmt: skip
        output = output if isinstance(output, torch.Tensor) else output.attention_outputs
        results.append(torch.autograd.grad(output, leaves, grad.to(dtype)))
    for got, want in zip(*results, strict=True):
        assert relative_rms_error(got, want) <= TOLERANCE[torch.float32]


BROKEN: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "page_past_the_pool": (lambda b: _set(b, "block_tables", (0, 1), 99), r"block_tables\[0, 1\] is 99, a page in use"),
    "negative_page": (lambda b: _set(b, "block_tables", (1, 0), -1), r"block_tables\[1, 0\] is -1"),
    "short_context": (lambda b: _set(b, "context_lens", 1, 4), r"context_lens\[1\] is 4; .* 5 query tokens"),
    "long_context": (lambda b: _set(b, "context_lens", 1, 10**6), r"context_lens\[1\] is 1000000"),
    "decreasing": (lambda b: _set(b, "query_start_loc", 2, 0), "never decrease"),
    "late_start": (lambda b: _set(b, "query_start_loc", 0, 1), "begin at 0"),
    "past_the_tokens": (lambda b: b._replace(query=b.query[:-1]), "end within the 16 tokens"),
    "shape_of_pages": (lambda b: b._replace(value_pages=b.value_pages[1:]), "pages, page_size"),
    "heads": (lambda b: b._replace(query=b.query[:, :5]), "5 query heads are not a multiple of the 2"),
    "no_heads": (lambda b: b._replace(query=b.query[:, :0]), "has no heads"),
    "dtype": (lambda b: b._replace(query=b.query.half()), "one dtype"),
    "index_dtype": (lambda b: b._replace(context_lens=b.context_lens.float()), "context_lens must be int32 or int64"),
    "index_shape": (lambda b: b._replace(context_lens=b.context_lens[1:]), r"query_start_loc \(B \+ 1,\)"),
}


def _set(batch: Batch, name: str, place: Any, value: int) -> Batch:
    tensor = getattr(batch, name).clone()
    tensor[place] = value
    return batch._replace(**{name: tensor})


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("backend", FORWARD)
def test_what_does_not_fit_is_a_value_error(backend: str, name: str) -> None:
    broken, message = BROKEN[name]
    with pytest.raises(ValueError, match=message):
        operation(backend)(*broken(make(*MIXED)))


def test_other_arguments_are_checked() -> None:
    batch = make(*MIXED)
    for arguments, message in (
        ({"num_seqs": 9}, "num_seqs must be in 0..6"), ({"num_seqs": torch.tensor([-1])}, "num_seqs must be in 0..6"),
        ({"num_seqs": torch.tensor([1, 2])}, "one number"), ({"softcap": 0.0}, "softcap must be positive"),
        ({"sinks": torch.zeros(5)}, r"sinks must be \(6,\)"), ({"sliding_window": 0}, "at least 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            operation()(*batch, **arguments)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mask", torch.ones(1, dtype=torch.bool)), ("bias", torch.zeros(1)), ("dropout_prob", 0.1), ("seed", 3),
        ("query_segment_ids", torch.zeros(1, 1)), ("key_segment_ids", torch.zeros(1, 1)),
    ],
)  # fmt: skip
def test_what_it_refuses(name: str, value: Any, backend: str | None) -> None:
    batch = make([1], [3])
    with pytest.raises(UnsupportedOperationError, match=f"does not take {name}: "):
        operation(backend)(*batch, **{name: value})
    with pytest.raises(UnsupportedOperationError, match=f"does not take {name}: "):
        operation().forward_native(*batch, **{name: value})
    nothing = {"mask": None, "dropout_prob": 0.0, "seed": None}
    assert operation(backend)(*batch, **nothing).attention_outputs.shape == (1, 6, 60)


def test_metadata() -> None:
    batch = make(*MIXED)
    expected = dense(batch, softmax_scale=0.25)
    output = operation(softmax_scale=0.25, runtime_dtype=torch.float64)(*batch).attention_outputs
    assert output.dtype == torch.float64
    assert relative_rms_error(output, expected) <= 1e-12
    assert operation(runtime_softmax_dtype=torch.float64).choose(*batch).backend == "native"
    with pytest.raises(UnsupportedOperationError, match="does not take dropout_prob"):
        operation(dropout_prob=0.2)(*batch)


class _Doubling(RaggedPageAttention):
    """A subclass may take what it passes on, and arguments of its own."""

    def forward_native(self, *args: Any, doubled: bool = False, **features: Any) -> AttentionOutput:
        output = super().forward_native(*args, **features)
        return AttentionOutput(attention_outputs=output.attention_outputs * (1 + doubled))


def test_subclasses_take_what_their_definition_does() -> None:
    batch, made = make(*MIXED), _Doubling(OperationMetadata(backend="native"))
    expected = operation("native")(*batch, softmax_scale=0.25).attention_outputs
    names = tuple(inspect.signature(RaggedPageAttention.forward_native).parameters)[1 : 1 + len(batch)]
    named = dict(zip(names, batch, strict=True))
    for output in (
        made(*batch, doubled=True, softmax_scale=0.25),
        made(**named, doubled=True, softmax_scale=0.25),
    ):
        torch.testing.assert_close(output.attention_outputs, 2 * expected)
    with pytest.raises(TypeError, match="keyword argument 'trebled'"):
        made(*batch, trebled=True)


def test_choices_on_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    call, features = OperationRegistry.get("ragged_page_attention").typical_call()
    assert operation().choose_on("cuda", call, features).backend == "triton"
    training = (call[0].detach().requires_grad_(), *call[1:])
    assert "no backward" in operation().choose_on("cuda", training, features).reason
    with torch.no_grad():
        assert operation().choose_on("cuda", training, features).backend == "triton"
    wide = tuple(torch.empty(*x.shape[:-1], 1024, device="meta") for x in call[:3])
    assert "must be in 1..512" in operation().choose_on("cuda", (*wide, *call[3:]), features).reason


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_a_graph(backend: str) -> None:
    batch, run = make(*MIXED, value_dim=20), operation(backend)
    batch = batch._replace(key_pages=batch.key_pages.nan_to_num(), value_pages=batch.value_pages.nan_to_num())

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return run(*tensors, sliding_window=20).attention_outputs * 2

    expected = Module()(*batch)
    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")
    leaves = [tensor.clone().requires_grad_() for tensor in batch[:3]]
    got = compiled(*leaves, *batch[3:])
    torch.testing.assert_close(got, expected)
    grads = torch.autograd.grad(got.square().sum(), leaves)
    eager = [tensor.clone().requires_grad_() for tensor in batch[:3]]
    torch.testing.assert_close(grads, torch.autograd.grad(Module()(*eager, *batch[3:]).square().sum(), eager))
    assert all(grad.abs().sum() > 0 for grad in grads)
    torch.testing.assert_close(torch.export.export(Module(), tuple(batch)).module()(*batch), expected)


def test_func_grad_and_autocast() -> None:
    batch, run = make([1, 4], [9, 4]), operation()
    batch = batch._replace(key_pages=batch.key_pages.nan_to_num(), value_pages=batch.value_pages.nan_to_num())

    def loss(query: torch.Tensor) -> torch.Tensor:
        return run(query, *batch[1:]).attention_outputs.square().sum()

    leaf = batch.query.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(batch.query), torch.autograd.grad(loss(leaf), leaf)[0])
    with torch.autocast("cpu", torch.bfloat16):
        output = run(*batch).attention_outputs
    assert output.dtype == torch.float32


def test_opcheck() -> None:
    batch = make([1, 4], [9, 4], dim=8, value_dim=4)
    query, keys, values = (tensor.nan_to_num().requires_grad_() for tensor in batch[:3])
    op = torch.ops.easytorch.ragged_page_attention.default
    sinks = torch.randn(6, requires_grad=True)
    for extra in (
        (None, *AttentionCall(scale=0.3, right=0), None, True),
        (torch.tensor([1]), *AttentionCall(sinks=sinks, scale=0.3, left=3, right=0, softcap=2.0), None, False),
    ):
        torch.library.opcheck(op, (query, keys, values, *batch[3:], *extra))


def test_differential_mode(compared: list[str]) -> None:
    for backend in FORWARD[1:]:
        operation(backend)(*make(*MIXED, extra=1))
    assert compared == [f"ragged_page_attention:{backend}" for backend in FORWARD[1:]]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_random_batches(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    contexts = [length + data.draw(st.integers(0, 12)) for length in lengths]
    sizes = {"page_size": data.draw(st.sampled_from([1, 3, 8])), "kv_heads": data.draw(st.sampled_from([1, 2, 3, 6]))}
    sides = st.one_of(st.none(), st.integers(0, 8))
    features = {
        "causal": data.draw(st.booleans()), "softcap": data.draw(st.sampled_from([None, 1.0])),
        "sliding_window": data.draw(st.one_of(st.none(), st.integers(1, 9), st.tuples(sides, sides))),
        "sinks": data.draw(st.sampled_from([None, torch.linspace(-3, 3, 6)])),
    }  # fmt: skip
    batch = make(lengths, contexts, dim=4, value_dim=4, extra=data.draw(st.integers(0, 2)), **sizes)
    expected = dense(batch, **features)
    for backend in FORWARD:
        output = operation(backend)(*batch, **features).attention_outputs
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_write_pages(index: torch.dtype) -> None:
    key_pages, value_pages = torch.zeros(5, 4, 2, 8), torch.zeros(5, 4, 2, 6)
    key, value = torch.randn(4, 2, 8), torch.randn(4, 2, 6)
    slots = torch.tensor([17, -1, 0, 7], dtype=index)
    written = write_pages(key_pages, value_pages, key, value, slots)
    assert written[0] is key_pages and written[1] is value_pages
    for pages, rows in ((key_pages, key), (value_pages, value)):
        expected = torch.zeros_like(pages)
        expected[4, 1], expected[0, 0], expected[1, 3] = rows[0], rows[2], rows[3]
        assert torch.equal(pages, expected)


def test_write_pages_checks_and_follows_strides() -> None:
    pages, rows = torch.zeros(5, 4, 6)[..., ::2], torch.ones(2, 3)
    write_page(pages, rows, torch.tensor([3, 4]))
    assert pages.sum() == 6 and pages[0, 3].sum() == 3 == pages[1, 0].sum()
    write_page(pages, rows[:0], torch.zeros(0, dtype=torch.int64))
    for arguments, message in (
        ((pages, rows, torch.tensor([0, 20])), r"in 0\.\.19, got 0 to 20"),
        ((pages, rows, torch.tensor([0, -2])), "got -2 to 0"),
        ((pages, rows[:, :2], torch.tensor([0, 1])), r"rows \(N, \.\.\.\)"),
        ((pages, rows.half(), torch.tensor([0, 1])), "one dtype"),
        ((pages, rows, torch.tensor([0.0, 1.0])), "int32 or int64"),
    ):
        with pytest.raises(ValueError, match=message):
            write_page(*arguments)


def test_write_pages_in_a_graph() -> None:
    pages, rows, slots = torch.zeros(3, 4, 2), torch.randn(2, 2), torch.tensor([5, -1])

    def step(pages: torch.Tensor) -> torch.Tensor:
        return write_page(pages, rows, slots) * 2

    compiled, eager = torch.zeros_like(pages), torch.zeros_like(pages)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(got, step(eager)) and torch.equal(compiled, eager) and eager[1, 1].equal(rows[0])
    torch.library.opcheck(torch.ops.easytorch.write_page.default, (pages, rows, slots))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["plain", "window", "softcap", "sinks"])
def test_long_prefill_takes_tiles(name: str, dtype: torch.dtype) -> None:
    lengths, contexts = [1, 260, 1], [30, 700, 9]
    assert 6 * lengths[1] * contexts[1] > grouped.FLASH_SCORES
    batch = make(lengths, contexts, dtype=dtype, extra=1)
    batch = batch._replace(key_pages=batch.key_pages.nan_to_num(), value_pages=batch.value_pages.nan_to_num())
    features: dict[str, Any] = {
        "plain": {}, "window": {"sliding_window": 90}, "softcap": {"softcap": 1.5},
        "sinks": {"sinks": torch.linspace(-2, 2, 6, dtype=dtype)},
    }[name]  # fmt: skip

    def run(backend: str, tensors: Batch) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        output = operation(backend)(*leaves, *tensors[3:], **features).attention_outputs
        return output, *torch.autograd.grad(output.square().sum(), leaves)

    exact = batch._replace(**{name: getattr(batch, name).double() for name in ("query", "key_pages", "value_pages")})
    for index, (got, expected) in enumerate(zip(run("aten", batch), run("native", exact), strict=True)):
        assert relative_rms_error(got, expected) <= TOLERANCE[dtype] * (2 if index and dtype == torch.bfloat16 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_query_whose_rows_overlap_is_decoded_and_has_a_gradient(dtype: torch.dtype) -> None:
    """Full pages leave nothing to mask: ATen's kernel then writes an output laid out as the query is."""
    batch = make([1] * 3, [16] * 3, heads=8, dim=60, value_dim=60, page_size=16, dtype=dtype)
    query = torch.randn(400).to(dtype).as_strided((3, 8, 60), (9, 1, 1)).requires_grad_()
    assert query.stride(1) == 1
    output = operation("aten")(*batch._replace(query=query)).attention_outputs
    double = query.detach().double().contiguous().requires_grad_()
    expected = operation("native")(
        *batch._replace(query=double, key_pages=batch.key_pages.double(), value_pages=batch.value_pages.double())
    ).attention_outputs
    upstream = torch.randn(expected.shape).to(dtype)
    (grad,) = torch.autograd.grad(output, query, upstream)
    (wanted,) = torch.autograd.grad(expected, double, upstream.double())
    for got, want in ((output, expected), (grad, wanted)):
        assert relative_rms_error(got, want) <= TOLERANCE[dtype]
