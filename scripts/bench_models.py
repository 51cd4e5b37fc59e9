"""Native models against transformers' with its best attention and experts: time and peak memory of whole models.

    python scripts/bench_models.py                                  every case, 2 threads; Llama has 0.44B
    python scripts/bench_models.py train-128k --layers 4 --tokens 256 --json figures.json
    python scripts/bench_models.py moe-prefill minilm-1000 --plot models.png

Each library runs in processes of its own, in turns, so that both see the same load; a figure is the median over the
rounds of the median of a process's calls. Peak memory is that of the process less what it held before the first call.
Prints ratios (ours over transformers') beside their bars, and writes everything to --json. The cases are in
bench/models.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench.models import CASES  # noqa: E402
from bench.report import installed  # noqa: E402

LIBRARIES = ("easytorch", "transformers")


def memory(field: str) -> int:
    """VmRSS or VmHWM, the most so far, of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """VmHWM starts again from VmRSS."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(library: str, case: str, layers: int, tokens: int, calls: int, threads: int) -> dict[str, float]:
    """Seconds a call, and MiB that the calls needed."""
    import torch

    torch.set_num_threads(threads)
    call = CASES[case].make(__import__(library), CASES[case], layers, tokens)
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
    command = [sys.executable, __file__, case, "--worker", library]
    command += ["--layers", str(arguments.layers or CASES[case].layers or 24)]
    command += ["--calls", str(arguments.calls), "--threads", str(arguments.threads)]
    command += ["--tokens", str(arguments.tokens or CASES[case].tokens)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    measured: dict[str, float] = json.loads(output.splitlines()[-1])
    return measured


def installed_cases() -> list[str]:
    """Those whose packages are here; says which are left out."""
    missing = {name: [one for one in case.needs if find_spec(one) is None] for name, case in CASES.items()}
    for name, packages in missing.items():
        if packages:
            print(f"{name:26} left out: {', '.join(packages)} not installed")
    return [name for name, packages in missing.items() if not packages]


def plot(cases: dict[str, Any], path: Path) -> None:
    """A bar a case, its ratio of time, and a mark where it may end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 1 + 0.35 * len(cases)), layout="constrained")
    ratios = [case["ratio"]["seconds"] for case in cases.values()]
    axes.barh(list(cases), ratios, color=["#4c72b0" if ratio <= 1 else "#c44e52" for ratio in ratios])
    for row, case in enumerate(cases.values()):
        if case["bar"] is not None:
            axes.plot([case["bar"]] * 2, [row - 0.4, row + 0.4], color="black")
    axes.axvline(1.0, color="grey", linestyle=":")
    axes.invert_yaxis()
    axes.set_xlabel("time, of transformers'; a black mark: the bar")
    figure.savefig(path)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--layers", type=int, help="instead of the case's own number; Llama's is 24")
    parser.add_argument("--tokens", type=int, help="instead of the case's own number")
    parser.add_argument("--calls", type=int, default=3, help="that are timed in a process, after one that is not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG of the ratios; needs matplotlib")
    parser.add_argument("--worker", choices=LIBRARIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.cases) - set(CASES)):
        parser.error(f"no case is called {', '.join(unknown)}; known: {', '.join(CASES)}")
    if arguments.worker:
        sizes = (arguments.layers, arguments.tokens, arguments.calls, arguments.threads)
        print(json.dumps(measure(arguments.worker, arguments.cases[0], *sizes)))
        return 0
    figures: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "versions": installed()}
    cases: dict[str, Any] = {}
    figures |= {"threads": arguments.threads, "cases": cases}
    for case in arguments.cases or installed_cases():
        rounds = [{library: alone(library, case, arguments) for library in LIBRARIES} for _ in range(arguments.rounds)]
        medians = {
            library: {kind: statistics.median(one[library][kind] for one in rounds) for kind in ("seconds", "mib")}
            for library in LIBRARIES
        }
        ours, theirs = medians["easytorch"], medians["transformers"]
        ratios = {kind: ours[kind] / max(theirs[kind], 1e-3 if kind == "seconds" else 1) for kind in ours}
        bar, memory_bar = CASES[case].bar, CASES[case].memory_bar
        cases[case] = {"ratio": ratios, "bar": bar, "memory_bar": memory_bar, **medians, "rounds": rounds}
        allowed, of_memory = ("" if one is None else f" (bar {one})" for one in (bar, memory_bar))
        print(
            f"{case:26} time {ratios['seconds']:.2f}{allowed} ({ours['seconds']:.2f} of {theirs['seconds']:.2f} s), "
            f"memory {ratios['mib']:.2f}{of_memory} ({ours['mib']:.0f} of {theirs['mib']:.0f} MiB)",
            flush=True,
        )
    if arguments.plot:
        plot(cases, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
