"""A small valid checkpoint of every format, written by the format's own library: what the fuzzers damage.

`SEEDS` is keyed by the format's name in `bridge/formats/registry.py`; each maker fills an empty folder.
Loaded by its path, from tests/bridge/formats/test_fuzz.py and scripts/fuzz_bridge.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 9,
    "max_position_embeddings": 5,
}


def arrays() -> dict[str, np.ndarray]:
    """Torch-like names; a matrix, a bf16 vector, int64, a bool, and an empty array."""
    return {
        "embeddings.word_embeddings.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "encoder.layer.0.output.dense.bias": np.arange(3).astype(ml_dtypes.bfloat16),
        "embeddings.position_ids": np.arange(5, dtype=np.int64),
        "flag": np.array(True),
        "empty": np.empty((0, 4), np.float16),
    }


def tree() -> dict:
    """The same as a nested dict, with Flax's leaf names."""
    plain = arrays()
    return {
        "embeddings": {"word_embeddings": {"embedding": plain["embeddings.word_embeddings.weight"]}},
        "encoder": {"layer": {"0": {"output": {"dense": {"bias": plain["encoder.layer.0.output.dense.bias"]}}}}},
        "flag": plain["flag"],
        "empty": plain["empty"],
    }


def _tensors() -> dict:
    import torch

    found = {}
    for name, array in arrays().items():
        wide = array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
        found[name] = torch.from_numpy(wide.copy())
        if wide is not array:
            found[name] = found[name].to(torch.bfloat16)
    return found


def _index(file: Path, weight_map: dict[str, str]) -> None:
    file.write_text(json.dumps({"metadata": {"total_size": 100}, "weight_map": weight_map}))


def safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(_tensors(), folder / "model.safetensors", metadata={"format": "pt"})


def sharded_safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    weight_map = {}
    for number, (name, tensor) in enumerate(list(_tensors().items())[:2], 1):
        weight_map[name] = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensor}, folder / weight_map[name], metadata={"format": "pt"})
    _index(folder / "model.safetensors.index.json", weight_map)


def pickled(folder: Path) -> None:
    import torch

    torch.save(_tensors(), folder / "pytorch_model.bin")


def pickled_before_zip(folder: Path) -> None:
    import torch

    torch.save(_tensors(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def sharded_pickle(folder: Path) -> None:
    import torch

    name, tensor = next(iter(_tensors().items()))
    torch.save({name: tensor}, folder / "pytorch_model-00001-of-00001.bin")
    _index(folder / "pytorch_model.bin.index.json", {name: "pytorch_model-00001-of-00001.bin"})


def msgpack(folder: Path) -> None:
    from flax.serialization import to_bytes

    scalars = {"step": np.float32(3), "count": 7, "turn": 1 + 2j}
    (folder / "flax_model.msgpack").write_bytes(to_bytes({**tree(), "state": scalars}))


def chunked_msgpack(folder: Path) -> None:
    import flax.serialization

    usual = flax.serialization.MAX_CHUNK_SIZE
    flax.serialization.MAX_CHUNK_SIZE = 16
    try:
        (folder / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(tree()))
    finally:
        flax.serialization.MAX_CHUNK_SIZE = usual


def sharded_msgpack(folder: Path) -> None:
    from flax.serialization import to_bytes
    from flax.traverse_util import flatten_dict, unflatten_dict

    weight_map = {}
    for number, (path, leaf) in enumerate(list(flatten_dict(tree()).items())[:2], 1):
        weight_map["/".join(path)] = file = f"flax_model-{number:05d}-of-00002.msgpack"
        (folder / file).write_bytes(to_bytes(unflatten_dict({path: leaf})))
    _index(folder / "flax_model.msgpack.index.json", weight_map)


def flax_safetensors(folder: Path) -> None:
    from flax.traverse_util import flatten_dict
    from safetensors.flax import save_file

    save_file(flatten_dict(tree(), sep="."), folder / "model.safetensors", metadata={"format": "flax"})


def easydel_safetensors(folder: Path) -> None:
    flax_safetensors(folder)
    (folder / "model.safetensors").rename(folder / "easydel-model.parameters")


def npz(folder: Path) -> None:
    # As big_vision saves: paths with "/", bfloat16 as numpy's two raw bytes.
    plain = {name.replace(".", "/"): array for name, array in arrays().items()}
    np.savez(folder / "model.npz", **plain)


def compressed_npz(folder: Path) -> None:
    np.savez_compressed(folder / "model.npz", kernel=np.arange(300, dtype=np.float32).reshape(10, 30))


def gguf(folder: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("token_embd.weight", arrays()["embeddings.word_embeddings.weight"])
    writer.add_tensor("output_norm.weight", np.ones(3, np.float16))
    quantized = gguf.quants.quantize(
        np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("output.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _orbax(folder: Path, **options: bool) -> None:
    import orbax.checkpoint

    handler = orbax.checkpoint.PyTreeCheckpointHandler(**options)
    orbax.checkpoint.Checkpointer(handler).save(
        folder / "default", {"params": tree()["embeddings"], "step": np.int32(3)}
    )


def orbax_ocdbt(folder: Path) -> None:
    _orbax(folder)


def orbax_zarr(folder: Path) -> None:
    _orbax(folder, use_ocdbt=False)


def orbax_zarr3(folder: Path) -> None:
    _orbax(folder, use_zarr3=True)


def dcp(folder: Path) -> None:
    import torch.distributed.checkpoint

    torch.distributed.checkpoint.save(_tensors(), checkpoint_id=folder, no_dist=True)


def _zarr(folder: Path, compressor: dict) -> dict:
    """A zarr folder of float32 (2, 3), and its tensorstore spec."""
    import tensorstore

    spec: dict = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder)}}
    spec["metadata"] = {"compressor": compressor, "shape": [2, 3], "dtype": "<f4", "chunks": [2, 3]}
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensorstore.open(spec, create=True).result().write(array).result()
    return spec


def easydel(folder: Path) -> None:
    # EasyDeL itself cannot be installed beside the pinned jax; eformer writes with tensorstore, and so does this.
    entries = []
    for name in ("embeddings/kernel", "norm/scale"):
        _zarr(folder / "model" / name, {"id": "zstd", "level": 1})
        entries.append({"path": f"model/{name}", "shape": [2, 3], "dtype": "float32"})
    index = {"format": "tensorstore", "version": "0.0.101", "prefixes": {"model": entries}}
    (folder / "tensorstore_index.json").write_text(json.dumps(index))


def t5x(folder: Path) -> None:
    # T5X is on no package index: its `checkpoints.Checkpointer` leaves these specs in a msgpack file of flax's.
    from flax.serialization import msgpack_serialize

    spec = _zarr(folder / "target.encoder.mlp.kernel", {"id": "gzip", "level": 1})
    spec["kvstore"]["path"] = "target.encoder.mlp.kernel/"
    target = {"encoder": {"mlp": {"kernel": spec}, "norm": {"scale": np.ones(3, np.float32)}}}
    content = {"version": 3, "optimizer": {"state": {"step": np.int32(7)}, "target": target}}
    (folder / "checkpoint").write_bytes(msgpack_serialize(content))


def easydel_msgpack(folder: Path) -> None:
    import msgpack
    from flax.serialization import to_bytes
    from flax.traverse_util import flatten_dict

    leaves = {**flatten_dict(tree()), ("hyperparameters",): "x"}
    pairs = [msgpack.packb((path, to_bytes(leaf))) for path, leaf in leaves.items()]
    (folder / "model.easydel").write_bytes(b"".join(pairs))


SEEDS: dict[str, tuple[Callable[[Path], None], ...]] = {
    "torch safetensors": (safetensors, sharded_safetensors),
    "torch pickle": (pickled, pickled_before_zip, sharded_pickle),
    "torch DCP": (dcp,),
    "Flax msgpack": (msgpack, chunked_msgpack, sharded_msgpack),
    "Flax safetensors": (flax_safetensors,),
    "npz": (npz, compressed_npz),
    "GGUF": (gguf,),
    "Orbax": (orbax_ocdbt, orbax_zarr, orbax_zarr3),
    "T5X": (t5x,),
    "EasyDeL": (easydel,),
    "EasyDeL safetensors": (easydel_safetensors,),
    "EasyDeL msgpack": (easydel_msgpack,),
}
