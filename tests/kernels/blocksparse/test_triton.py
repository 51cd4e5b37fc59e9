"""The Triton kernels without a GPU: the GPU's cases in the interpreter, compilation ahead of time, the block map."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.blocksparse import native
from easytorch.kernels.blocksparse.block_map import FULL, PARTIAL, lists_of, states, width_of
from easytorch.kernels.blocksparse.structure import structure_of

CASES = Path(__file__).with_name("test_triton_gpu.py")


def test_cases_of_the_gpu(interpret_cases: Callable[..., None]) -> None:
    interpret_cases(CASES)


def test_compiles_within_the_limits(compile_ahead: Callable[..., Any]) -> None:
    module = "easytorch.kernels.blocksparse.triton_calls"
    kernels = compile_ahead(module, "bfloat16", "sm_80", "sm_90", "sm_100", "gfx942")
    assert len(kernels) == 7 * 4
    for kernel in kernels:
        if "documents" in kernel["kernel"]:
            assert kernel["stack"] <= 512, kernel  # a loop that spilled would need thousands
            assert kernel["registers"] >= 64, kernel


STRUCTURES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "sliding_window": 20},
    {"sliding_window": (3, 40)},
    {"chunk_size": 24, "causal": True},
    {"causal": True, "prefix_length": torch.tensor([0, 37])},
]


@pytest.mark.parametrize("extra", ["", "mask", "segments"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize(("length", "keys"), [(90, 90), (30, 90), (90, 30), (1, 64)])
def test_the_map_says_what_the_definition_sees(length: int, keys: int, structure: dict[str, Any], extra: str) -> None:
    m, n = 32, 16
    found = structure_of(length, keys, torch.device("cpu"), **structure)
    query, key = torch.zeros(2, length, 2, 1), torch.zeros(2, keys, 2, 1)
    features: dict[str, Any] = {}
    given: dict[str, Any] = {}
    if extra == "mask":
        mask = (torch.rand(2, 1, length, keys, generator=torch.Generator().manual_seed(0)) > 0.9) | (
            torch.arange(keys) // n == 1
        )
        features = given = {"mask": mask & (torch.arange(keys) // n != 2)}
    if extra == "segments":
        ids = {"query": torch.arange(length)[None] // 33 % 2, "key": torch.arange(keys)[None] // 33 % 2}
        features = {f"{name}_segment_ids": x.repeat(2, 1) for name, x in ids.items()}
        given = {f"{name}_ids": x.repeat(2, 1) for name, x in ids.items()}
    seen = native.attention(query, key, key, **structure, **features)[1].any(1)  # (2, T, S)
    state = states(found, keys, m, n, **given).expand(2, -1, -1)
    needed = torch.zeros_like(state, dtype=torch.bool)
    for b in range(2):
        for i in range(state.shape[1]):
            for j in range(state.shape[2]):
                block = seen[b, i * m : (i + 1) * m, j * n : (j + 1) * n]
                needed[b, i, j] = block.any()
                assert state[b, i, j] or not block.any()
                assert (state[b, i, j] == FULL) <= bool(block.all()) and (state[b, i, j] != FULL or block.shape[1] == n)
    if not extra:
        assert torch.equal(state > 0, needed)
    reaches = {False: (found.left, found.right), True: (found.right, found.left)}
    for transposed, reach in reaches.items():
        each = state.mT if transposed else state
        width = width_of(*((n, m) if transposed else (m, n)), each.shape[2], reach)
        lists = lists_of(each, width)
        assert torch.equal(lists.total, (each > 0).sum(2).int()) and (lists.total <= width).all()
        for b in range(2):
            for i in range(each.shape[1]):
                listed = lists.blocks[b, i, : lists.total[b, i]]
                assert sorted(listed.tolist()) == each[b, i].nonzero()[:, 0].tolist()
                assert (each[b, i, listed[: lists.partial[b, i]].long()] == PARTIAL).all()
