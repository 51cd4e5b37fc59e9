"""Peak memory of attention at several lengths: flash grows with T, the definition with T squared."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

LENGTHS = {"cpu": (1024, 2048, 4096, 8192), "cuda": (2048, 4096, 8192, 16384, 32768)}
LONGEST_DEFINITION = {"cpu": 4096, "cuda": 16384}
IMPLEMENTATIONS = ("flash", "vanilla")
B, H, D = 1, 8, 64


def show(device: torch.device, console: Console, path: Path | None) -> None:
    """Prints MiB beyond the inputs and the output by length, and writes them as JSON."""
    lengths, rows = LENGTHS[device.type], []
    table = Table(
        "implementation", "passes", *(f"T {n}" for n in lengths), "growth, T doubled",
        title=f"peak memory beyond the inputs, MiB: B{B} H{H} D{D} causal, float32, {device.type}",
    )  # fmt: skip
    for name in IMPLEMENTATIONS:
        for backward in (False, True):
            peaks = [_peak(device, name, n, backward) for n in lengths
                     if name == "flash" or n <= LONGEST_DEFINITION[device.type]]  # fmt: skip
            growth = peaks[-1] / peaks[-2]
            passes = "forward+backward" if backward else "forward"
            cells = [f"{peak:.1f}" for peak in peaks] + [""] * (len(lengths) - len(peaks))
            table.add_row(name, passes, *cells, f"{growth:.2f}")
            rows.append({"implementation": name, "passes": passes, "mib": dict(zip(lengths, peaks, strict=False)),
                         "growth": growth})  # fmt: skip
    console.print(table)
    if path is not None:
        path.write_text(json.dumps({"device": device.type, "shape": f"B{B} H{H} D{D}", "rows": rows}, indent=1) + "\n")


def _peak(device: torch.device, name: str, length: int, backward: bool) -> float:
    """MiB, in a process of its own: the high-water mark of a process never falls."""
    command = [sys.executable, str(Path(__file__)), device.type, name, str(length), str(int(backward))]
    root = Path(__file__).resolve().parents[2]
    finished = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    return float(finished.stdout.split()[-1])


def _run(operation: Any, device: torch.device, length: int, backward: bool) -> None:
    query, key, value = (torch.randn(B, length, H, D, device=device, requires_grad=backward) for _ in range(3))
    output = operation(query, key, value, causal=True).attention_outputs
    if backward:
        output.sum().backward()


def _measure(device: torch.device, name: str, length: int, backward: bool) -> float:
    """The increase of the peak memory over that of a short call, which has loaded the libraries."""
    from easytorch.operations import OperationRegistry

    operation = OperationRegistry.create(name)
    _run(operation, device, 256, backward)
    inputs = (8 if backward else 4) * B * length * H * D * 4  # query, key, value, output, and their gradients
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        _run(operation, device, length, backward)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - inputs) / 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _run(operation, device, length, backward)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10 - inputs / 2**20


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    torch.set_num_threads(2)
    kind, implementation, rows_, both = sys.argv[1:]
    print(_measure(torch.device(kind), implementation, int(rows_), bool(int(both))))
