"""Sizes that change: a program for each, forgotten when there are too many; buckets where the user asks for them."""

import logging

import pytest
import torch
from torch import nn
from torch.export import Dim

import easytorch.frontend
from easytorch.frontend import bucketed, routing
from easytorch.frontend.lru import Bounded


class Masked(nn.Module):
    """A sum and outer product that leave out what the mask leaves out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x, mask):
        hidden = self.linear(x)
        return hidden, (hidden * mask[..., None]).sum(1), {"pairs": hidden @ hidden.transpose(1, 2)}


@pytest.fixture(scope="module")
def dynamic():
    module = Masked().eval()
    sizes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=64)}
    inputs = (torch.randn(3, 5, 3), torch.ones(3, 5))
    return module, easytorch.frontend.compile(module, inputs, dynamic_shapes=(sizes, sizes), backend="numpy")


def inputs(batch, length):
    return torch.randn(batch, length, 3), torch.randint(0, 2, (batch, length)).float()


def test_each_set_of_sizes_is_compiled_once(dynamic):
    module, compiled = dynamic
    for batch, length in ((3, 5), (2, 7), (4, 4), (2, 7), (3, 5)):
        given = inputs(batch, length)
        torch.testing.assert_close(compiled(*given), module(*given))
    given = inputs(2, 7)
    assert compiled.executable(*given) is compiled.executable(*given)


def test_buckets_are_few_and_change_no_result(dynamic):
    module, compiled = dynamic
    run = bucketed(compiled, pad={"x": 5.0, "mask": 0}, sizes=(4, 8))
    programs = set()
    for batch, length in ((3, 3), (4, 4), (2, 3), (8, 7), (5, 5)):
        given = inputs(batch, length)
        with torch.no_grad():
            got, wanted = run(*given), module(*given)
        torch.testing.assert_close(got, wanted)
        shape = (run.bucket(batch), run.bucket(length))
        programs.add(compiled.executable(*inputs(*shape)))
    assert len(programs) == 2
    with pytest.raises(ValueError, match="9 does not fit"):
        run(*inputs(9, 3))


def test_powers_of_two(dynamic):
    run = bucketed(dynamic[1], pad={"x": 0, "mask": 0})
    assert [run.bucket(size) for size in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


def test_buckets_are_refused_where_padding_would_be_kept(dynamic):
    with pytest.raises(ValueError, match="nothing of 'mask'"):
        bucketed(dynamic[1], pad={"x": 0})
    with pytest.raises(ValueError, match="sizes change of"):
        bucketed(dynamic[1], pad={"x": 0, "mask": 0, "other": 0})

    class Counting(nn.BatchNorm1d):
        pass

    norm = Counting(3).train()
    compiled = easytorch.frontend.compile(
        norm, (torch.randn(4, 3),), dynamic_shapes=({0: Dim("batch", min=2, max=64)},), backend="numpy"
    )
    with pytest.raises(ValueError, match="running_mean"):
        bucketed(compiled, pad={"input": 0})


def test_a_size_outside_its_range_is_refused(dynamic):
    with pytest.raises(easytorch.frontend.LoweringError, match="captured for 2 to 64"):
        dynamic[1](*inputs(3, 65))


def test_sizes_that_must_agree_are_checked(dynamic):
    with pytest.raises(easytorch.frontend.LoweringError, match="the same"):
        dynamic[1](torch.randn(3, 5, 3), torch.ones(3, 6))


def test_the_least_recently_used_program_goes():
    kept = Bounded(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert "b" not in kept and "a" in kept and len(kept) == 2
    with pytest.raises(ValueError, match="at least one"):
        Bounded(0)


@pytest.mark.jax_cpu
def test_narrow_products_on_a_cpu_run_on_torch_and_it_is_said_once(caplog):
    routing._say_once.cache_clear()
    narrow, wide = nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with caplog.at_level(logging.WARNING, "easytorch.frontend.routing"):
        first = easytorch.frontend.compile(narrow, (x.bfloat16(),))
        second = easytorch.frontend.compile(narrow, (x.bfloat16(),))
    assert first.backend.name == second.backend.name == "torch"
    assert len(caplog.records) == 1
    torch.testing.assert_close(first(x.bfloat16()), narrow(x.bfloat16()), rtol=2e-2, atol=1e-2)
    assert easytorch.frontend.compile(narrow, (x.bfloat16(),), backend="xla:cpu").backend.name == "xla"
    assert easytorch.frontend.compile(wide, (x,)).backend.name == "xla"
