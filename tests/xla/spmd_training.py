"""The trainer on the devices of torch_xla: run by test_spmd.py in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch_xla.debug import metrics

from easytorch.distributed import make_mesh
from easytorch.training.arguments import run

TEXT = "the class statement binds a name to an object and the function returns its value when it is called"
MODEL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attention_dropout": 0.0,
}  # fmt: skip


def corpus(folder: Path) -> Path:
    words = TEXT.split()
    lines = [" ".join(words[(i * 7 + j * j) % len(words)] for j in range(9)) + "." for i in range(400)]
    path = folder / "corpus.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def train(folder: Path, name: str, **changes) -> list[dict]:
    """The metrics of a run."""
    values = {
        "text": [str(folder / "corpus.txt")], "output": str(folder / name), "model": MODEL, "vocab_size": 300,
        "block_size": 32, "batch_size": 8, "steps": 6, "schedule": "constant", "learning_rate": 5e-3, "eval_every": 3,
        "save_every": 3, "warmup_steps": 2,
    }  # fmt: skip
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**values, **changes}))
    assert run(["--config", str(path)], "train") == 0
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def assert_equal(found: list[dict], want: list[dict]) -> None:
    """Training and held-out losses, and the norms of gradients."""
    for key in ("loss", "eval_loss", "gradient_norm"):
        ours, theirs = ([one[key] for one in lines if key in one] for lines in (found, want))
        assert len(ours) == len(theirs) > 1, key
        assert all(abs(a - b) < 2e-5 * abs(b) for a, b in zip(ours, theirs, strict=True)), (key, ours, theirs)


def compiled() -> int:
    return metrics.counter_value("UncachedCompile") or 0


def main(folder: Path) -> None:
    # before the first backward pass: autograd makes a queue for each device that it knows then
    make_mesh("fsdp=4", "xla")
    corpus(folder)
    want = train(folder, "cpu", device="cpu")
    mesh = {"device": "xla", "mesh": "fsdp=2,tp=2"}
    assert_equal(train(folder, "xla", **mesh), want)
    # one process of the CPU goes on from a checkpoint of the devices, and they from one of the CPU
    shards = {**mesh, "checkpoint_format": "sharded"}
    cases = ((mesh, {"device": "cpu"}), ({"device": "cpu"}, mesh), (shards, {"device": "cpu"}), (shards, shards))
    for number, (first, then) in enumerate(cases):
        name = f"resumed {number}"
        train(folder, name, **first, steps=3)
        change = {"resume": True, "change": ["steps", "mesh"]}
        assert_equal(train(folder, name, **then, **change), want)
    # with accumulation the gradients are the same, and more steps compile no more than few
    assert_equal(train(folder, "pieces", **mesh, micro_batch_size=1, activation_checkpointing="full"), want)
    before = compiled()
    train(folder, "longer", **mesh, steps=12, eval_every=6, save_every=6)
    assert compiled() == before
    print("ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
