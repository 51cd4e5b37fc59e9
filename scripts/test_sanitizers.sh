#!/usr/bin/env bash
# The tests of the C++ kernels with these compiled under the address and undefined-behaviour sanitizers: a read or write
# outside a tensor, a shift or cast that C++ does not define, end the run with the line of the source. Needs GCC.
#
#   scripts/test_sanitizers.sh              all tests of C++ kernels
#   scripts/test_sanitizers.sh -k layout    further arguments go to pytest
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib/venv.sh"

venv=${EASYTORCH_TEST_VENV:-$(ensure_venv test "$root/scripts/requirements/test.txt")}
cd "$root"
export CXX=${CXX:-g++} OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1
# -O1 after the -O2 of the library: GCC takes minutes for a file of the quantized products otherwise.
export EASYTORCH_CPU_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 -O1"
# Built outside the preloaded runtime, under which the compiler itself would run.
"$venv/bin/python" -m easytorch.kernels.cpu.build
# Python is not linked with the runtime of the sanitizer, so it is loaded first, and libstdc++ with it for its exceptions.
# Python, torch and jax keep what they allocate until they end: no leaks are looked for.
export LD_PRELOAD="$($CXX -print-file-name=libasan.so) $($CXX -print-file-name=libubsan.so) $($CXX -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/kernels/*/test_cpu*.py tests/kernels/*/test_codes.py \
  tests/kernels/decoder_step/test_layers.py tests/kernels/decoder_step/test_pages.py \
  tests/kernels/quantized_matmul/test_gguf_blocks.py tests/kernels/cpu/test_fakes.py tests/models/test_decoder_step.py \
  "$@"
