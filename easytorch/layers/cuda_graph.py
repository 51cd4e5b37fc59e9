"""A CUDA graph: work on the device recorded once and launched again as one, without Python or a launch per kernel.

All that touches `torch.cuda` for it is here; `captured_step.py` decides what is captured, and when.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from easytorch.switches import parse

T = TypeVar("T")


class GraphPool:
    """The memory that the graphs of one owner share: their intermediate results lie in the same places.

    A replay overwrites what another graph of the pool has returned. Freed with the last graph that uses it.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


class CudaGraph:
    """`warm_up(run)` once, then `capture(run)` once, then `replay()`. `run` returns tensors, in any pytree."""

    def __init__(self, device: torch.device, pool: GraphPool) -> None:
        self.device, self._pool = device, pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def warm_up(self, run: Callable[[], T]) -> T:
        """Runs it eagerly, on another stream than the default one, as a capture will: kernels are compiled and tuned,
        and the libraries allocate their workspaces, neither of which can be captured."""
        with torch.cuda.device(self.device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                output = run()
            current.wait_stream(side)
            for one in pytree.tree_leaves(output):
                if isinstance(one, torch.Tensor) and one.is_cuda:
                    one.record_stream(current)  # its memory is not used again before `current` has read it
        return output

    def capture(self, run: Callable[[], T]) -> T:
        """Records what `run` does, without doing it. Its results have values after each `replay`."""
        with torch.cuda.device(self.device):
            graph = torch.cuda.CUDAGraph()
            # other threads, such as a server's, may allocate meanwhile
            with torch.cuda.graph(graph, pool=self._pool.handle, capture_error_mode="thread_local"):
                output = run()
        self._graph = graph
        return output

    def replay(self) -> None:
        assert self._graph is not None, "capture() comes first"
        self._graph.replay()


def graph_of(device: torch.device, pool: GraphPool) -> CudaGraph | None:
    """A new graph; None where nothing is captured: without a GPU, or under EASYTORCH_CUDA_GRAPHS=0."""
    if device.type != "cuda" or not parse("EASYTORCH_CUDA_GRAPHS", os.environ.get("EASYTORCH_CUDA_GRAPHS", "1")):
        return None
    return CudaGraph(device, pool)
