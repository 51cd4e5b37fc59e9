"""`frontend.compile`: arguments, results, mutation, weights, sizes that change, control flow, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from easytorch import backends, frontend
from easytorch.frontend.registry import find_target

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Of(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def compiled(function: Callable[..., Any], *args: Any, **options: Any) -> frontend.CompiledModule:
    return frontend.compile(Of(function), args, backend="numpy", **options)


class Counter(torch.nn.Module):
    """Counts its calls and keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor, scale: float = 2.0, *, shift: torch.Tensor | None = None) -> dict[str, Any]:
        self.calls += 1
        self.mean.mul_(0.5).add_(x)
        self.scratch[0] = x[1]
        result = x * self.weight * scale
        return {"result": result if shift is None else result + shift, "pair": (self.mean * 1, self.calls)}


class Bias(torch.nn.Module):
    """Has a buffer and an argument of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.x - x


def test_a_buffer_and_an_argument_of_one_name() -> None:
    x = torch.tensor([3.0, 5.0])
    assert frontend.compile(Bias(), (x,), backend="numpy")(x).tolist() == [-2.0, -3.0]


def test_buffers_are_written_on_the_device_and_brought_back_when_asked() -> None:
    module, eager = Counter(), Counter()
    x = torch.tensor([3.0, 4.0])
    program = frontend.compile(module, (x,), backend="numpy")
    for _ in range(3):
        ours, theirs = program(x), eager(x)
        torch.testing.assert_close(ours, theirs)
    assert module.calls == 0
    assert program.state_dict()["calls"] == 3
    assert "scratch" not in program.state_dict()
    program.sync()
    torch.testing.assert_close(dict(module.named_buffers()), dict(eager.named_buffers()))
    assert program(x)["pair"][1] == 4


def test_an_output_is_not_changed_by_later_calls() -> None:
    program = frontend.compile(Counter(), (torch.ones(2),), backend="numpy")
    first = program(torch.ones(2))["pair"][1]
    program(torch.ones(2))
    assert first == 1


def test_weights_written_from_outside_are_taken_and_the_device_keeps_its_own_buffers() -> None:
    module = Counter()
    program = frontend.compile(module, (torch.ones(2),), backend="numpy")
    program(torch.ones(2))
    with torch.no_grad():
        module.weight.fill_(5.0)
    result = program(torch.ones(2))
    assert result["result"].tolist() == [10.0, 10.0]
    assert result["pair"][1] == 2
    program.bind()
    assert program(torch.ones(2))["pair"][1] == 1
    module.weight.data.fill_(7.0)  # which counts no version
    program.bind()
    assert program(torch.ones(2))["result"].tolist() == [14.0, 14.0]


def test_a_parameter_goes_to_a_device_once_for_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backends.new("numpy")
    module, x = torch.nn.Linear(2, 3), torch.ones(1, 2)
    sent: list[torch.Size] = []
    put = type(backend).buffer_from_torch
    monkeypatch.setattr(
        type(backend), "buffer_from_torch", lambda self, tensor: sent.append(tensor.shape) or put(self, tensor)
    )
    first = frontend.compile(module, (x,), backend=backend)(x)
    compiled = torch.compile(module, backend="easytorch", options={"backend": backend})
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), first)
    assert sent.count(module.weight.shape) == sent.count(module.bias.shape) == 1


def test_arguments_by_name_by_position_and_by_default() -> None:
    module, x, shift = Counter(), torch.ones(2), torch.tensor([1.0, 2.0])
    program = frontend.compile(module, (x,), backend="numpy", example_kwargs={"scale": 3.0, "shift": shift})
    wanted = [4.0, 8.0]
    assert program(x, scale=3.0, shift=shift)["result"].tolist() == wanted
    assert program(x, 3.0, shift=shift)["result"].tolist() == wanted
    assert program(shift=shift, x=x, scale=3.0)["result"].tolist() == wanted
    with pytest.raises(frontend.LoweringError, match=r"compiled for 3\.0, not 4\.0"):
        program(x, scale=4.0, shift=shift)
    with pytest.raises(frontend.LoweringError, match=r"missing: \['shift'\]"):
        program(x, 3.0)
    with pytest.raises(TypeError):
        program(x, 3.0, shift=shift, other=1)


def test_examples_by_name_and_a_tensor_alone() -> None:
    assert frontend.compile(Of(torch.neg), torch.ones(2), backend="numpy")(torch.ones(2)).tolist() == [-1, -1]
    program = frontend.compile(torch.nn.Identity(), {"input": torch.ones(2)}, backend="numpy")
    x = torch.ones(2)
    assert program(input=x) is x and program(x) is x, "an input that is returned is itself"


def test_inputs_are_written_to() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[1:].mul_(y)
        return x.sum()

    x, y = torch.arange(4.0), torch.tensor(2.0)
    program = compiled(step, x.clone(), y)
    mine, theirs = x.clone(), x.clone()
    assert program(mine, y) == step(theirs, y)
    assert torch.equal(mine, theirs)


def test_writes_through_views_and_strided_slices() -> None:
    def scramble(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.t()[0].fill_(7)
        y[:, 1::2] += 10
        y.view(-1)[3:5] = -1
        y.diagonal().zero_()
        return y

    x = torch.arange(20.0).view(4, 5)
    assert torch.equal(compiled(scramble, x)(x), scramble(x))


def test_a_tensor_under_two_names_is_one() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.zeros(2))
            self.second = [self.first]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first += x
            return self.second[0] * 1

    module = Tied()
    program = frontend.compile(module, (torch.ones(2),), backend="numpy")
    program(torch.ones(2))
    assert program(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_sizes_that_change_are_compiled_when_met(backend: str) -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x.view(-1, 2).softmax(-1) + torch.arange(x.shape[0]).sum() / x.numel(), x.shape[0]

    sizes = {"args": ({0: torch.export.Dim("rows")},)}
    program = frontend.compile(Of(forward), (torch.randn(3, 4),), dynamic_shapes=sizes, backend=backend)
    for rows in (3, 5, 9, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(program(x), forward(x))
    with pytest.raises(frontend.LoweringError, match="dynamic_shapes"):
        program(torch.randn(3, 5))


def test_other_sizes_and_dtypes_than_the_example_are_refused() -> None:
    program = compiled(torch.neg, torch.ones(2))
    with pytest.raises(frontend.LoweringError, match=r"torch.float32 \(2,\), and torch.float32 \(3,\)"):
        program(torch.ones(3))
    with pytest.raises(frontend.LoweringError, match="structure"):
        program([torch.ones(2)])


def test_results_known_beforehand() -> None:
    def forward(x: torch.Tensor) -> tuple[Any, ...]:
        return x.shape[0], None, "text", x

    x = torch.ones(2)
    assert compiled(forward, x)(x)[:3] == (2, None, "text")


def test_control_flow() -> None:
    def choose(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda a: a + y, lambda a: a * 2 - y, (x,))

    def twice_until(x: torch.Tensor) -> torch.Tensor:
        return torch.while_loop(lambda n, v: v.sum() < 100, lambda n, v: (n + 1, v * 2), (torch.tensor(0), x))[1]

    y = torch.tensor([5.0, 6.0])
    program = compiled(choose, torch.ones(2), y)
    for x in (torch.ones(2), -torch.ones(2)):
        assert torch.equal(program(x, y), choose(x, y))
    x = torch.tensor([1.0, 3.0])
    assert compiled(twice_until, x)(x).tolist() == [32.0, 96.0]


def test_narrow_floats_and_complex_numbers() -> None:
    x = torch.randn(3, 8)
    for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3), (torch.float64, 1e-12)):
        narrow = x.to(dtype)
        got = compiled(lambda v: torch.nn.functional.gelu(v).softmax(-1).mean(0), narrow)(narrow)
        assert got.dtype is dtype
        wanted = torch.nn.functional.gelu(x.double() if dtype is torch.float64 else narrow.float()).softmax(-1).mean(0)
        torch.testing.assert_close(got, wanted.to(dtype), rtol=tolerance, atol=tolerance)
    turn = torch.polar(torch.ones(3), torch.arange(3.0))
    assert torch.equal(compiled(lambda v: torch.view_as_real(v * v), turn)(turn), torch.view_as_real(turn * turn))


@torch.library.custom_op("easytorch_tests::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """An operation of a user's."""
    return x * factor


@scale.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operation_of_a_users() -> None:
    module, x = Of(lambda x: torch.ops.easytorch_tests.scale(x.sin(), 3.0)), torch.ones(2)
    with pytest.raises(NotImplementedError) as raised:
        frontend.compile(module, (x,), backend="numpy")
    message = str(raised.value)
    assert "easytorch_tests.scale.default" in message and "frontend.lowering" in message and "test_module.py" in message

    @frontend.lowering(torch.ops.easytorch_tests.scale.default)
    def lower(ctx: frontend.Context, x: Any, factor: float) -> Any:
        return ctx.builder.mul(x, ctx.scalar(factor, x.shape.dtype))

    torch.testing.assert_close(frontend.compile(module, (x,), backend="numpy")(x), module(x))
    with pytest.raises(ValueError, match="override=True"):
        frontend.lowering(torch.ops.easytorch_tests.scale.default)
    with pytest.raises(TypeError, match="overloads: default"):
        frontend.lowering(torch.ops.easytorch_tests.scale)

    @frontend.lowering(torch.ops.easytorch_tests.scale.default, override=True)
    def wrong(ctx: frontend.Context, x: Any, factor: float) -> Any:
        return ctx.cast(x, "float64")

    with pytest.raises(frontend.LoweringError, match=r"gives float64\[2\], not torch.float32 \[2\]"):
        frontend.compile(module, (x,), backend="numpy")


def test_an_operation_may_be_named_before_it_is_there() -> None:
    @frontend.lowering("easytorch_tests::later.default")
    def lower(ctx: frontend.Context, x: Any) -> Any:
        return ctx.builder.neg(x)

    assert find_target("easytorch_tests::later.default") is None

    @torch.library.custom_op("easytorch_tests::later", mutates_args=())
    def later(x: torch.Tensor) -> torch.Tensor:
        return -x

    later.register_fake(torch.empty_like)
    assert frontend.lowerings()[torch.ops.easytorch_tests.later.default] is lower
    assert compiled(later, torch.ones(2))(torch.ones(2)).tolist() == [-1, -1]


def test_what_depends_on_data_is_refused() -> None:
    with pytest.raises(Exception, match=r"(?i)data"):
        compiled(lambda x: x.nonzero() * x.nonzero().shape[0], torch.ones(2))
