"""CUDA graphs on a CPU: operators are recorded with their tensors, and done again at the same addresses.

As of CUDA's, a replay runs no Python: what a step computes on the host stays what it was at the capture, and an input
that is not written to its static tensor is not seen. A capture does nothing to the tensors that were there before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationMixin

from easytorch.cache import ragged_step
from easytorch.cache_names import CACHE
from easytorch.generation import captured
from easytorch.generation.engine import decode_graphs
from easytorch.layers import captured_step, cuda_graph
from easytorch.operations import AttentionOutput
from easytorch.protocol import captured_generation


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        storages = {_storage(one) for one in given}
        if func._schema.is_mutable:
            for one in given:  # so that the capture can be undone
                if _storage(one) not in self._made and _storage(one) not in self.before:
                    flat = torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage())
                    self.before[_storage(one)] = flat, flat.clone()
        output = func(*args, **kwargs)
        results = [one for one in pytree.tree_leaves(output) if isinstance(one, Tensor)]
        new = [one for one in results if _storage(one) not in storages]
        self._made |= {_storage(one) for one in new}
        self.calls.append((func, args, kwargs, results if new else []))
        return output


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class RecordedGraph:
    """`cuda_graph.CudaGraph` for tensors on a CPU."""

    counts: ClassVar[dict[str, int]] = {"warm": 0, "captured": 0, "replayed": 0}

    def warm_up(self, run: Any) -> Any:
        self.counts["warm"] += 1
        return run()

    def capture(self, run: Any) -> Any:
        self.counts["captured"] += 1
        with _Recording() as recording:
            output = run()
        for flat, values in recording.before.values():
            flat.copy_(values)
        self._calls = recording.calls
        return output

    def replay(self) -> None:
        self.counts["replayed"] += 1
        for func, args, kwargs, results in self._calls:
            again = func(*args, **kwargs)
            for kept, one in zip(
                results, [x for x in pytree.tree_leaves(again) if isinstance(x, Tensor)], strict=False
            ):
                kept.copy_(one)


@contextlib.contextmanager
def recorded_graphs(monkeypatch: Any) -> Iterator[dict[str, int]]:
    """Within it steps on a CPU are captured. Yields how often they were warmed up, captured and replayed.

    Operators in C++ that take a token's place from the host are not for graphs, and not used: a GPU has none of them.
    """

    def graph_of(device: torch.device, pool: Any) -> RecordedGraph | None:
        return RecordedGraph()

    originals = ragged_step._ATTENTION, ragged_step._LATENT_ATTENTION, ragged_step.write_pages

    def chosen(place: int, over_tensors: Any) -> Any:
        return lambda *args, **kwargs: (over_tensors if _recorded() else originals[place])(*args, **kwargs)

    RecordedGraph.counts = dict.fromkeys(RecordedGraph.counts, 0)
    with monkeypatch.context() as patch:
        for module in (cuda_graph, captured, decode_graphs, captured_generation):
            patch.setattr(module, "graph_of", graph_of)
        patch.setattr("easytorch.layers.decoder_step.steps", lambda x: False)
        for place, (name, function) in enumerate(_PAGED.items()):
            patch.setattr(ragged_step, name, chosen(place, function))
        patch.setattr(captured, "reads_little", lambda *_: True)
        patch.setattr(captured_generation, "reads_little", lambda *_: True)
        patch.setattr(GenerationMixin, "_valid_auto_compile_criteria", _as_on_a_gpu)
        for module in (captured, captured_generation):  # of other tests
            module._KEPT.clear()
        try:
            yield RecordedGraph.counts
        finally:
            for module in (captured, captured_generation):
                module._KEPT.clear()


def _as_on_a_gpu(model: Any, kwargs: Any, generation_config: Any) -> bool:
    cache = kwargs.get(CACHE)
    dynamic = cache is None or type(cache) is DynamicCache or not cache.is_compileable
    return not (dynamic or generation_config.disable_compile)


def _recorded() -> bool:
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(one, _Recording | captured_step.HostReads) for one in modes)


def _attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, lens: Tensor, tables: Tensor, starts: Tensor, **features: Any
) -> AttentionOutput:
    """`ragged_page_attention` of one token of each sequence, without a look at a value: those on a CPU check them."""
    key, value = (pages[tables.long()].flatten(1, 2) for pages in (key_pages, value_pages))
    return AttentionOutput(attention_outputs=_one_token(query, key, value, lens, **features))


def _attend_latents(
    query: Tensor, query_rope: Tensor, pools: Any, lens: Tensor, tables: Tensor, starts: Tensor, _: None,
    up_key: Tensor, up_value: Tensor, **features: Any,
) -> AttentionOutput:  # fmt: skip
    latent, rope = (pages[tables.long()].flatten(1, 2) for pages in pools)
    key = torch.cat(
        [torch.einsum("nsl,hdl->nshd", latent, up_key), rope[:, :, None].expand(-1, -1, len(up_key), -1)], -1
    )
    value = torch.einsum("nsl,hdl->nshd", latent, up_value)
    return AttentionOutput(
        attention_outputs=_one_token(torch.cat([query, query_rope], -1), key, value, lens, **features)
    )


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, lens: Tensor, *, softmax_scale: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    groups = query.shape[1] // key.shape[2]
    key, value = (one.repeat_interleave(groups, dim=2) for one in (key, value))
    scores = torch.einsum("nhd,nshd->nhs", query, key) * (
        query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    )
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    place = torch.arange(key.shape[1])[None]
    seen = place < lens[:, None]
    if sliding_window is not None:
        seen = seen & (place >= lens[:, None] - sliding_window)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None].expand(len(scores), -1, 1)], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[1]]
    # what was never written may be anything
    return torch.einsum("nhs,nshd->nhd", weights, torch.where(seen[:, :, None, None], value, 0.0))


def _write(key_pages: Tensor, value_pages: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    for pages, rows in ((key_pages, key), (value_pages, value)):
        flat = pages.view(-1, *pages.shape[2:])
        hit = torch.arange(len(flat))[:, None] == slots
        given = rows[hit.int().argmax(1)]
        flat.copy_(torch.where(hit.any(1).view(-1, *(1 for _ in given.shape[1:])), given, flat))


_PAGED = {"_ATTENTION": _attend, "_LATENT_ATTENTION": _attend_latents, "write_pages": _write}
