"""What stands beside the weights and goes along: config, tokenizer, generation settings, model card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from easytorch.bridge.unconverted import ADAPTER_CONFIG

# Weights of any kind, and what belongs to a training run and not to the model.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".ot", ".onnx", ".onnx_data", ".gguf", ".npz"),
    *(".tflite", ".mlmodel", ".index.json", ".index", ".data-00000-of-00001", ".partial"),
)


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or tells where they are."""
    return name.endswith(_WEIGHTS)


def copy_companions(source: Path, destination: Path, weights: Iterable[Path]) -> list[Path]:
    """Copies every file of the folder `source` that is not weights, subfolders and all; links are followed to files.

    weights: files and folders of the checkpoint itself. Hidden names are left out: they are caches and version control.
    """
    copied: list[Path] = []
    left_out = {path.resolve() for path in weights}
    if source.resolve() in left_out:
        return copied
    for parent, folders, files in os.walk(source):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and Path(parent, name).resolve() not in left_out
        )
        for name in sorted(files):
            file = Path(parent, name)
            if (
                name.startswith(".")
                or name == ADAPTER_CONFIG
                or is_weights(name)
                or not file.is_file()
                or file.resolve() in left_out
            ):
                continue
            target = destination / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            copied.append(target)
    return copied


def set_config_dtype(config: Path, dtype: str) -> None:
    """Makes `config.json` say the element type the weights have now, under the key it used for it."""
    content = json.loads(config.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in content else "dtype"
    config.write_text(json.dumps({**content, key: dtype}, indent=2) + "\n", encoding="utf-8")
