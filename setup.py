"""Packaging: three top-level folders install as one package (see docs/architecture.md, "Packaging").

The metadata is in pyproject.toml; only what it cannot say stands here. `kernels/` and `bridge/` have no
`__init__.py` of their own: a top-level `kernels` that is a regular package would hide the PyPI package of that
name, which transformers imports.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def _room(folder: str) -> list[str]:
    """`easytorch.<folder>` and every package below it."""
    return [f"easytorch.{folder}"] + [f"easytorch.{folder}.{name}" for name in find_packages(str(ROOT / folder))]


setup(
    packages=["easytorch"]
    + [f"easytorch.{name}" for name in find_packages(str(ROOT / "easytorch"))]
    + _room("kernels")
    + _room("bridge"),
    package_dir={"easytorch.kernels": "kernels", "easytorch.bridge": "bridge"},
)
