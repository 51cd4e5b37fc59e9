"""scripts/bench_cpu_kernels.py: a report as a table. Nothing is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_report_as_a_table(tmp_path: Path) -> None:
    rows = {
        "M1": {"us": {"cpu": 12.4, "aten": 20.0, "read": 11.0}, "ratio": {"aten": 0.62, "read": 1.1273}},
        "M4": {"us": {"cpu": 30.0, "sdpa": 60.0}, "ratio": {"sdpa": 0.5}},
    }
    machine = {"product float32": {"GF/s": 158.3}, "read": {"GB/s": 9.2}}
    report = {
        "cpu": "a CPU", "torch": "2.13", "threads": [1, 2], "load": [0.5, 1, 1], "load after": [1.25, 1, 1],
        "1 threads": {"machine": machine, "products": rows}, "2 threads": {"machine": machine, "tiny": {}},
    }  # fmt: skip
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    command = [sys.executable, str(ROOT / "scripts/bench_cpu_kernels.py"), "--table", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "a CPU, torch 2.13, load before and after 0.5, 1.2.",
        "",
        "1 thread: product float32 158 GF/s, read 9 GB/s.",
        "",
        "| products | us | of aten | of read | of sdpa |",
        "|---|---|---|---|---|",
        "| M1 | 12 | 0.62 | 1.13 |  |",
        "| M4 | 30 |  |  | 0.50 |",
        "",
        "2 threads: product float32 158 GF/s, read 9 GB/s.",
        "",
        "| tiny | us |",
        "|---|---|",
        "",
    ]
    page = tmp_path / "page.md"
    page.write_text("# C++ kernels\n\nWhat they are.\n")
    for _ in range(2):  # the second time in place of the first
        subprocess.run([*command, "--page", str(page)], check=True, timeout=600)
    mark = "<!-- Everything below is written by scripts/bench_cpu_kernels.py -->"
    written = f"# C++ kernels\n\nWhat they are.\n\n## Measured\n\n{mark}\n\n{run.stdout.rstrip()}\n"
    assert page.read_text() == written
