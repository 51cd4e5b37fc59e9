"""`LLM`: batch generation from prompts, by vLLM's names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from easytorch.generation.engine.engine import Engine, Prompt
from easytorch.generation.engine.outputs import CompletionOutput, RequestOutput
from easytorch.generation.engine.params import RequestOutputKind, SamplingParams


class LLM:
    """An `Engine` that runs prompts to their end. model: a loaded one, or the folder or name of one.

    settings: those of `Engine`. The tokenizer of a folder or name is loaded with it unless one is given.
    """

    def __init__(self, model: Any, tokenizer: Any = None, **settings: Any) -> None:
        if isinstance(model, str | os.PathLike):
            from transformers import AutoTokenizer

            from easytorch import AutoModelForCausalLM

            tokenizer = AutoTokenizer.from_pretrained(model) if tokenizer is None else tokenizer
            model = AutoModelForCausalLM.from_pretrained(model)
        self.engine = Engine(model, tokenizer, **settings)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Mapping[str, Any] | Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The finished outputs, in the order of the prompts.

        prompts: one or several, each text, tokens (a list, or an array or tensor of integers), or vLLM's dict of
        `prompt` or `prompt_token_ids`. sampling_params: of all, or one for each.
        """
        several = as_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(several)
        elif isinstance(sampling_params, Sequence) and all(isinstance(one, SamplingParams) for one in sampling_params):
            params = list(sampling_params)
        else:
            raise TypeError(f"sampling_params must be SamplingParams, one or a list of them, not {sampling_params!r}")
        if len(params) != len(several):
            raise ValueError(f"{len(several)} prompts, and sampling_params for {len(params)}")
        ids: list[list[str]] = []
        done: dict[str, RequestOutput] = {}
        try:
            for prompt, given in zip(several, params, strict=True):
                one = replace(given, output_kind=RequestOutputKind.FINAL_ONLY)
                ids.append([])
                for index in range(one.n):
                    ids[-1].append(self.engine.add_request(prompt, one, index=index))
            unfinished = {request_id for own in ids for request_id in own}
            while unfinished:
                for output in self.engine.step():
                    if output.finished and output.request_id in unfinished:
                        done[output.request_id] = output
                        unfinished.remove(output.request_id)
        finally:  # a refused prompt aborts the others too, as does an interruption
            for request_id in (request_id for own in ids for request_id in own):
                self.engine.abort(request_id)
        return [_together([done[request_id] for request_id in own]) for own in ids]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """`generate` from one or several conversations, formatted by the tokenizer's chat template."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise ValueError("chat needs a tokenizer with a chat template; use generate with prompts")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
            for one in conversations
        ]
        return self.generate(prompts, sampling_params)


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list of texts and lists of tokens; `ValueError` for what is neither."""
    if hasattr(prompts, "tolist"):  # numpy's arrays, and tensors
        prompts = prompts.tolist()
    single = isinstance(prompts, str | Mapping)
    if not single and (not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray)):
        raise ValueError(f"prompts are texts or lists of tokens, one or several, not {type(prompts).__name__}")
    if single or (len(prompts) and isinstance(prompts[0], int)):
        prompts = [prompts]
    return [_prompt(one) for one in prompts]


def _prompt(given: Any) -> Prompt:
    """A prompt that may be an array of tokens, or vLLM's dict."""
    if isinstance(given, Mapping):
        if len(given) != 1 or not given.keys() <= {"prompt", "prompt_token_ids"}:
            raise ValueError(
                f"a prompt that is a dict has prompt or prompt_token_ids, and not {', '.join(map(repr, given))}"
            )
        (given,) = given.values()
    prompt: Prompt = given.tolist() if hasattr(given, "tolist") else given
    return prompt


def _together(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """The continuations of one prompt as one output."""
    completions: list[CompletionOutput] = [completion for output in outputs for completion in output.outputs]
    return replace(outputs[0], outputs=completions)
