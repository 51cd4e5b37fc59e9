#!/usr/bin/env bash
# The C++ kernels on 64-bit ARM, checked on any machine: every source that the library has there is compiled, with the
# library's own flags, by clang as PyPI's ziglang carries it, and all are linked.
#
#   scripts/check_neon.sh                          says which sources fail
#   scripts/check_neon.sh --root FOLDER            also runs operators against float64 (check_neon.py)
#   scripts/check_neon.sh --root FOLDER ARG ...    runs pytest with these arguments in place of that
#
# Running needs qemu-aarch64 (Debian's qemu-user) and a FOLDER with arm64's programs, in which torch is importable:
#
#   mmdebstrap --arch=arm64 --variant=extract --include=python3.11,libgomp1,libstdc++6 bookworm FOLDER http://deb.debian.org/debian
#   pip install --target FOLDER/site --no-deps --only-binary :all: --python-version 3.11 --platform manylinux_2_28_aarch64 \
#       torch==2.9.1 numpy typing_extensions sympy mpmath networkx jinja2 markupsafe filelock fsspec pytest pluggy iniconfig packaging pygments
#
# Tests of refusals crash: an exception cannot pass from zig's C++ library to torch's.
# (On PyPI arm64's torch 2.9.1 is a CPU build, 2.13 one with CUDA, which needs CUDA's libraries to load.)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib/venv.sh"

folder=
if [[ ${1:-} == --root ]]; then
    folder=$(cd "$2" && pwd)
    shift 2
fi
venv=${EASYTORCH_TEST_VENV:-$(ensure_venv test "$root/scripts/requirements/test.txt")}
zig=$(ensure_venv neon "$root/scripts/requirements/neon.txt")
cd "$root"
export CXX="$zig/bin/python -m ziglang c++ -target aarch64-linux-gnu"
library=
if [[ -n $folder ]]; then
    export PYTHONPATH="$folder/site" OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
    emulated=(qemu-aarch64 -L "$folder" "$folder/usr/bin/python3.11")
    # where the emulated Python will look: compilers are not started from within, since a fork of it can hang
    library=$("${emulated[@]}" -c 'from easytorch.kernels.cpu import build; print(build.library_path())')
fi

PYTHONPATH='' LIBRARY=$library TORCH="$folder/site/torch/lib" "$venv/bin/python" - <<'PYTHON'
import os, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from easytorch.kernels.cpu import build

tool, library = build.compiler(), os.environ["LIBRARY"]
with tempfile.TemporaryDirectory() as folder:
    commands = build.compile_commands(Path(folder), tool, "aarch64")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(lambda command: subprocess.run(command, capture_output=True, text=True), commands))
    failed = [run for run in runs if run.returncode != 0]
    for run in failed:
        print(f"{run.args[run.args.index('-c') + 1]}\n{run.stderr}")
    if not failed:
        # without torch for ARM its functions stay undefined
        made = library or f"{folder}/library.so"
        Path(made).parent.mkdir(parents=True, exist_ok=True)
        torch = [f"-L{os.environ['TORCH']}", "-ltorch_cpu", "-lc10"] if library else []
        link = [*tool, "-shared", *(command[-1] for command in commands), "-o", made, *torch]
        run = subprocess.run(link, capture_output=True, text=True)
        print(run.stderr, end="")
        failed += [run] if run.returncode != 0 else []
print(f"aarch64: {len(commands)} sources, {len(failed)} failed")
sys.exit(bool(failed))
PYTHON

if [[ -n $folder ]]; then
    [[ $# -gt 0 ]] || exec "${emulated[@]}" scripts/check_neon.py
    exec "${emulated[@]}" -m pytest -q -p no:cacheprovider "$@"
fi
