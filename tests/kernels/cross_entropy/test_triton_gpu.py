"""Triton cross entropy, plain and fused with its linear layer, against the definitions in float64, on a GPU.

Under TRITON_INTERPRET=1 the same cases run on the CPU; test_triton.py does that in a process of its own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from easytorch.kernels.cross_entropy import native
from easytorch.kernels.cross_entropy.fused_linear import fused_linear_cross_entropy
from easytorch.kernels.cross_entropy.triton_op import cross_entropy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum", "ignore_index": 3},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.2},
    "capped": {"softcap": 2.0, "reduction": "none"},
    "cap_far_above_the_logits": {"softcap": 1e4},
    "z_loss": {"z_loss": 0.01},
    "everything": {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.05, "ignore_index": 0, "reduction": "none"},
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.usefixtures("poisoned_empty"),
]
Check = Callable[..., None]
fused = functools.partial(fused_linear_cross_entropy, library="triton", chunk_size=5)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE) * scale


def labelled(vocabulary: int, *shape: int, ignored: int = -100) -> torch.Tensor:
    labels = torch.randint(0, vocabulary, shape, device=DEVICE)
    return labels.masked_fill(torch.rand(shape, device=DEVICE) < 0.3, ignored)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_cross_entropy(options: dict[str, Any], dtype: torch.dtype, assert_matches: Check) -> None:
    labels = labelled(301, 3, 7, ignored=options.get("ignore_index", -100))
    arguments = {"logits": rand(3, 7, 301, scale=3.0), "labels": labels, **options}
    assert_matches(cross_entropy, native.cross_entropy, arguments, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fused_linear_cross_entropy(options: dict[str, Any], dtype: torch.dtype, assert_matches: Check) -> None:
    # scores near zero: what 16 bits round of a score enters its exponential as it is
    tensors = {"hidden": rand(2, 9, 30, scale=0.3), "weight": rand(61, 30, scale=0.3), "bias": rand(61, scale=0.3)}
    labels = labelled(61, 2, 9, ignored=options.get("ignore_index", -100))
    assert_matches(fused, native.linear_cross_entropy, {**tensors, "labels": labels, **options}, dtype)


def test_many_blocks_of_a_vocabulary(assert_matches: Check) -> None:
    arguments = {"logits": rand(2, 20001, scale=3.0), "labels": labelled(20001, 2), "reduction": "none"}
    assert_matches(cross_entropy, native.cross_entropy, {**arguments, "label_smoothing": 0.1}, torch.float32)
    logits = rand(2, 20001)
    logits[:, :9000] = float("-inf")  # a first block with nothing in it
    labels = torch.tensor([9000, 20000], device=DEVICE)
    torch.testing.assert_close(cross_entropy(logits, labels), native.cross_entropy(logits, labels))


def test_large_logits_neither_overflow_nor_vanish() -> None:
    logits, labels = rand(4, 50, scale=1e4), labelled(50, 4).int()
    torch.testing.assert_close(cross_entropy(logits, labels), native.cross_entropy(logits, labels))


@pytest.mark.parametrize("level", [2.0**22, -(2.0**22)])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}], ids=str)
def test_logits_that_are_large_throughout(options: dict[str, Any], level: float, assert_matches: Check) -> None:
    """A float32 logsumexp beside 2**22 is rounded to quarters; what is above the largest logit is not."""
    logits = torch.randint(0, 5, (4, 301), device=DEVICE) + level
    arguments = {"logits": logits, "labels": labelled(301, 4), "reduction": "none", **options}
    assert_matches(cross_entropy, native.cross_entropy, arguments, torch.float32)


def test_strides_of_rows() -> None:
    packed, labels = rand(6, 2, 40), labelled(40, 6, 2)
    for logits, at in ((packed[:, 1], labels[:, 1]), (packed.transpose(0, 1), labels.T), (packed[:, 0, ::2], None)):
        given = labelled(20, 6) if at is None else at
        leaf, exact = logits.detach().requires_grad_(), logits.detach().requires_grad_()
        got, want = cross_entropy(leaf, given), native.cross_entropy(exact, given)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, leaf), torch.autograd.grad(want, exact))


def test_nothing_to_learn_from() -> None:
    labels = torch.full((3,), -100, device=DEVICE)
    logits = rand(3, 8).requires_grad_()
    loss = cross_entropy(logits, labels)
    assert loss.item() == 0.0
    assert torch.equal(torch.autograd.grad(loss, logits)[0], torch.zeros_like(logits))
    assert cross_entropy(rand(0, 8), labels[:0]).item() == 0.0


def test_a_label_outside_of_the_vocabulary_shows() -> None:
    """As NaN, where labels cannot be read without waiting for the device; on the CPU it is refused."""
    logits, labels = rand(3, 8).requires_grad_(), torch.tensor([1, 8, -1], device=DEVICE)
    if INTERPRETED:
        with pytest.raises(ValueError, match="labels must be in"):
            cross_entropy(logits, labels, reduction="none")
        return
    losses = cross_entropy(logits, labels, reduction="none")
    assert losses.isnan().tolist() == [False, True, True]
    grad = torch.autograd.grad(losses.sum(), logits)[0]
    assert grad.isnan().all(1).tolist() == [False, True, True]


def test_compiles_to_one_graph_and_passes_opcheck() -> None:
    logits, labels = rand(5, 24).requires_grad_(), labelled(24, 5)

    def step(logits: torch.Tensor) -> torch.Tensor:
        return 2 * cross_entropy(logits, labels, softcap=3.0)

    compiled, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(logits), step(logits)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(torch.autograd.grad(compiled, logits), torch.autograd.grad(expected, logits))
    operator = torch.ops.easytorch.triton_cross_entropy.default
    torch.library.opcheck(operator, (logits, labels, -100, 0.1, 3.0, 0.01))
    torch.library.opcheck(operator, (logits, labels, -100, 0.0, None, 0.0))


@pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_vocabularies_of_models(dtype: torch.dtype, assert_matches: Check) -> None:
    arguments = {"logits": rand(500, 128256), "labels": labelled(128256, 500), "label_smoothing": 0.1}
    assert_matches(cross_entropy, native.cross_entropy, arguments, dtype)
    tensors = {"hidden": rand(500, 512, scale=0.2), "weight": rand(32000, 512, scale=0.2)}
    function = functools.partial(fused_linear_cross_entropy, library="triton")
    assert_matches(function, native.linear_cross_entropy, {**tensors, "labels": labelled(32000, 500)}, dtype)
