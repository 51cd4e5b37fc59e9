"""The backends there are, by name, and the configuration string that chooses one."""

from __future__ import annotations

import builtins
import importlib
import os
from collections.abc import Callable

from easytorch.backends.arguments import text
from easytorch.backends.errors import BackendError
from easytorch.backends.interface import Backend

# Takes what follows the colon of a configuration, or "".
Constructor = Callable[[str], Backend]

CONFIG_ENV_VAR = "EASYTORCH_BACKEND"

# Backends of this package, imported when they are first asked for.
_OURS = {
    "xla": "easytorch.backends.xla.backend",
    "torch": "easytorch.backends.aten.backend",
    "numpy": "easytorch.backends.reference.backend",
}
# Found by name and not listed: it runs nothing.
_BASES = {"notimplemented": "easytorch.backends.notimplemented"}
_CONSTRUCTORS: dict[str, Constructor] = {}


def register(name: str, constructor: Constructor) -> None:
    """Makes a backend known; of a name that is taken the last one counts, as in GoMLX."""
    if not callable(constructor):
        raise BackendError(f"register: a constructor is a function of the configuration, and {constructor!r} is none")
    _CONSTRUCTORS[text(name, "register: the name")] = constructor


def list() -> builtins.list[str]:
    """The names of all backends, sorted."""
    return sorted({*_OURS, *_CONSTRUCTORS} - set(_BASES))


def choose(config: str | None, default: str) -> Backend:
    """The backend of `config`, else of $EASYTORCH_BACKEND, else of `default`, else the first that is registered."""
    if config is not None:
        return new_with_config(config)
    if (chosen := os.environ.get(CONFIG_ENV_VAR)) is not None:
        return new_with_config(chosen)
    if default.partition(":")[0] in list():
        return new_with_config(default)
    if not list():
        raise BackendError("no backends are registered")
    return new_with_config(list()[0])


def new_with_config(config: str) -> Backend:
    """The backend that `config` names; an empty name is an error."""
    name, _, rest = text(config, "the configuration").partition(":")
    home = {**_OURS, **_BASES}.get(name)
    if name not in _CONSTRUCTORS and home is not None:
        importlib.import_module(home)
    if name not in _CONSTRUCTORS:
        raise BackendError(f"no backend is called {name!r}; known: {', '.join(list())}")
    return _CONSTRUCTORS[name](rest)
