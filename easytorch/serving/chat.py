"""Conversations as prompts, by the tokenizer's chat template."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from easytorch.generation.text import LONE_SURROGATE, valid_text
from easytorch.serving.errors import APIError
from easytorch.serving.schemas import Message


def chat_prompt(tokenizer: Any, messages: Sequence[Message], more: Mapping[str, Any] | None) -> list[int]:
    """The tokens of a conversation, with the generation prompt. more: further arguments of the template."""
    if not tokenizer.chat_template:
        raise APIError(400, "this model's tokenizer has no chat template; use /v1/completions")
    given = dict(more or {})
    # the tokenizer's own arguments: a template of the client's would run for as long as it likes
    if reserved := given.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys():
        raise APIError(400, f"chat_template_kwargs: {min(reserved)!r} cannot be set by a request")
    try:
        conversation = [_plain(message) for message in messages]
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **given)
    except RecursionError as error:
        message = "messages or chat_template_kwargs are nested too deeply for the chat template"
        raise APIError(400, message, param="messages") from error
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # a template may raise any exception
        raise APIError(400, f"the chat template refuses these messages: {error}", param="messages") from error
    tokens: list[int] = tokenizer(checked_text(text), add_special_tokens=False)["input_ids"]
    return tokens


def checked_text(text: str) -> str:
    """`text`; an error for one with a lone surrogate."""
    if not valid_text(text):
        raise APIError(400, f"the text has {LONE_SURROGATE}")
    return text


def _plain(message: Message) -> dict[str, Any]:
    given = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        parts = []
        for part in message.content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise APIError(400, f"a part of type {part.get('type')!r}: only text is supported", param="messages")
            parts.append(part["text"])
        given["content"] = "".join(parts)
    if message.role == "developer":  # OpenAI's newer name
        given["role"] = "system"
    return given
