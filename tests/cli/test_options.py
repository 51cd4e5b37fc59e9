"""Every option of a command reaches what carries it out: the defaults, and each option alone."""

from __future__ import annotations

import importlib
import inspect
import json
import threading
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from easytorch.bridge.jobs.report import ConversionReport
from easytorch.cli.main import app
from easytorch.cli.serve import in_thread_of_its_own

REPORT = {"destination": "b", "tensors": 1, "bytes": 2, "target_format": "flax", "seconds": 0.1}
CONVERT = {
    ("--dtype", "bf16"): ("dtype", "bf16"),
    ("--max-shard-size", "3MB"): ("max_shard_size", "3MB"),
    ("--verify",): ("verify", True),
    ("--resume",): ("resume", True),
    ("--from", "maxtext"): ("scheme", "maxtext"),
    ("--config", "c"): ("config", "c"),
    ("--step", "7"): ("step", 7),
    ("--params-key", "ema"): ("params_key", "ema"),
    ("--rules", "t.py"): ("rules", "t.py"),
    ("--drop", "a", "--drop", "b*"): ("drop", ("a", "b*")),
}
DIFF = {
    ("--tolerance", "0.5"): ("tolerance", 0.5),
    ("--config", "c"): ("config", "c"),
    ("--rules", "t.py"): ("rules", "t.py"),
}
GENERATE = {
    ("--max-new-tokens", "3"): ("max_new_tokens", 3),
    ("--temperature", "0.5"): ("temperature", 0.5),
    ("--top-k", "4"): ("top_k", 4),
    ("--top-p", "0.25"): ("top_p", 0.25),
    ("--seed", "9"): ("seed", 9),
    ("--dtype", "float16"): ("dtype", torch.float16),
    ("--attn-implementation", "flash"): ("attn_implementation", "flash"),
}
SERVE = {
    ("--host", "0.0.0.0"): ("host", "0.0.0.0"),
    ("--port", "1"): ("port", 1),
    ("--api-key", "k"): ("api_key", "k"),
    ("--served-model-name", "n"): ("name", "n"),
    ("--dtype", "bfloat16"): ("dtype", torch.bfloat16),
    ("--max-memory", "0.5"): ("max_memory", 1 << 29),
    ("--max-batch-tokens", "5"): ("max_batch_tokens", 5),
    ("--max-requests", "6"): ("max_requests", 6),
    ("--max-model-length", "7"): ("max_model_length", 7),
    ("--no-prefix-reuse",): ("prefix_reuse", False),
    ("--enforce-eager",): ("enforce_eager", True),
    ("--kv-cache-dtype", "fp8"): ("kv_cache_dtype", "fp8"),
    ("--max-queue", "8"): ("max_queue", 8),
    ("--max-body", "0.5"): ("max_body", 1 << 19),
    ("--request-timeout", "1.5"): ("request_timeout", 1.5),
    ("--drain-timeout", "2"): ("drain_timeout", 2),
}


class Stop(Exception):
    """The command has called what the test looks at."""


def recorded(monkeypatch, module: str, name: str, seen: dict, result=None):
    """Puts a function in place of `module.name` that keeps its keyword arguments."""

    def called(*arguments, **keywords):
        seen.update({f"argument {place}": one for place, one in enumerate(arguments)}, **keywords)
        return result

    monkeypatch.setattr(importlib.import_module(module), name, called)


@pytest.fixture
def run(monkeypatch):
    """`run("convert", options)`: what the function that carries out the command is called with."""
    seen: dict = {}

    def of_command(command: str, *options: str) -> dict:
        seen.clear()
        arguments = {
            "convert": ["a", "b", "--to", "flax"],
            "diff": ["a", "b"],
            "generate": ["m", "--prompt", "x"],
            "serve": ["m"],
        }[command]
        found = CliRunner().invoke(app, [command, *arguments, *options])
        assert found.exit_code == 0, found.output + repr(found.exception)
        return dict(seen)

    recorded(monkeypatch, "easytorch.bridge.convert", "convert", seen, SimpleNamespace(
        **REPORT, verified=False, outputs_difference=None, kept=(), tied=(), notes=(), to_dict=lambda: REPORT
    ))  # fmt: skip
    same = SimpleNamespace(
        same=True,
        compared=1,
        only_first=(),
        only_second=(),
        differing=(),
        notes=(),
        to_dict=lambda: {"x": float("inf")},
    )
    recorded(monkeypatch, "easytorch.bridge.diff", "diff", seen, same)
    model = SimpleNamespace(to=lambda place: model, eval=lambda: model, config=SimpleNamespace(architectures=["X"]))
    info = {"missing_keys": ()}

    def loads(name, **keywords):
        seen.update(keywords)
        return model, info

    easytorch = importlib.import_module("easytorch")
    monkeypatch.setattr(easytorch.AutoModelForCausalLM, "from_pretrained", loads)
    monkeypatch.setattr("easytorch.auto.tokenizer.load_tokenizer", lambda name: "tokenizer")
    recorded(monkeypatch, "easytorch.generation.text", "stream_tokens", seen, [1, 2])
    monkeypatch.setattr("easytorch.generation.text.decode_incrementally", lambda tokenizer, ids: (str(i) for i in ids))
    config = SimpleNamespace(architectures=["XForCausalLM"], is_encoder_decoder=False, model_type="x")
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda name: config)
    recorded(monkeypatch, "easytorch.generation.engine", "Engine", seen)

    def create_app(name, **keywords):
        seen.update(keywords, name=name)

    def make_server(app, host, port, **keywords):
        seen.update(keywords, host=host, port=port)
        return SimpleNamespace(run=lambda: seen.update(ran=True))

    pytest.importorskip("fastapi")
    monkeypatch.setattr("easytorch.serving.app.create_app", create_app)
    monkeypatch.setattr("easytorch.serving.run.make_server", make_server)
    monkeypatch.delenv("EASYTORCH_API_KEY", raising=False)
    return of_command


@pytest.mark.parametrize(
    ("command", "options"), [("convert", CONVERT), ("diff", DIFF), ("generate", GENERATE), ("serve", SERVE)]
)
def test_each_option_alone_changes_its_own_argument(command, options, run):
    plain = run(command)
    plain.pop("progress", None)
    for given, (name, value) in options.items():
        found = run(command, *given)
        found.pop("progress", None)
        changed = {key for key in {*found, *plain} if found.get(key) != plain.get(key)}
        assert changed == {name} and found[name] == value, given
    function = importlib.import_module(f"easytorch.cli.{command}").command
    known = {flag.lstrip("-").removeprefix("no-").replace("-", "_") for given in options for flag in given[:1]}
    rest = {"source", "destination", "to", "as_json", "first", "second", "model", "prompt", "device", "scheme"}
    assert set(inspect.signature(function).parameters) - rest == known - {"from"}, "a new option: try it here"


def test_the_defaults_are_those_documented(run):
    found = run("convert")
    assert (found["argument 0"], found["argument 1"], found["to"], found["max_shard_size"]) == ("a", "b", "flax", "5GB")
    assert (found["verify"], found["resume"], found["drop"], found["dtype"]) == (False, False, (), None)
    assert run("diff")["tolerance"] == 0.0
    found = run("generate")
    assert (found["argument 2"], found["max_new_tokens"], found["temperature"]) == ("x", 128, 0.0)
    assert (found["top_k"], found["top_p"], found["seed"], found["dtype"]) == (None, None, None, "auto")
    assert "attn_implementation" not in found
    found = run("serve")
    assert (found["host"], found["port"], found["name"], found["api_key"]) == ("127.0.0.1", 8000, "m", None)
    assert (found["max_memory"], found["max_batch_tokens"], found["max_requests"]) == (None, 2048, 256)
    assert (found["max_model_length"], found["prefix_reuse"], found["max_queue"]) == (None, True, 1024)
    assert (found["max_body"], found["request_timeout"], found["drain_timeout"]) == (8 << 20, 600.0, 60)
    assert found["ran"]


def test_a_key_may_stand_in_the_environment(run, monkeypatch):
    monkeypatch.setenv("EASYTORCH_API_KEY", "secret")
    assert run("serve")["api_key"] == "secret" and run("serve", "--api-key", "k")["api_key"] == "k"


def test_serve_loads_in_a_thread_that_has_ended(run, monkeypatch):
    """A pool of OpenMP threads beside the engine's would slow its steps."""
    threads = []
    here = threading.current_thread
    monkeypatch.setattr("easytorch.auto.tokenizer.load_tokenizer", lambda name: threads.append(here()))
    assert run("serve")["ran"]
    assert threads[0] is not threading.current_thread() and not threads[0].is_alive()

    def fails(name):
        raise ValueError("no tokenizer here")

    monkeypatch.setattr("easytorch.auto.tokenizer.load_tokenizer", fails)
    with pytest.raises(ValueError, match="no tokenizer here"):
        in_thread_of_its_own(lambda: fails("m"))


REFUSED = [
    ("convert", ["a", "b"], "--to"),
    ("diff", ["a", "b", "--tolerance", "-1"], "--tolerance"),
    ("generate", ["m", "-p", "x", "--dtype", "int8"], "'int8' is none of auto"),
    ("generate", ["m", "-p", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
    ("generate", ["m", "-p", "x", "--temperature", "-0.1"], "--temperature"),
    ("generate", ["m", "-p", "x", "--top-k", "0"], "--top-k"),
    ("serve", ["m", "--dtype", "int8"], "'int8' is none of auto"),
    ("serve", ["m", "--api-key", ""], "the key is empty"),
    ("serve", ["m", "--port", "65536"], "--port"),
    ("serve", ["m", "--max-requests", "0"], "--max-requests"),
    ("serve", ["m", "--max-queue", "0"], "--max-queue"),
    ("serve", ["m", "--drain-timeout", "0"], "--drain-timeout"),
    ("train", ["--processes", "0"], "--processes"),
]


@pytest.mark.parametrize(("command", "arguments", "said"), REFUSED)
def test_a_wrong_value_is_usage_and_names_the_option(command, arguments, said):
    found = CliRunner().invoke(app, [command, *arguments], env={"COLUMNS": "200"})
    assert found.exit_code == 2 and said in found.output


def test_what_cannot_be_served_is_named():
    from easytorch.cli.serve import generates

    of = lambda names, both=False: SimpleNamespace(architectures=names, is_encoder_decoder=both, model_type="t5")  # noqa: E731
    assert generates(of(["LlamaForCausalLM"])) is True and generates(of(["GPT2LMHeadModel"])) is True
    assert generates(of(["BertModel"])) is False and generates(of(None)) is False
    with pytest.raises(ValueError, match="t5 has an encoder and a decoder"):
        generates(of(["T5Model"], both=True))
    with pytest.raises(ValueError, match="LlavaForConditionalGeneration reads images beside text"):
        generates(of(["LlavaForConditionalGeneration"]))


def test_devices():
    from easytorch.cli.generate import check_causal, find_device

    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="'gpu' is not a device; give auto"):
        find_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device cuda:1: torch .* sees no GPU here; use --device cpu"):
            find_device("cuda:1")
    model = SimpleNamespace(config=SimpleNamespace(architectures=["BertForMaskedLM"], is_decoder=False))
    with pytest.raises(ValueError, match=r"m: holds BertForMaskedLM, which cannot generate: it has no 'a\.b'"):
        check_causal(model, ["b", "a.b"], "m")
    with pytest.raises(ValueError, match="it reads text in both directions"):
        check_causal(model, (), "m")
    model.config.architectures = [type(model).__name__]
    check_causal(model, (), "m")


def test_a_report_prints_all_it_has(run, monkeypatch):
    full = ConversionReport.__dataclass_fields__
    seen: dict = {}
    values = {name: f"<{name}>" for name in full} | REPORT | {
        "verified": True, "outputs_difference": 1e-7, "kept": {"k1": 1}, "tied": {"t1": 1}, "notes": ["n1", "n2"],
    }  # fmt: skip
    made = SimpleNamespace(**values, to_dict=lambda: values)
    recorded(monkeypatch, "easytorch.bridge.convert", "convert", seen, made)
    said = CliRunner().invoke(app, ["convert", "a", "b", "--to", "flax"]).output
    for word in ("b: 1 tensors", "flax", "verified", "1e-07", "k1", "t1", "note: n1", "note: n2"):
        assert word in said
    said = CliRunner().invoke(app, ["convert", "a", "b", "--to", "flax", "--json"]).output
    assert json.loads(said) == json.loads(json.dumps(values))


def test_differences_are_exit_code_1_and_json_has_no_infinity(run, monkeypatch):
    said = CliRunner().invoke(app, ["diff", "a", "b", "--json"])
    assert json.loads(said.output) == {"x": "Infinity"} and said.exit_code == 0
    info = SimpleNamespace(shape=(2,), dtype="float32"), SimpleNamespace(shape=(3,), dtype="float16")
    found = SimpleNamespace(
        same=False, compared=4, only_first=["f"], only_second=["s"], first="A", second="B", notes=["why"],
        differing=[SimpleNamespace(name="d", first=info[0], second=info[1], max_abs=0.5, max_rel=0.25)],
    )  # fmt: skip
    recorded(monkeypatch, "easytorch.bridge.diff", "diff", {}, found)
    said = CliRunner().invoke(app, ["diff", "a", "b"])
    assert said.exit_code == 1
    assert said.output.splitlines() == [
        "- f", "+ s",
        "~ d  shape (2,) against (3,), float32 against float16, max abs 0.5, max relative 0.25",
        "note: why", "4 tensors in both, 1 differ; 1 only in A, 1 only in B",
    ]  # fmt: skip
