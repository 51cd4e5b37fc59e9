"""A check of a pickled torch checkpoint before torch unpickles it: dangerous files are refused unread.

`weights_only=True` runs no code from the file, but it inflates compressed entries whatever their size, allocates what
legal constructors are told to, and hashes the keys of dicts: nested tuples there overflow the C stack (a crash), or
take 2**depth steps. Layouts: torch.serialization of torch 2.13 (`_save`, `_legacy_save`) and Python's pickletools.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

from easytorch.bridge.errors import CheckpointError

# All that state dicts of plain tensors name: constructors, storages and element types.
_NAMES = re.compile(
    r"collections OrderedDict"
    r"|torch (\w+Storage|Size|device|bool|u?int\d+|b?float\d+\w*|complex\d+|double|half)"
    r"|torch\.storage (UntypedStorage|TypedStorage)"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
    r"|torch\._tensor _rebuild_from_type_v2|torch\.nn\.parameter (Parameter|Buffer)"
)
# A tensor takes about 200 bytes and 40 operations: both are far more than any model needs.
_PICKLE_LIMIT = 64 << 20
_OPERATION_LIMIT = 1 << 24
# Those torch makes hold a shape or a storage's five fields.
_TUPLE_LIMIT = 1000
# Operations that put one value on the stack.
_CONSTANTS = ("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1")
_TEXTS = ("BINUNICODE", "SHORT_BINSTRING")
_EMPTY = ("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET")
_PUSHES = frozenset((*_CONSTANTS, *_TEXTS, *_EMPTY))
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def check_pickle(path: Path) -> None:
    """Refuses (`CheckpointError`) a file torch should not be given; one that is merely damaged is left to torch."""
    if zipfile.is_zipfile(path):
        _check_archive(path)
        return
    # Not mapped: a file that is cut meanwhile would end the process.
    with path.open("rb") as stream:
        data = io.BytesIO(stream.read(_PICKLE_LIMIT))
    # The magic number, the protocol, the system, the state dict and the keys of the storages.
    for _ in range(5):
        if not _Check(path).run(data):
            break
    if data.tell() == _PICKLE_LIMIT:
        raise CheckpointError(f"has pickles of more than {_PICKLE_LIMIT} bytes, too many for names", file=path)


def _check_archive(path: Path) -> None:
    seen = set()
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            name = entry.filename
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                message = f"has the compressed entry {name!r}, and torch compresses nothing; save it again with torch"
                raise CheckpointError(message, file=path)
            if name in seen or entry.header_offset + entry.file_size > size:
                raise CheckpointError(f"has the entry {name!r} twice or not whole; download it again", file=path)
            seen.add(name)
            if name.endswith("data.pkl"):
                if entry.file_size > _PICKLE_LIMIT:
                    raise CheckpointError(f"has a pickle of {entry.file_size} bytes, too many for names", file=path)
                _Check(path).run(io.BytesIO(archive.read(entry)))


class _Check:
    """One pickle carried out on sizes alone: the stack holds, for each value, how many values it is made of."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack: list[int] = []
        self._marks: list[list[int]] = []
        self._memo: dict[int, int] = {}

    def run(self, stream: Any) -> bool:
        """Whether the pickle in `stream` came to its end; False for a damaged one, whose error is torch's to give."""
        count = 0
        try:
            for operation, argument, _ in pickletools.genops(stream):
                count += 1
                if count > _OPERATION_LIMIT:
                    raise CheckpointError("has a pickle too long for names of tensors", file=self._path)
                self._step(operation.name, argument)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            if isinstance(error, CheckpointError):
                raise
            return False
        return True

    def _step(self, name: str, argument: object) -> None:
        stack = self._stack
        if name in _PUSHES:
            stack.append(1)
        elif name == "GLOBAL":
            if _NAMES.fullmatch(str(argument)) is None:
                called = str(argument).replace(" ", ".")
                raise CheckpointError(
                    f"is not a pickle of plain tensors (it calls {called}), and others are not loaded because they can "
                    "run code; save the state dict as safetensors",
                    file=self._path,
                )
            stack.append(1)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[int(str(argument))] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[int(str(argument))])
        elif name == "MARK":
            self._marks.append(stack)
            self._stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            self._stack = self._marks.pop()
            if name == "TUPLE":
                self._push_tuple(stack)
        elif name in _TUPLES:
            parts = [stack.pop() for _ in range(_TUPLES[name])]
            self._push_tuple(parts)
        elif name in ("NEWOBJ", "REDUCE"):
            del stack[-2:]
            stack.append(1)
        elif name in ("BUILD", "APPEND"):
            stack.pop()
        elif name == "SETITEM":
            del stack[-2:]
        elif name == "BINPERSID":
            stack[-1] = 1
        elif name not in ("PROTO", "STOP"):
            raise CheckpointError(
                f"is pickled with {name}, which torch's loader of plain tensors does not read; save it again with "
                "torch.save, or as safetensors",
                file=self._path,
            )

    def _push_tuple(self, parts: list[int]) -> None:
        size = 1 + sum(parts)
        if size > _TUPLE_LIMIT:
            raise CheckpointError(
                f"has a tuple of {size} values, and no shape has so many; save the state dict as safetensors",
                file=self._path,
            )
        self._stack.append(size)
