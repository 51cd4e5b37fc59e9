"""ragged_page_multi_latent_attention: each sequence of a batch against dense mla in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from easytorch.kernels.cpu import library
from easytorch.kernels.ragged_page.write import write_page
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error

BACKENDS = ["native", "aten"] + ["cpu"] * (library.missing() is None)
LENGTHS, CONTEXTS = [1, 5, 1, 0, 40], [20, 9, 1, 5, 40]
HEADS, NOPE, ROPE, LATENT, VALUE, PAGE = 6, 30, 10, 36, 20, 7


def operation(backend: str | None = None, name: str = "ragged_page_multi_latent_attention", **kw: Any) -> OperationImpl:
    return OperationRegistry.create(name, OperationMetadata(backend=backend, **kw))


def make(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A call, its cache written by slot, and the latents with rotated keys of each sequence."""
    torch.manual_seed(0)
    rows = [torch.randn(context, LATENT + ROPE, dtype=dtype) for context in CONTEXTS]
    order = torch.randperm(20).tolist()
    tables = torch.full((len(LENGTHS), 7), -1, dtype=torch.int32)
    pages = torch.full((20, PAGE, LATENT + ROPE), float("nan"), dtype=dtype)
    for b, row in enumerate(rows):
        used = -(-len(row) // PAGE)
        tables[b, :used] = torch.tensor([order.pop() for _ in range(used)])
        place = torch.arange(len(row))
        write_page(pages, row, tables[b, place // PAGE] * PAGE + place % PAGE)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    tokens = int(starts[-1]) + 2
    call = {
        "query": torch.randn(tokens, HEADS, NOPE, dtype=dtype),
        "query_rope": torch.randn(tokens, HEADS, ROPE, dtype=dtype),
        "latent_pages": pages,
        "context_lens": torch.tensor(CONTEXTS),
        "block_tables": tables,
        "query_start_loc": starts,
        "up_key": torch.randn(HEADS, NOPE, LATENT, dtype=dtype),
        "up_value": torch.randn(HEADS, VALUE, LATENT, dtype=dtype),
    }
    return call, rows


def dense(call: dict[str, Any], rows: list[torch.Tensor], **features: Any) -> torch.Tensor:
    exact = {n: x.double() for n, x in call.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    up = {name: exact[name] for name in ("up_key", "up_value") if name in exact}
    outputs = []
    for b, row in enumerate(rows):
        mine = slice(*call["query_start_loc"][b : b + 2].tolist())
        latent, rope = row.double().split([LATENT, ROPE], dim=-1)
        outputs.append(
            operation("native", "mla")(
                exact["query"][None, mine], exact["query_rope"][None, mine], latent[None], rope[None], **up,
                **{"causal": True, **features},
            ).attention_outputs[0]
        )  # fmt: skip
    output = torch.cat(outputs)
    return torch.cat([output, output.new_zeros(2, *output.shape[1:])])


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "not_causal": {"causal": False},
    "window": {"sliding_window": 6},
    "softcap_sinks_scale": {"softcap": 2.0, "sinks": torch.linspace(-1, 1, HEADS), "softmax_scale": 0.4},
}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_dense(backend: str, features: str) -> None:
    call, rows = make()
    expected = dense(call, rows, **FEATURES[features])
    output = operation(backend)(**call, **FEATURES[features]).attention_outputs
    assert relative_rms_error(output, expected) <= TOLERANCE[torch.float32]
    assert (output[-2:] == 0).all()
    pair = call["latent_pages"].split([LATENT, ROPE], dim=-1)
    assert torch.equal(
        operation(backend)(**{**call, "latent_pages": pair}, **FEATURES[features]).attention_outputs, output
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision(backend: str, dtype: torch.dtype) -> None:
    call, rows = make(dtype)
    output = operation(backend)(**call).attention_outputs
    assert output.dtype == dtype and relative_rms_error(output, dense(call, rows)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_absorbed_form_and_num_seqs(backend: str) -> None:
    call, rows = make()
    call["query"] = torch.einsum("thd,hdl->thl", call["query"], call.pop("up_key"))
    up_value = call.pop("up_value")
    output = operation(backend, softmax_scale=0.2)(**call, num_seqs=2).attention_outputs
    assert output.shape == (49, HEADS, LATENT) and (output[6:] == 0).all()
    projected = operation(backend)(**call, up_value=up_value, softmax_scale=0.2).attention_outputs
    expected = torch.einsum("thl,hvl->thv", output[:6], up_value)
    torch.testing.assert_close(projected[:6], expected, rtol=1e-4, atol=1e-4)
    assert relative_rms_error(output[:6], dense(call, rows, softmax_scale=0.2)[:6]) <= TOLERANCE[torch.float32]


def test_gradients_and_graphs() -> None:
    call, _ = make()
    call["latent_pages"] = call["latent_pages"].nan_to_num()
    names = ("query", "query_rope", "latent_pages", "up_key", "up_value")
    rest = {name: value for name, value in call.items() if name not in names}
    run = operation()

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        return run(**dict(zip(names, tensors, strict=True)), **rest, sliding_window=20).attention_outputs

    exact = [call[name].double().requires_grad_() for name in names]
    expected = operation("native")(**dict(zip(names, exact, strict=True)), **rest, sliding_window=20).attention_outputs
    want = torch.autograd.grad(expected.square().sum(), exact)
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [call[name].clone().requires_grad_() for name in names]
        output = function(*leaves)
        assert relative_rms_error(output, expected) <= TOLERANCE[torch.float32]
        for a, b in zip(torch.autograd.grad(output.square().sum(), leaves), want, strict=True):
            assert relative_rms_error(a, b) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors(backend: str) -> None:
    call, _ = make()
    for wrong, message in (
        ({"latent_pages": call["latent_pages"][..., :10]}, "hold L \\+ R numbers"),
        ({"query": call["query"][None]}, "expected query"), ({"up_key": None}, "as wide as the latent"),
        ({"context_lens": call["context_lens"] - 1}, r"context_lens\[2\] is 0"), ({"softcap": -1.0}, "softcap"),
        ({"block_tables": call["block_tables"][:1]}, r"block_tables \(B, max_pages\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            operation(backend)(**{**call, **wrong})
    with pytest.raises(UnsupportedOperationError, match="does not take mask"):
        operation(backend)(**call, mask=torch.ones(1, dtype=torch.bool))


def test_choices() -> None:
    typical, _ = OperationRegistry.get("ragged_page_multi_latent_attention").typical_call()
    assert operation().choose_on("cuda", typical, {}).backend == "triton"
    assert operation().choose_on("cpu", typical, {}).backend == "aten"
    trained = (typical[0].detach().requires_grad_(), *typical[1:])
    assert "no backward" in operation().choose_on("cuda", trained, {}).reason


def test_differential_mode(compared: list[str]) -> None:
    call = make()[0]
    operation()(**call)
    assert compared == [f"ragged_page_multi_latent_attention:{operation().choose(**call).backend}"]
