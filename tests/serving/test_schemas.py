"""Every field of a request reaches the sampling parameters, or is refused by name."""

from __future__ import annotations

import json

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import ValidationError

from easytorch.generation.engine import EngineStats, RequestOutputKind, SamplingParams
from easytorch.serving import metrics
from easytorch.serving.errors import APIError, add_handlers
from easytorch.serving.schemas import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, SamplingRequest
from easytorch.serving.token_bytes import token_bytes

# None of them a default of SamplingParams.
GIVEN = {
    "n": 2, "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "presence_penalty": 1.5, "stop": ["a", "b"],
    "frequency_penalty": -0.5, "repetition_penalty": 1.25, "logit_bias": {"5": 3.0, "7": -2.0}, "seed": 11,
    "min_tokens": 3, "stop_token_ids": [4, 6], "include_stop_str_in_output": True, "ignore_eos": True,
    "skip_special_tokens": False, "allowed_token_ids": [5, 7], "bad_words": ["a"],
    "truncate_prompt_tokens": 5,
}  # fmt: skip
STREAMED = {"stream", "stream_options", "structured_outputs"}
CHAT = {"model": "small", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "small", "prompt": "x"}


def expected(name):
    return {int(key): value for key, value in GIVEN[name].items()} if name == "logit_bias" else GIVEN[name]


@pytest.mark.parametrize(("kind", "least"), [(ChatCompletionRequest, CHAT), (CompletionRequest, TEXT)])
def test_every_field_reaches_the_sampling_parameters(kind, least):
    own = set(SamplingRequest.model_fields) - set(EmbeddingRequest.model_fields) - STREAMED
    assert own == GIVEN.keys(), "a new field: give it a value here"
    plain = kind(**least).params()
    longest = None if kind is ChatCompletionRequest else 16
    assert plain == SamplingParams(max_tokens=longest, output_kind=RequestOutputKind.FINAL_ONLY)
    streamed = kind(**least, stream=True).params()
    assert streamed == SamplingParams(max_tokens=longest, output_kind=RequestOutputKind.DELTA)
    for name in GIVEN:
        made = kind(**least, **{name: GIVEN[name]}, **({"max_tokens": 9} if name == "min_tokens" else {})).params()
        changed = {key for key in vars(plain) if getattr(made, key) != getattr(plain, key)}
        also = {"min_tokens": {"max_tokens"}, "stop": {"stop_strings"}}.get(name, set())
        assert changed - also == {name} and getattr(made, name) == expected(name)
    made = kind(**least, **GIVEN, max_tokens=9).params()
    assert {name: getattr(made, name) for name in GIVEN} == {name: expected(name) for name in GIVEN}
    assert made.max_tokens == 9


def test_lengths_and_logprobs_of_a_conversation():
    assert ChatCompletionRequest(**CHAT, max_completion_tokens=5).params().max_tokens == 5
    assert ChatCompletionRequest(**CHAT, max_completion_tokens=5, max_tokens=5).params().max_tokens == 5
    for given, found in (({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)):
        assert ChatCompletionRequest(**CHAT, **given).params().logprobs == found
    assert ChatCompletionRequest(**CHAT, logprobs=False).params().logprobs is None
    assert CompletionRequest(**TEXT, logprobs=3).params().logprobs == 3
    assert CompletionRequest(**TEXT).max_tokens == 16


def test_structures():
    schema = {"type": "integer"}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for given, name, value in (
        ({"structured_outputs": {"json": schema}}, "json", schema),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": "start: a"}}, "grammar", "start: a"),
        ({"response_format": named}, "json", schema),
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_object", True),
    ):
        assert getattr(ChatCompletionRequest(**CHAT, **given).params().structured_outputs, name) == value
    assert ChatCompletionRequest(**CHAT, response_format={"type": "text"}).params().structured_outputs is None


REFUSED = [
    ({"stream_options": {}}, "stream_options requires stream=true"),
    ({"stop": ["a"] * 17}, "stop: at most 16 strings"),
    ({"n": 129}, "n must be between 1 and 128"),
    ({"n": 0}, "n must be between 1 and 128"),
    ({"n": 1.0}, "n"),
    ({"top_k": True}, "top_k"),
    ({"logit_bias": {"-1": 1.0}}, "'-1' is not a token id"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1.0]}, "stop_token_ids"),
    ({"more": 1}, "more"),
    ({"stream": True, "stream_options": {"more": 1}}, "more"),
]
REFUSED_CHATS = [
    *(({name: [1]}, f"{name}: this server does not support it") for name in (
        "tools", "tool_choice", "functions", "function_call", "audio", "prediction", "reasoning_effort", "verbosity",
        "web_search_options",
    )),
    ({"modalities": ["audio"]}, "modalities"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "both constrain the text"),
    ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "json_schema is for"),
    ({"response_format": {"type": "json_object", "more": 1}}, "more"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs requires"),
]  # fmt: skip
REFUSED_TEXTS = [
    ({"suffix": "a"}, "suffix"), ({"n": 2, "best_of": 1}, "best_of"),
    ({"prompt": ""}, "prompt is empty"), ({"prompt": []}, "prompt is empty"), ({"prompt": [1.5]}, "prompt"),
]  # fmt: skip


def test_what_is_no_request_is_refused_by_name():
    for kind, least, cases in (
        (ChatCompletionRequest, CHAT, REFUSED + REFUSED_CHATS),
        (CompletionRequest, TEXT, REFUSED + REFUSED_TEXTS),
    ):
        for given, match in cases:
            with pytest.raises(ValidationError, match=match):
                kind(**{**least, **given})


def test_the_ends_of_requests_and_what_asks_for_nothing_are_taken():
    for name in ("tools", "tool_choice", "functions", "audio", "prediction"):
        for nothing in (None, False, [], {}, "none", "auto"):
            ChatCompletionRequest(**CHAT, **{name: nothing})
    ChatCompletionRequest(**CHAT, modalities=["text"])
    assert CompletionRequest(**TEXT, echo=True).echo and CompletionRequest(**TEXT, logprobs=0).params().logprobs == 0
    assert CompletionRequest(**TEXT, n=128, stop=["a"] * 16, best_of=128).n == 128
    assert CompletionRequest(**TEXT, stream=True, stream_options={"include_usage": True}).stream_options.include_usage


def test_null_is_the_default_of_what_may_be_left_out():
    given = CompletionRequest(**TEXT)
    for name in CompletionRequest.model_fields.keys() - {"model", "prompt", "max_tokens"}:
        assert CompletionRequest(**TEXT, **{name: None}) == given, name
    with pytest.raises(ValueError, match="model"):
        CompletionRequest(**TEXT | {"model": None})


def test_one_prompt_or_several():
    for kind, name, method in ((CompletionRequest, "prompt", "prompts"), (EmbeddingRequest, "input", "inputs")):
        for given, found in (
            ("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]),
        ):  # fmt: skip
            assert getattr(kind(model="small", **{name: given}), method)() == found
    with pytest.raises(ValueError, match="input is empty"):
        EmbeddingRequest(model="small", input=[]).inputs()


def test_kinds_of_errors_and_their_headers():
    kinds = {
        400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error",
        499: "invalid_request_error", 500: "server_error", 503: "server_error",
    }  # fmt: skip
    for status, kind in kinds.items():
        error = APIError(status, "why", param="p", code="c")
        assert error.body() == {"error": {"message": "why", "type": kind, "param": "p", "code": "c"}}
        response = error.response()
        assert response.status_code == status and response.headers["content-type"] == "application/json"
        assert response.headers.get("retry-after") == ("1" if status == 429 else None)
        assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


def test_what_goes_wrong_in_a_request_has_that_body_and_names_the_field():
    app = FastAPI()
    add_handlers(app)

    @app.post("/text")
    async def answer(request: CompletionRequest) -> None:
        errors = {"api": APIError(429, "full", code="c"), "key": KeyError("x"), "deep": RecursionError("too deep")}
        raise errors[str(request.prompt)]

    client = TestClient(app, raise_server_exceptions=False)
    headers = {"Content-Type": "application/json"}
    for content, status, message, param in (
        (json.dumps(TEXT | {"prompt": "api"}), 429, "full", None),
        (json.dumps(TEXT | {"prompt": "key"}), 500, "the server failed (KeyError); see its log", None),
        (json.dumps(TEXT | {"prompt": "deep"}), 500, "the server failed (RecursionError); see its log", None),
        ("{", 400, "the body is not JSON: ", None),
        (json.dumps(TEXT | {"temprature": 1}), 400, "unrecognized argument: temprature", "temprature"),
        (json.dumps(TEXT | {"n": 0}), 400, "n must be between 1 and 128", None),
        (json.dumps(TEXT | {"seed": "x"}), 400, "seed: Input should be a valid integer", "seed"),
        (json.dumps({"prompt": "x"}), 400, "model: Field required", "model"),
    ):
        answered = client.post("/text", content=content, headers=headers)
        error = answered.json()["error"]
        assert (answered.status_code, error["param"]) == (status, param), content
        assert error["message"].startswith(message) and "Value error" not in error["message"]
    assert client.get("/none").json()["error"]["message"] == "GET /none: Not Found"
    assert client.get("/text").status_code == 405
    error = APIError(429, "full")
    assert (error.status_code, error.detail, str(error)) == (429, "full", "429: full")


def test_every_count_of_the_engine_is_a_metric():
    names = list(EngineStats.__dataclass_fields__)
    stats = EngineStats(**{name: 100 + place for place, name in enumerate(names)})
    said = metrics.text(stats, {("/b", 200): 2, ("/a", 400): 1})
    values = {line.rsplit(" ", 1)[0]: line.rsplit(" ", 1)[1] for line in said.splitlines() if line[0] != "#"}
    shown = {field: values[f"easytorch_{name}"] for name, (_, _, field) in metrics._ENGINE_METRICS.items()}
    assert shown == {name: str(getattr(stats, name)) for name in names}
    assert [line for line in said.splitlines() if "path=" in line] == [
        'easytorch_http_requests_total{path="/a",status="400"} 1',
        'easytorch_http_requests_total{path="/b",status="200"} 2',
    ]
    assert said.count("# TYPE") == said.count("# HELP") == len(values) - 1 and said.endswith("\n")
    assert "counter" in said.split("# TYPE easytorch_steps_total ")[1][:8] and "easytorch_" in metrics.text(None, {})


def test_the_bytes_of_a_token_of_part_of_a_character():
    class Named:
        def convert_ids_to_tokens(self, token):
            return ["<0xE2>", "âĤ", "\ufffd", "ab"][token]

    broken = "\ufffd"
    assert [token_bytes(Named(), token, broken) for token in range(3)] == [[0xE2], [0xE2, 0x82], list(broken.encode())]
    assert token_bytes(Named(), 3, "ab") == [97, 98]
