"""Errors as OpenAI's API states them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class APIError(HTTPException):
    """An error with a status; an HTTPException, since FastAPI turns any other that reading a body raises into 400."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(self.status)
        # ASCII: a message may quote text that cannot be encoded as UTF-8 (a lone surrogate)
        return Response(json.dumps(self.body()), self.status, headers, "application/json")


def add_handlers(app: FastAPI) -> None:
    """Gives every error of `app` that body; an unexpected one is logged, and its traceback is not sent."""

    @app.exception_handler(APIError)
    async def handle_api_error(request: Request, error: APIError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def handle_validation_error(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        if first["type"] == "json_invalid":
            return APIError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}").response()
        if first["type"] == "extra_forbidden":
            return APIError(400, f"unrecognized argument: {place}", param=place).response()
        if first["type"] == "model_attributes_type" and not place and not _says_json(request):
            return APIError(415, "send the body as JSON, with the header Content-Type: application/json").response()
        message = first["msg"].removeprefix("Value error, ")
        return APIError(400, f"{place}: {message}" if place else message, param=place or None).response()

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> Response:
        return APIError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()

    @app.exception_handler(Exception)
    async def handle_unexpected_error(request: Request, error: Exception) -> Response:
        return APIError(500, f"the server failed ({type(error).__name__}); see its log").response()


def _says_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
