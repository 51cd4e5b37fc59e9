"""Examples of conversations as tokens and labels: the tokenizer's chat template, and a loss on the answers alone.

An example has "messages", or "prompt" and "completion", or (of preferences) "chosen" and "rejected" with the prompt or
without; each is a list of messages `{"role": ..., "content": ...}` or text, as in TRL.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from easytorch.training.config import TrainingConfig, flag
from easytorch.training.examples import Example, need_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # a label without a loss, in torch's cross entropy
Tokens = tuple[list[int], list[int]]  # ids, labels


def set_template(tokenizer: PreTrainedTokenizerBase, config: TrainingConfig) -> None:
    """The chat template of the config, where it names one."""
    if config.chat_template is not None:
        path = Path(config.chat_template)
        if not path.is_file():
            raise FileNotFoundError(f"{flag('chat_template')}: there is no file {config.chat_template!r}")
        tokenizer.chat_template = path.read_text(encoding="utf-8")


def answer_tokens(example: Example, tokenizer: PreTrainedTokenizerBase, name: str) -> Tokens:
    """The tokens of a conversation, or of a prompt with its completion; labels are those of the answers."""
    if "messages" in example:
        return _conversation(example["messages"], 0, tokenizer, name)
    need_columns(example, name, "prompt", "completion")
    return _completion(example["prompt"], example["completion"], tokenizer, name)


def preference_tokens(example: Example, tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[Tokens, Tokens]:
    """The same of the chosen and of the rejected answer to one prompt."""
    need_columns(example, name, "chosen", "rejected")
    chosen, rejected = example["chosen"], example["rejected"]
    prompt = example.get("prompt")
    if prompt is None:
        if isinstance(chosen, str) or isinstance(rejected, str):
            need_columns(example, name, "prompt")
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    return (
        _completion(prompt, chosen, tokenizer, name),
        _completion(prompt, rejected, tokenizer, name),
    )


def _completion(prompt: Any, completion: Any, tokenizer: PreTrainedTokenizerBase, name: str) -> Tokens:
    if isinstance(prompt, str) and isinstance(completion, str):
        first = list(tokenizer(prompt, verbose=False)["input_ids"])
        if first and first[-1] == tokenizer.eos_token_id:  # the end that some tokenizers add
            first.pop()
        answer = list(tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"])
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{flag('dataset')} {name}: the tokenizer has no end-of-text (eos) token to end an answer")
        answer.append(tokenizer.eos_token_id)
        return first + answer, [IGNORED] * len(first) + answer
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError(f"{flag('dataset')} {name}: prompt and answer must both be text, or both messages")
    return _conversation([*prompt, *completion], len(prompt), tokenizer, name)


def _conversation(messages: Any, first: int, tokenizer: PreTrainedTokenizerBase, name: str) -> Tokens:
    """The conversation by the chat template; labels are those of the assistant's messages from number `first` on."""
    where = f"{flag('dataset')} {name}"
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
        raise ValueError(f'{where}: messages must be a list of {{"role": ..., "content": ...}}, got {messages!r:.80}')
    if not tokenizer.chat_template:
        raise ValueError(
            f"{where} holds conversations, and the tokenizer has no chat template: give one by {flag('chat_template')}"
        )
    if not any(one["role"] == "assistant" for one in messages[first:]):
        return [], []
    if "{% generation" in str(tokenizer.chat_template) or "{%- generation" in str(tokenizer.chat_template):
        return _by_template(messages, first, tokenizer, name)
    ids = _apply(tokenizer, messages, name)
    labels = [IGNORED] * len(ids)
    for number in range(first, len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        before = _apply(tokenizer, messages[:number], name, add_generation_prompt=True)
        after = _apply(tokenizer, messages[: number + 1], name)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            raise ValueError(
                f"{where}: the chat template changes earlier messages when later ones are added, so that the tokens of "
                "an answer are not known; mark answers in it by {% generation %} ... {% endgeneration %}"
            )
        labels[len(before) : len(after)] = ids[len(before) : len(after)]
    return ids, labels


def _tokens_of(tokenizer: PreTrainedTokenizerBase, messages: list[Any], name: str, **settings: Any) -> Any:
    """transformers' `apply_chat_template`; `ValueError` where the template is wrong or refuses the messages."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, **settings)
    except TemplateError as error:
        raise ValueError(
            f"{flag('dataset')} {name}: the chat template ({flag('chat_template')}, or the tokenizer's) does not take "
            f"it: {error}; correct the template, or the messages"
        ) from error


def _by_template(messages: list[Any], first: int, tokenizer: PreTrainedTokenizerBase, name: str) -> Tokens:
    found = _tokens_of(tokenizer, messages, name, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = list(found["input_ids"]), list(found["assistant_masks"])
    start = len(_apply(tokenizer, messages[:first], name)) if first else 0
    return ids, [
        one if of and place >= start else IGNORED for place, (one, of) in enumerate(zip(ids, mask, strict=True))
    ]


def _apply(tokenizer: PreTrainedTokenizerBase, messages: list[Any], name: str, **settings: Any) -> list[int]:
    if not messages:
        return []
    return list(_tokens_of(tokenizer, messages, name, return_dict=False, **settings))
