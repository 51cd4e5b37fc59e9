"""How to install a package that an `import` did not find: Python's own message only names it."""

from __future__ import annotations

# The extra of pyproject.toml that brings a package; every other is a dependency, called on PyPI as it is imported.
_EXTRAS = {
    "jax": "jax",
    "jaxlib": "jax",
    "flatbuffers": "jax",
    "tensorstore": "bridge",
    "gguf": "bridge",
    "triton": "gpu",
    "torch_xla": "tpu",
    "s3fs": "s3",
    "gcsfs": "gcs",
    "matplotlib": "train",
    "tokenizers": "train",
    "lion_pytorch": "train",
    "datasets": "finetune",
    "fastapi": "serve",
    "uvicorn": "serve",
    "jinja2": "serve",
    "llguidance": "serve",
}


def what_to_install(error: BaseException) -> str | None:
    """One line for a module that is not there; None for every other error, an import that says more itself included."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package, _, inside = error.name.partition(".")
    if package == "easytorch" or str(error) != f"No module named {error.name!r}":
        return None
    if inside:
        return f"the package {package!r} has no {error.name!r}; another version may: pip install --upgrade {package}"
    wanted = f'"easytorch[{_EXTRAS[package]}]"' if package in _EXTRAS else package
    return f"the package {package!r} is not installed: pip install {wanted}"
