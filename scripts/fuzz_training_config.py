"""Give `easytorch train` each of its settings wrong, and require one clear error that leaves nothing behind.

    scripts/fuzz_training_config.py [--seed 0] [--random 200]

Each field is missing, null, of a wrong type and out of range; unknown and misspelt keys, absurd meshes and files of
settings that are no mapping follow, then `--random` draws of two wrong fields at once. A case passes where the run ends
with exit code 2 and one line, before anything is written; or where the settings are taken, which is told by the data
having been reached (nothing is trained). What several processes would be given (`PLACES`) is asked of `launch`,
which is to refuse it before it starts them. Prints the cases that fail, and exits with 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from easytorch.training import TrainingConfig, arguments, prepare  # noqa: E402
from easytorch.training.launch import launch  # noqa: E402

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1}  # fmt: skip
MODEL = {"model_type": "llama", **SIZES}
WRONG: list[Any] = [
    None, True, -1, 0, 1.5, 2**31, 2**70, -(2**70), float("nan"), float("inf"), "", "no such", "1", "\0", [], [1],
    [None], {}, {"a": 1}, {"model_type": "llama", "hidden_size": "wide"},
]  # fmt: skip
MESHES = ["tp", "tp=", "tp=0", "tp=-2", "tp=2,tp=2", "dp=-1,tp=-1", "zz=2", "tp=2", "pp=3", "=2", ",", "tp=1e3",
          "ep=99", "dp=1,fsdp=1,pp=1,ep=1,sp=1,tp=2"]  # fmt: skip
MODELS: list[Any] = [
    {"model_type": "lama"}, {"model_type": 3}, {"model_type": "bert"}, {"hidden_size": 16}, {**MODEL, "hiden_size": 3},
    {**MODEL, "num_attention_heads": 0}, {**MODEL, "num_attention_heads": 3, "num_key_value_heads": 2},
    {**MODEL, "hidden_act": "relux"}, {**MODEL, "rope_parameters": {"rope_type": "odd"}},
    {**MODEL, "hidden_size": None}, {**MODEL, "num_hidden_layers": "2"},
    {**MODEL, "num_hidden_layers": -1}, {**MODEL, "hidden_size": 2**62},
]  # fmt: skip
FILES = ["", "null", "3", "[1]", "a: [", "? [1]\n: 2", "- a\n- b", '{"text": ', "\x00", "text: a\ntext: b"]


MOE = {"model_type": "qwen3_moe", **SIZES, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2,
       "head_dim": 8}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}
# (processes, settings) that no run can take
PLACES: list[tuple[int, dict[str, Any]]] = [
    (2, {"mesh": "tp=2"}), (4, {"mesh": "tp=4", "model": {**MODEL, "num_key_value_heads": 2}}),
    (3, {"mesh": "tp=3"}), (2, {"mesh": "tp=2", "model": GPT2}), (2, {"mesh": "ep=2"}),
    (2, {"mesh": "ep=2", "model": GPT2}),
    (3, {"mesh": "ep=3", "model": MOE, "batch_size": 3}), (2, {"mesh": "pp=2"}), (3, {"mesh": "pp=3", "model": MOE}),
    (2, {"mesh": "pp=2", "model": {**MODEL, "num_hidden_layers": 2, "tie_word_embeddings": True}}),
    (2, {"mesh": "pp=2", "model": GPT2}), (4, {"mesh": "pp=2,sp=2", "model": MOE}), (3, {"mesh": "sp=3"}),
    (2, {"mesh": "sp=2", "model": {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1}}),
    (2, {"mesh": "dp=4"}), (2, {"mesh": "dp=2,fsdp=2"}), (4, {"mesh": "fsdp=-1,tp=3"}), (2, {"mesh": "fsdp=0"}),
    (3, {"mesh": "fsdp=3"}), (2, {"batch_size": 3}), (2, {"micro_batch_size": 2}), (0, {}), (-1, {}),
    (2, {"device": "xla"}), (1, {"model": {"model_type": "bert"}}), (1, {"model": {"model_type": "roberta"}}),
    (1, {"model": {"model_type": "xlnet"}}), (1, {"model": {"model_type": "t5"}}),
    (1, {"model": {"model_type": "vit"}}),
    (1, {"model": "./no-such-model"}), (1, {"text": ["no-such.txt"]}), (1, {"text": ["."]}), (1, {"text": []}),
    (1, {"text": None, "dataset": "no-such.jsonl", "task": "sft"}), (1, {"text": None, "dataset": "empty.jsonl"}),
    (1, {"block_size": 64, "model": {**MODEL, "max_position_embeddings": 8}}), (1, {"output": "text.txt"}),
    (2, {"mesh": "fsdp=2", "lora": {"rank": 2}}), (1, {"task": "dpo"}), (1, {"resume": True, "change": ["nothing"]}),
    (10**6, {"batch_size": 10**6}), (2, {"mesh": "tp=1,dp=-1,pp=-1"}),
]  # fmt: skip


ACCEPTED = "accepted"


class ReachedError(Exception):
    """The settings were right."""


def reached(*_: Any, **__: Any) -> Any:
    raise ReachedError


def cases(base: dict[str, Any], draw: random.Random, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    fields = [item.name for item in dataclasses.fields(TrainingConfig)]
    for name in fields:
        yield f"{name} missing", {key: value for key, value in base.items() if key != name}
        for value in WRONG:
            yield f"{name}={value!r}", {**base, name: value}
        yield f"{name} misspelt", {**base, name + "x": 1}
    for mesh in MESHES:
        yield f"mesh={mesh!r}", {**base, "mesh": mesh}
    for model in MODELS:
        yield f"model={model!r}", {**base, "model": model}
    for _ in range(number):
        first, second = draw.sample(fields, 2)
        changes = {first: draw.choice(WRONG), second: draw.choice(WRONG)}
        yield f"{changes!r}", {**base, **changes}


def failure(folder: Path, text: str, ending: str) -> str:
    """Why the run of a file of settings is not as it ought to be; "" where it is, ACCEPTED where they are right."""
    path = folder / f"run.{ending}"
    path.write_text(text, encoding="utf-8")
    before = set(folder.rglob("*"))
    printed, said = io.StringIO(), io.StringIO()
    code: Any = None
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        try:
            code = arguments.run([str(path)], "train")
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    words = said.getvalue()
    if "ReachedError" in words:
        return ACCEPTED
    left = sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one not in before)
    lines = words.strip().splitlines()
    if code != 2:
        return f"ended with {code}: {words.strip()[-300:]}"
    if len(lines) != 1 or not lines[0].startswith("error: "):
        return f"said {len(lines)} lines: {words[:300]!r}"
    return f"left {left}" if left else ""


def taken_by(folder: Path, base: dict[str, Any], processes: int, changes: dict[str, Any]) -> str:
    """Why `launch` of these settings is not refused with one of its errors, leaving nothing; "" where it is."""
    before = set(folder.rglob("*"))
    values = {name: value for name, value in {**base, **changes}.items() if value is not None}
    with mock.patch("subprocess.Popen", reached), contextlib.redirect_stdout(io.StringIO()):
        try:
            launch(TrainingConfig.from_dict(values), processes)
        except (ValueError, OSError) as error:
            left = [one for one in folder.rglob("*") if one not in before]
            return f"left {left}" if left else "" if str(error) else "said nothing"
        except BaseException as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
    return "was taken"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", type=int, default=200)
    parser.add_argument("--accepted", action="store_true", help="print what is taken too")
    given = parser.parse_args()
    failed = tried = accepted = 0
    with tempfile.TemporaryDirectory() as name, mock.patch.object(prepare, "write_data", reached), \
            mock.patch("easytorch.training.loop.write_data", reached), contextlib.chdir(name):  # fmt: skip
        folder = Path(name)
        (folder / "empty.jsonl").write_text("")
        (folder / "text.txt").write_text("the class binds a name to an object.\n" * 60)
        base = {"text": ["text.txt"], "output": "out", "model": MODEL, "vocab_size": 270, "block_size": 8,
                "batch_size": 2, "steps": 1, "device": "cpu"}  # fmt: skip
        every = [
            (words, json.dumps(values), "json")
            for words, values in cases(base, random.Random(given.seed), given.random)
        ]
        every += [(repr(text), text, "yaml") for text in FILES]
        for words, text, ending in every:
            tried += 1
            why = failure(folder, text, ending)
            if why == ACCEPTED:
                accepted += 1
                if given.accepted:
                    print(f"taken {words}", flush=True)
            elif why:
                failed += 1
                print(f"FAIL {words}: {why}", flush=True)
        for processes, changes in PLACES:
            tried += 1
            if why := taken_by(folder, base, processes, changes):
                failed += 1
                print(f"FAIL {processes} processes, {changes}: {why}", flush=True)
    print(f"{tried} cases: {accepted} taken, {tried - accepted - failed} refused in one line, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
