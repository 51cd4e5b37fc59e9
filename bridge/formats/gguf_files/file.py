"""GGUF, llama.cpp's format: `*.gguf`, or parts called `NAME-00001-of-00003.gguf`; names are llama.cpp's.

Quantized elements are read as float32. Plain numbers and Q8_0 are written; as in llama.cpp's converter, norms, vectors
and a few small tables are always float32, and rows whose length blocks do not divide are float16 instead of Q8_0.
Source: ggml's docs/gguf.md, the gguf package (`GGUFWriter` writes the headers), llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from easytorch.bridge.core.casting import CastOverflow, cast
from easytorch.bridge.core.config import Config
from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.in_parts import InParts
from easytorch.bridge.core.mapped import MappedFile, check_announced
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import ALIASES, FLOATING
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Layout, Source
from easytorch.bridge.formats.gguf_files.blocks import (
    PLAIN,
    UNPACKED,
    block_length,
    can_unpack,
    packed,
    require_gguf,
    rounded,
    stored_bytes,
    unpack,
)
from easytorch.bridge.formats.gguf_files.vocabulary import write_tokenizer
from easytorch.bridge.formats.gguf_files.walk import ALIGNMENT, MAX_DIMENSIONS, Header, Stored, as_text
from easytorch.bridge.formats.sharding import shard_names, split

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_PARTS = 10_000
# What llama.cpp's converter keeps in float32, beside vectors, norms and whatever is no `.weight`.
_SMALL = re.compile(r"(?:.*_norm|.*\.ffn_gate_inp(?:_shexp)?|position_embd|token_types|.*\.attn_rel_b)\.weight")
_KINDS = {name: kind for kind, name in PLAIN.items()}
Q8_0 = "q8_0"
# llama.cpp's number for what most of a file is stored as.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}


class GgufReader(ContextManager):
    """One open file or the parts of one. `fields`: the metadata, arrays included."""

    def __init__(self, files: Sequence[Path], writable: bool = False) -> None:
        require_gguf()
        self.files = tuple(files)
        self.tensors: dict[str, TensorInfo] = {}
        self.fields: dict[str, Any] = {}
        self.types: dict[str, int] = {}
        self._maps: list[MappedFile] = []
        self._home: dict[str, tuple[MappedFile, Stored]] = {}
        try:
            for file in files:
                self._open(file, writable)
            self._take_out_derived()
        except BaseException:
            self.close()
            raise

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata as text, lists by their length, and how many tensors are stored as what."""
        kinds = [stored.kind for _, stored in self._home.values()]
        counted = ", ".join(f"{kind} {kinds.count(kind)}" for kind in dict.fromkeys(kinds))
        return {"tensor types": counted, **{key: as_text(value) for key, value in self.fields.items()}}

    def _open(self, file: Path, writable: bool) -> None:
        mapped = MappedFile(file, writable)
        self._maps.append(mapped)
        header = Header(file, mapped.bytes, mapped.size)
        for key, value in header.fields.items():
            self.fields.setdefault(key, value)
            self.types.setdefault(key, header.kinds[key])
        for stored in header.tensors:
            if stored.name in self.tensors:
                raise CheckpointError(
                    f"stands in {self.tensors[stored.name].file} and again here", file=file, tensor=stored.name
                )
            if stored.kind not in PLAIN and not can_unpack(stored.kind):
                message = f"is packed as {stored.kind}, which the gguf package here does not unpack"
                raise CheckpointError(f"{message}; upgrade it, or convert the file with llama.cpp", tensor=stored.name)
            dtype = PLAIN.get(stored.kind, UNPACKED)
            packed = ("", 0) if stored.kind in PLAIN else (stored.kind, stored.nbytes)
            self.tensors[stored.name] = TensorInfo(stored.name, stored.shape, dtype, str(file), *packed)
            self._home[stored.name] = mapped, stored

    def _take_out_derived(self) -> None:
        """Rotary factors follow from the config: they are read into it and are no weights."""
        from easytorch.bridge.formats.gguf_files.config import DERIVED

        self.derived = {name: self.read(name) for name in DERIVED if name in self.tensors}
        for name in self.derived:
            del self.tensors[name]

    def config(self) -> dict[str, Any] | None:
        """The contents of config.json, from the metadata; None for an architecture that is not known here."""
        from easytorch.bridge.formats.gguf_files.config import config_from

        try:
            return config_from(self.fields, self.tensors, self.derived)
        except CheckpointError as error:
            raise CheckpointError(str(error), file=self.files[0]) from error

    def write_tokenizer(self, folder: Path) -> str | None:
        """Writes the tokenizer in the metadata into `folder` as transformers reads it; returns why it could not."""
        return write_tokenizer(self.files[0], self.fields, folder)

    def read(self, name: str) -> np.ndarray:
        """The elements, packed ones unpacked to float32; a view of the file where it is mapped."""
        return self.read_in_parts(name).whole()

    def read_in_parts(self, name: str) -> InParts:
        """`read` in one part, which is read when it is used unless it must be dequantized."""
        mapped, stored = self._home[name]
        if stored.kind in PLAIN:
            return InParts.of(mapped.elements(stored.start, stored.shape, PLAIN[stored.kind]))
        packed = mapped.array(stored.start, (stored.nbytes,), "uint8")
        return InParts.of(unpack(packed, stored.kind, stored.shape))

    def read_packed(self, name: str) -> np.ndarray:
        """The bytes of a tensor as in the file."""
        mapped, stored = self._home[name]
        return mapped.array(stored.start, (stored.nbytes,), "uint8")

    def close(self) -> None:
        """Lets go of the mapped files."""
        for mapped in self._maps:
            mapped.close()


_ACCEPTED = "GGUF's readers take matrices as q8_0, f32, f16 or bf16; give one of them as dtype"


class Gguf:
    """The format. `most` is what matrices are stored as: None for what they are, else a `--dtype`."""

    name = "GGUF"
    scheme = "gguf"
    suffix = ".gguf"
    file_name = "model.gguf"

    def __init__(self, most: str | None = None) -> None:
        self._most = None if most is None else "Q8_0" if most == Q8_0 else _kind(ALIASES.get(most, most))
        if most is not None and self._most is None:
            raise ValueError(f"{most!r}: {_ACCEPTED}")

    def storing(self, dtype: str) -> Gguf:
        """The format with matrices stored as `dtype`: q8_0, f32, f16 or bf16; `ValueError` for another."""
        return Gguf(dtype)

    def detect(self, path: Path) -> Path | None:
        """`model.gguf`, the only `.gguf` or the first part of the only set of parts; any `.gguf` given as a file."""
        if path.is_file():
            return path if path.suffix == self.suffix else None
        if (path / self.file_name).is_file():
            return path / self.file_name
        found = sorted(file for file in path.glob("*.gguf") if file.is_file() and not file.name.startswith("mmproj"))
        whole = [file for file in found if (part := _PART.fullmatch(file.name)) is None or int(part["number"]) == 1]
        if len(whole) > 1:
            names = ", ".join(file.name for file in whole)
            raise CheckpointError(f"holds several GGUF files ({names}); give the path of the one to use", file=path)
        return whole[0] if whole else found[0] if found else None

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """The file, or all parts of the set it belongs to."""
        return GgufReader(_parts(file), writable)

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """The tensors in the order given."""
        require_gguf()
        groups = split(tensors, max_shard_size, self.stored_bytes)
        return dict(zip(shard_names(self.file_name, len(groups)), groups, strict=True))

    def stored_bytes(self, info: TensorInfo) -> int:
        """The bytes that a tensor takes in the file."""
        return stored_bytes(self._stored(info), info.shape)

    def _stored(self, info: TensorInfo) -> str:
        """ggml's type for the tensor: the one it has in GGUF already where no dtype is asked for.

        `CheckpointError` for what GGUF cannot hold.
        """
        if len(info.shape) > MAX_DIMENSIONS or len(info.name.encode()) >= 64:
            raise CheckpointError(
                f"of shape {info.shape} is more than ggml's names and dimensions hold", tensor=info.name
            )
        if info.packed and self._most is None:
            return info.packed
        if info.dtype not in FLOATING:
            if info.dtype not in _KINDS:
                raise CheckpointError(f"GGUF has no dtype {info.dtype}; cast it to one it has", tensor=info.name)
            return _KINDS[info.dtype]
        most = self._most or _kind(info.dtype)
        if most is None:
            raise CheckpointError(f"is {info.dtype}; {_ACCEPTED}", tensor=info.name)
        if len(info.shape) < 2 or not info.name.endswith(".weight") or _SMALL.fullmatch(info.name):
            return "F32"
        return "F16" if most == "Q8_0" and info.shape[-1] % block_length(most) else most

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        """One file; the first of several has the metadata and the rotary factors."""
        from easytorch.bridge.formats.gguf_files.header import carried_fields, write_header

        number, _ = _place(file)
        derived = _derived(source) if number == 0 else {}
        kinds = {info.name: self._stored(info) for info in tensors}
        entries = [(info.name, info.shape, kinds[info.name]) for info in tensors]
        entries += [(name, array.shape, "F32") for name, array in derived.items()]
        fields, types = (
            (source.origin.fields, source.origin.types) if isinstance(source.origin, GgufReader) else ({}, {})
        )
        file_type = self._file_type(kinds)
        if any(kind == info.packed for kind, info in zip(kinds.values(), tensors, strict=True)):
            # A mixture of packed types, which only the file it comes from has a number for.
            file_type = fields.get("general.file_type", file_type)
        carried = carried_fields(fields, whole=_is_own(source))
        write_header(folder / file, entries, _config(source), file_type, *_place(file), carried, types)
        with (folder / file).open("ab") as stream:
            for info in tensors:
                for piece in _stored_elements(info, kinds[info.name], source):
                    stream.write(piece.data)
                _pad(stream)
                source.wrote(info)
            for array in derived.values():
                stream.write(array.tobytes())
                _pad(stream)

    def _file_type(self, kinds: Mapping[str, str]) -> int:
        """llama.cpp's number for what was asked for, or for what most matrices are."""
        stored = [kind for name, kind in kinds.items() if kind in _FILE_TYPES and kind != "F32"]
        return _FILE_TYPES.get(self._most or max(stored, key=stored.count, default="F32"), 0)

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """Writes the total number of tensors, which every part states, into each."""
        if len(layout) > 1:
            from easytorch.bridge.formats.gguf_files.header import state_total

            total = sum(len(infos) for infos in layout.values()) + len(_derived(source))
            for file in layout:
                state_total(folder / file, total)

    def reads_back(self, info: TensorInfo, array: np.ndarray) -> np.ndarray:
        """The array rounded to what it is stored as; packed elements that were copied are what they were."""
        return array if info.packed and self._most is None else rounded(array, self._stored(info))


def _stored_elements(info: TensorInfo, kind: str, source: Source) -> Iterator[np.ndarray]:
    """The bytes of a tensor as ggml's type `kind`, in pieces; of one that is stored so already, the same bytes."""
    if kind == info.packed and isinstance(source.origin, GgufReader):
        yield source.origin.read_packed(info.name)
        return
    array = source.read(info.name)
    check_announced(info, array)
    try:
        yield from packed(array, kind)
    except CastOverflow as error:
        raise error.of(info.name) from None


def _kind(dtype: str) -> str | None:
    """ggml's type for matrices of a floating `dtype`, None where it has none: bfloat16 holds all that eight bits do."""
    if dtype.startswith("float8"):
        return "BF16"
    return _KINDS[dtype] if dtype in ("float32", "float16", "bfloat16") else None


def _config(source: Source) -> Config:
    if source.config is None:
        raise CheckpointError("GGUF states the model's config, and there is none; give it by `config`")
    return source.config


def _is_own(source: Source) -> bool:
    """Whether the weights come from a GGUF file, and the config is what that file says."""
    return isinstance(source.origin, GgufReader) and source.origin.config() == _config(source).content


def _derived(source: Source) -> Mapping[str, np.ndarray]:
    """The rotary factors: of a file with its own config the very ones it has."""
    from easytorch.bridge.formats.gguf_files.config import derived_tensors

    if isinstance(source.origin, GgufReader) and _is_own(source):
        return {name: cast(array, np.dtype(np.float32)) for name, array in source.origin.derived.items()}
    return derived_tensors(_config(source))


def _pad(stream: BinaryIO) -> None:
    stream.write(bytes(-stream.tell() % ALIGNMENT))


def _place(file: str) -> tuple[int, int]:
    """Which part of how many `file` is, from 0."""
    part = _PART.fullmatch(file)
    return (0, 1) if part is None else (int(part["number"]) - 1, int(part["count"]))


def _parts(file: Path) -> list[Path]:
    """All parts of the set that `file` belongs to; `CheckpointError` when one is missing."""
    part = _PART.fullmatch(file.name)
    if part is None:
        return [file]
    count = int(part["count"])
    if not 0 < count <= _MOST_PARTS:
        raise CheckpointError(f"is called one of {count} parts; rename it, or give all of them", file=file)
    found = [file.with_name(f"{part['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    for one in found:
        if not one.is_file():
            raise CheckpointError(f"its part {one.name!r} is missing; download or copy it again", file=file)
    return found
