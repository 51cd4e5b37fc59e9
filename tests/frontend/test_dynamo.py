"""`torch.compile(backend="easytorch")`: graphs, breaks, mutation, aliases, shapes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import easytorch.frontend
from easytorch.frontend.program import Program

OPTIONS = {"backend": "numpy"}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, backend="easytorch", options=OPTIONS, **options)


@pytest.fixture
def programs(monkeypatch):
    """Every compilation of a graph for a set of sizes, by the graph's name."""
    made = []
    compile_once = Program.compile

    def counted(self, given):
        made.append(self._name)
        return compile_once(self, given)

    monkeypatch.setattr(Program, "compile", counted)
    return made


def test_values_and_types_are_those_of_eager():
    def function(x, y):
        return torch.softmax(x @ y, -1), (x > 0).sum(), {"mean": x.mean(0), "n": 3}

    x, y = torch.randn(4, 5), torch.randn(5, 6)
    torch.testing.assert_close(compiled(function, fullgraph=True)(x, y), function(x, y))


def test_a_graph_break_leaves_two_graphs(programs):
    def function(x):
        x = x * 2
        torch._dynamo.graph_break()
        return torch.relu(x) + 1

    x = torch.randn(3)
    torch.testing.assert_close(compiled(function)(x), function(x))
    assert programs == ["inference", "inference"]


def test_python_values_are_guarded():
    def function(x, flag):
        return x + 1 if flag else x - 1

    run, x = compiled(function), torch.zeros(2)
    assert run(x, True).tolist() == [1, 1]
    assert run(x, False).tolist() == [-1, -1]


def test_sizes_that_change_are_one_dynamo_graph_and_a_program_each(programs):
    def function(x):
        return (x * x.shape[0]).cumsum(0)

    run = compiled(function, dynamic=True)
    for size in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 5, 3):
        x = torch.randn(size, 2)
        torch.testing.assert_close(run(x), (x * size).cumsum(0))
    assert len(programs) == 11


def test_inputs_written_in_place():
    def function(cache, x, place):
        cache[:, place] = x
        cache.mul_(2)
        return cache.sum()

    x, place = torch.randn(2), torch.tensor(1)
    ours, theirs = torch.ones(2, 3), torch.ones(2, 3)
    run = compiled(function)
    for _ in range(3):
        torch.testing.assert_close(run(ours, x, place), function(theirs, x, place))
        torch.testing.assert_close(ours, theirs)


def test_module_buffers_written_in_place():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x):
            self.calls += 1
            self.last.copy_(x)
            return x * self.calls

    module, x = Counter(), torch.randn(3)
    run = compiled(module)
    assert [run(x)[0].item() for _ in range(3)] == pytest.approx([x[0].item() * n for n in (1, 2, 3)])
    assert module.calls.item() == 3
    assert torch.equal(module.last, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x, x.t()),
        lambda x: (x[0], x * 2),
        lambda x: (lambda y: (y, y[1:], y.t()))(x.t() * 2),
        lambda x: (x * 2).t().unsqueeze(0),
        lambda x: (x * 2).expand(4, 2, 3),
        lambda x: x.add_(1).view(-1),
    ],
    ids=["input", "view of input", "intermediate", "transposed", "expanded", "mutated input"],
)
def test_outputs_alias_as_in_eager(function):
    ours, theirs = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3)
    got, wanted = compiled(function)(ours), function(theirs)
    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else ((got, wanted),)
    for left, right in pairs:
        assert torch.equal(left, right)
        assert (left.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()) == (
            right.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
        )
    if isinstance(got, tuple) and len(got) == 3:
        got[0].fill_(7)
        assert torch.equal(got[1], torch.full_like(got[1], 7)), "a view of a result is no view any more"


def test_strides_are_those_of_eager():
    def function(x):
        return (x + 1).permute(0, 2, 1).exp(), x.movedim(0, 1) * 2

    x = torch.randn(2, 3, 4)
    for got, wanted in zip(compiled(function)(x), function(x), strict=True):
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(got, wanted)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert compiled(lambda x: x * 2)(image).is_contiguous(memory_format=torch.channels_last)


def test_nothing_to_compute_and_empty_arrays():
    assert compiled(lambda x: x)(torch.ones(2)).tolist() == [1, 1]
    assert compiled(lambda x: (x * 2, x.sum()))(torch.ones(0, 3))[0].shape == (0, 3)


def test_weights_are_bound_once_and_again_when_written(monkeypatch):
    layer = nn.Linear(3, 3, bias=False)
    run = compiled(layer)
    x = torch.eye(3)
    with torch.no_grad():
        run(x)
        backend = easytorch.frontend.routing.backend_of("numpy")
        moved = []
        original = type(backend).buffer_from_torch
        monkeypatch.setattr(
            type(backend),
            "buffer_from_torch",
            lambda self, tensor, device_num=0: (moved.append(tuple(tensor.shape)), original(self, tensor))[1],
        )
        run(x)
        assert len(moved) == 1, "the weight was moved again"
        layer.weight.add_(1)
        torch.testing.assert_close(run(x), x @ layer.weight.t())
        layer.weight.data = torch.full((3, 3), 5.0)
        torch.testing.assert_close(run(x), x @ layer.weight.t())


def test_unknown_options_are_refused():
    for given in ({"options": {"backnd": "xla"}}, {"mode": "max-autotune"}):
        with pytest.raises(Exception, match="knows the options backend"):
            torch.compile(lambda x: x + 1, backend="easytorch", **given)(torch.ones(1))


def test_an_operation_without_a_lowering_is_named():
    with torch.library._scoped_library("easytorch_test_dynamo", "DEF") as library:
        library.define("odd(Tensor x) -> Tensor")
        library.impl("odd", lambda x: x.clone(), "CompositeExplicitAutograd")
        torch.library.register_fake("easytorch_test_dynamo::odd", torch.empty_like, lib=library)
        with pytest.raises(Exception, match=r"easytorch_test_dynamo.odd.default: no lowering"):
            compiled(lambda x: torch.ops.easytorch_test_dynamo.odd(x))(torch.ones(1))


def test_the_name_is_known_after_the_import_alone():
    code = (
        "import torch, easytorch.frontend; "
        "f = torch.compile(lambda x: x + 1, backend='easytorch', options={'backend': 'numpy'}); "
        "assert f(torch.ones(2)).tolist() == [2, 2]; "
        "from torch._dynamo import list_backends; assert 'easytorch' in list_backends()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600, cwd=Path(__file__).parents[2])
