"""decode: every feature and `lengths` against the float64 definition, gradients, what is refused, who chooses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from easytorch.kernels.attention.native import attention
from easytorch.kernels.cpu import library, processor
from easytorch.kernels.decode import aten, aten_products, aten_split, cpu
from easytorch.kernels.decode.native import decode as definition
from easytorch.kernels.interop import installed
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import relative_rms_error

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
B, S, H, K, D, DV = 3, 63, 6, 2, 60, 36
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MIXED = torch.tensor([0, 17, S])


def decode(backend: str | None = None) -> OperationImpl:
    return OperationRegistry.create("decode", OperationMetadata(backend=backend))


def tensors(kv_heads: int = K) -> list[torch.Tensor]:
    return [torch.randn(B, 1, H, D), torch.randn(B, S, kv_heads, D), torch.randn(B, S, kv_heads, DV)]


def segments() -> dict[str, torch.Tensor]:
    query = torch.zeros(B, 1, dtype=torch.int64)
    query[1] = 7  # which no key has
    return {"query_segment_ids": query, "key_segment_ids": torch.randint(0, 2, (B, S))}


CASES: dict[str, Any] = {
    "plain": dict,
    "causal": lambda: {"causal": True},
    "scale": lambda: {"softmax_scale": 0.3},
    "mask": lambda: {"mask": torch.rand(B, H, 1, S) > 0.5},
    "mask_nothing": lambda: {"mask": torch.tensor([True, False, True]).reshape(B, 1, 1, 1)},
    "mask_keys": lambda: {"mask": torch.rand(S) > 0.5},
    "bias": lambda: {"bias": torch.randn(B, H, 1, S)},
    "bias_and_mask": lambda: {"bias": torch.randn(H, 1, S), "mask": torch.rand(B, 1, 1, S) > 0.5},
    "segments": segments,
    "window": lambda: {"sliding_window": 9, "causal": True},
    "window_sides": lambda: {"sliding_window": (20, 3)},
    "softcap": lambda: {"softcap": 1.5},
    "sinks": lambda: {"sinks": torch.randn(H), "mask": torch.rand(B, 1, 1, S) > 0.5},
    "everything": lambda: {
        **segments(), "mask": torch.rand(B, H, 1, S) > 0.3, "bias": torch.randn(1, H, 1, S), "causal": True,
        "sliding_window": (40, None), "softcap": 4.0, "sinks": torch.randn(H), "softmax_scale": 0.2,
    },
}  # fmt: skip


def run(function: Any, given: dict[str, Any], rounded: torch.dtype, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The output and the gradient of every floating tensor, in `dtype`, of tensors rounded to `rounded`."""
    leaves = {
        name: value.to(rounded).to(dtype).detach().requires_grad_()
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    output = function(**{**given, **leaves})
    output = output if isinstance(output, torch.Tensor) else output.attention_outputs
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(rounded).to(dtype)
    grads = torch.autograd.grad(output, list(leaves.values()), upstream)
    return {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES]
    + [(case, dtype) for case in ("causal", "everything") for dtype in (torch.float16, torch.bfloat16)],
)
@pytest.mark.parametrize("lengths", ["all", "mixed", "same"])
@pytest.mark.parametrize("backend", ["native", "aten"])
def test_equals_the_definition(backend: str, case: str, lengths: str, dtype: torch.dtype) -> None:
    torch.manual_seed(sum(map(ord, case)))
    given = dict(zip(("query", "key", "value"), tensors(), strict=True)) | CASES[case]()
    if lengths != "all":
        given["lengths"] = MIXED if lengths == "mixed" else torch.full((B,), 30, dtype=torch.int32)
        for name in ("key", "value"):  # what lies beyond is not read
            for b, length in enumerate(given["lengths"]):
                given[name][b, length:] = float("nan")
    got, expected = run(decode(backend), given, dtype, dtype), run(definition, given, dtype, torch.float64)
    for name in expected:
        # in half precision a gradient passes two roundings
        allowed = TOLERANCE[dtype] * (2 if dtype != torch.float32 and name != "output" else 1)
        assert got[name].dtype == dtype
        assert relative_rms_error(got[name], expected[name]) <= allowed, name
    if lengths == "mixed":
        assert (got["output"][0] == 0).all()
    if case == "mask_nothing":
        assert (got["output"][1] == 0).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lengths", ["all", "mixed"])
@pytest.mark.parametrize("backend", ["aten", pytest.param("cpu", marks=needs_library)])
def test_without_a_gradient(
    backend: str, lengths: str, case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths that autograd cannot follow; blocks smaller than the keys, and a last one that is not full."""
    monkeypatch.setattr(aten, "_LARGE", 0)
    monkeypatch.setattr(aten, "_faster_by_products", lambda key: dtype != torch.bfloat16)
    monkeypatch.setattr(aten, "_faster_split", lambda key, value: True)
    monkeypatch.setattr(aten_products, "_BLOCK", 20)
    monkeypatch.setattr(aten_split, "_BLOCK", 20)
    torch.manual_seed(sum(map(ord, case)))
    query, key, value = tensors()
    value = torch.randn(B, S, K, D) if dtype == torch.bfloat16 else value  # the split takes no other dim
    given = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in ({"query": query, "key": key, "value": value} | CASES[case]()).items()
    }
    if lengths == "mixed":
        given["lengths"] = MIXED
        for name in ("key", "value"):
            for b, length in enumerate(MIXED):
                given[name][b, length:] = float("nan")
    double = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    untouched = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
    got = decode(backend)(**given).attention_outputs
    assert got.dtype == dtype
    assert relative_rms_error(got, definition(**double)) <= TOLERANCE[dtype]
    if case == "mask_nothing":
        assert (got[1] == 0).all()
    for name, value in untouched.items():
        assert torch.equal(given[name].nan_to_num(), value.nan_to_num()), name


@pytest.mark.parametrize("value_of", ["mask", "bias"])
def test_a_long_bfloat16_cache_with_blocks_that_nothing_sees(value_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence sees only keys of the middle block, or of the last and shorter one, or none."""
    taken: list[int] = []
    genuine = aten_split.attend_split
    monkeypatch.setattr(aten, "attend_split", lambda *args: taken.append(1) or genuine(*args))
    torch.manual_seed(0)
    keys = 2 * aten_split._BLOCK + 77
    query, key = torch.randn(3, 1, 4, 128).bfloat16(), torch.randn(3, keys, 2, 128).bfloat16()
    value = torch.randn(3, keys, 2, 128).bfloat16() + 3.0  # a share of an empty block would show
    place, first = torch.arange(keys), torch.tensor([keys - 1300, keys - 20, keys])[:, None]
    seen = ((place >= first) & (place < first + 40))[:, None, None]
    hidden = {"mask": seen} if value_of == "mask" else {"bias": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)}
    got = decode("aten")(query, key, value, **hidden).attention_outputs
    assert taken
    assert (got[2] == 0).all()
    expected = definition(query.double(), key.double(), value.double(), **hidden)
    for b in range(2):
        assert relative_rms_error(got[b], expected[b]) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["BSKD", "BKSD"])
def test_a_cache_of_4096_keys(layout: str, dtype: torch.dtype) -> None:
    """What the size alone decides."""
    query, key, value = (torch.randn(*shape).to(dtype) for shape in ((2, 1, 4, 128), *[(2, 4100, 2, 128)] * 2))
    if layout == "BKSD":
        key, value = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (key, value))
    mask = torch.rand(2, 1, 1, 4100) > 0.5
    mask[0, ..., :2048] = False  # nothing of the first blocks
    mask[1] = False
    for features in ({}, {"mask": mask}, {"bias": torch.randn(4, 1, 4100).to(dtype), "sliding_window": 3000}):
        got = decode("aten")(query, key, value, **features).attention_outputs
        expected = definition(query.double(), key.double(), value.double(), **features)
        assert relative_rms_error(got, expected) <= TOLERANCE[dtype]
        assert "mask" not in features or (got[1] == 0).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 17, S])
def test_the_definition_is_attention_over_the_first_keys(case: str, length: int) -> None:
    query, key, value = (tensor.double() for tensor in tensors())
    features = CASES[case]()
    got = definition(query, key, value, lengths=torch.full((B,), length), **features)
    for name in ("mask", "bias"):
        if name in features and features[name].shape[-1] == S:
            features[name] = features[name][..., :length]
    if "key_segment_ids" in features:
        features["key_segment_ids"] = features["key_segment_ids"][:, :length]
    torch.testing.assert_close(got, attention(query, key[:, :length], value[:, :length], **features)[0])


@pytest.mark.parametrize("layout", ["BSKD", "BKSD"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_layouts_and_groups(kv_heads: int, layout: str) -> None:
    query, key, value = tensors(kv_heads)
    expected = definition(query.double(), key.double(), value.double())
    if layout == "BKSD":
        key, value = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (key, value))
    assert relative_rms_error(decode()(query, key, value).attention_outputs, expected) <= 1e-5


def test_dropout_is_the_definitions() -> None:
    operation, (query, key, value) = decode(), tensors()
    assert operation.choose(query, key, value, dropout_prob=0.5).backend == "native"
    expected = attention(query, key, value, dropout_prob=0.5, seed=3)[0]
    got = operation(query, key, value, dropout_prob=0.5, seed=3).attention_outputs
    assert torch.equal(got, expected)
    with pytest.raises(UnsupportedOperationError, match="no dropout"):
        decode("aten")(query, key, value, dropout_prob=0.5)


@pytest.mark.parametrize("backend", [None, "native", "aten", "decode"])
def test_more_queries_are_refused(backend: str | None) -> None:
    query, key, value = tensors()
    with pytest.raises(UnsupportedOperationError, match=r"one query token .T = 1., got T = 2: use attention"):
        decode(backend)(torch.cat([query, query], 1), key, value)
    with pytest.raises(UnsupportedOperationError, match="one query token"):
        decode(backend)(query=torch.cat([query, query], 1), key=key, value=value)


@pytest.mark.parametrize("backend", ["native", "aten"])
def test_errors(backend: str) -> None:
    operation, (query, key, value) = decode(backend), tensors()
    for lengths, message in (
        (torch.ones(B), "int32 or int64"),
        (torch.ones(B + 1, dtype=torch.int32), r"\(3,\), one per sequence, got \(4,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            operation(query, key, value, lengths=lengths)
    with pytest.raises(ValueError, match="head_dim differ"):
        operation(query, key[:2], value)
    with pytest.raises(ValueError, match="softcap must be positive"):
        operation(query, key, value, softcap=-1.0)


def test_lengths_beyond_the_keys() -> None:
    with pytest.raises(ValueError, match=r"0\.\.63, the keys there are"):
        decode("aten")(*tensors(), lengths=torch.tensor([1, S + 1, 2]))


def test_attention_of_one_query_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", False)
    operation, (query, key, value) = OperationRegistry.create("attention"), tensors()
    choice = operation.choose(query, key, value, causal=True)
    assert (choice.implementation, choice.backend) == ("decode", "aten")
    assert operation.choose(query.expand(B, 2, H, D), key, value, causal=True).implementation == "sdpa"
    assert operation.choose(query, key, value, dropout_prob=0.5).implementation == "sdpa"
    # a head that is alone with its keys has nothing to share: no step between it and ATen
    query, key, value = tensors(H)
    assert operation.choose(query, key, value, causal=True).implementation == "sdpa"
    assert operation.choose(query, key, value, softcap=2.0).implementation == "decode"
    with pytest.raises(UnsupportedOperationError, match="one query token"):
        forced = OperationRegistry.create("attention", OperationMetadata(backend="decode"))
        forced(query.expand(B, 2, H, D), key, value)


@needs_library
def test_where_the_cpp_operator_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    query, key, value = tensors()

    def chosen(operation: OperationImpl, *given: torch.Tensor, **features: Any) -> tuple[str | None, str]:
        choice = operation.choose(*given, **features)
        return choice.implementation, choice.backend

    for operation in (OperationRegistry.create("attention"), decode()):
        for features in ({}, {"causal": True}, {"softcap": 2.0, "sinks": torch.zeros(H)}, {"mask": torch.ones(S) > 0}):
            assert chosen(operation, query, key, value, **features)[1] == "cpu"
        assert chosen(operation, *tensors(H), causal=True)[1] == "cpu"
        for given, features in (
            ((query.double(), key.double(), value.double()), {}),
            ((query.clone().requires_grad_(), key, value), {}),
            ((query, key, value), {"bias": torch.zeros(S, requires_grad=True)}),
            ((query, key, value), {"dropout_prob": 0.5}),
        ):
            assert chosen(operation, *given, **features)[1] != "cpu"
        with torch.autocast("cpu", torch.bfloat16):
            assert chosen(operation, query, key, value)[1] != "cpu"
    for name, setting in (
        ("runtime_softmax_dtype", torch.float64),
        ("softmax_scale", 0.5),
        ("runtime_dtype", torch.bfloat16),
        ("dropout_prob", 0.1),
    ):
        for kind in ("attention", "decode"):
            made = OperationRegistry.create(kind, OperationMetadata(**{name: setting}))
            assert made.choose(query, key, value).backend != "cpu"
    for refused, reason in (
        ({"dropout_prob": 0.5}, "no dropout"),
        ({"bias": torch.zeros(S).requires_grad_()}, "no gr"),
    ):
        with pytest.raises(UnsupportedOperationError, match=reason):
            decode("cpu")(query, key, value, **refused)
    with pytest.raises(UnsupportedOperationError) as refusal:
        decode()(query.expand(-1, 2, -1, -1), key, value)
    assert str(refusal.value).count("got T = 2") == 1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_heads", [1, K, H])
@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -0.5])
def test_one_token_in_the_layout_of_a_cache(scale: float | None, kv_heads: int, dtype: torch.dtype) -> None:
    query, key, value = (tensor.to(dtype) for tensor in tensors(kv_heads))
    heads_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    got = OperationRegistry.create("attention").one_token(
        heads_first[0], heads_first[1].contiguous(), heads_first[2].contiguous(), scale
    )
    assert got.shape == (B, 1, H, DV) and got.dtype == dtype
    expected = attention(query.double(), key.double(), value.double(), causal=True, softmax_scale=scale)[0]
    assert relative_rms_error(got, expected) <= TOLERANCE[dtype]


def test_what_one_token_leaves_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(B, H, 1, D), torch.randn(B, K, S, D), torch.randn(B, K, S, DV)
    operation = OperationRegistry.create("attention")
    assert operation.one_token(query, key, value, 1.0) is not None
    large = torch.zeros(1, 1, 1, 1).expand(B, K, 2**18, D)
    for others in (
        (query, key.transpose(1, 2).contiguous().transpose(1, 2), value),  # a layout that has to be looked at
        (query, key, value[..., ::2]),
        (query.expand(B, H, 2, D), key, value),
        (query[0], key[0], value[0]),
        (query[:, :-1], key, value),
        (query[:1], key, value),
        (query, key[:, :1].contiguous(), value),
        (query, key[:, :, 1:].contiguous(), value),
        (query, key[..., 1:].contiguous(), value),
        (query[..., :0], key[..., :0], value),
        (query, key[:, :, :0], value[:, :, :0]),
        (query[:, :0], key[:, :0], value[:, :0]),
        (query, key.double(), value),
        (query.int(), key.int(), value.int()),
        (query.to("meta"), key.to("meta"), value.to("meta")),
        (query, key.to("meta"), value),
        (query, torch.nn.Parameter(key), value),
        (query, large, large),
        (query, None, value),
    ):
        assert operation.one_token(*others, 1.0) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert not cpu.takes(query, key, value)
    assert not cpu.takes(query.clone().requires_grad_(), key, value)
    assert not cpu.takes(query.double(), key.double(), value.double())
    assert cpu.takes(query, key, value) == (library.missing() is None)
    for scale in (1, True, "1", float("nan"), float("inf"), torch.tensor(1.0)):
        assert operation.one_token(query, key, value, scale) is None
    for setting in (
        {"backend": "decode"},
        {"softmax_scale": 0.5},
        {"dropout_prob": 0.5},
        {"runtime_dtype": torch.float64},
        {"runtime_softmax_dtype": torch.float64},
    ):
        made = OperationRegistry.create("attention", OperationMetadata(**setting))
        assert made.one_token(query, key, value, 1.0) is None
    for name, said in (("EASYTORCH_OPS", "attention=vanilla"), ("EASYTORCH_CHECK", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, said)
            assert operation.one_token(query, key, value, 1.0) is None


def test_names_and_metadata() -> None:
    operation = OperationRegistry.create("autoregressive_decodeattn", OperationMetadata(softmax_scale=0.5))
    query, key, value = tensors()
    expected = definition(query, key, value, softmax_scale=0.5)
    assert relative_rms_error(operation(query, key, value).attention_outputs, expected) <= 1e-5


class Module(torch.nn.Module):
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor | None
    ) -> torch.Tensor:
        return decode()(query, key, value, lengths=lengths, sliding_window=20, causal=True).attention_outputs


@pytest.mark.parametrize("lengths", [None, MIXED], ids=["all", "mixed"])
def test_compile_and_export(lengths: torch.Tensor | None) -> None:
    given = (*tensors(), lengths)
    expected = Module()(*given)
    torch.testing.assert_close(torch.compile(Module(), fullgraph=True, backend="aot_eager")(*given), expected)
    program = torch.export.export(Module(), given)
    torch.testing.assert_close(program.module()(*given), expected)
    assert all("easytorch" not in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("case", ["plain", "everything"])
@pytest.mark.parametrize("lengths", [None, MIXED], ids=["all", "mixed"])
def test_vmap_and_grad(lengths: torch.Tensor | None, case: str) -> None:
    query, key, value = tensors()
    features, operation = CASES[case](), decode()

    def call(query: torch.Tensor) -> torch.Tensor:
        return operation(query, key, value, lengths=lengths, **features).attention_outputs

    many = torch.stack([query, -query])
    torch.testing.assert_close(torch.func.vmap(call)(many), torch.stack([call(one) for one in many]))
    got = torch.func.grad(lambda q: call(q).square().sum())(query)
    leaf = query.clone().requires_grad_()
    torch.testing.assert_close(got, torch.autograd.grad(call(leaf).square().sum(), leaf)[0])


@pytest.mark.parametrize("case", CASES)
def test_check_mode(case: str, compared: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", False)
    decode("aten")(*tensors(), lengths=MIXED, **CASES[case]())
    OperationRegistry.create("attention")(*tensors(), **CASES[case]())
    assert compared == ["decode:aten"] * 2


def test_autocast_and_checkpointing() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tensors())
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_rms_error(decode()(query, key, value).attention_outputs, definition(query, key, value)) < 8e-3
    plain = decode()(query, key, value).attention_outputs.square().sum()
    again = torch.utils.checkpoint.checkpoint(
        lambda *given: decode()(*given).attention_outputs.square().sum(), query, key, value, use_reentrant=False
    )
    for a, b in zip(torch.autograd.grad(plain, query), torch.autograd.grad(again, query), strict=True):
        torch.testing.assert_close(a, b)


def test_the_path_of_each_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(processor, "AVX2", False)
    for package in ("triton", "jax"):
        monkeypatch.setitem(installed.INSTALLED, package, True)
    args, features = decode().typical_call()
    expected = {"cpu": "aten", "cuda": "triton", "rocm": "triton", "tpu": "xla"}
    attention = OperationRegistry.create("attention")
    for platform, backend in expected.items():
        assert decode().choose_on(platform, args, features).backend == backend
        choice = attention.choose_on(platform, args, features)
        assert (choice.implementation, choice.backend) == ("decode", backend)
        longer = (args[1][:, :2].repeat_interleave(4, 2), *args[1:])
        assert attention.choose_on(platform, longer, features).implementation != "decode"
    for platform in ("cuda", "tpu"):  # forward only: a gradient is another implementation's
        wanting = tuple(tensor.clone().requires_grad_() for tensor in args)
        assert attention.choose_on(platform, wanting, features).implementation == "flash"
        assert decode().choose_on(platform, wanting, features).backend == "native"


@pytest.mark.parametrize("batch", [0, 2])
def test_one_token_of_caches_without_numbers(batch: int) -> None:
    """A tensor without numbers is contiguous whatever its strides: the kernel is not asked for it."""
    value = torch.empty(batch, 2, 5, 8 if batch == 0 else 0, 2)[..., 0]
    key = torch.ones(batch, 2, 5, 8) if batch else value
    assert OperationRegistry.create("attention").one_token(torch.ones(batch, 4, 1, 8), key, value) is None
