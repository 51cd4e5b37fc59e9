"""Import every module of EasyTorch; a module may lack only a package that an extra of pyproject.toml names.

    python scripts/import_all.py

Optional means absent, not broken: a module that is about jax (say) fails with an ImportError of jax, and nothing else
fails. Exit code 1, and what failed, otherwise.
"""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# What is imported under another name than it is installed under, and what comes with a package of an extra.
IMPORTED_AS = {
    "orbax-checkpoint": "orbax",
    "jax": "jax jaxlib",
    "jaxlib": "jaxlib",
    "fastapi": "fastapi starlette pydantic",
}


def modules() -> Iterator[str]:
    """Every module by the name under which it is imported."""
    for room in ("easytorch", "kernels", "bridge"):
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if parts[-1] != "__main__":
                yield name if room == "easytorch" else f"easytorch.{name}"


def optional() -> set[str]:
    """The packages that extras name, as they are imported."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    names = (re.split(r"[<>=\[]", need)[0] for needs in extras.values() for need in needs)
    return {found for name in names for found in IMPORTED_AS.get(name, name).split()}


def failure(name: str, allowed: set[str]) -> str | None:
    """Why `name` cannot be imported, None where it can, or lacks one of `allowed` and says so."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        return None if missing in allowed else f"{name}: {error}"
    return None


def main() -> int:
    allowed = optional()
    names = list(modules())
    failed = [why for name in names if (why := failure(name, allowed)) is not None]
    print("\n".join(failed), file=sys.stderr)
    print(f"{len(names) - len(failed)} of {len(names)} modules can be imported or name the extra that they need")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
