"""`OperationRegistry`: operations by name."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from easytorch.operations.dispatch.impl import OperationImpl
    from easytorch.operations.dispatch.metadata import OperationMetadata

_T = TypeVar("_T", bound="type[OperationImpl]")


class OperationRegistry:
    """Name -> `OperationImpl` class. A taken name and an unknown one are errors."""

    _classes: dict[str, type[OperationImpl]] = {}  # noqa: RUF012 - one table for the process

    @classmethod
    def register(cls, impl: _T) -> _T:
        """Class decorator: registers under `impl.get_impl_name()`, one name or a tuple (the rest are aliases)."""
        names = impl.get_impl_name()
        names = (names,) if isinstance(names, str) else tuple(names)
        for name in names:
            holder = cls._classes.get(name)
            if holder is not None and holder is not impl:
                raise ValueError(
                    f"the operation name {name!r} is taken by {holder.__module__}.{holder.__qualname__}; "
                    f"give {impl.__qualname__} another name"
                )
        cls._classes.update(dict.fromkeys(names, impl))
        return impl

    @classmethod
    def get(cls, name: str) -> type[OperationImpl]:
        """The class registered under `name`; `ValueError` listing the known names otherwise."""
        if name not in cls._classes:
            close = difflib.get_close_matches(name, cls._classes, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"no operation is called {name!r}{hint}; known: {', '.join(cls.names())}")
        return cls._classes[name]

    @classmethod
    def create(cls, name: str, metadata: OperationMetadata | None = None) -> OperationImpl:
        """An instance of the operation `name`, with the default metadata when none is given."""
        return cls.get(name)(metadata)

    @classmethod
    def names(cls) -> list[str]:
        """Every registered name, aliases included, sorted."""
        return sorted(cls._classes)
