"""Operations: one contract each, and the dispatch that picks an implementation for the tensors at hand."""

from easytorch.operations.base import BaseOperation, backend
from easytorch.operations.impl import Choice, OperationImpl, UnsupportedOperationError
from easytorch.operations.metadata import OperationMetadata
from easytorch.operations.output import AttentionOutput, OperationOutput
from easytorch.operations.registry import OperationRegistry

__all__ = [
    "AttentionOutput",
    "BaseOperation",
    "Choice",
    "OperationImpl",
    "OperationMetadata",
    "OperationOutput",
    "OperationRegistry",
    "UnsupportedOperationError",
    "backend",
]
