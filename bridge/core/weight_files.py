"""Which files hold weights, told by their names."""

from __future__ import annotations

# Weights of any kind, and what belongs to a training run and not to the model.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".ot", ".onnx", ".onnx_data", ".gguf", ".npz"),
    *(".tflite", ".mlmodel", ".index.json", ".index", ".data-00000-of-00001", ".partial"),
)


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or tells where they are."""
    return name.endswith(_WEIGHTS)
