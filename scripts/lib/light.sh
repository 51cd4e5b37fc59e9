# The light tests: the rooms that a new Python or another transformers could break, in minutes. Source it:
#
#   source "$root/scripts/lib/light.sh"
#   run_light "$venv" "$@"        # arguments, if any, take the place of the rooms

LIGHT=(tests/models tests/layers tests/protocol tests/generation tests/training tests/cli tests/packaging)

run_light() {
    local venv=$1
    shift
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1
    [[ $# -gt 0 ]] || set -- "${LIGHT[@]}" tests/test_auto_*.py
    "$venv/bin/python" -m pytest -q -m "not slow" -n "${EASYTORCH_TEST_WORKERS:-2}" --dist loadfile "$@"
}
