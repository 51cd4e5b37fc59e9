"""Which steps the CPU takes: keys that nothing sees are never read, and memory stays linear in the length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.blocksparse import aten_blocks, aten_op, native
from easytorch.kernels.blocksparse.aten_plan import ROWS, steps
from easytorch.kernels.blocksparse.structure import structure_of, within_segments

LENGTH = 5 * ROWS


def _heads(length: int = LENGTH) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, length, heads, 8) for heads in (2, 1, 1)]


def _documents(*ends: int) -> torch.Tensor:
    return torch.bucketize(torch.arange(LENGTH), torch.tensor(ends), right=True)[None]


def _scores(mask: torch.Tensor | None = None, ids: torch.Tensor | None = None, **structure: Any) -> int:
    """How many scores of one head are computed."""
    found = structure_of(LENGTH, LENGTH, torch.device("cpu"), **structure)
    if ids is not None:
        found, exact = within_segments(found, ids, ids)
        ids = None if exact else ids
    return sum(step.scores for step in steps(found, 1, mask, ids, ids))


BLOCKS = torch.zeros(5, 5, dtype=torch.bool)
BLOCKS[[0, 1, 2, 4, 4], [4, 1, 0, 0, 3]] = True  # row 3 sees nothing, row 4 two blocks with a gap between


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 25 * ROWS**2),
        ({"causal": True}, 15 * ROWS**2),
        ({"causal": True, "chunk_size": ROWS}, 5 * ROWS**2),
        ({"causal": True, "sliding_window": 2}, 5 * ROWS**2 + 4 * ROWS),
        ({"sliding_window": (0, 0)}, 5 * ROWS**2),
        ({"causal": True, "prefix_length": 2 * ROWS}, (2 + 2 + 3 + 4 + 5) * ROWS**2),
        ({"ids": _documents(ROWS, 3 * ROWS)}, (1 + 2 + 2 + 2 + 2) * ROWS**2),
        ({"ids": _documents(ROWS, 3 * ROWS), "causal": True}, (1 + 1 + 2 + 1 + 2) * ROWS**2),
        ({"ids": torch.arange(LENGTH)[None] // ROWS % 2}, (3 + 2 + 3 + 2 + 3) * ROWS**2),  # one document in pieces
        ({"mask": BLOCKS.repeat_interleave(ROWS, 0).repeat_interleave(ROWS, 1)[None, None]}, 5 * ROWS**2),
    ],
)
def test_only_what_is_seen_is_computed(given: dict[str, Any], expected: int) -> None:
    assert _scores(**given) == expected


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("case", ["window", "documents", "mask"])
def test_unseen_keys_are_never_read(case: str, softcap: float | None) -> None:
    """NaN in keys and values that no row sees, and in whole blocks that a row's block does not: it would spread."""
    query, key, value = _heads()
    rows = slice(0, LENGTH)
    features: dict[str, Any] = {"causal": True, "softcap": softcap}
    poison = torch.zeros(LENGTH, dtype=torch.bool)
    if case == "window":  # the queries are the last ones: the window ends far from the first keys
        query, rows = query[:, -ROWS:], slice(LENGTH - ROWS, LENGTH)
        features["sliding_window"] = 20
        poison[: rows.start - 20] = True
    elif case == "documents":
        features |= dict.fromkeys(("query_segment_ids", "key_segment_ids"), _documents(ROWS, 3 * ROWS))
        features["query_segment_ids"] = torch.where(features["query_segment_ids"] == 1, 0, 2)
        poison[ROWS : 3 * ROWS] = True
    else:
        features["mask"] = ~(torch.arange(LENGTH) // ROWS == 2)
        poison[2 * ROWS : 3 * ROWS] = True
    leaves = [query.requires_grad_(), *(x.masked_fill(poison[:, None, None], torch.nan) for x in (key, value))]
    leaves[1:] = [x.requires_grad_() for x in leaves[1:]]
    clean = [x.detach().double().nan_to_num().requires_grad_() for x in leaves]
    got = aten_op.attention(*leaves, **features)
    expected = native.attention(*clean, **features)[0]
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    grads, wanted = (
        torch.autograd.grad(out.square().sum(), xs) for out, xs in ((got, leaves), (expected, clean))
    )  # fmt: skip
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=1e-4, atol=1e-5)


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor any operator returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_memory_is_linear_in_the_length(softcap: float | None) -> None:
    def largest(length: int) -> int:
        query, key, value = _heads(length)
        end = torch.arange(1, length + 1, dtype=torch.int32)[None]
        begin, call = torch.zeros_like(end), AttentionCall(scale=0.3, softcap=softcap)
        with _Largest() as mode:
            output, logsumexp = aten_blocks.forward(query, key, value, begin, end, call)
            aten_blocks.backward(output, query, key, value, output, logsumexp, begin, end, call, False)
        return mode.elements

    short, long = largest(1024), largest(4096)
    assert long <= 4 * short
    assert long < 2 * 4096 * 4096 / 8  # an eighth of the scores of both heads
