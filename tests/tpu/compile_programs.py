"""Compiles the programs that a test file lists, and prints what is known of each without a device, as JSON.

    JAX_PLATFORMS=cpu python tests/tpu/compile_programs.py tests/tpu/test_compile_flash.py

Run by conftest.py in a process of its own: libtpu and its environment stay out of the other tests. The file's
`programs()` yields a name and a function that compiles. The seconds of processor time that each takes go to stderr.
"""

from __future__ import annotations

import json
import runpy
import sys
import time


def main(path: str) -> None:
    figures = {}
    for name, compile_program in runpy.run_path(path)["programs"]():
        print(f"{name} ...", end=" ", file=sys.stderr, flush=True)  # the last line names the program that fails
        began = time.process_time()
        compiled = compile_program()
        print(f"{time.process_time() - began:.1f} s", file=sys.stderr)
        assert name not in figures, name
        text = compiled.as_text()
        figures[name] = {
            "kernels": text.count('custom_call_target="tpu_custom_call"'),
            "temporary": compiled.memory_analysis().temp_size_in_bytes,
            "bytes": _bytes_accessed(compiled),
            "sends": text.count("collective-permute-start("),
            "gathers": text.count("all-gather"),
        }
    print(json.dumps(figures))


def _bytes_accessed(compiled) -> float:
    """As the compiler counts them; of a Pallas kernel what its cost estimate says, or nothing."""
    costs = compiled.cost_analysis()
    return (costs[0] if isinstance(costs, list) else costs)["bytes accessed"]


if __name__ == "__main__":
    main(sys.argv[1])
