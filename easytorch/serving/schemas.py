"""The request bodies, by OpenAI's field names, with vLLM's further sampling parameters.

A field of an unsupported feature is refused unless its value disables the feature; an unknown field is an error that
names it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from easytorch.generation.engine import RequestOutputKind, SamplingParams, StructuredOutputsParams

Token = Annotated[int, Field(ge=0)]
# For each unsupported feature the values that disable it.
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "none", "auto")
_NULLABLE = frozenset({"n", "stream", "echo"})
# No other fields, and no value of another type: "false" and 1 are no booleans, "0.5" no number.
_AS_GIVEN = ConfigDict(extra="forbid", strict=True)


class StreamOptions(BaseModel):
    model_config = _AS_GIVEN
    include_usage: bool = False
    include_obfuscation: bool = False


class StructuredOutputs(BaseModel):
    """vLLM's extension: one of them."""

    model_config = _AS_GIVEN
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def params(self) -> StructuredOutputsParams:
        return StructuredOutputsParams(
            json=self.json_, json_object=self.json_object, regex=self.regex, choice=self.choice, grammar=self.grammar
        )


class JSONSchema(BaseModel):
    """strict: a schema is followed in any case."""

    model_config = _AS_GIVEN
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = _AS_GIVEN
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.json_schema is None) != (self.type != "json_schema"):
            raise ValueError("response_format: json_schema is for the type json_schema, and for no other")
        return self

    def params(self) -> StructuredOutputsParams | None:
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=self.json_schema.schema_)


class _Request(BaseModel):
    """Fields that change nothing: user, metadata, store, service_tier, safety_identifier, prompt_cache_key."""

    model_config = _AS_GIVEN
    model: str
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class SamplingRequest(_Request):
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    allowed_token_ids: list[Token] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """null is the default of these, as of all that may be left out; OpenAI's client sends it for None."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name not in _NULLABLE}

    @model_validator(mode="after")
    def _check(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream=true")
        if isinstance(self.stop, list) and len(self.stop) > 16:
            raise ValueError("stop: at most 16 strings")
        if not 1 <= self.n <= 128:
            raise ValueError("n must be between 1 and 128")
        for token in self.logit_bias or {}:
            if not (token.isascii() and token.isdecimal() and len(token) < 10):
                raise ValueError(f"logit_bias: {token[:20]!r} is not a token id")
        return self

    def _given(self) -> dict[str, Any]:
        names = (
            "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "seed", "min_tokens", "stop", "stop_token_ids", "allowed_token_ids", "bad_words",
            "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "truncate_prompt_tokens",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        given["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.structured_outputs is not None:
            given["structured_outputs"] = self.structured_outputs.params()
        return given


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # a template may read more
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatCompletionRequest(SamplingRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: ResponseFormat | None = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        refuse_all(
            self, "tools", "tool_choice", "functions", "function_call", "audio", "prediction", "reasoning_effort",
            "verbosity", "web_search_options",
        )  # fmt: skip
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("response_format and structured_outputs both constrain the text; give one of them")
        if self.modalities not in (None, ["text"]):
            raise ValueError('modalities: this server supports ["text"] only')
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        return self

    def params(self) -> SamplingParams:
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        given = self._given()
        if self.response_format is not None and (structure := self.response_format.params()) is not None:
            given["structured_outputs"] = structure
        return SamplingParams(**given, max_tokens=most, logprobs=logprobs)


class CompletionRequest(SamplingRequest):
    prompt: str | list[str] | list[Token] | list[list[Token]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.suffix:
            raise ValueError("suffix: this server does not support fill-in-the-middle")
        if self.best_of not in (None, self.n):
            raise ValueError("best_of: this server returns every continuation it generates; use n")
        if not self.prompt:
            raise ValueError("prompt is empty")
        return self

    @property
    def prompt_only(self) -> bool:
        """No new tokens: the prompt is returned with its log probabilities, as programs that score texts ask for."""
        return self.echo and self.max_tokens == 0

    def prompts(self) -> list[Any]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def params(self) -> SamplingParams:
        prompt_logprobs = self.logprobs if self.echo else None
        if self.prompt_only:
            prompt_logprobs = prompt_logprobs or 0  # the engine has no new token for a prompt that it scores alone
        return SamplingParams(
            **self._given(), max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs
        )


class EmbeddingRequest(_Request):
    input: str | list[str] | list[Token] | list[list[Token]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    def inputs(self) -> list[Any]:
        if not self.input:
            raise ValueError("input is empty")
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return list(self.input)


def refuse_all(request: BaseModel, *names: str) -> None:
    for name in names:
        if getattr(request, name) not in _NOTHING:
            raise ValueError(f"{name}: this server does not support it; leave it out")
