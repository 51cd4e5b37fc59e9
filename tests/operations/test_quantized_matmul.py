"""quantized_matmul: the formats and how exactly they hold a weight; products, gradients, tracing, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easytorch.kernels.cpu import library
from easytorch.kernels.interop import installed
from easytorch.kernels.quantized_matmul.formats import FORMATS, FP4_LEVELS, NF4_LEVELS, pack, unpack
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from easytorch.operations.dispatch.platform import PLATFORMS

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORCED = ["aten", "native", *(["cpu"] if library.missing() is None else [])]
GROUPS: list[int | str | None] = [None, 16, "row", "tensor"]


def multiply(backend: str | None = None, **metadata: Any) -> OperationImpl:
    return OperationRegistry.create("quantized_matmul", OperationMetadata(backend=backend, **metadata))


def made(format: str, group_size: int | str | None = None, shape: tuple[int, int] = (36, 60)) -> QuantizedWeight:
    """`format` may end in "_zero", for a zero point."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 8
    return quantize(weight, format.removesuffix("_zero"), group_size, symmetric=not format.endswith("_zero"))


KINDS = [*FORMATS, "int4_zero"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_within_bound(weight: torch.Tensor, quantized: QuantizedWeight) -> None:
    """No number is further off than `quantize` says."""
    columns, size = quantized.shape[1], quantized.group_size
    scale = quantized.scale.double().repeat_interleave(size, 1)[:, :columns].expand(weight.shape)
    error = (quantized.dequantize(torch.float64) - weight.double()).abs()
    bound = {
        "int8": scale / 2,
        "int4": scale / (2 if quantized.zero is None else 1),
        "nf4": 0.152 * scale,
        "fp4_e2m1": scale,
        "fp8_e4m3fn": torch.maximum(weight.double().abs() / 2**4, scale / 2**10),
        "fp8_e5m2": torch.maximum(weight.double().abs() / 2**3, scale / 2**17),
    }[quantized.format]
    assert bool((error <= bound * (1 + 1e-5)).all())


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 70), group=st.one_of(st.sampled_from([None, "row", "tensor"]),
    st.integers(1, 80)), kind=st.sampled_from(KINDS), shift=st.sampled_from([0.0, 3.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_round_trip_and_product_of_any_shape(
    rows: int, columns: int, group: int | str | None, kind: str, shift: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) + shift
    quantized = quantize(weight, kind.removesuffix("_zero"), group, symmetric=not kind.endswith("_zero"))
    assert_within_bound(weight, quantized)
    x = torch.randn(3, columns, generator=generator)
    expected = x.double() @ quantized.dequantize(torch.float64).T
    for forced in FORCED:
        if multiply(forced).supports(forced, x, quantized) is None:
            torch.testing.assert_close(multiply(forced)(x, quantized).double(), expected, rtol=1e-4, atol=1e-4)


def test_nf4_levels_are_the_quantiles_of_the_paper() -> None:
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2  # halfway between the last of 16 and of 15 quantiles
    positive = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([positive, torch.zeros(1, dtype=torch.float64), negative]).sort().values
    torch.testing.assert_close(torch.tensor(NF4_LEVELS, dtype=torch.float64), levels / levels.max(), rtol=0, atol=2e-7)


def test_codes_are_packed_as_bitsandbytes_does() -> None:
    assert pack(torch.tensor([[1, 2, 15], [0, 7, 8]])).tolist() == [[0x12, 0xF0], [0x07, 0x80]]
    codes = torch.randint(0, 16, (5, 7))
    assert torch.equal(unpack(pack(codes), 7), codes.to(torch.uint8))
    quantized = quantize(torch.tensor([[-1.0, 0.0, 1.0, 0.4407]]), "nf4")
    assert quantized.data.tolist() == [[0x07, 0xFC]]
    assert quantized.scale.tolist() == [[1.0]]


def test_fp4_is_e2m1_with_ties_to_even() -> None:
    signs, exponents, mantissas = ((torch.arange(16) >> shift) & mask for shift, mask in ((3, 1), (1, 3), (0, 1)))
    small = exponents == 0
    magnitudes = torch.where(small, 0.5 * mantissas, (1 + 0.5 * mantissas) * 2.0 ** (exponents - 1))
    assert torch.equal(torch.tensor(FP4_LEVELS), magnitudes * (1 - 2 * signs))
    halfway = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, -0.25, 6.0]])
    expected = torch.tensor([[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0, -0.0, 6.0]])
    decoded = quantize(halfway, "fp4").dequantize()
    assert torch.equal(decoded, expected) and torch.equal(decoded.signbit(), expected.signbit())


def test_numbers_that_the_formats_hold_exactly() -> None:
    integers = torch.arange(-7, 8).float()[None] * 0.5
    for format in ("int8", "int4", "fp8_e4m3fn", "fp8_e5m2"):
        numbers = integers if format != "int8" else torch.arange(-127, 128).float()[None]
        if format.startswith("fp8"):
            numbers = torch.tensor([[FORMATS[format].largest, -1.0, 0.0, 0.5, 2.0**-6]])
        assert torch.equal(quantize(numbers, format).dequantize(), numbers)
    lopsided = torch.arange(16).float()[None] * 0.25 - 1
    quantized = quantize(lopsided, "int4", symmetric=False)
    assert quantized.zero is not None and quantized.zero.tolist() == [[4]]
    assert torch.equal(quantized.dequantize(), lopsided)


@pytest.mark.parametrize("kind", KINDS)
def test_every_group_has_a_scale_of_its_own(kind: str) -> None:
    """A row and a group of numbers a million times smaller lose no digit to their neighbours."""
    factor = torch.ones(3, 64)
    factor[:, 16:32] = 2.0**-20
    factor[1] *= 2.0**-20
    numbers, format, symmetric = torch.randn(3, 64), kind.removesuffix("_zero"), not kind.endswith("_zero")
    small, alike = (quantize(x, format, 16, symmetric=symmetric).dequantize() for x in (numbers * factor, numbers))
    torch.testing.assert_close(small / factor, alike)


def test_a_searched_scale_leaves_less_error_and_keeps_exact_numbers() -> None:
    weight = torch.randn(64, 256)
    weight[:4] = torch.arange(-7, 8).repeat(18)[:256] * 0.5  # exact by seven levels
    weight[4:8] = torch.arange(-8, 8).repeat(16) * 0.25  # exact by all sixteen
    weight[8, :32] = 0.0
    plain, searched = quantize(weight, "int4", 32), quantize(weight, "int4", 32, search=True)
    errors = [(one.dequantize() - weight).square().unflatten(1, (-1, 32)).sum(-1) for one in (plain, searched)]
    assert bool((errors[1] <= errors[0]).all()) and float(errors[1].sum()) < 0.75 * float(errors[0].sum())
    assert not errors[1][:8].any() and not searched.dequantize()[8, :32].any()
    columns = quantize(weight[:, :40], "int4", 32, search=True)  # a last group that is shorter
    assert torch.equal(columns.dequantize()[:, :32], searched.dequantize()[:, :32])


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: str) -> None:
    weight = torch.randn(3, 40)
    weight[:, 16:32] = 0.0
    quantized = quantize(weight, kind.removesuffix("_zero"), 16, symmetric=not kind.endswith("_zero"))
    assert torch.equal(quantized.dequantize()[:, 16:32], torch.zeros(3, 16))
    assert not quantize(torch.zeros(2, 6), kind.removesuffix("_zero")).dequantize().any()


def test_defaults_and_memory() -> None:
    weight = torch.randn(64, 256)
    sizes = {name: quantize(weight, name) for name in [*FORMATS, "fp8"]}
    assert {name: quantized.group_size for name, quantized in sizes.items()} == {
        "int8": 256, "int4": 128, "nf4": 64, "fp4_e2m1": 32, "fp8_e4m3fn": 256, "fp8_e5m2": 256,
        "fp8": 256,
    }  # fmt: skip
    assert sizes["fp8"].format == "fp8_e4m3fn"
    assert sizes["int4"].nbytes == 64 * 128 + 64 * 2 * 4
    assert quantize(weight, "int8", "tensor").scale.shape == (1, 1)
    assert quantize(weight, "int8", -1).scale.shape == (64, 1)
    assert quantize(weight.bfloat16(), "int4", 1000).group_size == 256


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forced", FORCED)
def test_outputs_and_gradients(forced: str, kind: str, group: int | str | None, dtype: torch.dtype) -> None:
    weight = made(kind, group)
    x, bias = torch.randn(3, 21, 60).to(dtype).requires_grad_(), torch.randn(36).to(dtype).requires_grad_()
    if (reason := multiply(forced).supports(forced, x, weight, bias)) is not None:
        assert forced == "cpu"
        pytest.skip(reason)
    got = multiply(forced)(x, weight, bias)
    wide, wide_bias = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    expected = wide @ weight.dequantize(torch.float64).T + wide_bias
    assert got.dtype == dtype
    upstream = torch.randn(got.shape).to(dtype)
    grads = torch.autograd.grad(got, (x, bias), upstream)
    want = torch.autograd.grad(expected, (wide, wide_bias), upstream.double())
    for a, b in zip((got, *grads), (expected, *want), strict=True):
        assert a.shape == b.shape
        assert relative_rms_error(a, b) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 32), (36, 64), (33, 100), (40, 60)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9])
def test_few_rows_of_int8(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """ATen's kernel for them takes no other widths than multiples of 32."""
    weight, x, bias = made("int8", shape=shape), torch.randn(rows, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    got = multiply("aten")(x, weight, bias)
    expected = x.double() @ weight.dequantize(torch.float64).T + bias.double()
    assert got.shape == expected.shape
    assert relative_rms_error(got, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9])
@pytest.mark.parametrize("kind", ["int4", "int4_zero"])
def test_prepacked_for_the_cpu(kind: str, rows: int, dtype: torch.dtype) -> None:
    weight = made(kind, 32, shape=(48, 96))
    packed, x, bias = weight.prepacked(), torch.randn(rows, 96).to(dtype).requires_grad_(), torch.randn(48).to(dtype)
    assert packed.packed is not None and torch.equal(packed.dequantize(), weight.dequantize())
    assert packed.nbytes > weight.nbytes and packed.to("cpu").packed is None and "packed" not in packed.to_dict()
    got = multiply("aten")(x, packed, bias)
    assert relative_rms_error(got, x.double() @ weight.dequantize(torch.float64).T + bias.double()) <= TOLERANCE[dtype]
    grad = torch.autograd.grad(got.sum(), x)[0]
    assert relative_rms_error(grad, weight.dequantize(torch.float64).sum(0).expand(rows, 96)) <= TOLERANCE[dtype]


def test_prepacked_in_one_graph() -> None:
    operation, packed, x = multiply(), made("int4", 32, shape=(48, 96)).prepacked(), torch.randn(2, 96).bfloat16()
    compiled = torch.compile(lambda x, weight: operation(x, weight), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, packed), operation(x, packed))
    assert not torch.equal(operation(x, packed), operation(x, packed.to("cpu")))  # it is another kernel


def test_what_is_not_prepacked() -> None:
    for weight in (made("nf4"), made("int4", 16), made("int4", 32, (36, 64)), made("int4", 32, (48, 60))):
        assert weight.prepacked() is weight
    assert made("int4", "tensor", (48, 64)).prepacked().packed is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["fp8_e4m3fn", "fp8_e5m2"])
def test_every_pattern_of_fp8(format: str, dtype: torch.dtype) -> None:
    data = torch.arange(256, dtype=torch.uint8).view(FORMATS[format].dtype)
    scale = torch.full((1, 1), 0.5)
    finite = data.float().isfinite()
    for codes in (data[finite], data):
        weight = QuantizedWeight(codes[:, None], scale, None, format, (len(codes), 1), 1)
        got = multiply("aten")(torch.ones(1, 1, dtype=dtype), weight)[0]
        torch.testing.assert_close(got, (codes.float() * 0.5).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_a_weight_of_several_blocks_and_a_vector() -> None:
    weight = made("int4", 32, shape=(700, 1024))
    x = torch.randn(1024, requires_grad=True)
    got = multiply("aten")(x, weight)
    expected = weight.dequantize(torch.float64) @ x.double()
    assert relative_rms_error(got, expected) < 1e-5
    grad = torch.autograd.grad(got.sum(), x)[0]
    assert relative_rms_error(grad, weight.dequantize(torch.float64).sum(0)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_differentiates_twice(kind: str) -> None:
    weight, operation = made(kind, 4, shape=(5, 7)), multiply("aten")
    x, bias = torch.randn(3, 7, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    inputs = (x.requires_grad_(), bias.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: operation(a, weight, b), inputs)
    assert torch.autograd.gradgradcheck(lambda a, b: operation(a, weight, b) ** 2, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_safetensors_and_back(kind: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weight = made(kind, 16)
    safetensors.save_file(weight.to_dict("layer."), tmp_path / "weight.safetensors")
    tensors = {**safetensors.load_file(tmp_path / "weight.safetensors"), "other": torch.ones(1)}
    back = QuantizedWeight.from_dict(tensors, "layer.")
    assert (back.format, back.shape, back.group_size) == (weight.format, weight.shape, weight.group_size)
    assert torch.equal(back.dequantize(), weight.dequantize())
    with pytest.raises(ValueError, match="settings is missing"):
        QuantizedWeight.from_dict({"data": weight.data, "scale": weight.scale})
    assert torch.equal(weight.to("cpu").dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("format", "group_size", "options", "message"),
    [
        ("int3", None, {}, "unknown format 'int3'; known: int8, int4, nf4"),
        ("int8", 0, {}, "group_size must be a positive"),
        ("int8", 2.5, {}, "group_size must be a positive"),
        ("int8", "column", {}, "group_size must be a positive"),
        ("nf4", None, {"symmetric": False}, "only int4 has a zero point"),
    ],
)
def test_errors_of_quantize(format: str, group_size: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(4, 8), format, group_size, **options)


def test_weights_that_cannot_be_quantized() -> None:
    for weight in (torch.ones(8), torch.ones(2, 2, dtype=torch.int64), torch.ones(0, 4), torch.ones(2, 3, 4)):
        with pytest.raises(ValueError, match=r"takes a floating weight \(N, K\)"):
            quantize(weight, "int8")
    with pytest.raises(ValueError, match="infinities or NaN"):
        quantize(torch.tensor([[1.0, float("nan")]]), "int8")


def test_a_weight_that_does_not_fit_together() -> None:
    weight = made("int4_zero", 16)
    assert weight.zero is not None
    parts = (weight.data, weight.scale, weight.zero)
    for changed, message in (
        ((weight.data[:, 1:], *parts[1:], "int4", (36, 60), 16), r"stored as \(36, 30\) torch.uint8, got \(36, 29\)"),
        ((weight.data.float(), *parts[1:], "int4", (36, 60), 16), r"got \(36, 30\) torch.float32"),
        ((*parts, "int4", (36, 60), 32), r"scale must be \(36, 2\) for groups of 32, or \(1, 1\), got \(36, 4\)"),
        ((parts[0], parts[1].half(), None, "int4", (36, 60), 16), "scale must be float32"),
        ((*parts[:2], weight.zero[:1], "int4", (36, 60), 16), r"zero must be \(36, 4\) uint8"),
        ((*parts, "nf4", (36, 60), 16), "only int4 has a zero point"),
        ((*parts, "int5", (36, 60), 16), "unknown format 'int5'"),
        ((*parts, "int4", (36, 60), 0), "group_size must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantizedWeight(*changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("forced", FORCED)
def test_errors(forced: str) -> None:
    operation, weight = multiply(forced), made("int8")
    for call in ((torch.ones(2, 59), weight), (torch.ones(2, 60), weight, torch.ones(60)), (torch.tensor(1.0), weight)):
        with pytest.raises(ValueError, match=r"takes x \(\.\.\., K\), weight \(N, K\) and bias \(N,\)"):
            operation(*call)
    with pytest.raises(ValueError, match="floating"):
        operation(torch.ones(2, 60, dtype=torch.int64), weight)
    with pytest.raises(TypeError, match=r"made by quantize\(\), got Tensor"):
        operation(torch.ones(2, 60), torch.ones(36, 60))
    with pytest.raises(ValueError, match="weight is on meta and x on cpu"):
        operation(torch.ones(2, 60), weight.to("meta"))


@pytest.mark.parametrize("kind", KINDS)
def test_compile_export_checkpoint_and_opcheck(kind: str) -> None:
    operation, weight = multiply(), made(kind, 16)
    x, bias = torch.randn(4, 60, requires_grad=True), torch.randn(36, requires_grad=True)

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor) -> torch.Tensor:
            return 2 * operation(x, weight, bias)

    expected = Module()(x, weight, bias)
    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")(x, weight, bias)
    torch.testing.assert_close(compiled, expected)
    grads = torch.autograd.grad(expected.square().sum(), (x, bias))
    torch.testing.assert_close(torch.autograd.grad(compiled.square().sum(), (x, bias)), grads)
    exported = torch.export.export(Module(), (x, weight, bias)).module()
    torch.testing.assert_close(exported(x, weight, bias), expected)
    again = torch.utils.checkpoint.checkpoint(Module(), x, weight, bias, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.square().sum(), (x, bias)), grads)
    call = (weight.data.view(torch.uint8), weight.scale, weight.zero, None, None, weight.format, 60, weight.group_size)
    torch.library.opcheck(torch.ops.easytorch.aten_quantized_matmul.default, (x, bias, *call))
    torch.library.opcheck(torch.ops.easytorch.aten_quantized_input_grad.default, (torch.randn(4, 36), *call))


def test_an_exported_program_is_saved_with_its_weight_as_an_argument(tmp_path: Path) -> None:
    operation, weight, x = multiply(), made("int4_zero", 16), torch.randn(4, 60)

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
            return operation(x, weight)

    torch.export.save(torch.export.export(Module(), (x, weight)), tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    torch.testing.assert_close(loaded(x, weight), operation(x, weight))


def test_vmap_and_functional_gradients() -> None:
    operation, weight, batch = multiply(), made("int4", 16), torch.randn(2, 4, 60)
    expected = torch.stack([operation(x, weight) for x in batch])
    torch.testing.assert_close(torch.func.vmap(lambda x: operation(x, weight))(batch), expected)
    grad = torch.func.grad(lambda x: operation(x, weight).sum())(batch[0])
    torch.testing.assert_close(grad, weight.dequantize().sum(0).expand(4, 60), rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedOperationError, match=r"torch\.func"):
        torch.func.grad(lambda x: multiply("aten")(x, weight).sum())(batch[0])


def test_autocast_and_runtime_dtype() -> None:
    weight, bias = made("nf4"), torch.randn(36, requires_grad=True)
    x = torch.randn(4, 60, requires_grad=True)
    # by ATen, as a call with gradients: few rows without them are the C++ operator's, which rounds otherwise
    expected = multiply("aten")(x.detach().bfloat16(), weight, bias.detach())
    torch.testing.assert_close(multiply(runtime_dtype=torch.bfloat16)(x, weight, bias), expected)
    with torch.autocast("cpu", torch.bfloat16):
        got = multiply()(x, weight, bias)
    torch.testing.assert_close(got, expected)
    assert [grad.dtype for grad in torch.autograd.grad(got.sum(), (x, bias))] == [torch.float32] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_check_mode(kind: str, dtype: torch.dtype, compared: list[str]) -> None:
    for rows in (1, 9):
        multiply("aten")(torch.randn(rows, 64).to(dtype), made(kind, shape=(36, 64)), torch.randn(36))
    assert compared == ["quantized_matmul:aten"] * 2


def test_the_path_of_each_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("triton", "jax"):
        monkeypatch.setitem(installed.INSTALLED, name, True)
    call = multiply().typical_call()
    assert call is not None
    found = {platform: multiply().choose_on(platform, *call).backend for platform in PLATFORMS}
    assert found == {"cpu": "aten", "cuda": "triton", "rocm": "triton", "tpu": "pallas"}
    for platform in ("cuda", "tpu"):
        assert "float64" in multiply(runtime_dtype=torch.float64).choose_on(platform, *call).reason
    with pytest.raises(UnsupportedOperationError, match="runs on cuda, rocm, the tensors are on cpu"):
        multiply("triton")(torch.ones(2, 60), made("int8"))


@pytest.mark.parametrize("forced", FORCED)
def test_the_gradient_of_a_wide_bias_is_summed_wide(forced: str) -> None:
    bias = torch.zeros(36, requires_grad=True)
    multiply(forced)(torch.zeros(257, 60, dtype=torch.bfloat16), made("int8"), bias).sum().backward()
    assert bias.grad is not None and bias.grad.tolist() == [257.0] * 36  # bfloat16 has 256 and 258
