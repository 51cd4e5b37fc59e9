"""The chat page at `/`, which uses the server's own API."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.responses import HTMLResponse, Response


async def page() -> Response:
    """The page. It loads nothing from elsewhere; its content security policy allows only requests to this server."""
    html, policy = _page()
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return HTMLResponse(html, headers=headers)


@functools.cache
def _page() -> tuple[str, str]:
    """The page, and the content security policy that names its own script and style by their hashes."""
    html = resources.files("easytorch.serving").joinpath("page.html").read_text(encoding="utf-8")

    def sources(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in parts)

    policy = (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy
