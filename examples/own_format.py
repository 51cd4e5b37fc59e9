"""A checkpoint format of your own: a JSON file of nested lists. Registered, `inspect`, `diff` and `convert` read it."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from easytorch import bridge
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import TensorInfo
from easytorch.bridge.formats.registry import register


class JsonReader:
    """An open file; a format for large files would map it and read one tensor at a time."""

    def __init__(self, file: Path) -> None:
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            self._arrays = {name: np.asarray(value, dtype=np.float32) for name, value in values.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"is no JSON object of tensors: {error}", file=file) from error
        self.files = (file,)
        self.metadata: Mapping[str, str] = {}
        self.tensors = {
            name: TensorInfo(name, array.shape, "float32", file.name) for name, array in self._arrays.items()
        }

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def close(self) -> None: ...

    def __enter__(self) -> "JsonReader":
        return self

    def __exit__(self, *exception: object) -> None: ...


class JsonWeights:
    """What recognises and opens the files."""

    name = "json-weights"
    scheme = "torch"  # whose names its tensors carry

    def detect(self, path: Path) -> Path | None:
        return path if path.is_file() and path.name.endswith(".weights.json") else None

    def open(self, file: Path, *, writable: bool = False) -> JsonReader:
        return JsonReader(file)


register(JsonWeights())

torch.manual_seed(0)
module = torch.nn.Linear(3, 2)
with tempfile.TemporaryDirectory() as name:
    file = Path(name, "model.weights.json")
    file.write_text(json.dumps({key: tensor.tolist() for key, tensor in module.state_dict().items()}))
    info = bridge.inspect(file)
    print(info.format, [(tensor.name, tensor.shape) for tensor in info.tensors])

    save_file(module.state_dict(), Path(name, "model.safetensors"))
    difference = bridge.diff(file, Path(name, "model.safetensors"))
    print("the same bits as in safetensors:", difference.same)
    assert difference.same
