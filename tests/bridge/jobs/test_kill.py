"""Conversions ended at any moment: by SIGKILL, by signals one may catch, by a full disk. What stands there is whole."""

import filecmp
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from easytorch.bridge.convert import convert
from easytorch.bridge.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[3]
SEED = 20240607
KILLS = 50
CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 12_000,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
# Forks a child for each line: [signal, at which of its calls it is sent, arguments of `easytorch`]. It has converted
# both ways itself before, so that a child imports nothing. Calls and not seconds: no moment comes too early or too late
# because a machine is busy. What signals do here is what they do by default, whatever the test's parent ignores.
SERVER = """
import itertools, json, os, signal, sys, traceback
from easytorch.cli.main import main
replies = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for source, to in zip(sys.argv[2::2], sys.argv[3::2]):
    try:
        main(["convert", source, f"{sys.argv[1]}.{to}", "--to", to])
    except SystemExit as end:
        assert not end.code
errors = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for line in sys.stdin:
    number, moment, *arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        calls = itertools.count()
        def counted(function):
            def call(*given, **named):
                if next(calls) == moment and number:
                    os.kill(os.getpid(), number)
                return function(*given, **named)
            return call
        for name in ("open", "pwrite", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        os.ftruncate(errors, 0)
        os.dup2(errors, 2)
        try:
            main(arguments)
        except SystemExit as end:
            with open(sys.argv[1] + ".calls", "w") as file:
                file.write(str(next(calls)))
            os._exit(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(99)
    status = os.waitpid(child, 0)[1]
    with open(sys.argv[1] + ".calls") as file:
        made = int(file.read() or 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), made]), file=replies, flush=True)
"""


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """A folder in memory where there is one: what is tested takes as long everywhere then, whatever the disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path_factory.mktemp("disk")
        return
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def place(memory):
    """An empty folder."""
    with TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def models(memory):
    """The same 32 MB as torch and as Flax folders, both in shards of 5 MB: target -> (source, what it becomes)."""
    import torch
    import transformers

    folder = memory / "models"
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig.from_dict(CONFIG))
    model.save_pretrained(folder / "torch", max_shard_size="5MB")
    convert(folder / "torch", folder / "flax", to="flax", max_shard_size="5MB")
    convert(folder / "flax", folder / "again", to="torch", max_shard_size="5MB")
    return {"flax": (folder / "torch", folder / "flax"), "torch": (folder / "flax", folder / "again")}


@pytest.fixture(scope="module")
def easytorch(models, memory):
    """`easytorch(*arguments, number=0, moment=0)` in a process of its own: its exit code and the calls it made."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    stderr = memory / "stderr"
    warm_up = [str(part) for to, (source, _) in models.items() for part in (source, to)]
    command = [sys.executable, "-c", SERVER, str(stderr), *warm_up]
    server = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def run(*arguments, number=0, moment=0):
        server.stdin.write(json.dumps([number, moment, *map(str, arguments)]) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    run.stderr = stderr.read_text
    yield run
    server.stdin.close()
    assert server.wait(600) == 0
    server.stdout.close()


def assert_same(folder, expected):
    """Bit for bit, file for file."""
    names = sorted(file.name for file in expected.iterdir())
    assert sorted(file.name for file in folder.iterdir()) == names
    assert len(names) > 6
    _, different, missing = filecmp.cmpfiles(folder, expected, names, shallow=False)
    assert (different, missing) == ([], [])


def partials(folder):
    return [file for file in folder.iterdir() if file.name.endswith(".partial")]


def finished(partial):
    """How many files the journal calls finished; none where the kill came before there was one."""
    journal = partial / "journal"
    return journal.read_text().count("\n") - 1 if journal.exists() else 0


@pytest.mark.parametrize("to", ["flax", "torch"])
def test_killed_at_any_moment(easytorch, models, place, to):
    source, expected = models[to]
    destination = place / "new"
    arguments = ("convert", source, destination, "--to", to, "--max-shard-size", "5MB", "--resume")
    code, calls = easytorch(*arguments)
    assert (code, easytorch.stderr()) == (0, "")
    assert_same(destination, expected)
    shutil.rmtree(destination)
    assert calls > 100
    moments = random.Random(f"{SEED} {to}")
    killed = gone_on = 0
    for number in range(KILLS // 2):
        moment = moments.randrange(calls)
        code, _ = easytorch(*arguments, number=signal.SIGKILL, moment=moment)
        assert code in (0, -signal.SIGKILL), (SEED, number, moment, easytorch.stderr())
        killed += code != 0
        if not destination.exists():
            assert [file for file in place.iterdir() if file not in partials(place)] == []
            assert len(partials(place)) <= 1
            if number % 2:
                # The next one goes on from what two have left.
                continue
            gone_on += any(finished(partial) for partial in partials(place))
            assert easytorch(*arguments)[0] == 0, easytorch.stderr()
        assert_same(destination, expected)
        assert easytorch(*arguments)[0] == 0, easytorch.stderr()
        assert partials(place) == []
        shutil.rmtree(destination)
    # All of it is for nothing if the runs were over before they were killed, or never had anything to go on from.
    assert killed >= KILLS // 10
    assert gone_on >= 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_ended_by_a_signal(easytorch, models, place, number, code):
    source, expected = models["flax"]
    arguments = ("convert", source, place / "not" / "new", "--to", "flax", "--max-shard-size", "5MB")
    calls = easytorch(*arguments)[1]
    shutil.rmtree(place / "not")
    for part in (0.1, 0.5, 0.7, 0.9):
        ended, _ = easytorch(*arguments, number=number, moment=int(part * calls))
        assert ended in (0, code)
        if (place / "not" / "new").exists():
            # The signal came too late, or in the very last moment.
            assert_same(place / "not" / "new", expected)
            shutil.rmtree(place / "not")
            continue
        assert list(place.iterdir()) == []
        assert "Traceback" not in easytorch.stderr()


@pytest.fixture(params=["tmpfs", "limit"])
def too_small(request, place):
    """A folder in which there is no room for a model of 32 MB, and what makes room."""
    if request.param == "limit":
        # Python ignores SIGXFSZ, so that a write beyond it is an error like that of a full disk.
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, hard))
        yield place, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    disk = place / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk, lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    # Lazily: what a traceback still holds open there is no error of the test.
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("to", ["flax", "torch"])
def test_no_room(models, too_small, to):
    source, expected = models[to]
    folder, make_room = too_small
    before = sorted(folder.iterdir())
    with pytest.raises(CheckpointError, match=r"new: cannot be written: (No space left on device|File too large)$"):
        convert(source, folder / "new", to=to, max_shard_size="5MB")
    assert sorted(folder.iterdir()) == before
    make_room()
    convert(source, folder / "new", to=to, max_shard_size="5MB", resume=True)
    assert_same(folder / "new", expected)
