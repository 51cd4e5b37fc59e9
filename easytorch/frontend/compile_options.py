"""The name of the backend in `torch.compile`, and its options. Imports nothing."""

from __future__ import annotations

NAME = "easytorch"
OPTIONS = ("backend",)
