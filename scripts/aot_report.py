"""Write what the Triton kernels take of each GPU, compiled here without one, into docs/kernels/.

    python scripts/aot_report.py [--jobs 2] [triton] [triton_flash]

`triton` is one table of every operation, in bfloat16: some minutes on two cores. `triton_flash` is attention by dtype,
head_dim and features, 35 cases: a quarter of an hour on two busy cores. Without a name, both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import product, repeat
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs/kernels"
MARK = "<!-- Everything below is written by scripts/aot_report.py -->\n"

sys.path.insert(0, str(ROOT))
from easytorch.kernels.interop.triton_aot_compile import compile_module  # noqa: E402 - a script of the checkout
from easytorch.kernels.interop.triton_devices import SHARED_MEMORY  # noqa: E402

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
CASES = [
    *product(SHARED_MEMORY, ("bfloat16", "float16"), (64, 128)),
    *product(SHARED_MEMORY, ("bfloat16",), (256,)),
    *product(SHARED_MEMORY, ("float32",), (64,)),
    *product(SHARED_MEMORY, ("bfloat16",), (128,), ("--everything",)),
]


def modules() -> list[str]:
    """Every module with `typical_calls`."""
    found = sorted(path for path in ROOT.glob("kernels/*/triton_*.py") if "def typical_calls(" in path.read_text())
    return [f"easytorch.kernels.{path.parent.name}.{path.stem}" for path in found]


def operations_table(jobs: int) -> list[str]:
    """A row for each kernel, in a column for each GPU: registers, stack and shared memory."""
    cases = list(product(modules(), ARCHITECTURES))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    with ProcessPoolExecutor(jobs) as pool:
        compiled = pool.map(compile_module, (m for m, _ in cases), repeat("bfloat16"), (a for _, a in cases))
        for (module, architecture), kernels in zip(cases, compiled, strict=True):
            for kernel in kernels:
                row = rows.setdefault((module.split(".")[2], kernel["kernel"]), {})
                row[architecture] = f"{kernel['registers']} / {kernel['stack']} / {kernel['shared']}"
    header = ("operation", "kernel", *ARCHITECTURES)
    lines = [(*name, *(row.get(architecture, "") for architecture in ARCHITECTURES)) for name, row in rows.items()]
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)]


def compile_case(case: tuple[str | int, ...]) -> list[dict[str, Any]]:
    """One process a case: its compiler's memory goes back, and several run side by side."""
    command = [sys.executable, "-W", "ignore", "-m", "easytorch.kernels.attention.triton_aot", *map(str, case)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    output = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    features = "all" if "--everything" in case else "causal"
    return [{**json.loads(line), "features": features} for line in output.splitlines()]


def flash_row(kernel: dict[str, Any]) -> str:
    blocks = f"{kernel['block_m']} x {kernel['block_n']}" if kernel["block_n"] else str(kernel["block_m"])
    share = 100 * kernel["shared"] / SHARED_MEMORY[kernel["architecture"]]
    cells = (
        *(kernel[name] for name in ("architecture", "dtype", "head_dim", "features", "kernel")),
        blocks,
        *(kernel[name] for name in ("num_warps", "num_stages", "registers", "stack")),
        f"{kernel['shared']} ({share:.0f} %)",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def flash_table(jobs: int) -> list[str]:
    with ThreadPoolExecutor(jobs) as pool:
        kernels = [kernel for case in pool.map(compile_case, CASES) for kernel in case]
    header = (
        "| GPU | dtype | head_dim | features | kernel | queries x keys | warps | stages | registers | stack | shared |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    )
    return [*header, *map(flash_row, kernels)]


TABLES = {"triton": operations_table, "triton_flash": flash_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="page", help=f"of {', '.join(TABLES)} (all)")
    parser.add_argument("--jobs", type=int, default=2, help="cases compiled at a time (2)")
    given = parser.parse_args()
    unknown = set(given.pages) - set(TABLES)
    if unknown:
        parser.error(f"unknown page {', '.join(sorted(unknown))}; known: {', '.join(TABLES)}")
    os.environ.pop("TRITON_INTERPRET", None)
    versions = f"Triton {triton.__version__}, torch {torch.__version__}; no GPU was at hand.\n"
    for name in given.pages or TABLES:
        page = PAGES / f"{name}.md"
        written, _, _ = page.read_text().partition(MARK)
        table = "\n".join([versions, *TABLES[name](given.jobs)])
        page.write_text(f"{written}{MARK}\n{table}\n")


if __name__ == "__main__":
    main()
