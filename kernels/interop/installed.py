"""Which optional libraries are installed, found once and without importing them."""

from __future__ import annotations

from importlib.util import find_spec

INSTALL = {
    "jax": "pip install 'easytorch[jax]'",
    "triton": "pip install 'easytorch[gpu]'",
    "torch_xla": "pip install 'easytorch[tpu]'",
}

# A plain dict: torch.compile reads it as a constant, where it could not trace find_spec.
INSTALLED = {name: find_spec(name) is not None for name in INSTALL}


def missing(library: str) -> str | None:
    """None when `library` is installed, else what to do."""
    return None if INSTALLED[library] else f"{library} is not installed ({INSTALL[library]})"
