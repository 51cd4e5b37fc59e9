"""Which files hold weights, by their names."""

from __future__ import annotations

# Weights of any format, and files of a training run that are not the model's.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".ot", ".onnx", ".onnx_data", ".gguf", ".npz"),
    *(".tflite", ".mlmodel", ".index.json", ".index", ".data-00000-of-00001", ".partial"),
)


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or is an index of them."""
    return name.endswith(_WEIGHTS)
