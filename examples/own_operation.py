"""An operation of your own: a definition, a faster path beside it, and the same dispatch as EasyTorch's operations."""

import torch

from easytorch import OperationImpl, OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.base import backend


@OperationRegistry.register
class SquaredRelu(OperationImpl):
    """`squared_relu(x)`: max(x, 0)^2, elementwise."""

    @classmethod
    def get_impl_name(cls) -> str:
        return "squared_relu"

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:  # the definition, in float32
        return torch.where(x > 0, x.float() * x.float(), 0.0).to(x.dtype)

    @backend("aten")  # the library behind this path
    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).square()

    def supports(self, backend: str, x: torch.Tensor) -> str | None:
        """None, or the reason why this path does not carry the call: the automatic choice then moves on."""
        if backend == "aten" and x.dtype == torch.float16:
            return "float16 overflows above 255"
        return None


x = torch.linspace(-2, 2, 9)
operation = OperationRegistry.create("squared_relu")
print(operation.choose(x), "->", operation(x).tolist())
print(operation.choose(x.half()))

native = OperationRegistry.create("squared_relu", OperationMetadata(backend="native"))  # obeyed, or refused
torch.testing.assert_close(operation(x), native(x))
