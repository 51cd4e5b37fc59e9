"""rotary against complex numbers in float64 and transformers' functions: both layouts, parts, positions, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from easytorch.kernels.rotary import aten, torch_xla_op
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATHS = {name: OperationRegistry.create("rotary", OperationMetadata(backend=name)) for name in ("native", "aten")}
rotary = OperationRegistry.create("rotary")
paths = pytest.mark.parametrize("rotary", PATHS.values(), ids=PATHS)
layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])


@pytest.fixture(autouse=True)
def small_calls_learn_as_large_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "FEW_TO_LEARN", 0)


def _angles(batch: int, length: int, rotated: int) -> Tensor:
    return torch.rand(batch, length, rotated // 2, dtype=torch.float64).repeat(1, 1, 2) * 6


def _expected(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Each pair as a complex number, turned by its angle."""
    dim, half = angles.shape[-1], angles.shape[-1] // 2
    pairs = x[..., :dim].unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.complex(first, second) * torch.exp(1j * angles[..., None, :half])
    halves = torch.stack((turned.real, turned.imag), dim=-1 if interleaved else -2).flatten(-2)
    return torch.cat([halves, x[..., dim:]], dim=-1)


@paths
@layouts
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "rotated", "batch"), [(60, 60, 1), (60, 20, 2)])
def test_outputs_and_gradients(
    rotary: OperationImpl, interleaved: bool, dtype: torch.dtype, dim: int, rotated: int, batch: int
) -> None:
    torch.manual_seed(0)
    packed = torch.randn(2, 63, 8, dim, dtype=dtype)
    q, k = (t.detach().requires_grad_() for t in packed.split((6, 2), 2))  # slices of one projection
    angles = _angles(batch, 63, rotated)
    wide = [t.detach().double().requires_grad_() for t in (q, k)]
    got = rotary(q, k, angles.cos().float(), angles.sin().float(), interleaved=interleaved)
    expected = [_expected(x, angles, interleaved) for x in wide]
    weights = [torch.randn_like(x) for x in got]
    grads = torch.autograd.grad(got, (q, k), weights)
    grads64 = torch.autograd.grad(expected, wide, [w.double() for w in weights])
    for a, b in zip((*got, *grads), (*expected, *grads64), strict=True):
        assert a.dtype == dtype
        assert relative_rms_error(a, b) <= TOLERANCE[dtype]


@paths
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables_in_the_dtype_of_the_heads(rotary: OperationImpl, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, angles = torch.randn(2, 9, 4, 16, dtype=dtype), torch.randn(2, 9, 2, 16, dtype=dtype), _angles(2, 9, 16)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for interleaved in (False, True):
        wide = PATHS["native"](q.double(), k.double(), cos.double(), sin.double(), interleaved=interleaved)
        for got, want in zip(rotary(q, k, cos, sin, interleaved=interleaved), wide, strict=True):
            assert got.dtype == dtype
            assert relative_rms_error(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_definition_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    cohere = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    q, k = torch.randn(2, 9, 4, 16, dtype=dtype), torch.randn(2, 9, 2, 16, dtype=dtype)
    angles = _angles(2, 9, 16)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for got, want in zip(PATHS["native"](q, k, cos, sin), expected, strict=True):
        assert torch.equal(got, want)
    cos, sin = angles.cos().float(), angles.sin().float()
    twice = [table[..., :8].repeat_interleave(2, -1) for table in (cos, sin)]
    expected = cohere.apply_rotary_pos_emb(q, k, *twice, unsqueeze_dim=2)
    for got, want in zip(PATHS["native"](q, k, cos, sin, interleaved=True), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [16, 8])
def test_one_token_has_the_bits_of_one_among_many(rotated: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(3, 5, 6, 16).to(dtype), torch.randn(3, 5, 2, 16).to(dtype)
    cos, sin = (table.to(dtype) for table in (_angles(3, 5, rotated).cos(), _angles(3, 5, rotated).sin()))
    together = rotary(query, key, cos, sin)
    for t in range(5):
        one = slice(t, t + 1)
        alone = rotary(query[:, one], key[:, one], cos[:, one], sin[:, one])
        for turned, expected in zip(alone, together, strict=True):
            assert torch.equal(turned, expected[:, one])


@paths
def test_positions_choose_rows_of_the_tables(rotary: OperationImpl) -> None:
    q, k, angles = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16), _angles(1, 20, 16)[0].float()
    cos, sin = angles.cos(), angles.sin()
    ids = torch.tensor([[3, 4, 5, 6, 7], [0, 0, 19, 2, 1]])
    for got, want in zip(rotary(q, k, cos, sin, position_ids=ids), rotary(q, k, cos[ids], sin[ids]), strict=True):
        assert torch.equal(got, want)
    shifted, offset = rotary(q, k, cos, sin, position_ids=ids[:1]), rotary(q, k, cos, sin, offset=3)
    first = rotary(q, k, cos[None, :5], sin[None, :5])
    for got, want in zip((*offset, *rotary(q, k, cos, sin)), (*shifted, *first), strict=True):
        assert torch.equal(got, want)


@paths
def test_gradients_of_gradients_and_of_the_tables(rotary: OperationImpl) -> None:
    q, k = (torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    angles = _angles(1, 3, 4)
    cos, sin = angles.cos(), angles.sin()
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, cos, sin), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: rotary(q, k, cos, sin), (q, k))
    learned = OperationRegistry.create("rotary")
    tables = [t.clone().requires_grad_() for t in (cos, sin)]
    assert torch.autograd.gradcheck(lambda c, s: learned(q.detach(), k.detach(), c, s), tables)


@paths
@layouts
def test_under_vmap_and_grad(rotary: OperationImpl, interleaved: bool) -> None:
    q, k, angles = torch.randn(3, 1, 5, 2, 8), torch.randn(3, 1, 5, 1, 8), _angles(1, 5, 8).float()
    cos, sin = angles.cos(), angles.sin()

    def turned(q: Tensor, k: Tensor) -> Tensor:
        return sum(x.square().sin().sum() for x in rotary(q, k, cos, sin, interleaved=interleaved))

    mapped = torch.func.vmap(torch.func.grad(turned, argnums=(0, 1)))(q, k)
    leaves = [t.clone().requires_grad_() for t in (q, k)]
    total = sum(turned(a, b) for a, b in zip(*leaves, strict=True))
    torch.testing.assert_close(mapped, torch.autograd.grad(total, leaves))


@layouts
def test_compiled_exported_checkpointed(interleaved: bool) -> None:
    class Turn(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            return rotary(q, k, cos, sin, interleaved=interleaved)

    torch.manual_seed(0)
    angles = _angles(1, 5, 8).float()
    q, k = torch.randn(2, 5, 4, 8, requires_grad=True), torch.randn(2, 5, 2, 8, requires_grad=True)
    inputs = (q, k, angles.cos(), angles.sin())
    expected = Turn()(*inputs)
    compiled = torch.compile(Turn(), fullgraph=True, backend="aot_eager")(*inputs)
    exported = torch.export.export(Turn(), inputs).module()(*inputs)
    again = torch.utils.checkpoint.checkpoint(Turn(), *inputs, use_reentrant=False)
    grads = [torch.autograd.grad(sum(x.square().sum() for x in o), (q, k)) for o in (expected, compiled, again)]
    for got in (compiled, exported, again):
        torch.testing.assert_close(got, expected)
    for got in grads[1:]:
        torch.testing.assert_close(got, grads[0])


@layouts
def test_check_mode(interleaved: bool, compared: list[str]) -> None:
    angles = _angles(1, 5, 8).float()
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
    for dtype in DTYPES:
        rotary(q.to(dtype), k.to(dtype), angles.cos(), angles.sin(), interleaved=interleaved)
    assert len(compared) == len(DTYPES)


def test_errors() -> None:
    q, table = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 8)
    for arguments in ((q, q, table, table[..., :4]), (q, q, table[:, :4], table[:, :4]), (q, q[:, :4], table, table)):
        with pytest.raises(ValueError, match="rotary takes query"):
            rotary(*arguments)
    with pytest.raises(ValueError, match="choose rows of tables"):
        rotary(q, q, table, table, offset=1)
    with pytest.raises(ValueError, match="tables of 5 positions have no rows 1 to 6"):
        rotary(q, q, table[0], table[0], offset=1)
    for ids in (torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 5), torch.zeros(5, dtype=torch.long)):
        with pytest.raises(ValueError, match="position_ids must be integers"):
            rotary(q, q, table[0], table[0], position_ids=ids)
    with pytest.raises(ValueError, match="exclude each other"):
        rotary(q, q, table[0], table[0], position_ids=torch.zeros(1, 5, dtype=torch.long), offset=2)


@pytest.mark.jax_cpu
@pytest.mark.parametrize("wide", range(4))
def test_xla_refuses_float64_wherever_it_is(wide: int) -> None:
    tensors = [torch.ones(1, 3, 2, 8), torch.ones(1, 3, 2, 8), torch.ones(3, 8), torch.ones(3, 8)]
    assert torch_xla_op.supports(*tensors) is None
    tensors[wide] = tensors[wide].double()
    assert "float64" in (torch_xla_op.supports(*tensors) or "")


def test_forward_mode_of_what_was_computed() -> None:
    """Halves of a result are views that forward mode lets nobody write to."""
    rotary = OperationRegistry.create("rotary")
    x, angles = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 4).repeat(1, 1, 2)
    weight = torch.nn.Parameter(torch.ones(()))

    def turned(x: torch.Tensor) -> torch.Tensor:
        return rotary(x * weight, x * weight, angles.cos(), angles.sin())[0]

    output, tangent = torch.func.jvp(turned, (x,), (2 * x,))
    torch.testing.assert_close(tangent, 2 * output)
