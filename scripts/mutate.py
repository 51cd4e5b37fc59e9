"""Breaks the code on purpose, one mutation at a time, and counts how many the tests notice.

    python scripts/mutate.py                         every room of scripts/mutations/
    python scripts/mutate.py --room training --only clipping
    python scripts/mutate.py --sample 20 --seed 3    a seeded choice over all rooms
    python scripts/mutate.py --list

A mutation names a file, a text that occurs once in it, the text that replaces it, what that breaks, and the tests that
ought to notice. Mutations are made in a copy of the checkout, so a run that is killed leaves nothing behind. Before
its first mutation a set of tests must pass on the copy as it is: a test that fails anyway notices nothing.

A mutation is killed when its tests fail or exceed --timeout. The exit code is 1 where fewer than --bar are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

ROOT = Path(__file__).resolve().parents[1]
FIELDS = ("file", "find", "replace", "tests", "breaks")


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change of the code that tests ought to notice."""

    room: str
    number: int  # from 1, in its room's file
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    breaks: str

    @property
    def label(self) -> str:
        return f"{self.room}#{self.number} {self.file}: {self.breaks}"

    def apply(self, source: str) -> str:
        """The source, mutated. ValueError unless `find` occurs exactly once."""
        count = source.count(self.find)
        if count != 1:
            raise ValueError(f"{self.label}: `find` occurs {count} times in {self.file}; it must occur once")
        return source.replace(self.find, self.replace)


@dataclass(frozen=True)
class Result:
    mutation: Mutation
    outcome: str  # killed, timeout or survived
    seconds: float

    @property
    def noticed(self) -> bool:
        return self.outcome != "survived"


def read_room(path: Path) -> list[Mutation]:
    """The mutations of one file of scripts/mutations/. ValueError names a field that is missing or unknown."""
    entries = tomllib.loads(path.read_text()).get("mutation", [])
    found = []
    for number, entry in enumerate(entries, 1):
        if sorted(entry) != sorted(FIELDS):
            raise ValueError(f"{path.name}#{number} has the fields {sorted(entry)}; they must be {sorted(FIELDS)}")
        if entry["find"] == entry["replace"]:
            raise ValueError(f"{path.name}#{number} changes nothing")
        entry["tests"] = tuple(entry["tests"])
        found.append(Mutation(room=path.stem, number=number, **entry))
    return found


def read_rooms(folder: Path) -> list[Mutation]:
    return [mutation for path in sorted(folder.glob("*.toml")) for mutation in read_room(path)]


def copy_checkout(root: Path, destination: Path) -> None:
    """The files git knows or would add, at `destination`."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, names):
        source = root / name
        if source.is_file():
            target = destination / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


class Checkout:
    """A copy of the checkout that mutations are made in, one after the other."""

    def __init__(self, root: Path, folder: Path, timeout: float) -> None:
        self.folder = folder
        self.timeout = timeout
        copy_checkout(root, folder)
        self._writes = 0

    def run_tests(self, tests: Iterable[str]) -> tuple[str, str]:
        """passed, failed or timeout, and what pytest printed."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        environment = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", **os.environ}
        # libraries of mutated C++ would take the places of the user's own
        environment["XDG_CACHE_HOME"] = str(self.folder.parent / "cache")
        with tempfile.TemporaryFile("w+") as output:
            # A session of its own: a mutation that hangs may hang in a process the test has started.
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                return "timeout", ""
            finally:
                _end(process)
            output.seek(0)
            text = output.read()
        if code == 0:
            return "passed", text
        if code in (4, 5):  # pytest: no such argument; no test collected
            raise ValueError(f"pytest finds no test in {' '.join(tests)}:\n{text[-1000:]}")
        return "failed", text

    def try_mutation(self, mutation: Mutation) -> Result:
        path = self.folder / mutation.file
        source = path.read_text()
        began = time.monotonic()
        self._write(path, mutation.apply(source))
        try:
            outcome, _ = self.run_tests(mutation.tests)
        finally:
            self._write(path, source)
        names = {"passed": "survived", "failed": "killed", "timeout": "timeout"}
        return Result(mutation, names[outcome], time.monotonic() - began)

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source)
        # Python takes compiled code for current when size and whole seconds agree: give each version a time of its own.
        self._writes += 1
        stamp = 1_000_000_000 + self._writes
        os.utime(path, (stamp, stamp))


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_mutations(mutations: list[Mutation], root: Path, jobs: int, timeout: float) -> list[Result]:
    """Tries every mutation. ValueError where tests fail without one."""
    by_tests: dict[tuple[str, ...], list[Mutation]] = defaultdict(list)
    for mutation in mutations:
        by_tests[mutation.tests].append(mutation)
    results: list[Result] = []
    lock = Lock()
    with tempfile.TemporaryDirectory(prefix="easytorch-mutate-") as work:
        checkouts: SimpleQueue[Checkout] = SimpleQueue()
        for job in range(jobs):
            checkouts.put(Checkout(root, Path(work) / str(job), timeout))

        def run_group(tests: tuple[str, ...], group: list[Mutation]) -> None:
            checkout = checkouts.get()
            try:
                outcome, text = checkout.run_tests(tests)
                if outcome != "passed":
                    raise ValueError(f"without a mutation, {' '.join(tests)} end with: {outcome}\n{text[-3000:]}")
                for mutation in group:
                    result = checkout.try_mutation(mutation)
                    with lock:
                        results.append(result)
                        print(f"{result.outcome:9}{result.seconds:6.1f} s  {mutation.label}", flush=True)
            finally:
                checkouts.put(checkout)

        with ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(run_group, *item) for item in by_tests.items()]:
                future.result()
    return results


def summarize(results: list[Result]) -> str:
    """One line per room, the survivors, and the total."""
    rooms: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        rooms[result.mutation.room].append(result)
    lines = [""]
    for room, of_room in sorted(rooms.items()):
        lines.append(f"{room:20}{sum(result.noticed for result in of_room):4} of {len(of_room):3} killed")
    noticed = sum(result.noticed for result in results)
    lines.append(f"{'all':20}{noticed:4} of {len(results):3} killed: {noticed / len(results):.1%}")
    lines += [f"survived: {result.mutation.label}" for result in results if not result.noticed]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", action="append", help="only these files of scripts/mutations/, without .toml")
    parser.add_argument("--only", metavar="TEXT", help="only mutations whose label has this text")
    parser.add_argument("--sample", type=int, metavar="N", help="N of them, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="how many at once, each in a copy of its own (2)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that the tests of one mutation may take")
    parser.add_argument("--bar", type=float, default=0.9, help="the share that must be killed (0.9)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true", help="print the mutations and stop")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    mutations = read_rooms(ROOT / "scripts" / "mutations")
    rooms = {mutation.room for mutation in mutations}
    if options.room:
        if unknown := set(options.room) - rooms:
            print(f"error: no room {sorted(unknown)}; there are {sorted(rooms)}", file=sys.stderr)
            return 2
        mutations = [mutation for mutation in mutations if mutation.room in options.room]
    if options.only:
        mutations = [mutation for mutation in mutations if options.only in mutation.label]
    if options.sample is not None:
        mutations = random.Random(options.seed).sample(mutations, min(options.sample, len(mutations)))
    if not mutations:
        print("error: no mutation has that label", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(mutation.label for mutation in mutations))
        return 0
    for mutation in mutations:  # all of them apply, before the first is tried
        mutation.apply((ROOT / mutation.file).read_text())
    try:
        results = run_mutations(mutations, ROOT, options.jobs, options.timeout)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summarize(results))
    if options.json is not None:
        rows = [{**asdict(result.mutation), "outcome": result.outcome, "seconds": result.seconds} for result in results]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if sum(result.noticed for result in results) >= options.bar * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
