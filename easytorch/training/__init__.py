"""The trainer: the same loop on one process and under torchrun (docs: docs/training.md)."""

from easytorch.training.checkpoint import latest_checkpoint
from easytorch.training.config import TrainingConfig
from easytorch.training.finite import NonFiniteError
from easytorch.training.launch import TrainingFailedError, launch
from easytorch.training.loop import TrainingResult, train

__all__ = [
    "NonFiniteError",
    "TrainingConfig",
    "TrainingFailedError",
    "TrainingResult",
    "latest_checkpoint",
    "launch",
    "train",
]
