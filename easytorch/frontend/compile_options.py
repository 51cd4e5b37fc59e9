"""What `torch.compile` calls this backend, and the options that it takes. Imports nothing."""

from __future__ import annotations

NAME = "easytorch"
OPTIONS = ("backend",)
