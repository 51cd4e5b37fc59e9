"""Outputs of operations: dataclasses that serialize, tensors included."""

from __future__ import annotations

import base64
import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Self

import torch

_TENSOR_KEY = "__tensor__"


@dataclass(kw_only=True)
class OperationOutput:
    """Base of every operation's result: `to_dict/from_dict/to_json/from_json/replace`."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict, nested outputs as dicts too; tensors stay tensors."""
        return {field.name: _to_plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**data)

    def to_json(self, **kwargs: Any) -> str:
        """The fields as JSON; a tensor becomes dtype, shape and base64 bytes, bit-exact. kwargs: `json.dumps`'s."""
        return json.dumps(self.to_dict(), default=_encode_tensor, **kwargs)

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        return cls.from_dict(json.loads(json_str, object_hook=_decode_tensor))

    def replace(self, **kwargs: Any) -> Self:
        """A new instance with the given fields replaced."""
        return dataclasses.replace(self, **kwargs)


@dataclass(kw_only=True)
class AttentionOutput(OperationOutput):
    """Result of an attention.

    attention_outputs: (B, T, H, Dv).
    attention_weights: (B, H, T, S) where the implementation materializes them (`vanilla`), else None.
    cache_view: the key/value cache after the call, for the operations that write one.
    """

    attention_outputs: torch.Tensor | None = None
    attention_weights: torch.Tensor | None = None
    cache_view: Any = None


# torch.export and torch.func take and return operations' results as the tensors they hold
torch.export.register_dataclass(AttentionOutput, serialized_type_name="easytorch.AttentionOutput")


def _to_plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, OperationOutput) else value


def _encode_tensor(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"cannot write a {type(value).__name__} as JSON: fields must be tensors or plain values")
    flat = value.detach().cpu().contiguous().reshape(-1)
    return {
        _TENSOR_KEY: str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "data": base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode("ascii"),
    }


def _decode_tensor(data: dict[str, Any]) -> Any:
    if _TENSOR_KEY not in data:
        return data
    dtype = getattr(torch, data[_TENSOR_KEY])
    raw = bytearray(base64.b64decode(data["data"]))
    if not raw:
        return torch.empty(data["shape"], dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(data["shape"])
