"""Requests that are refused before they are read: without the API key, or with too large a body."""

from __future__ import annotations

import hmac
from typing import Any

from easytorch.serving.errors import APIError

# Served without a key: health checks of load balancers, and the page, which asks its user for the key.
_UNAUTHENTICATED = ("/health", "/")


class Limits:
    """ASGI middleware. api_key: None asks for none. max_body: bytes."""

    def __init__(self, app: Any, *, api_key: str | None, max_body: int) -> None:
        self.app, self.api_key, self.max_body = app, api_key, max_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self.api_key is not None and scope["path"] not in _UNAUTHENTICATED:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.api_key.encode()):
                error = APIError(401, "the API key is missing or wrong: send Authorization: Bearer KEY")
                await error.response()(scope, receive, send)
                return
        too_large = APIError(413, f"the body is larger than the {self.max_body} bytes that this server takes")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.max_body:
            await too_large.response()(scope, receive, send)
            return
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_body:  # of a body that came in chunks, without its length
                raise too_large
            return message

        await self.app(scope, counted, send)
