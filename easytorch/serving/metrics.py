"""Metrics in Prometheus's text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from easytorch.generation.engine import EngineStats

_ENGINE_METRICS = {
    "requests_running": ("gauge", "Requests running.", "running"),
    "requests_waiting": ("gauge", "Requests waiting for pages.", "waiting"),
    "pages": ("gauge", "Pages of the cache.", "num_pages"),
    "pages_free": ("gauge", "Free pages.", "free_pages"),
    "prompt_tokens_total": ("counter", "Prompt tokens received.", "prompt_tokens"),
    "prompt_tokens_cached_total": ("counter", "Prompt tokens served from the prefix cache.", "cached_tokens"),
    "generated_tokens_total": ("counter", "Tokens generated.", "generated_tokens"),
    "preemptions_total": ("counter", "Requests preempted and recomputed.", "preemptions"),
    "steps_total": ("counter", "Steps of the engine.", "steps"),
    "steps_captured_total": ("counter", "Steps that were CUDA graphs.", "captured_steps"),
}


def text(stats: EngineStats | None, responses: Mapping[tuple[str, int], int]) -> str:
    """The metrics. responses: counts by (path, status)."""
    lines = []
    for name, (kind, help_, field) in _ENGINE_METRICS.items() if stats is not None else ():
        lines += _head(name, kind, help_)
        lines.append(f"easytorch_{name} {getattr(stats, field)}")
    lines += _head("http_requests_total", "counter", "Responses, by path and status.")
    for (path, status), count in sorted(responses.items()):
        lines.append(f'easytorch_http_requests_total{{path="{path}",status="{status}"}} {count}')
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, help_: str) -> list[str]:
    return [f"# HELP easytorch_{name} {help_}", f"# TYPE easytorch_{name} {kind}"]


class CountResponses:
    """ASGI middleware. paths: those counted by name; all others count as "other", so that clients add no labels."""

    def __init__(self, app: Any, *, counts: Counter[tuple[str, int]], paths: frozenset[str]) -> None:
        self.app, self.counts, self.paths = app, counts, paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self.paths else "other"
                self.counts[path, message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counted)
