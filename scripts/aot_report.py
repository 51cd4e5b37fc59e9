"""Write docs/kernels/triton_flash.md: what the Triton kernels take of each GPU, compiled here without one.

    python scripts/aot_report.py [--jobs 2]

35 cases; a quarter of an hour on two busy cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/kernels/triton_flash.md"
MARK = "<!-- Everything below is written by scripts/aot_report.py -->\n"

sys.path.insert(0, str(ROOT))
from easytorch.kernels.interop.triton_devices import SHARED_MEMORY  # noqa: E402 - a script of the checkout

CASES = [
    *product(SHARED_MEMORY, ("bfloat16", "float16"), (64, 128)),
    *product(SHARED_MEMORY, ("bfloat16",), (256,)),
    *product(SHARED_MEMORY, ("float32",), (64,)),
    *product(SHARED_MEMORY, ("bfloat16",), (128,), ("--everything",)),
]


def compile_case(case: tuple[str | int, ...]) -> list[dict[str, Any]]:
    """One process a case: its compiler's memory goes back, and several run side by side."""
    command = [sys.executable, "-W", "ignore", "-m", "easytorch.kernels.attention.triton_aot", *map(str, case)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    output = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    features = "all" if "--everything" in case else "causal"
    return [{**json.loads(line), "features": features} for line in output.splitlines()]


def row(kernel: dict[str, Any]) -> str:
    blocks = f"{kernel['block_m']} x {kernel['block_n']}" if kernel["block_n"] else str(kernel["block_m"])
    share = 100 * kernel["shared"] / SHARED_MEMORY[kernel["architecture"]]
    cells = (
        *(kernel[name] for name in ("architecture", "dtype", "head_dim", "features", "kernel")),
        blocks,
        *(kernel[name] for name in ("num_warps", "num_stages", "registers", "stack")),
        f"{kernel['shared']} ({share:.0f} %)",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="cases compiled at a time (2)")
    with ThreadPoolExecutor(parser.parse_args().jobs) as pool:
        kernels = [kernel for case in pool.map(compile_case, CASES) for kernel in case]
    header = (
        "| GPU | dtype | head_dim | features | kernel | queries x keys | warps | stages | registers | stack | shared |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    )
    versions = f"Triton {triton.__version__}, torch {torch.__version__}.\n"
    table = "\n".join([versions, *header, *map(row, kernels)])
    written, _, _ = PAGE.read_text().partition(MARK)
    PAGE.write_text(f"{written}{MARK}\n{table}\n")


if __name__ == "__main__":
    main()
