"""What a model of transformers' records while a layer runs (router logits, hidden states), as outputs of the layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Records:
    """What has been recorded when this is made. Hooks add to it, past the graph of a layer that is computed again."""

    def __init__(self) -> None:
        self._own = _collector().get()
        # lists are added to; beside them is which layers are wanted
        self._before = {key: list(one) if isinstance(one, list) else one for key, one in (self._own or {}).items()}

    def during(self, work: Callable[[], Any]) -> tuple[Any, dict[str, list[Any]]]:
        """What `work` returns, and what it has recorded, which is not kept. It may run again when all is over."""
        if self._own is None:
            return work(), {}
        collector = _collector()
        outer = collector.get()
        mine = {key: list(one) if isinstance(one, list) else one for key, one in self._before.items()}
        token = collector.set(mine)
        try:
            result = work()
        finally:
            if outer is None:
                collector.reset(token)
            else:  # while a graph is made, `reset` forgets this one too
                collector.set(outer)
        return result, {key: one[len(self._before[key]) :] for key, one in mine.items() if isinstance(one, list)}

    def add(self, found: Mapping[str, Sequence[Any]]) -> None:
        """Records what `during` has found, or what stands for it in the graph."""
        for key, entries in found.items():
            self._own[key].extend(entries)


def _collector() -> Any:
    from transformers.utils import output_capturing

    return output_capturing._active_collector
