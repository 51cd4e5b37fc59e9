"""Dispatch: the path of the platform, forcing, refusing, falling back with one log line, and the differential mode."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch

from easytorch.kernels.attention import native
from easytorch.kernels.cpu import processor
from easytorch.kernels.interop import installed
from easytorch.operations import (
    Attention,
    BaseOperation,
    Choice,
    OperationImpl,
    OperationMetadata,
    OperationRegistry,
    UnsupportedOperationError,
    backend,
)
from easytorch.operations.attention.impl import AttentionImpl
from easytorch.operations.dispatch import impl
from easytorch.operations.dispatch.check import OperationMismatchError
from easytorch.operations.dispatch.platform import PLATFORMS


def heads(length: int = 8, count: int = 4, dim: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, length, count, dim, dtype=dtype)


def attention(**metadata: Any) -> OperationImpl:
    return OperationRegistry.create("attention", OperationMetadata(**metadata))


class Double(BaseOperation):
    def forward_native(self, x: torch.Tensor) -> str:
        return "native"

    @backend("aten")
    def forward_gpu(self, x: torch.Tensor) -> str:
        return "gpu"


def test_paths_follow_the_defaults() -> None:
    paths = {platform: Double.path(platform)[0] for platform in ("cpu", "cuda", "rocm", "tpu", "native")}
    gpu, plain = "forward_gpu", "forward_native"
    assert paths == {"cpu": plain, "cuda": gpu, "rocm": gpu, "tpu": plain, "native": plain}
    assert Double.backends() == {"native": "forward_native", "aten": "forward_gpu"}
    operation, x = Double(), torch.ones(1)
    assert operation(x) == operation.forward_cpu(x) == operation.forward_tpu(x) == "native"
    assert operation.forward_cuda(x) == operation.forward_rocm(x) == "gpu"


def test_forward_native_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseOperation()  # type: ignore[abstract]


def test_a_device_without_kernels_takes_the_definition() -> None:
    x = torch.empty(2, 8, 4, 16, device="meta")
    choice = attention().choose(x, x, x)
    assert (choice.implementation, choice.backend, choice.platform) == ("vanilla", "native", "native")
    assert attention()(x, x, x).attention_outputs.shape == x.shape


@pytest.mark.parametrize(
    ("forced", "implementation", "backend_name"),
    [
        ("vanilla", "vanilla", "native"),
        ("eager", "vanilla", "native"),
        ("native", "vanilla", "native"),
        ("sdpa", "sdpa", "aten"),
        ("aten", "sdpa", "aten"),
        ("sdpa:aten", "sdpa", "aten"),
        ("flash", "flash", "aten"),
        ("flash_attn2", "flash", "aten"),
        ("flash:xla", "flash", "xla"),
        ("xla", "flash", "xla"),
        ("flash:native", "flash", "native"),
    ],
)
def test_a_forced_choice_is_obeyed(
    forced: str, implementation: str, backend_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(installed.INSTALLED, "jax", True)  # choosing does not import it
    q = heads()
    choice = attention(backend=forced).choose(q, q, q)
    assert (choice.implementation, choice.backend, choice.reason) == (implementation, backend_name, "forced")
    monkeypatch.setenv("EASYTORCH_OPS", f"attention={forced}, rms_norm=native")
    assert attention().choose(q, q, q)[1:] == choice[1:]


@pytest.mark.parametrize("name", ["attention", "flash", "sdpa", "vanilla", "rms_norm", "rotary"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_path_of_a_platform_can_be_forced_there(name: str, platform: str) -> None:
    """Two platforms may share a backend's name (XLA on CPU and TPU, ATen on CPU and GPU) and not its method."""
    free = OperationRegistry.create(name)
    call = free.typical_call()
    assert call is not None
    choice = free.choose_on(platform, *call)
    forced = OperationRegistry.create(name, OperationMetadata(backend=choice.backend)).choose_on(platform, *call)
    if choice.backend == "native":  # the definition: the chooser's is vanilla's
        assert forced.method == "forward_native"
    else:
        assert (forced.implementation, forced.method) == (choice.implementation, choice.method)
    assert (forced.platform, forced.backend) == (platform, choice.backend)


@pytest.mark.parametrize(
    ("forced", "features", "message"),
    [
        ("flash3", {}, "no implementation or backend 'flash3'.*vanilla, eager.*native, aten"),
        ("flash:cudnn", {}, "flash has no backend 'cudnn'; it has native, aten, triton, xla"),
        ("sdpa", {"softcap": 2.0}, "ATen has no softcap"),
        ("aten", {"sinks": torch.zeros(4)}, "ATen has no sinks"),
        ("sdpa", {"dropout_prob": 0.5, "seed": 1}, "takes no seed"),
        ("triton", {}, "runs on cuda, rocm, the tensors are on cpu"),
    ],
)
def test_a_forced_choice_is_refused_with_the_reason(
    forced: str, features: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = heads()
    with pytest.raises(UnsupportedOperationError, match=message):
        attention(backend=forced)(q, q, q, **features)
    monkeypatch.setenv("EASYTORCH_OPS", f"attention={forced}")
    with pytest.raises(UnsupportedOperationError, match=message):
        attention()(q, q, q, **features)


def test_sdpa_by_its_own_name_refuses_rather_than_falls_back() -> None:
    q = heads()
    with pytest.raises(UnsupportedOperationError, match="ATen has no softcap"):
        OperationRegistry.create("sdpa")(q, q, q, softcap=2.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("attention", "is not of the form operation=implementation"),
        ("attention=", "is not of the form operation=implementation"),
        ("atention=flash", "no operation is called 'atention'.*did you mean 'attention'"),
        ("attention=flash,attention=sdpa", "twice"),
    ],
)
def test_a_malformed_environment_is_an_error(setting: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYTORCH_OPS", setting)
    q = heads()
    with pytest.raises(ValueError, match=message):
        attention()(q, q, q)


def test_the_automatic_choice_falls_back_and_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(impl, "_logged", set())
    q, operation = heads(length=20), attention()
    with caplog.at_level(logging.INFO, logger="easytorch"):
        for _ in range(3):
            choice = operation.choose(q, q, q, softcap=2.0)
    assert (choice.implementation, choice.backend) == ("vanilla", "native")
    assert "ATen has no softcap" in choice.reason
    assert len(caplog.records) == 1
    expected = native.attention(q, q, q, softcap=2.0)[0]
    assert torch.equal(operation(q, q, q, softcap=2.0).attention_outputs, expected)


def test_flash_falls_back_to_blocks_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(installed.INSTALLED, "jax", False)
    q = heads()
    choice = OperationRegistry.create("flash").choose_on("tpu", (q, q, q), {})
    assert (choice.implementation, choice.backend) == ("flash", "native")
    assert "jax is not installed (pip install 'easytorch[jax]')" in choice.reason
    with pytest.raises(UnsupportedOperationError, match="jax is not installed"):
        attention(backend="flash:xla").choose(q, q, q)


def test_metadata_settles_what_the_call_leaves_open() -> None:
    q = heads()
    settled = attention(softmax_scale=0.3, runtime_dtype=torch.float64, backend="vanilla")
    output = settled(q, q, q).attention_outputs
    assert output.dtype == torch.float64
    torch.testing.assert_close(output, native.attention(*[q.double()] * 3, softmax_scale=0.3)[0])
    output = settled(q, q, q, softmax_scale=0.7).attention_outputs
    torch.testing.assert_close(output, native.attention(*[q.double()] * 3, softmax_scale=0.7)[0])


def test_metadata_dropout_is_applied() -> None:
    q = heads()
    output = attention(dropout_prob=0.5, backend="vanilla")(q, q, q, seed=3).attention_outputs
    torch.testing.assert_close(output, native.attention(q, q, q, dropout_prob=0.5, seed=3)[0])
    with pytest.raises(UnsupportedOperationError, match="takes no seed"):
        attention(dropout_prob=0.5, backend="sdpa")(q, q, q, seed=3)


def test_what_a_definition_lacks_is_refused_where_it_would_be_fallen_back_to() -> None:
    class Lacking(Wrong):
        @classmethod
        def get_impl_name(cls) -> str:
            return "lacking_for_the_test"

        def supports(self, backend: str, *args: Any, **kwargs: Any) -> str | None:
            return f"{backend} has none of it"

    with pytest.raises(
        UnsupportedOperationError, match="on cpu: aten: aten has none of it; native: native has none of it"
    ):
        Lacking()(torch.ones(3))


def test_the_softmax_dtype_is_refused_where_it_is_not_computed() -> None:
    q = heads(dtype=torch.bfloat16)
    with pytest.raises(UnsupportedOperationError, match=r"not computed in torch\.bfloat16"):
        attention(runtime_softmax_dtype=torch.bfloat16, backend="sdpa")(q, q, q)
    assert attention(runtime_softmax_dtype=torch.float32, backend="sdpa").choose(q, q, q).backend == "aten"
    assert attention(runtime_softmax_dtype=torch.bfloat16).choose(q, q, q).implementation == "vanilla"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: (q[0], q, q), r"\(batch, seq, heads, head_dim\)"),
        (lambda q: (q, q[:1], q[:1]), "differ"),
        (lambda q: (q, q[:, :, :3], q[:, :, :3]), "not a multiple"),
        (lambda q: (q, q.double(), q), "one dtype"),
    ],
)
@pytest.mark.parametrize("forced", [None, "vanilla", "sdpa", "flash:native", "flash:xla"])
def test_shapes_that_do_not_fit_are_one_clear_error(forced: str | None, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(backend=forced)(*call(heads()))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"mask": torch.ones(8, 8)}, "mask must be boolean"),
        ({"mask": torch.ones(3, 8, dtype=torch.bool)}, "does not broadcast"),
        ({"bias": torch.ones(8, 9)}, "does not broadcast"),
        ({"query_segment_ids": torch.zeros(2, 8)}, "go together"),
        ({"sliding_window": 0}, "at least 1"),
        ({"dropout_prob": 1.0}, "dropout_prob"),
    ],
)
@pytest.mark.parametrize("forced", [None, "vanilla", "flash:native", "flash:xla"])
def test_features_that_do_not_fit_are_one_clear_error(forced: str | None, features: Any, message: str) -> None:
    q = heads()
    with pytest.raises(ValueError, match=message):
        attention(backend=forced)(q, q, q, **features)


def test_an_unknown_keyword_is_an_error() -> None:
    q = heads()
    with pytest.raises(TypeError, match="casual"):
        attention()(q, q, q, casual=True)


class Wrong(OperationImpl):
    @classmethod
    def get_impl_name(cls) -> str:
        return "wrong_for_the_test"

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @backend("aten")
    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.001


def test_check_mode_raises_where_an_implementation_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYTORCH_CHECK", "0")
    Wrong()(torch.ones(3))
    monkeypatch.setenv("EASYTORCH_CHECK", "1")
    with pytest.raises(OperationMismatchError, match=r"wrong_for_the_test \(aten, cpu\) differs.*relative RMS"):
        Wrong()(torch.ones(3))


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_the_switch_is_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYTORCH_CHECK", value)
    with pytest.raises(OperationMismatchError):
        Wrong()(torch.ones(3))


@pytest.mark.parametrize("value", ["0", "false", "No", " off", ""])
def test_the_switch_is_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYTORCH_CHECK", value)
    assert torch.equal(Wrong()(torch.ones(3)), torch.full((3,), 2.001))


@pytest.mark.parametrize("value", ["2", "disabled", "y", "-"])
def test_a_switch_that_says_neither_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYTORCH_CHECK", value)
    with pytest.raises(ValueError, match=f"EASYTORCH_CHECK='{value}' is neither on .1, true, yes, on. nor off .0, f"):
        Wrong()(torch.ones(3))


@pytest.mark.parametrize(
    "result",
    [lambda x: (x + 1).double(), lambda x: (x + 1)[None], lambda x: {"result": x + 1}],
    ids=["dtype", "shape", "structure"],
)
def test_check_mode_looks_at_dtype_shape_and_structure(result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYTORCH_CHECK", "1")
    monkeypatch.setattr(Wrong, "forward_cpu", backend("aten")(lambda self, x: result(x)))
    with pytest.raises(OperationMismatchError, match="differs from its definition in output"):
        Wrong()(torch.ones(3))


# Whose dropout follows a seed: the differential mode draws one for a call that has none, and compares.
SEEDED = {
    "vanilla": True, "sdpa": False, "sdpa:native": True, "flash:native": True, "flash:aten": True,
    "blocksparse:native": True, "blocksparse:aten": True,
}  # fmt: skip


@pytest.mark.parametrize("forced", SEEDED)
def test_check_mode_pins_dropout_where_it_can(forced: str, compared: list[str]) -> None:
    q = heads(length=40)
    attention(backend=forced)(q, q, q, causal=True)
    assert len(compared) == 1
    torch.manual_seed(0)
    first = attention(backend=forced)(q, q, q, dropout_prob=0.4).attention_outputs
    assert len(compared) == 1 + SEEDED[forced]
    second = attention(backend=forced)(q, q, q, dropout_prob=0.4).attention_outputs
    assert not torch.equal(first, second)


# multi_latent_attention takes other tensors; test_multi_latent.py has its dropout
@pytest.mark.parametrize("settings", [{"dropout_prob": 0.4}, {}])
@pytest.mark.parametrize("name", ["attention", "vanilla", "sdpa", "flash", "blocksparse", "ring", "decode"])
def test_what_claims_to_take_a_seed_repeats_itself_by_it(name: str, settings: dict[str, float]) -> None:
    """On the CPU's backends: the same seed twice gives the same, which ATen's own dropout does not."""
    cls = OperationRegistry.get(name)
    assert issubclass(cls, AttentionImpl)
    q, k = heads(length=1 if cls.primary_name() == "decode" else 40), heads(length=40)
    for backend_name in sorted(cls.takes_seed & {"native", "aten"}):
        operation = cls(OperationMetadata(backend=backend_name, **settings))
        assert operation.reproducible(backend_name, {"dropout_prob": 0.0}) == {"dropout_prob": 0.0}
        pinned = operation.reproducible(backend_name, {} if settings else {"dropout_prob": 0.4})
        assert pinned is not None and pinned["seed"] is not None
        first, second = (operation(q, k, k, **pinned).attention_outputs for _ in range(2))
        kept = operation(q, k, k, dropout_prob=0.0).attention_outputs
        assert torch.equal(first, second) and not torch.equal(first, kept)


WINDOW, BIAS, DROPOUT = {"sliding_window": 256}, {"bias": torch.zeros(1)}, {"dropout_prob": 0.1, "seed": 1}
IDS = torch.zeros(1, 1024, dtype=torch.int64)
DOCUMENTS = {"query_segment_ids": IDS, "key_segment_ids": IDS}


@pytest.fixture
def without_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which no operator in C++ comes first; tests/kernels/attention/test_cpu.py asks where they do."""
    monkeypatch.setattr(processor, "AVX2", False)


@pytest.mark.usefixtures("without_cpp")
@pytest.mark.parametrize(
    ("length", "heads", "features", "float32", "bfloat16", "training"),
    [
        (8, 16, {}, "sdpa", "sdpa", "sdpa"),
        (8, 16, {"softcap": 2.0}, "vanilla", "vanilla", "vanilla"),
        (128, 16, {"softcap": 2.0}, "flash", "flash", "vanilla"),
        (128, 16, {"sinks": torch.zeros(16)}, "flash", "flash", "vanilla"),
        (128, 16, DROPOUT, "flash", "flash", "vanilla"),
        (1024, 16, DROPOUT, "flash", "flash", "flash"),
        (128, 16, {}, "sdpa", "sdpa", "sdpa"),
        (128, 128, {}, "sdpa", "sdpa", "flash"),
        (512, 16, {}, "sdpa", "flash", "flash"),
        (512, 1, {}, "sdpa", "sdpa", "sdpa"),
        (1024, 16, BIAS, "sdpa", "sdpa", "sdpa"),
        (1024, 16, {"mask": torch.ones(1, dtype=torch.bool)}, "sdpa", "flash", "sdpa"),
        (1024, 16, WINDOW, "flash", "flash", "flash"),
        (1024, 16, {"sliding_window": (800, 0)}, "sdpa", "flash", "flash"),
        (1024, 16, DOCUMENTS, "flash", "flash", "flash"),
        (4096, 16, {}, "sdpa", "flash", "flash"),
        (1024, 16, {"softcap": 2.0}, "blocksparse", "blocksparse", "flash"),
        (4096, 16, {"sliding_window": 512}, "blocksparse", "flash", "flash"),
    ],
)
def test_the_automatic_choice_on_the_cpu(
    length: int, heads: int, features: dict[str, Any], float32: str, bfloat16: str, training: str
) -> None:
    """`training` in bfloat16: what records a gradient is chosen by other figures than what does not."""

    def chosen(dtype: torch.dtype, requires_grad: bool) -> str:
        q = torch.empty(1, length, heads, 8, dtype=dtype, requires_grad=requires_grad)
        return attention().choose(q, q, q, causal=True, **features).implementation

    assert [chosen(torch.float32, False), chosen(torch.bfloat16, False)] == [float32, bfloat16]
    assert chosen(torch.bfloat16, True) == training
    with torch.no_grad():
        assert chosen(torch.bfloat16, True) == bfloat16


@pytest.mark.usefixtures("without_cpp")
@pytest.mark.parametrize(
    ("features", "bfloat16"),
    [({}, "sdpa"), ({"causal": False}, "sdpa"), ({"causal": True}, "flash"), (WINDOW, "flash"), (DOCUMENTS, "flash")],
    ids=["nothing", "not causal", "causal", "window", "documents"],
)
def test_flash_is_chosen_where_tiles_are_skipped(features: dict[str, Any], bfloat16: str) -> None:
    for requires_grad in (False, True):
        q = torch.empty(1, 1024, 16, 8, dtype=torch.bfloat16, requires_grad=requires_grad)
        assert attention().choose(q, q, q, **features).implementation == bfloat16
    q = torch.empty(1, 1024, 16, 8, dtype=torch.float16)
    assert attention().choose(q, q, q, **features).implementation == "flash"


@pytest.mark.usefixtures("without_cpp")
@pytest.mark.parametrize(
    ("length", "window", "expected"),
    [
        (256, (16, 16), "sdpa"),
        (512, (64, 64), "flash"),
        (1024, (64, 64), "blocksparse"),
        (1024, 65, "blocksparse"),
        (1024, (128, 128), "flash"),
        (1024, (300, 300), "sdpa"),
        (1024, (None, 64), "sdpa"),
    ],
)
def test_a_window_on_both_sides_skips_tiles(length: int, window: Any, expected: str) -> None:
    q = torch.empty(1, length, 16, 8)
    assert attention().choose(q, q, q, sliding_window=window).implementation == expected


def test_keywords_only_and_any_order() -> None:
    q, k = heads(), heads(count=2)
    expected = native.attention(q, k, k, causal=True)[0]
    got = attention()(causal=True, value=k, key=k, query=q).attention_outputs
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("length", [1, 8, 192])
@pytest.mark.parametrize(
    "features",
    [{}, {"causal": True}, {"causal": True, "sliding_window": 4}, {"softcap": 3.0}, {"sinks": torch.zeros(4)},
     {"dropout_prob": 0.5, "seed": 1}, {"causal": True, "prefix_length": 2}],
    ids=lambda features: "+".join(features),
)  # fmt: skip
@pytest.mark.parametrize("settings", [{}, {"softmax_scale": 0.5}], ids=["free", "scale"])
def test_a_call_runs_what_choosing_chooses(settings: dict[str, float], features: dict[str, Any], length: int) -> None:
    operation, q, k = attention(**settings), heads(length), heads(192)
    choice = operation.choose(q, k, k, **features)
    ran: list[tuple[str, str, dict[str, Any]]] = []
    assert isinstance(operation, Attention)
    for name, implementation in operation.implementations.items():
        for method in set(implementation.backends().values()):
            run = functools.partial(lambda name, method, *_, **given: ran.append((name, method, given)), name, method)
            setattr(implementation, method, run)
            if method == "forward_cpp":  # without its checks, which choosing has made
                implementation.run_cpp = run  # type: ignore[method-assign]
    operation(q, k, k, **features)
    assert ran == [(choice.implementation, choice.method, features)]  # the settings are the implementation's to add


@pytest.mark.parametrize("name", ["choose_on", "choose_freely"])
def test_an_order_of_its_own_is_asked_at_each_call(name: str) -> None:
    class Own(Wrong):
        pass

    setattr(Own, name, lambda self, platform, args, kwargs: Choice(self, "forward_native", platform, "native", "own"))
    Own.__init_subclass__()
    x = torch.ones(3)
    assert torch.equal(Wrong()(x), x + 1.001) and torch.equal(Own()(x), x + 1)


@pytest.mark.parametrize("name", OperationRegistry.names())
def test_a_wrong_keyword_is_laid_to_the_operation(name: str) -> None:
    operation = OperationRegistry.create(name)
    args, kwargs = operation.typical_call()
    named = {operation.primary_name()} | ({"attention"} if isinstance(operation, AttentionImpl) else set())
    with pytest.raises(TypeError, match=rf"^({'|'.join(named)})\(\) got an unexpected keyword argument 'temperature'"):
        operation(*args, **kwargs, temperature=1.0)


def test_what_a_subclass_overrides_runs_where_the_operator_in_cpp_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    from easytorch.operations.rms_norm import RMSNorm

    class Doubled(RMSNorm):
        def run(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
            return super().run(kernel, *args, **kwargs) * 2

    class Zero(RMSNorm):
        @backend("cpu")
        def forward_cpp(self, x: torch.Tensor, weight: Any = None, eps: float = 1e-6) -> torch.Tensor:
            return torch.zeros_like(x)

    class Own(RMSNorm):
        def forward_cpu(self, x: torch.Tensor, weight: Any = None, eps: float = 1e-6) -> torch.Tensor:
            return torch.ones_like(x)

    x = torch.randn(3, 256)
    monkeypatch.setattr(RMSNorm, "prefers_cpp", lambda *given: True)
    assert torch.equal(Own()(x), torch.ones_like(x)) and Own().choose(x).method == "forward_cpu"
    for operation in (Doubled(), Zero()):
        try:
            expected = operation.forward_cpp(x)
        except NotImplementedError as error:  # the library is missing
            pytest.skip(str(error))
        assert torch.equal(operation(x), expected)
