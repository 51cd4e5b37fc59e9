"""Random numbers in compiled programs: repeatable, different at each call, of the right distribution."""

import math

import pytest
import torch
from torch import nn

from easytorch.frontend import LoweringError, compile, lowerings

aten = torch.ops.aten
SIZE = 20_000


class Draw(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def draw(function, *inputs, backend="numpy", seed=0):
    run = compile(Draw(function).train(), inputs, backend=backend)
    torch.manual_seed(seed)
    return run(*inputs)


def test_a_seed_makes_runs_repeatable_and_calls_differ():
    x = torch.ones(64)
    run = compile(Draw(lambda x: (torch.rand_like(x), torch.rand_like(x))), (x,), backend="numpy")
    torch.manual_seed(3)
    first, second = run(x), run(x)
    torch.manual_seed(3)
    again = run(x)
    torch.manual_seed(4)
    other = run(x)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    numbers = [*first, *second, *other]
    assert all(not torch.equal(a, b) for i, a in enumerate(numbers) for b in numbers[:i])


def test_the_generator_that_torch_saves_and_restores_is_the_one():
    x = torch.ones(8)
    run = compile(Draw(torch.rand_like), (x,), backend="numpy")
    with torch.random.fork_rng():
        first = run(x)
    assert torch.equal(first, run(x))


@pytest.mark.jax_cpu
def test_the_same_bits_on_every_backend():
    def function(x):
        return torch.rand_like(x), torch.randint(0, 1000, (7,)), torch.rand(3, dtype=torch.float64), torch.randperm(9)

    x = torch.ones(5, 3)
    results = [draw(function, x, backend=backend, seed=11) for backend in ("numpy", "xla", "torch")]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_dropout_keeps_its_rate_and_its_mean():
    for p in (0.1, 0.5):
        kept = draw(lambda x, p=p: nn.functional.dropout(x, p, True), torch.ones(SIZE))
        assert set(kept.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
        assert abs((kept == 0).float().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / SIZE)


def test_dropout_of_nothing_and_of_everything():
    x = torch.tensor([1.0, math.inf, math.nan])
    assert torch.equal(draw(lambda x: aten.native_dropout(x, 1.0, True)[0], x), torch.zeros(3))
    got, mask = draw(lambda x: aten.native_dropout(x, 0.0, True), x)
    assert torch.equal(got.nan_to_num(5), x.nan_to_num(5)) and mask.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_uniform(dtype):
    got = draw(lambda x: torch.rand_like(x), torch.ones(SIZE, dtype=dtype))
    assert got.dtype == dtype
    assert got.min() >= 0 and got.max() < 1
    moments(got, 0.5, math.sqrt(1 / 12))
    assert len(got.unique()) > (200 if dtype == torch.bfloat16 else 1500)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_normal(dtype):
    got = draw(lambda x: torch.randn_like(x), torch.ones(SIZE + 1, dtype=dtype))
    assert got.dtype == dtype and got.isfinite().all()
    if dtype.is_complex:
        moments(got.real, 0, math.sqrt(0.5))
        got = got.imag * math.sqrt(2)
    moments(got, 0, 1)
    inside = (got.abs() < 1).float().mean().item()
    assert inside == pytest.approx(math.erf(math.sqrt(0.5)), abs=0.02)
    assert torch.corrcoef(torch.stack([got[:-1].float(), got[1:].float()]))[0, 1].abs() < 0.04


DISTRIBUTIONS = {
    "uniform_": (lambda x: x.clone().uniform_(-2, 3), 0.5, math.sqrt(25 / 12)),
    "normal_": (lambda x: x.clone().normal_(2, 3), 2, 3),
    "normal of tensors": (lambda x: torch.normal(x * 4, x * 0.5), 4, 0.5),
    "exponential_": (lambda x: x.clone().exponential_(2), 0.5, 0.5),
    "geometric_": (lambda x: x.clone().geometric_(0.25), 4, math.sqrt(0.75) / 0.25),
    "log_normal_": (
        lambda x: x.clone().log_normal_(0, 0.5),
        math.exp(0.125),
        math.sqrt(math.expm1(0.25)) * math.exp(0.125),
    ),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3, math.sqrt(0.21)),
    "bernoulli_": (lambda x: x.clone().bernoulli_(0.3), 0.3, math.sqrt(0.21)),
    "bernoulli_ of a tensor": (lambda x: x.clone().bernoulli_(x * 0.3), 0.3, math.sqrt(0.21)),
    "randint": (lambda x: torch.randint(-5, 5, (SIZE,)).float(), -0.5, math.sqrt(99 / 12)),
    "randint_like": (lambda x: torch.randint_like(x, 10), 4.5, math.sqrt(99 / 12)),
    "random_": (lambda x: x.clone().random_(10), 4.5, math.sqrt(99 / 12)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_moments(name):
    function, mean, deviation = DISTRIBUTIONS[name]
    moments(draw(function, torch.ones(SIZE)), mean, deviation)


def moments(got, mean, deviation):
    got = got.double()
    assert got.mean().item() == pytest.approx(mean, abs=5 * deviation / math.sqrt(got.numel()))
    assert got.std().item() == pytest.approx(deviation, rel=0.06)


def test_cauchy_has_its_quartiles():
    got = draw(lambda x: x.clone().cauchy_(1, 2), torch.ones(SIZE)).quantile(torch.tensor([0.25, 0.5, 0.75]))
    # 5 standard errors of a quartile: sqrt(p (1 - p) / n) / density = sqrt(3 / 16 / 20000) * 4 pi = 0.038
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0, 3.0]), atol=0.2, rtol=0)


def test_wide_integers():
    low, high = -(2**63), 2**63 - 1
    got = draw(lambda x: torch.randint(low, high, (1000,)), torch.ones(1))
    assert got.min() < -(2**62) and got.max() > 2**62


def test_permutations():
    got = draw(lambda x: torch.randperm(50), torch.ones(1))
    assert sorted(got.tolist()) == list(range(50)) and got.tolist() != list(range(50))


def test_multinomial():
    weights = torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 2.0]])
    got = draw(lambda w: torch.multinomial(w, SIZE, replacement=True), weights)
    assert not (got[0] == 1).any() and not (got[1] == 0).any()
    assert (got[0] == 2).float().mean().item() == pytest.approx(0.75, abs=0.02)
    pairs = draw(lambda w: torch.multinomial(w.repeat(500, 1), 2), weights)
    assert pairs.shape == (1000, 2)
    assert (pairs[:, 0] != pairs[:, 1]).all() and not (pairs[::2] == 1).any()


def test_random_numbers_in_a_branch_are_refused():
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x - 1, (x,))

    with pytest.raises(LoweringError, match="inside a branch"):
        compile(Draw(function), (torch.ones(2),), backend="numpy")


def test_every_random_operation_of_core_aten_is_lowered():
    known = lowerings()
    for overload in torch._decomp.decomposition_table:
        assert overload is not aten.native_dropout.default or overload in known
    for target in (aten.rand.default, aten.randn.default, aten.randperm.default, aten.native_dropout.default):
        assert target in known
