"""Loading a checkpoint: seconds and memory beside the weights, ours against transformers'.

    python scripts/bench_loading.py                        30,720 expert tensors, and a dense model
    python scripts/bench_loading.py experts --layers 8     fewer of them
    python scripts/bench_loading.py dense --dtype float32  cast while it is loaded

Each library loads the same folder in a process of its own, in turns; figures are medians. Memory is anonymous, sampled
every 2 ms: a tensor that is mapped from its file costs none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LIBRARIES = ("easytorch", "transformers")


def anonymous() -> float:
    """RssAnon of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def write(case: str, layers: int, folder: Path) -> int:
    """A checkpoint in bfloat16 as its makers publish it, experts one by one; how many tensors it has."""
    import torch
    import transformers
    from safetensors.torch import save_file

    common = {"vocab_size": 1000, "num_hidden_layers": layers, "tie_word_embeddings": False}
    if case == "experts":
        config: Any = transformers.Qwen3MoeConfig(
            **common, hidden_size=128, intermediate_size=64, moe_intermediate_size=64, num_experts=128,
            num_experts_per_tok=8, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            **common | {"vocab_size": 32000}, hidden_size=1024, intermediate_size=4096, num_attention_heads=16,
            num_key_value_heads=8,
        )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if weight.dim() != 3:
            weights[name] = weight
            continue
        stem, _, part = name.rpartition(".")
        for expert, one in enumerate(weight):
            halves = {"gate_proj": one[:64], "up_proj": one[64:]} if part == "gate_up_proj" else {"down_proj": one}
            for inner, half in halves.items():
                weights[f"{stem}.{expert}.{inner}.weight"] = half.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    return len(weights)


def load(library: str, folder: str, dtype: str) -> dict[str, float]:
    import torch

    source: Any = __import__(library)
    loader = source.AutoModelForCausalLM
    torch.set_num_threads(1)
    before, peak, done = anonymous(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    model = loader.from_pretrained(folder, dtype=getattr(torch, dtype))
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    held = anonymous() - before
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 2**20
    return {"seconds": seconds, "extra": max(0.0, peak - before - held), "held": held, "weights": weights}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="experts, dense; both by default")
    parser.add_argument("--layers", type=int, help="80 of experts, 24 of the dense model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("LIBRARY", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(load(*arguments.worker, arguments.dtype)))
        return 0
    figures: dict[str, Any] = {}
    if unknown := sorted(set(arguments.cases) - {"experts", "dense"}):
        parser.error(f"no case is called {', '.join(unknown)}; known: experts, dense")
    for case in arguments.cases or ("experts", "dense"):
        with tempfile.TemporaryDirectory() as folder:
            count = write(case, arguments.layers or {"experts": 80, "dense": 24}[case], Path(folder))
            runs: dict[str, list[dict[str, float]]] = {library: [] for library in LIBRARIES}
            for _ in range(arguments.rounds):
                for library in LIBRARIES:
                    command = [sys.executable, __file__, "--dtype", arguments.dtype, "--worker", library, folder]
                    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                    runs[library].append(json.loads(output.splitlines()[-1]))
        medians = {
            library: {key: statistics.median(one[key] for one in found) for key in found[0]}
            for library, found in runs.items()
        }
        figures[case] = {"tensors": count, **medians}
        for library, one in medians.items():
            print(
                f"{case:8} {count:6} tensors to {arguments.dtype}: {library:12} {one['seconds']:7.2f} s, beside "
                f"{one['weights']:.0f} MiB of weights {one['held']:.0f} MiB anonymous after, {one['extra']:.0f} more "
                f"on the way",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
