"""Native models against transformers' with its best attention: time and peak memory of prefill and of a training step.

    python scripts/bench_models.py                                  every case, 0.44B, 2 threads
    python scripts/bench_models.py train-128k --layers 4 --tokens 256 --json figures.json

Each library runs in processes of its own, in turns, so that both see the same load; a figure is the median over the
rounds of the median of a process's calls. Peak memory is that of the process less what it held before the first call.
Prints ratios (ours over transformers') and writes everything to --json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CASES = {
    "prefill-fp32": {"dtype": "float32", "vocabulary": 32000, "tokens": 1024},
    "prefill-bf16": {"dtype": "bfloat16", "vocabulary": 32000, "tokens": 1024},
    "train-fp32": {"dtype": "float32", "vocabulary": 32000, "tokens": 512},
    "train-bf16": {"dtype": "bfloat16", "vocabulary": 32000, "tokens": 512},
    "train-128k": {"dtype": "float32", "vocabulary": 131072, "tokens": 512},
    "train-128k-bf16": {"dtype": "bfloat16", "vocabulary": 131072, "tokens": 512},
}
LIBRARIES = ("easytorch", "transformers")


def memory(field: str) -> int:
    """VmRSS or VmHWM, the most so far, of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """VmHWM starts again from VmRSS."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(library: str, case: str, layers: int, tokens: int, calls: int, threads: int) -> dict[str, float]:
    """Seconds a call, and MiB that the calls needed, of a Llama-like model of so many layers."""
    import torch
    import transformers

    settings = CASES[case]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=settings["vocabulary"], hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    source: Any = __import__(library)
    model = source.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, str(settings["dtype"])))
    ids = torch.randint(0, config.vocab_size, (1, tokens))
    training = case.startswith("train")
    model.train(training)

    def call() -> None:
        if training:
            model.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()
        else:
            with torch.no_grad():
                model(ids, use_cache=False, logits_to_keep=1)

    seconds = []
    forget_peak()
    before = memory("VmRSS")
    for _ in range(calls + 1):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[1:]), "mib": memory("VmHWM") - before}


def alone(library: str, case: str, arguments: argparse.Namespace) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, case, "--worker", library, "--layers", str(arguments.layers)]
    command += ["--calls", str(arguments.calls), "--threads", str(arguments.threads)]
    command += ["--tokens", str(arguments.tokens or CASES[case]["tokens"])]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    measured: dict[str, float] = json.loads(output.splitlines()[-1])
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, help="instead of the case's own number")
    parser.add_argument("--calls", type=int, default=3, help="that are timed in a process, after one that is not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=LIBRARIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.cases) - set(CASES)):
        parser.error(f"no case is called {', '.join(unknown)}; known: {', '.join(CASES)}")
    if arguments.worker:
        sizes = (arguments.layers, arguments.tokens, arguments.calls, arguments.threads)
        print(json.dumps(measure(arguments.worker, arguments.cases[0], *sizes)))
        return 0
    figures: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "layers": arguments.layers}
    for case in arguments.cases or CASES:
        rounds = [{library: alone(library, case, arguments) for library in LIBRARIES} for _ in range(arguments.rounds)]
        medians = {
            library: {kind: statistics.median(one[library][kind] for one in rounds) for kind in ("seconds", "mib")}
            for library in LIBRARIES
        }
        ours, theirs = medians["easytorch"], medians["transformers"]
        ratios = {kind: ours[kind] / max(theirs[kind], 1e-9) for kind in ours}
        figures[case] = {"ratio": ratios, **medians, "rounds": rounds}
        print(
            f"{case:16} time {ratios['seconds']:.2f} ({ours['seconds']:.2f} of {theirs['seconds']:.2f} s), memory "
            f"{ratios['mib']:.2f} ({ours['mib']:.0f} of {theirs['mib']:.0f} MiB)",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
