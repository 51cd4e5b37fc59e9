"""numpy's `.npz`: a zip archive with one `.npy` file per tensor, as big_vision and vision_transformer publish weights.

Members are stored or deflated. Stored ones are mapped; a deflated one is inflated when it is read, into as many bytes
as its header declares and no more. bfloat16, which numpy does not know, comes back from an npz as two void bytes
(`|V2`) and is restored, as big_vision's `recover_dtype` does. Nothing is unpickled.
Source: numpy.lib.format (the .npy versions 1 to 3), the zip specification (APPNOTE 4.3).
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from easytorch.bridge.core.blocks import byte_blocks
from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.mapped import MappedFile, check_announced
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Layout, Source
from easytorch.bridge.formats.numpy_files.npy_header import HEADER_BYTES, NpyHeader, npy_bytes, read_npy_header

_STORED, _DEFLATED = 0, 8
_ENCRYPTED = 1
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_MAGIC = b"PK\x03\x04"
# A deflated member may promise a hundred times its bytes (weights deflate to nine tenths, fresh zeros to a thousandth);
# beyond that it may not promise more than 256 MiB.
_RATIO, _FREE_BYTES = 100, 256 << 20
_PIECE = 1 << 20
# Elements start at a multiple of this, so that they can be used in place.
_ALIGNMENT = 64
_ZIP64_EXTRA = 20


class NpzFile(ContextManager):
    def __init__(self, path: Path, writable: bool = False) -> None:
        self._map = MappedFile(path, writable)
        self.files = (path,)
        self.metadata: Mapping[str, str] = {}
        self._starts: dict[str, int] = {}
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._headers: dict[str, NpyHeader] = {}
        tensors: dict[str, TensorInfo] = {}
        try:
            self._index(tensors)
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = tensors

    def _fail(self, message: str, name: str | None = None) -> CheckpointError:
        return CheckpointError(f"{message}; download or save the file again", file=self.files[0], tensor=name)

    def _index(self, tensors: dict[str, TensorInfo]) -> None:
        for member in self._directory():
            name = member.filename.removesuffix(".npy")
            if name == member.filename or not name:
                raise self._fail("is not an array: an npz holds files called <name>.npy", member.filename)
            if name in self._members:
                raise self._fail("stands twice in the archive", name)
            self._members[name] = member
        self._locate()
        for name, member in self._members.items():
            header = read_npy_header(self._opening(name, member), self.files[0], name)
            if header.start + header.nbytes != member.file_size:
                raise self._fail(
                    f"declares {header.dtype} {header.shape}, {header.nbytes} bytes, "
                    f"and {member.file_size - header.start} are there",
                    name,
                )
            self._headers[name] = header
            tensors[name] = TensorInfo(name, header.shape, header.dtype, str(self.files[0]))

    def _directory(self) -> list[zipfile.ZipInfo]:
        """The archive's table of contents."""
        try:
            with zipfile.ZipFile(self.files[0]) as archive:
                return archive.infolist()
        except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, UnicodeDecodeError) as error:
            raise self._fail(f"is not a whole npz archive ({error})") from error
        # zipfile trusts the offsets of a damaged directory.
        except (OSError, ValueError, struct.error, OverflowError, IndexError) as error:
            raise self._fail(f"has a damaged table of contents ({error})") from error

    def _locate(self) -> None:
        """Finds where the bytes of each member start, and refuses those that overlap or claim too much."""
        end, ends = 0, ""
        for name, member in sorted(self._members.items(), key=lambda entry: entry[1].header_offset):
            start = self._start(name, member)
            if member.header_offset < end:
                raise self._fail(f"its bytes are also those of {ends!r}", name)
            end, ends = start + member.compress_size, name
            if end > self._map.size:
                raise self._fail("is truncated: its bytes end after the file", name)
            if member.file_size > max(_FREE_BYTES, _RATIO * member.compress_size):
                raise self._fail(
                    f"promises {member.file_size} bytes out of {member.compress_size}, more than weights deflate", name
                )
            self._starts[name] = start

    def _start(self, name: str, member: zipfile.ZipInfo) -> int:
        """The offset of the first byte of a member, behind its local header."""
        if member.flag_bits & _ENCRYPTED:
            raise self._fail("is encrypted", name)
        if member.compress_type not in (_STORED, _DEFLATED):
            raise self._fail(
                f"is compressed by method {member.compress_type}; numpy writes {_STORED} and {_DEFLATED}", name
            )
        if member.compress_type == _STORED and member.compress_size != member.file_size:
            raise self._fail("is stored in another number of bytes than it has", name)
        at = member.header_offset
        if at < 0 or at + 30 > self._map.size:
            raise self._fail("its header stands outside the file", name)
        name_length: int
        extra_length: int
        magic, name_length, extra_length = _LOCAL_HEADER.unpack(self._map.bytes[at : at + 30])
        if magic != _LOCAL_MAGIC:
            raise self._fail("has no header where the table of contents says", name)
        return at + 30 + name_length + extra_length

    def _opening(self, name: str, member: zipfile.ZipInfo) -> bytes:
        """The first bytes of a member's content, enough for the header of an array."""
        start = self._starts[name]
        stored = self._map.bytes[start : start + min(member.compress_size, HEADER_BYTES)]
        if member.compress_type == _STORED:
            return stored
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(stored, HEADER_BYTES)
        except zlib.error as error:
            raise self._fail(f"cannot be inflated ({error})", name) from error

    def read(self, name: str) -> np.ndarray:
        """The elements; a view of a mapped file where the member is neither deflated nor in another byte order."""
        header, member = self._headers[name], self._members[name]
        if member.compress_type == _STORED:
            return header.array(self._map.array(self._starts[name] + header.start, (header.nbytes,), "uint8"), 0)
        return header.array(self._inflated(name, member), header.start)

    def _inflated(self, name: str, member: zipfile.ZipInfo) -> np.ndarray:
        content = np.empty(member.file_size, np.uint8)
        engine, filled = zlib.decompressobj(-zlib.MAX_WBITS), 0
        at, end = self._starts[name], self._starts[name] + member.compress_size
        try:
            while not engine.eof and (engine.unconsumed_tail or at < end):
                given = engine.unconsumed_tail or self._map.bytes[at : min(at + _PIECE, end)]
                at += 0 if engine.unconsumed_tail else len(given)
                # One byte more than there is room for, to see a member that goes on.
                piece = engine.decompress(given, min(_PIECE, len(content) - filled) + 1)
                if len(piece) > len(content) - filled:
                    raise self._fail(f"inflates to more than the {member.file_size} bytes it declares", name)
                content[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
                filled += len(piece)
        except zlib.error as error:
            raise self._fail(f"cannot be inflated ({error})", name) from error
        if filled != len(content) or zlib.crc32(content.data) != member.CRC:
            raise self._fail("is damaged: its length or its checksum is not what the archive says", name)
        return content

    def close(self) -> None:
        """Lets go of the mapped file."""
        self._map.close()


class Npz:
    """A tree of arrays in one npz file, names joined by "/"."""

    name = "npz"
    scheme = None
    suffix: str | None = ".npz"
    file_name = "model.npz"

    def detect(self, path: Path) -> Path | None:
        """`model.npz` of a folder, else the only `.npz` there; any `.npz` given as a file."""
        if path.is_file():
            return path if path.suffix == ".npz" else None
        if (path / self.file_name).is_file():
            return path / self.file_name
        found = sorted(path.glob("*.npz"))
        return found[0] if len(found) == 1 else None

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        return NpzFile(file, writable)

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """One file, whatever its size; `CheckpointError` for an element type that numpy cannot name."""
        for info in tensors:
            npy_bytes(info)
        return {self.file_name: list(tensors)}

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        """The archive, stored and not deflated, elements at multiples of 64 bytes."""
        with (folder / file).open("wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            for info in tensors:
                header = npy_bytes(info)
                member = zipfile.ZipInfo(f"{info.name}.npy")
                member.extra = _padding(stream.tell(), member.filename, len(header))
                array = source.read(info.name)
                check_announced(info, array)
                with archive.open(member, "w", force_zip64=True) as out:
                    out.write(header)
                    for block in byte_blocks(array):
                        out.write(block)
                source.wrote(info)

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """Nothing stands beside the file."""

    def reads_back(self, info: TensorInfo, array: np.ndarray) -> np.ndarray:
        return array


def _padding(position: int, name: str, header: int) -> bytes:
    """An extra field of the local header at `position` that makes the elements start aligned."""
    before = position + 30 + len(name.encode()) + _ZIP64_EXTRA + 4 + header
    # 0x4246 ("FB") is what torch's own archives pad with.
    return struct.pack("<HH", 0x4246, -before % _ALIGNMENT) + bytes(-before % _ALIGNMENT)
