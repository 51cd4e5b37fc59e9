"""The header of a GGUF file, written by the gguf package: metadata, tokenizer, and where each tensor will stand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from easytorch.bridge.core.config import Config
from easytorch.bridge.formats.gguf_files.blocks import stored_bytes
from easytorch.bridge.formats.gguf_files.config import OWN_CONFIG
from easytorch.bridge.formats.gguf_files.vocabulary import tokenizer_fields

Entry = tuple[str, tuple[int, ...], str]
_TOTAL = "split.tensors.count"
# What says how one file is stored, and our own key, which is written anew.
_OF_ONE_FILE = re.compile(
    rf"general\.(architecture|alignment|file_type|quantization_version|type)|split\..*|{re.escape(OWN_CONFIG)}"
)


def write_header(
    path: Path,
    entries: Sequence[Entry],
    config: Config,
    file_type: int,
    number: int,
    count: int,
    carried: Mapping[str, Any],
    types: Mapping[str, int],
) -> None:
    """Writes a new file up to its data; the data of `entries` (name, shape, ggml's type) follows in that order.

    number, count: which part this is of how many; the first one has the metadata.
    carried: the metadata that goes along from another GGUF file, `carried_fields`; types: of its single numbers.
    Without a tokenizer in it, the one beside `config` is taken.
    """
    import gguf
    import numpy as np

    from easytorch.bridge.formats.gguf_files.config import arch_of, fields_of
    from easytorch.bridge.formats.gguf_files.tokenizer import add_tokenizer
    from easytorch.bridge.formats.gguf_files.vocabulary import add_fields

    writer = gguf.GGUFWriter(None, arch_of(config))
    if count > 1:
        # First, so that the total stands at a fixed offset and can be filled in once all parts are written. Parts after
        # the first hold no other fields.
        fields = writer.kv_data[0]
        writer.kv_data[0] = {}
        writer.add_int32(_TOTAL, 0)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.kv_data[0].update(fields if number == 0 else {})
    if number == 0:
        for key, value in fields_of(config).items():
            if key in carried:
                continue
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_string(key, value)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        if not tokenizer_fields(carried):
            add_tokenizer(writer, config)
        made = writer.kv_data[0].keys()
        add_fields(writer, {key: value for key, value in carried.items() if key not in made}, types)
    for name, shape, kind in entries:
        # The dtype only says that the shape counts elements.
        number_of = gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), stored_bytes(kind, shape), number_of)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as stream:
        stream.write(bytes(-stream.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def carried_fields(fields: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """The part of the metadata `fields` of another GGUF file that is copied: its name, tokenizer, unknown settings.

    whole: also the model's settings, where the config is the file's own and not one given instead.
    """
    model = f"{fields.get('general.architecture')}."
    return {
        key: value
        for key, value in fields.items()
        if not _OF_ONE_FILE.fullmatch(key) and (whole or not key.startswith(model))
    }


def state_total(path: Path, tensors: int) -> None:
    """Puts the number of tensors of all parts into one that `write_header` wrote as a part."""
    with path.open("r+b") as stream:
        # Magic, version and two counts; the key with its length; its type.
        stream.seek(4 + 4 + 8 + 8 + 8 + len(_TOTAL) + 4)
        stream.write(tensors.to_bytes(4, "little"))
