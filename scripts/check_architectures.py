"""Every model type of the installed transformers, small and with random weights: our auto classes against its own.

    python scripts/check_architectures.py --out build/architectures.jsonl --markdown docs/architectures.md
    python scripts/check_architectures.py --types t5,gemma3          # some of them, printed
    python scripts/check_architectures.py --sample 12 --seed 3       # some of them, drawn

A type is built from its own config made small (easytorch/auto/tiny.py), by `easytorch.AutoModel*` and by
`transformers.AutoModel*` with the same weights, and both are run without a mask, with padding on either side, with 4D
masks, token by token through caches, backwards, and by `generate`. One process does the work and is replaced when a
type takes too long or too much memory. What --out already holds is not done again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import multiprocessing
import random
import re
import resource
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MEMORY = 5 << 30
# What generates is tried first, then what stands for the type in general, then whatever there is.
AUTOS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModel")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="model types, separated by commas; otherwise all that transformers knows")
    parser.add_argument("--sample", type=int, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw and of the inputs")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one type")
    parser.add_argument("--out", type=Path, help="results, one JSON object a line; a later run goes on from there")
    parser.add_argument("--markdown", type=Path, help="write the table of all results of --out there")
    options = parser.parse_args(arguments)
    types = options.types.split(",") if options.types else model_types()
    if options.sample:
        types = sorted(random.Random(options.seed).sample(types, options.sample))
    results = {result["type"]: result for result in _read(options.out)}
    with Worker(options.timeout, options.seed) as worker:
        for done, name in enumerate(types):
            if name in results:
                continue
            results[name] = worker.check(name)
            print(f"{done + 1}/{len(types)} {line_of(results[name])}", flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(results[name]) + "\n")
    if options.markdown:
        options.markdown.write_text(table(list(results.values())))
    wrong = [name for name in types if results[name]["status"] in ("different", "fails")]
    print(summary([results[name] for name in types]))
    if wrong:
        print(f"seed {options.seed}: wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


def model_types() -> list[str]:
    """Every model type that an auto class of the installed transformers makes a model of."""
    import transformers

    from easytorch.auto import MODELS

    names = set()
    for auto in MODELS:
        for config in getattr(transformers, auto)._model_mapping:
            names.add(config.model_type)
    return sorted(filter(None, names))


class Worker:
    """A process that checks one type after the other, started again after one that it did not survive."""

    def __init__(self, timeout: float, seed: int) -> None:
        self.timeout, self.seed = timeout, seed
        self.process: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def check(self, model_type: str) -> dict[str, Any]:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, other = context.Pipe()
            self.process = context.Process(target=work, args=(other, self.seed), daemon=True)
            self.process.start()
            other.close()
            self.connection.recv()  # imports are done
        self.connection.send(model_type)
        with contextlib.suppress(EOFError):
            if self.connection.poll(self.timeout):
                return self.connection.recv()
            self._stop()
            return {"type": model_type, "status": "not tried", "reason": f"took more than {self.timeout:.0f} s"}
        code = self.process.exitcode
        self._stop()
        return {"type": model_type, "status": "fails", "reason": f"ended the process ({code})"}

    def _stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None


def work(connection: Connection, seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    connection.send("ready")
    while True:
        connection.send(check(connection.recv(), seed))


def check(model_type: str, seed: int = 0) -> dict[str, Any]:
    """One row of the table: type, class, attention groups that are ours, layers that called it, and the verdict."""
    import transformers

    import easytorch
    from easytorch.auto.failures import FAILURES, first_line

    result: dict[str, Any] = {"type": model_type, "status": "not tried"}
    try:
        config = completed(transformers.CONFIG_MAPPING[model_type])
    except FAILURES as error:
        return result | {"reason": f"its config has no defaults: {first_line(error)}"}
    autos = [*AUTOS, *(name for name in easytorch.auto.MODELS if name not in AUTOS)]
    autos = [name for name in autos if type(config) in getattr(transformers, name)._model_mapping]
    if not autos:
        return result | {"reason": "no auto class makes it"}
    rows, classes = [], set()
    for auto in autos:  # the first class that can be tried stands for the type
        try:
            found = getattr(transformers, auto)._model_mapping[type(config)]
        except FAILURES as error:
            rows.append(result | {"reason": f"transformers does not hold its class: {first_line(error)}"})
            continue
        model_class = found[0] if isinstance(found, tuple) else found
        if model_class in classes:
            continue
        classes.add(model_class)
        row = _check_class(auto, model_class, config, seed)
        rows.append(result | {"class": model_class.__name__, "auto": auto} | row)
        if row["status"] != "not tried":
            return rows[-1]
    return rows[0]


def _check_class(auto: str, model_class: Any, config: Any, seed: int) -> dict[str, Any]:
    """The verdict on one class: status, layers and those that called ours, how many calls were compared, reason."""
    import copy

    import torch

    import easytorch
    from easytorch.auto.cases import tensors
    from easytorch.auto.comparison import difference, in_float64, is_rounding
    from easytorch.auto.failures import FAILURES, first_line
    from easytorch.auto.plugging import built_from
    from easytorch.auto.trial import has_attention, small_models

    config = copy.deepcopy(config)
    config.architectures = [model_class.__name__]  # without it transformers cannot choose among several classes
    failures: list[str] = []
    for theirs in small_models(model_class, built_from(model_class, config), failures):
        if not has_attention(theirs):
            return {"status": "stock", "reason": f"{model_class.__name__} has no attention that could be replaced"}
        part, inputs = _working(theirs, seed, failures)
        if inputs is not None:
            break
    else:
        return {
            "status": "not tried",
            "reason": _as_it_is(model_class, built_from(model_class, config)) or failures[-1],
        }
    torch.manual_seed(0)
    try:
        given = _as_given(theirs.config)
        if built_from(model_class, config) is not config:  # the text of a config that has images too
            config.text_config, given = given, config
        ours = getattr(easytorch, auto).from_config(given).eval()
        ours.load_state_dict(theirs.state_dict())
    except FAILURES as error:
        return {"status": "fails", "reason": f"loading: {first_line(error)}"}
    compared, wrong = 0, []
    theirs, run = theirs.get_submodule(part), ours.get_submodule(part)
    own_calls = dict(_calls(run, copy.deepcopy(inputs)))
    for case, expected in _calls(theirs, inputs):  # no boolean mask for a class whose attention is eager
        given = own_calls[case]
        try:
            torch.manual_seed(0)
            right = tensors(expected())
        except FAILURES:
            continue  # transformers does not carry it either
        compared += 1
        try:
            torch.manual_seed(0)
            found = tensors(given())
            off = difference(found, right)
        except FAILURES as error:
            off = first_line(error)
        else:
            if off is not None:
                exact = []
                for model in (run, theirs):
                    with in_float64(model, inputs) as wide, contextlib.suppress(*FAILURES):
                        torch.manual_seed(0)
                        exact.append(tensors(dict(_calls(model, wide))[case]()))
                if len(exact) == 2 and is_rounding(found, right, *exact):
                    off = None
        if off is not None:
            wrong.append(f"{case}: {off}")
    report = ours.easytorch_report
    row = {"native": report.native, "layers": len(report.layers), "called": len(report.called or ())}
    row |= {"compared": compared} | ({"part": part} if part else {})
    if report.reason is not None:
        row["reason"] = report.reason
    if wrong:
        return row | {"status": "different", "reason": "; ".join(wrong)}
    return row | {"status": "equal" if row["called"] else "stock"}


def _as_it_is(model_class: Any, config: Any) -> str | None:
    """Why transformers itself makes no model of the type's default config, None where it does."""
    import torch

    from easytorch.auto.failures import FAILURES, first_line

    try:
        with torch.device("meta"):
            model_class._from_config(_as_given(config))
    except ImportError as error:
        return f"a package is not installed: {first_line(error)}"
    except FAILURES as error:
        return f"transformers' default config makes no model, and there is no checkpoint here: {first_line(error)}"
    return None


def _as_given(config: Any) -> Any:
    """A copy of a model's config in which no attention is chosen."""
    import copy

    from easytorch.auto.tiny import configs_in

    config = copy.deepcopy(config)
    for part in configs_in(config):
        part._attn_implementation_internal = None
    return config


# What some default configs leave open and their classes cannot be built without; every checkpoint has it.
OPEN = {
    "context_length": 16,
    "dropout": 0.0,
    "dropout_rate": 0.0,
    "default_language": "en_XX",
    "is_decoder": True,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "prediction_length": 4,
    "rope_theta": 10000.0,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 320,
}


def completed(config_class: Any) -> Any:
    """The default config, with a value for what it leaves open."""
    from easytorch.auto.tiny import configs_in

    config = config_class()
    for part in configs_in(config):
        for name, value in OPEN.items():
            if name in vars(part) and vars(part)[name] is None:
                setattr(part, name, value)
    return config


def _calls(model: Any, inputs: dict[str, Any]) -> list[tuple[str, Any]]:
    import functools

    import torch

    from easytorch.auto.trial import cases

    def quietly(call: Any) -> Any:
        with torch.no_grad():
            return call()

    calls = [(name, functools.partial(quietly, call)) for name, call in cases(model, inputs)]
    if model.can_generate() and "input_ids" in inputs:
        tokens = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, :3] = 0
        for cache in ("dynamic", "static"):
            calls.append((f"generate with a {cache} cache", functools.partial(_generate, model, tokens, mask, cache)))
    return calls


def _generate(model: Any, inputs: dict[str, Any], mask: Any, cache: str) -> Any:
    ids = model.generate(
        **inputs,
        attention_mask=mask,
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        num_beams=1,
        cache_implementation=cache,
        disable_compile=True,
    )
    return ids.float()


def _working(model: Any, seed: int, failures: list[str]) -> tuple[str, dict[str, Any] | None]:
    """The first model inside `model`, itself first, that inputs were found for: its name there, and they."""
    from transformers import PreTrainedModel

    from easytorch.auto.inputs import working_inputs

    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel):
            inputs, failure = working_inputs(part, seed)
            if inputs is not None:
                return name, inputs
            if part is model:
                failures.append(failure or "no inputs were found for it")
    return "", None


def _read(file: Path | None) -> list[dict[str, Any]]:
    if file is None or not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def line_of(result: dict[str, Any]) -> str:
    layers = f"{result['called']}/{result['layers']} layers" if "layers" in result else ""
    return f"{result['type']} {result.get('class', '')}: {result['status']} {layers} {result.get('reason', '')}".strip()


def summary(results: list[dict[str, Any]]) -> str:
    counts = collections.Counter(result["status"] for result in results)
    return f"{len(results)} types: " + ", ".join(f"{count} {status}" for status, count in counts.most_common())


_HEAD = """# Architectures

Every model type of transformers {version}, from its own config made small, by `easytorch.AutoModel*` and by
transformers' own auto classes with the same weights: no mask, padding on either side, 4D masks, decoding through
dynamic and static caches, gradients, `generate`. `scripts/check_architectures.py` makes this page; relative RMS
differences above 1e-4 count as different, unless float64 shows that they are rounding.

| Status | Types | |
|---|---|---|
| equal | {equal} | our attention runs, and every number compared is transformers' own |
| stock | {stock} | transformers' own attention is kept, for the reason given; every number is its own |
| not tried | {not_tried} | could not be built or run small, so transformers' own attention is kept |
| different, fails | {wrong} | a defect |

Layers: how many of the attention layers called ours in the first forward of what could be run. Reason: why not all.

| Type | Class | Status | Layers | Compared | Reason |
|---|---|---|---|---|---|
"""


def table(results: list[dict[str, Any]]) -> str:
    import transformers

    counts = collections.Counter(result["status"] for result in results)
    head = _HEAD.format(
        version=transformers.__version__,
        equal=counts["equal"],
        stock=counts["stock"],
        not_tried=counts["not tried"],
        wrong=counts["different"] + counts["fails"],
    )
    rows = []
    for result in sorted(results, key=lambda result: result["type"]):
        layers = f"{result['called']} of {result['layers']}" if "layers" in result else ""
        name = result.get("class", "") + (" (native)" if result.get("native") else "")
        reason = "; ".join(filter(None, (result.get("reason"), result.get("part") and f"run: {result['part']}")))
        reason = re.sub(r" from '/\S*", "", reason)  # a module's file on this machine
        reason = reason.replace("|", "\\|").replace("<", "&lt;")
        rows.append(
            f"| {result['type']} | {name} | {result['status']} | {layers} | {result.get('compared', '')} | {reason} |"
        )
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
