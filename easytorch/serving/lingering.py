"""Answers that are sent before their request has been read: too large a body, a wrong key, an unknown path."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any


class LingeringClose:
    """ASGI middleware: reads what is left of a request's body between its answer and the end of the connection.

    A connection that is closed while bytes arrive is reset, and the client may lose the answer (RFC 9112, 9.6). most:
    bytes, and seconds: how long; a client that sends more than that is reset.
    """

    def __init__(self, app: Any, *, most: int = 64 << 20, seconds: float = 5.0) -> None:
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        names = {name for name, _ in scope["headers"]}
        # who asks whether to send the body sends none after a refusal, and would be told to by reading
        unread = bool(names & {b"content-length", b"transfer-encoding"}) and b"expect" not in names

        async def watched() -> Any:
            nonlocal unread
            message = await receive()
            if not message.get("more_body", False):  # the last part of the body, or the client has gone
                unread = False
            return message

        async def read_rest() -> None:
            left = self.most
            while unread and left > 0:
                left -= len((await watched()).get("body", b""))

        async def lingering(message: Any) -> None:
            if not unread or message["type"] != "http.response.body" or message.get("more_body", False):
                await send(message)
                return
            await send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(read_rest(), self.seconds)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self.app(scope, watched, lingering)
