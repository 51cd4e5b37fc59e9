"""The uvicorn server: SIGTERM and Ctrl-C let running requests finish."""

from __future__ import annotations

from typing import Any

import uvicorn


def make_server(app: Any, host: str, port: int, *, drain_timeout: int) -> uvicorn.Server:
    """A server of `app`. drain_timeout: seconds that running requests have after the first signal."""
    config = uvicorn.Config(app, host, port, timeout_graceful_shutdown=drain_timeout, ws="none", server_header=False)
    return uvicorn.Server(config)
