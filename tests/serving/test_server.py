"""The server by the real `openai` client, over HTTP."""

from __future__ import annotations

import asyncio
import copy
import json
import socket

import openai
import pytest
import tokenizers
import torch

from easytorch.generation.engine import LLM, Engine, SamplingParams, StructuredOutputsParams
from easytorch.serving.app import create_app
from easytorch.serving.chat import chat_prompt
from easytorch.serving.errors import APIError
from easytorch.serving.limits import Limits
from easytorch.serving.schemas import Message
from tests.serving.conftest import serving

KEY = "a secret"
MESSAGES = [{"role": "developer", "content": "the class"}, {"role": "user", "content": "binds a name"}]


@pytest.fixture(scope="module")
def address(model, tokenizer):
    engine = Engine(model, tokenizer, max_memory=1 << 21)
    with serving(create_app("small", engine=engine, api_key=KEY, max_body=20_000)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(address):
    # no proxy of the environment: the server is on this machine
    http = openai.DefaultHttpxClient(trust_env=False, timeout=300)
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, http_client=http)


@pytest.fixture(scope="module")
def expected(model, tokenizer):
    llm = LLM(model, tokenizer, max_memory=1 << 21)
    return lambda prompt, **params: llm.generate(prompt, SamplingParams(**params))[0].outputs


def test_models(client):
    assert [one.id for one in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "easytorch"
    with pytest.raises(openai.NotFoundError, match="the model 'large' is not served here; 'small' is"):
        client.models.retrieve("large")


def test_chat(client, expected, tokenizer):
    text = "system: the class\nuser: binds a name\nassistant:"
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    right = expected(prompt, temperature=0.8, seed=5, max_tokens=12, n=2)
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, temperature=0.8, seed=5, max_tokens=12, n=2
    )
    assert [one.message.content for one in answer.choices] == [one.text for one in right]
    assert [one.finish_reason for one in answer.choices] == [one.finish_reason for one in right]
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(prompt), "once, for both continuations"
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in right)
    parts = [{"type": "text", "text": "binds "}, {"type": "text", "text": "a name"}]
    same = client.chat.completions.create(
        model="small", messages=[MESSAGES[0], {"role": "user", "content": parts}], temperature=0.8, seed=5,
        max_completion_tokens=12, user="somebody", metadata={"some": "thing"},
    )  # fmt: skip
    assert same.choices[0].message.content == right[0].text


def test_a_chat_stream_joins_to_the_answer(client):
    settings = {"model": "small", "messages": MESSAGES, "temperature": 0.9, "seed": 3, "max_tokens": 15, "n": 2}
    settings |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**settings)
    texts, logprobs, reasons, usage = {}, {}, {}, None
    for chunk in client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        assert chunk.object == "chat.completion.chunk"
        assert "usage" in chunk.model_fields_set and (chunk.usage is None) == bool(chunk.choices), (
            "null before the last"
        )
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.index not in texts:
                assert choice.delta.role == "assistant"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.content if choice.logprobs else [])
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content and reasons[choice.index] == choice.finish_reason
        assert len(choice.logprobs.content) == len(logprobs[choice.index])
        for one, same in zip(choice.logprobs.content, logprobs[choice.index], strict=True):
            assert one.token == same.token and len(one.top_logprobs) == 2
            assert one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob
            assert one.logprob <= one.top_logprobs[0].logprob
    # the second time the prompt's pages are there
    assert usage.total_tokens == whole.usage.total_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 16


def test_the_bytes_of_tokens_join_to_the_text(client):
    """Those of a character that is several tokens too, each of which is no text by itself."""
    more = {"structured_outputs": {"choice": ["a 日本 👍 é"]}}
    chat = client.chat.completions.create(
        model="small", messages=MESSAGES, logprobs=True, top_logprobs=1, max_tokens=40, extra_body=more
    )
    tokens = chat.choices[0].logprobs.content
    joined = b"".join(bytes(one.bytes) for one in tokens if one.token != "<|endoftext|>")
    assert any("\ufffd" in one.token for one in tokens)
    assert joined.decode() == chat.choices[0].message.content == "a 日本 👍 é"


def test_completions(client, expected, tokenizer):
    prompts = ["the class", "binds a name to"]
    answer = client.completions.create(model="small", prompt=prompts, temperature=0, max_tokens=8, logprobs=1, n=1)
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        right = expected(prompt, temperature=0, max_tokens=8, logprobs=1)[0]
        assert choice.text == right.text and choice.finish_reason == right.finish_reason
        values = [given[token].logprob for token, given in zip(right.token_ids, right.logprobs, strict=True)]
        assert choice.logprobs.token_logprobs == pytest.approx(values, abs=1e-4)
        assert choice.logprobs.text_offset[0] == 0 and len(choice.logprobs.top_logprobs) == len(values)
    assert answer.usage.prompt_tokens == sum(len(tokenizer(one)["input_ids"]) for one in prompts)
    tokens = tokenizer(prompts[0])["input_ids"]
    again = client.completions.create(model="small", prompt=tokens, temperature=0, max_tokens=8, echo=True)
    assert again.choices[0].text == prompts[0] + answer.choices[0].text
    pieces = client.completions.create(
        model="small", prompt=[tokens, tokens], temperature=0, max_tokens=8, echo=True, stream=True
    )
    texts = {}
    for chunk in pieces:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {0: again.choices[0].text, 1: again.choices[0].text}


def test_an_echo_has_the_log_probabilities_of_the_prompt(client, expected, model, tokenizer):
    """As programs that score texts read them; with no new token, whole and as a stream."""
    prompts = ["the class", "binds a name to"]
    asked = {"model": "small", "prompt": prompts, "temperature": 0, "logprobs": 2, "echo": True}
    whole = client.completions.create(**asked, max_tokens=4)
    alone = client.completions.create(**asked, max_tokens=0)
    pieces = {0: [[], [], []], 1: [[], [], []]}
    for chunk in client.completions.create(**asked, max_tokens=4, stream=True):
        for choice in chunk.choices:
            tokens, values, offsets = pieces[choice.index]
            tokens += choice.logprobs.tokens
            values += choice.logprobs.token_logprobs
            offsets += choice.logprobs.text_offset
    for index, prompt in enumerate(prompts):
        right = expected(prompt, temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)[0]
        choice, only = whole.choices[index], alone.choices[index]
        assert choice.text == prompt + right.text and only.text == prompt and only.finish_reason == "length"
        given = tokenizer(prompt)["input_ids"]
        found = choice.logprobs
        assert pieces[index] == [found.tokens, found.token_logprobs, found.text_offset]
        assert "".join(found.tokens[: len(given)]) == prompt and len(found.tokens) == len(given) + 4
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert found.text_offset == [len("".join(found.tokens[:place])) for place in range(len(found.tokens))]
        assert only.logprobs.tokens == found.tokens[: len(given)]
        assert only.logprobs.token_logprobs[1:] == pytest.approx(found.token_logprobs[1 : len(given)], abs=1e-4)
        assert all(value is not None and value < 0 for value in found.token_logprobs[1:])
    longest = [5 + place % 90 for place in range(model.config.max_position_embeddings)]
    for logprobs in (2, None):
        full = client.completions.create(model="small", prompt=longest, max_tokens=0, echo=True, logprobs=logprobs)
        assert full.choices[0].finish_reason == "length" and full.usage.completion_tokens == 0
        assert logprobs is None or len(full.choices[0].logprobs.tokens) == len(longest)
        assert logprobs is not None or full.choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match=f"a request at most {len(longest)}"):
        client.completions.create(model="small", prompt=[*longest, 5], max_tokens=0, echo=True)
    assert alone.usage.completion_tokens == 0 and alone.usage.prompt_tokens == whole.usage.prompt_tokens


def test_an_echo_is_the_prompt_as_far_as_it_is_kept(model, tokenizer):
    """The given text where nothing is cut, without what the tokenizer puts before it; else the text of what is left."""
    begins = copy.deepcopy(tokenizer)
    begins._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokens = begins("the class")["input_ids"]
    assert tokens[0] == 0 and begins.decode(tokens) != "the class"
    engine = Engine(model, begins, max_memory=1 << 21)
    with serving(create_app("small", engine=engine)) as (url, _):
        http = openai.DefaultHttpxClient(trust_env=False, timeout=300)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
        for most, kept in ((None, tokens), (-1, tokens), (len(tokens), tokens), (2, tokens[-2:])):
            expected = "the class" if kept == tokens else begins.decode(kept)
            asked = {"model": "small", "prompt": "the class", "echo": True, "logprobs": 0, "max_tokens": 0}
            answer = client.completions.create(**asked, extra_body={"truncate_prompt_tokens": most})
            assert answer.choices[0].text == expected, most
            assert answer.usage.prompt_tokens == len(answer.choices[0].logprobs.tokens) == len(kept)


def test_tokens_that_the_model_rules_out(model, tokenizer):
    """JSON has no infinity: it was an error of the client's, and in a stream no JSON."""
    ruled_out = copy.deepcopy(model)
    never = torch.zeros(len(tokenizer)).index_fill(0, torch.tensor([7]), float("-inf"))
    ruled_out.lm_head.bias = torch.nn.Parameter(never)
    engine = Engine(ruled_out, tokenizer, max_memory=1 << 21)
    with serving(create_app("small", engine=engine)) as (url, _):
        http = openai.DefaultHttpxClient(trust_env=False, timeout=300)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
        asked = {"model": "small", "prompt": [5, 7, 9], "echo": True, "logprobs": 1, "max_tokens": 0}
        (whole,) = client.completions.create(**asked).choices
        (piece, *_) = [one for chunk in client.completions.create(**asked, stream=True) for one in chunk.choices]
    for found in (whole.logprobs, piece.logprobs):
        assert found.token_logprobs[1] == found.top_logprobs[1][found.tokens[1]] == -9999.0
        assert found.token_logprobs[2] > -9999.0


def test_a_stream_of_completions_joins_to_the_answer(client):
    """Two prompts with two continuations each: every choice in its place, and offsets that go on."""
    settings = {"model": "small", "prompt": ["the class", "binds a name to"], "n": 2, "temperature": 0.8, "seed": 3}
    settings |= {"max_tokens": 9, "logprobs": 1}
    whole = client.completions.create(**settings)
    assert [one.index for one in whole.choices] == [0, 1, 2, 3]
    found = {}
    for chunk in client.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            text, offsets, tokens = found.setdefault(choice.index, ([], [], []))
            text.append(choice.text)
            offsets += choice.logprobs.text_offset
            tokens += choice.logprobs.tokens
    for choice in whole.choices:
        text, offsets, tokens = found[choice.index]
        assert ("".join(text), tokens) == (choice.text, choice.logprobs.tokens)
        assert offsets == choice.logprobs.text_offset == [len("".join(tokens[:place])) for place in range(len(tokens))]


def test_stop_strings_end_the_text(client):
    settings = {"model": "small", "prompt": "the class", "temperature": 0, "max_tokens": 40}
    whole = client.completions.create(**settings).choices[0].text
    stop = whole[5:8]
    cut = whole.index(stop)
    answer = client.completions.create(**settings, stop=[stop, "not there"]).choices[0]
    assert (answer.text, answer.finish_reason) == (whole[:cut], "stop")
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**settings, stop=stop, stream=True)]
    assert "".join(pieces) == whole[:cut], "nothing of the stop string was shown"
    kept = client.completions.create(**settings, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == whole[: cut + len(stop)]


def test_vllm_s_parameters(client, expected):
    more = {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2, "ignore_eos": True, "min_tokens": 2}
    answer = client.completions.create(model="small", prompt="the", seed=2, max_tokens=9, extra_body=more)
    assert answer.choices[0].text == expected("the", seed=2, max_tokens=9, **more)[0].text


def test_structured_outputs(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    settings = {"model": "small", "messages": MESSAGES, "max_tokens": 80, "seed": 1}
    answer = client.chat.completions.create(**settings, response_format=form, n=4).choices
    complete = [json.loads(one.message.content) for one in answer if one.finish_reason == "stop"]
    assert complete and all(one in ({"a": 1}, {"a": 2}) for one in complete)
    more = {"structured_outputs": {"choice": ["yes", "no"]}}
    pieces = client.completions.create(model="small", prompt="the", stream=True, extra_body=more)
    assert "".join(chunk.choices[0].text for chunk in pieces) in ("yes", "no")
    words = client.chat.completions.create(**settings, response_format={"type": "text"}, temperature=0)
    assert (
        words.choices[0].message.content
        == client.chat.completions.create(**settings, temperature=0).choices[0].message.content
    )
    begun = (
        client.chat.completions.create(**settings, response_format={"type": "json_object"}).choices[0].message.content
    )
    assert begun.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1}, "temperature=-1.0 must be finite"),
        ({"top_p": 0}, "top_p=0.0 must be above 0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 500}, "max_tokens=500 follow, which is more than the 128"),
        ({"messages": [{"role": "user", "content": "the class " * 200}]}, "a request at most 128"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the chat template refuses these messages: no tools here"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "'image_url': only text is supported",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: this server does not support it"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is for the type json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
            "the structured output cannot be compiled: Invalid type: nope",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "(("}}}, "unclosed group"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "given: regex, choice"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}, "min_tokens": 2}}, "leave min_tokens out"),
        ({"logit_bias": {"x": 1}}, "logit_bias: 'x' is not a token id"),
        ({"logit_bias": {"100000": 1}}, "logit_bias has token 100000"),
        ({"stop": [""]}, "none of them empty"),
        ({"n": 0}, "n must be between 1 and 128"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens and max_completion_tokens differ; give one"),
        ({"top_logprobs": 2}, "top_logprobs requires logprobs=true"),
        ({"logprobs": True, "top_logprobs": 50}, "logprobs=50 must be at most 20"),
        ({"extra_body": {"temprature": 1}}, "unrecognized argument: temprature"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}}, "'chat_template' cannot be set"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "'tokenize' cannot be set"),
        ({"extra_body": {"seed": "x"}}, "seed: Input should be a valid integer"),
        ({"extra_body": {"temperature": "0.5"}}, "temperature: Input should be a valid number"),
        ({"extra_body": {"top_p": True}}, "top_p: Input should be a valid number"),
        ({"extra_body": {"ignore_eos": "false"}}, "ignore_eos: Input should be a valid boolean"),
        ({"logit_bias": {"1" * 5000: 1}}, "is not a token id"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_400_and_say_why(change, message, stream, client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": "small", "messages": MESSAGES, "stream": stream} | change)
    assert message in error.value.body["message"]
    assert error.value.body["type"] == "invalid_request_error"
    assert "Traceback" not in error.value.response.text


def test_the_other_errors_have_openai_s_body(client, address):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="large", messages=MESSAGES)
    assert error.value.body["code"] == "model_not_found"
    with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="small generates text and has no embeddings"):
        client.embeddings.create(model="small", input="x")
    http = client._client
    headers = {"Authorization": f"Bearer {KEY}"}
    post = lambda content, **more: http.post(  # noqa: E731
        f"{address}/v1/completions", content=content, headers=headers | {"Content-Type": "application/json"} | more
    )
    for content, status, message in (
        (b'{"model": "small", ', 400, "the body is not JSON"),
        (b"[" * 5000, 400, ""),
        (b"\xff\xfe", 400, ""),
        (b"", 400, ""),
        (b'"text"', 400, ""),
        (b'{"model": "small", "prompt": "\\ud800"}', 400, "lone surrogate"),
        (b'{"model": "\\ud800", "prompt": "x"}', 404, "is not served here"),
        (b'{"model": "small", "prompt": "x", "\\ud800": 1}', 400, ""),
        (b'{"model": "small", "prompt": "x", "temperature": NaN}', 400, "temperature=nan must be a number"),
        (b'{"model": "small", "prompt": "x", "temperature": 1e999}', 400, "must be finite"),
        (b'{"model": "small", "prompt": [-1]}', 400, ""),
        (b'{"model": "small", "prompt": [99999999]}', 400, "token 99999999"),
        (b'{"model": "small", "prompt": []}', 400, "prompt is empty"),
        (b'{"model": "small", "prompt": "x", "max_tokens": 0}', 400, "max_tokens=0"),
        (b'{"model": "small", "prompt": "x", "n": 2, "best_of": 3}', 400, "best_of"),
        (b'{"model": "small", "prompt": ["x", ""]}', 400, "the prompt has no tokens"),
        (b'{"model": "small", "prompt": [99999999999], "echo": true}', 400, "token 99999999999"),
        (b'{"model": "small", "prompt": "x", "stream": "no"}', 400, "stream: Input should be a valid boolean"),
        (
            b'{"model": "small", "prompt": ["x"' + b', "x"' * 20 + b'], "n": 100}',
            400,
            "are 2100 requests, and the limit",
        ),
        (b" " * 20_001, 413, "larger than the 20000 bytes"),
    ):
        answer = post(content)
        assert answer.status_code == status, (content[:40], answer.text)
        assert message in answer.json()["error"]["message"], answer.text
    chunks = (b" " * 5000 for _ in range(5))  # its length is not said before
    assert post(chunks).status_code == 413
    assert http.get(f"{address}/v1/nothing", headers=headers).json()["error"]["type"] == "not_found_error"
    assert http.get(f"{address}/v1/completions", headers=headers).status_code == 405
    form = http.post(f"{address}/v1/completions", data='{"model": "small"}', headers=headers)  # as curl -d sends it
    assert form.status_code == 415 and "Content-Type: application/json" in form.json()["error"]["message"]


def test_health_and_metrics(client, address):
    assert client._client.get(f"{address}/health").json() == {"status": "ok"}, "without a key"
    assert client._client.get(f"{address}/metrics").status_code == 401
    client.completions.create(model="small", prompt="the", max_tokens=3)
    client._client.get(f"{address}/made-up", headers={"Authorization": f"Bearer {KEY}"})
    lines = client._client.get(f"{address}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert int(values["easytorch_generated_tokens_total"]) > 0
    assert values["easytorch_pages_free"] == values["easytorch_pages"] and values["easytorch_requests_running"] == "0"
    assert int(values['easytorch_http_requests_total{path="/v1/completions",status="200"}']) > 0
    assert "made-up" not in "".join(values), "nobody can add names"
    assert int(values['easytorch_http_requests_total{path="other",status="404"}']) > 0


def test_what_is_nested_too_deeply_is_said_where_it_is_read(tokenizer):
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    loose = copy.copy(tokenizer)
    loose.chat_template = "{{ given | tojson }}"
    with pytest.raises(APIError, match="messages or chat_template_kwargs are nested too deeply"):
        chat_prompt(loose, [Message(role="user", content="x")], {"given": deep})
    for schema in ("[" * 5000, {"enum": deep}):
        with pytest.raises(ValueError, match="the JSON schema is nested too deeply"):
            StructuredOutputsParams(json=schema)


def test_a_conversation_has_the_special_tokens_of_its_template_alone():
    class Tokenizer:
        chat_template = "given"

        def apply_chat_template(self, conversation, tokenize, add_generation_prompt):
            return f"<s>{conversation[0]['content']}"

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [1] * add_special_tokens + [len(text)]}

    assert chat_prompt(Tokenizer(), [Message(role="user", content="hello")], None) == [8]


@pytest.mark.parametrize("length", [b"x", b"-5", b"20001"])
def test_a_length_that_is_none_is_refused_unread(length):
    sent = []

    async def send(message):
        sent.append(message)

    async def reached(*_):
        raise AssertionError("the application was reached")

    scope = {"type": "http", "path": "/v1/models", "headers": [(b"content-length", length)]}
    asyncio.run(Limits(reached, api_key=None, max_body=20_000)(scope, None, send))
    assert sent[0]["status"] == 413


@pytest.mark.parametrize(("path", "key", "status"), [("/v1/completions", KEY, 413), ("/v1/models", "wrong", 401)])
def test_an_answer_is_not_lost_while_its_body_arrives(path, key, status, address):
    """A connection that is closed while bytes arrive is reset, and its answer lost."""
    host, port = address.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.0\r\nAuthorization: Bearer {key}\r\nContent-Length: 20000000\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + b" " * 20_000_000)
        assert connection.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())
