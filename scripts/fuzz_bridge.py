"""Fuzzes the bridge's readers, guided by coverage, from the valid checkpoints of tests/bridge/seeds.py.

    python scripts/fuzz_bridge.py --seconds 120                 every reader, one after the other
    python scripts/fuzz_bridge.py --seconds 600 --reader GGUF

Needs `pip install atheris`. A reader that raises anything but CheckpointError, takes longer than 90 seconds or more
than 3 GB has failed: the input is kept, and the exit code is 1. The same inputs can be given again with --again FILE.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def load_seeds() -> ModuleType:
    """tests/bridge/seeds.py."""
    spec = importlib.util.spec_from_file_location("bridge_seeds", ROOT / "tests" / "bridge" / "seeds.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seed_contents(reader: str) -> list[dict[str, bytes]]:
    """The files of every seed of a reader, by their paths."""
    found = []
    for make in load_seeds().SEEDS[reader]:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder))
            files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
            found.append({str(file.relative_to(folder)): file.read_bytes() for file in files})
    return found


def fuzz(reader: str, arguments: list[str]) -> None:
    """Runs libFuzzer in this process, which it ends. An input is the seed's number, its file's number, that file."""
    import atheris

    contents = seed_contents(reader)
    with atheris.instrument_imports(include=["easytorch.bridge"]):
        from easytorch.bridge.errors import CheckpointError
        from easytorch.bridge.formats import registry
    format_ = next(format_ for format_ in registry.formats() if format_.name == reader)
    work = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))

    def attempt(data: bytes) -> None:
        if len(data) < 2:
            return
        files = contents[data[0] % len(contents)]
        paths = sorted(files)
        replaced = paths[data[1] % len(paths)]
        folder = work / "checkpoint"
        try:
            for path in paths:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data[2:] if path == replaced else files[path])
            file = format_.detect(folder)
            if file is None:
                return
            try:
                with format_.open(file) as opened:
                    for info in opened.tensors.values():
                        array = opened.read(info.name)
                        assert (array.shape, array.dtype.name) == (info.shape, info.dtype)
            except CheckpointError:
                return
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    atheris.Setup([sys.argv[0], *arguments], attempt)
    atheris.Fuzz()


def run(reader: str, seconds: int, kept: Path) -> bool:
    """Fuzzes one reader in a process of its own and prints what came of it; whether nothing failed."""
    slug = re.sub(r"\W+", "_", reader)
    corpus, artifacts = kept / f"corpus_{slug}", kept / f"failed_{slug}_"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, files in enumerate(seed_contents(reader)):
        for place, path in enumerate(sorted(files)):
            (corpus / f"seed_{number}_{place}").write_bytes(bytes([number, place]) + files[path])
    limits = [f"-max_total_time={seconds}", "-timeout=90", "-rss_limit_mb=3000", "-max_len=65536"]
    command = [sys.executable, __file__, "--inside", reader, *limits, "-print_final_stats=1"]
    command += [f"-artifact_prefix={artifacts}", str(corpus)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    executions = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
    coverage = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", done.stderr)
    count = int(executions[1]) if executions else 0
    edges, features, inputs = coverage[-1] if coverage else ("?", "?", "?")
    outcome = "nothing failed" if done.returncode == 0 else "FAILED"
    print(
        f"{reader:20} {count:9} executions {count / seconds:7.0f}/s  coverage {edges} edges, {features} features, "
        f"{inputs} inputs: {outcome}",
        flush=True,
    )
    if done.returncode:
        # Python's traceback goes to the one, libFuzzer's account to the other.
        print(*done.stdout.splitlines()[-60:], *done.stderr.splitlines()[-40:], sep="\n", flush=True)
    return done.returncode == 0


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        fuzz(sys.argv[2], sys.argv[3:])
        return
    known = list(load_seeds().SEEDS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", action="append", choices=known, help="only this one; may be given again")
    parser.add_argument("--seconds", type=int, default=60, help="for each reader")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "fuzz_bridge", help="for its inputs")
    parser.add_argument("--again", type=Path, help="one kept input, with --reader: the error it makes")
    given = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed: pip install atheris")
    readers = given.reader or known
    if given.again is not None:
        command = [sys.executable, __file__, "--inside", readers[0], str(given.again)]
        sys.exit(subprocess.run(command).returncode)
    outcomes = [run(reader, given.seconds, given.keep) for reader in readers]
    sys.exit(0 if all(outcomes) else 1)


if __name__ == "__main__":
    main()
