"""Damaged checkpoints, every reader: a CheckpointError that says where, or a checkpoint that is whole; nothing else.

The formats are those of the registry and the checkpoints those of seeds.py, so that a new reader without a seed fails.
`scripts/fuzz_bridge.py` looks further, guided by coverage.
"""

import importlib.util
import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry
from easytorch.bridge.inspect import inspect

_spec = importlib.util.spec_from_file_location("bridge_seeds", Path(__file__).parents[1] / "seeds.py")
seeds = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(seeds)

FORMATS = {format_.name: format_ for format_ in registry.formats()}
CASES = [(name, maker) for name in FORMATS for maker in seeds.SEEDS.get(name, ())]
# Far above what any of these small files can need, and far below what their damaged sizes ask for; seconds of CPU.
MEMORY_LIMIT = 256 << 20
TIME_LIMIT = 10


class TooSlow(BaseException):
    """No reader catches it."""


def test_every_reader_has_a_seed():
    assert set(seeds.SEEDS) == set(FORMATS)


@pytest.fixture(scope="module", params=CASES, ids=[f"{name}-{maker.__name__}" for name, maker in CASES])
def original(request, tmp_path_factory):
    """A whole checkpoint: its format, and its files by their paths in its folder."""
    name, make = request.param
    folder = tmp_path_factory.mktemp("seed")
    make(folder)
    contents = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    inspect_all(FORMATS[name], folder)  # what is imported at first use is no part of the time that an attempt takes
    return FORMATS[name], contents


@pytest.fixture
def attempt(tmp_path):
    """Opens and reads damaged contents; what is neither success nor CheckpointError is raised."""

    def attempt(format_, contents, read=read_all):
        folder = tmp_path / "damaged"
        for path, content in contents.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        reset_peak()
        before = peak()
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
        try:
            outcome = read(format_, folder)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            shutil.rmtree(folder)
        assert peak() - before < MEMORY_LIMIT
        return outcome

    def too_slow(number, frame):
        raise TooSlow

    former = signal.signal(signal.SIGPROF, too_slow)
    yield attempt
    signal.signal(signal.SIGPROF, former)


def read_all(format_, folder):
    """How many tensors were read; 0 where that was an error, or nothing was found."""
    file = format_.detect(folder)
    if file is None:
        return 0
    try:
        with format_.open(file) as reader:
            for name, info in reader.tensors.items():
                array = reader.read(name)
                assert (name, array.shape, array.dtype.name) == (info.name, info.shape, info.dtype)
                assert array.nbytes == info.nbytes
                array.sum(dtype=bool)
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert error.file is not None
        assert str(folder) in error.file
        return 0
    return len(reader.tensors)


def inspect_all(format_, folder):
    """The same for what every command does first: finding the format and the scheme, and a config in the shapes."""
    try:
        return len(inspect(folder).tensors)
    except CheckpointError as error:
        assert str(folder) in str(error)
        return 0


def reset_peak():
    """Makes the kernel forget the most memory this process has held."""
    Path("/proc/self/clear_refs").write_text("5")


def peak():
    """The most bytes this process has held since."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def test_the_seeds_are_whole(original, attempt):
    format_, contents = original
    assert attempt(format_, contents) > 0


# What lengths, offsets, shapes and codes are replaced by.
LIES = st.one_of(
    *(st.sampled_from([0, 1, 0x7F, 0x80, (1 << 8 * width) - 1, 1 << (8 * width - 1)]).map(
        lambda number, width=width, order=order: (number & (1 << 8 * width) - 1).to_bytes(width, order)
    ) for width in (1, 2, 4, 8) for order in ("little", "big")),
    st.binary(min_size=1, max_size=12),
)  # fmt: skip
NUMBERS = st.sampled_from(
    (
        *(b"-1", b"0", b"1", b"4294967296", b"9223372036854775807", b"99999999999999999999999", b"1e400", b"NaN"),
        *(b"null", b'"x"', b"[]", b"{}", b"[[" * 2000, b"0.5", b"true"),
    )
)


@st.composite
def damages(draw, contents):
    """The contents with one file cut, spliced, or with a few bytes or numbers replaced."""
    path = draw(st.sampled_from(sorted(contents)))
    content = contents[path]
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["bytes", "number", "cut", "copy", "noise"]))
        start = draw(st.integers(0, len(content)))
        if kind == "bytes":
            lie = draw(LIES)
            content = content[:start] + lie + content[start + len(lie) :]
        elif kind == "number":
            found = [match.span() for match in re.finditer(rb"-?\d+", content)]
            if found:
                start, end = draw(st.sampled_from(found))
                content = content[:start] + draw(NUMBERS) + content[end:]
        elif kind == "noise":
            content = draw(st.binary(max_size=200))
        elif kind == "cut":
            content = content[:start] + content[draw(st.integers(start, len(content))) :]
        else:
            end = min(len(content), start + draw(st.integers(1, 64)))
            where = draw(st.integers(0, len(content)))
            content = content[:where] + content[start:end] + content[where:]
    return {**contents, path: content}


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged(original, attempt, data):
    format_, contents = original
    attempt(format_, data.draw(damages(contents)))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_and_inspected(original, attempt, data):
    format_, contents = original
    config = json.dumps(seeds.CONFIG).encode()
    attempt(format_, data.draw(damages({**contents, "config.json": config})), inspect_all)


# Not those that one cannot tell: GGUF's last bytes are padding, EasyDeL's pairs end anywhere, torch reads its own.
@pytest.mark.parametrize("name", ["safetensors", "msgpack", "flax_safetensors", "npz"])
def test_every_truncation_is_noticed(name, attempt, tmp_path):
    make = getattr(seeds, name)
    format_ = next(FORMATS[format_name] for format_name, makers in seeds.SEEDS.items() if make in makers)
    make(tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    for length in range(len(content)):
        assert attempt(format_, {file.name: content[:length]}) == 0, length
