# Python environments that are made once and reused while their pins stay the same. Source it:
#
#   source "$root/scripts/lib/venv.sh"
#   python=$(find_python)                                      # a Python 3.11, 3.12 or 3.13, or an error
#   venv=$(ensure_venv test scripts/requirements/test.txt)     # ~/.cache/easytorch/venvs/test-<hash>, made if needed
#   ensure_venv_at .venv scripts/requirements/test.txt         # the same, at a place of your choice
#   "$venv/bin/python" -m pytest
#
# Progress goes to stderr, so `$(ensure_venv ...)` is the path alone. EASYTORCH_VENVS moves the folder of environments,
# PYTHON names the interpreter to use.
#
# A requirements file is installed in stages, top to bottom, one pip call each; a line `#stage [pip options]` begins the
# next one. So a wheel that decides what the others resolve to (torch) can come first and alone, and one whose
# dependencies are unwanted can have `#stage --no-deps`.
#
# An environment is complete when its stamp holds the hash of the requirements and the Python version, written last:
# a half-made or outdated one is built again. Runs at once wait for one another. A folder without our stamp is not ours
# and is never touched. The project itself is not installed: several checkouts may share an environment.

VENV_STAMP=.easytorch-venv

# The interpreter for new environments: $PYTHON, else the first of python3.11, 3.12, 3.13, python3 that works.
find_python() {
    local candidate tried=()
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
        tried+=("$candidate ($("$candidate" --version 2>/dev/null || echo "does not run"))")
    done
    echo "error: Python 3.11, 3.12 or 3.13 is needed; tried: ${tried[*]}. Install one, or set PYTHON to its path." >&2
    return 1
}

# ensure_venv NAME REQUIREMENTS_FILE: prints the path of an environment that has what the file asks for.
ensure_venv() {
    local name=$1 requirements=$2 python hash venv
    python=$(find_python) || return
    hash=$(_venv_hash "$python" "$requirements") || return
    venv="${EASYTORCH_VENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/easytorch/venvs}/$name-${hash:0:12}"
    ensure_venv_at "$venv" "$requirements" || return
    echo "$venv"
}

# ensure_venv_at PATH REQUIREMENTS_FILE: the same at PATH. Prints nothing on stdout.
ensure_venv_at() {
    local venv=$1 requirements=$2 python hash
    python=$(find_python) || return
    hash=$(_venv_hash "$python" "$requirements") || return
    mkdir -p "$(dirname "$venv")" || return
    (
        # The lock belongs to descriptor 9, which Python shares: it lasts until this subshell ends. Python's flock,
        # because the command of that name is Linux's only.
        exec 9>"$venv.lock"
        "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || exit
        _venv_make "$venv" "$requirements" "$python" "$hash"
    )
}

_venv_make() {
    local venv=$1 requirements=$2 python=$3 hash=$4
    if [[ -e $venv && ! -e $venv/$VENV_STAMP ]]; then
        echo "error: $venv exists and was not made by this script. Move it away, or choose another place." >&2
        return 1
    fi
    if [[ -e $venv && $(<"$venv/$VENV_STAMP") == "$hash" && -x $venv/bin/python ]]; then
        return
    fi
    echo "making $venv from $requirements with $("$python" --version) (a few minutes)" >&2
    rm -rf "$venv" || return
    mkdir -p "$venv" && echo "incomplete" >"$venv/$VENV_STAMP" || return
    if ! "$python" -m venv "$venv" >&2; then
        echo "error: $python cannot make environments; on Debian and Ubuntu install the package python3-venv." >&2
        return 1
    fi
    _venv_install "$venv" "$requirements" && echo "$hash" >"$venv/$VENV_STAMP"
}

# Runs the stages of a requirements file. -qq drops pip's warnings and keeps its errors.
_venv_install() {
    local venv=$1 requirements=$2 stages stage options
    stages=$(mktemp -d) || return
    awk -v to="$stages" 'BEGIN { n = 10 } /^#stage/ { n++ } { print > (to "/" n ".txt") }' "$requirements"
    for stage in "$stages"/*.txt; do
        options=$(sed -n 's/^#stage//p' "$stage")
        # shellcheck disable=SC2086 - the options are words
        if ! "$venv/bin/python" -m pip install -qq $options -r "$stage" >&2; then
            echo "error: pip could not install this part of $requirements: $(grep -v '^#' "$stage" | xargs)" >&2
            rm -rf "$stages"
            return 1
        fi
    done
    rm -rf "$stages"
}

# What an environment depends on: the requirements without comments (stages count) and the exact Python.
_venv_hash() {
    "$1" - "$2" <<'PYTHON'
import hashlib, pathlib, platform, sys

lines = pathlib.Path(sys.argv[1]).read_text().splitlines()
pins = [line.strip() for line in lines if line.startswith("#stage") or (line.strip() and not line.startswith("#"))]
print(hashlib.sha256("\n".join([*pins, sys.version, platform.machine()]).encode()).hexdigest())
PYTHON
}
