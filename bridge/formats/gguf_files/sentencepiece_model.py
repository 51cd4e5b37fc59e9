"""`tokenizer.model` of SentencePiece: its pieces and how it normalizes, read without the library.

Source: google/sentencepiece, src/sentencepiece_model.proto; the encoding is protobuf's wire format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from easytorch.bridge.errors import CheckpointError

_LIMIT = 64 << 20
UNIGRAM, BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass
class Vocabulary:
    """`pieces`: text, score and SentencePiece's type (1 normal, 2 unknown, 3 control, 4 user's, 5 unused, 6 byte)."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    model_type: int = UNIGRAM
    dummy_prefix: bool = True
    remove_spaces: bool = True
    charsmap: bytes = b""


def read_vocabulary(file: Path) -> Vocabulary:
    """The model in `file`; `CheckpointError` for anything else."""
    with file.open("rb") as stream:
        data = stream.read(_LIMIT + 1)
    try:
        if len(data) > _LIMIT:
            raise ValueError(f"more than {_LIMIT} bytes")
        return _vocabulary(data)
    except (ValueError, struct.error, IndexError) as error:
        raise CheckpointError(f"is not a SentencePiece model ({error}); download it again", file=file) from error


def _vocabulary(data: bytes) -> Vocabulary:
    made = Vocabulary()
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            parts = dict(_fields(value))
            text, score, kind = parts.get(1, b""), parts.get(2, 0.0), parts.get(3, 1)
            if not isinstance(text, bytes) or not isinstance(score, float) or not isinstance(kind, int):
                raise ValueError("a piece of the wrong types")
            made.pieces.append((text.decode("utf-8"), score, kind))
        elif number == 2 and isinstance(value, bytes):
            made.model_type = int(dict(_fields(value)).get(3, UNIGRAM))
        elif number == 3 and isinstance(value, bytes):
            parts = dict(_fields(value))
            charsmap = parts.get(2, b"")
            made.charsmap = charsmap if isinstance(charsmap, bytes) else b""
            made.dummy_prefix, made.remove_spaces = bool(parts.get(3, 1)), bool(parts.get(4, 1))
    if not made.pieces:
        raise ValueError("no pieces")
    return made


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
        elif kind == _BYTES:
            length, at = _varint(data, at)
            if length > len(data) - at:
                raise ValueError("a length beyond the end")
            yield tag >> 3, data[at : at + length]
            at += length
        elif kind in (_FIXED32, _FIXED64):
            code = "<f" if kind == _FIXED32 else "<d"
            (number,) = struct.unpack_from(code, data, at)
            yield tag >> 3, number
            at += struct.calcsize(code)
        else:
            raise ValueError(f"a field of the unknown kind {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number without an end")
