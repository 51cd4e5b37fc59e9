"""Name patterns, one side of a weight rule: components are literals or variables (see `bridge.rules.table`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_VARIABLE = re.compile(r"\{(\w+)(?::([^{}]+))?\}")
_OPTIONAL = re.compile(r"\[([^\[\]]+)\]")

Bindings = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Pattern:
    """One side of a rule without its optional prefix: components that are literal or a variable with its choices."""

    components: tuple[str | tuple[str, tuple[str, ...]], ...]
    separator: str

    def match(self, name: str) -> Bindings | None:
        """The values of the variables in `name`, or None if it does not match."""
        parts = name.split(self.separator)
        if len(parts) != len(self.components):
            return None
        bindings: dict[str, str] = {}
        for part, component in zip(parts, self.components, strict=True):
            if isinstance(component, str):
                if part != component:
                    return None
            elif (component[1] and part not in component[1]) or bindings.setdefault(component[0], part) != part:
                return None
        return tuple(sorted(bindings.items()))

    def fill(self, bindings: Bindings) -> str:
        """The name for these bindings."""
        values = dict(bindings)
        return self.separator.join(part if isinstance(part, str) else values[part[0]] for part in self.components)

    def like(self, name: str) -> str:
        """The instance of this pattern closest to `name`, for error messages."""
        parts = name.split(self.separator)
        parts += [""] * (len(self.components) - len(parts))
        return self.separator.join(
            component if isinstance(component, str) else _choose(part, component[1])
            for part, component in zip(parts, self.components, strict=False)
        )

    @property
    def variables(self) -> frozenset[str]:
        return frozenset(component[0] for component in self.components if not isinstance(component, str))

    def overlaps(self, other: Pattern) -> bool:
        """Whether some name matches both."""
        return len(self.components) == len(other.components) and all(
            _share(mine, theirs) for mine, theirs in zip(self.components, other.components, strict=True)
        )


def _choose(part: str, choices: tuple[str, ...]) -> str:
    return (part or "0") if not choices or part in choices else choices[0]


def _share(mine: str | tuple[str, tuple[str, ...]], theirs: str | tuple[str, tuple[str, ...]]) -> bool:
    ours = (mine,) if isinstance(mine, str) else mine[1]
    yours = (theirs,) if isinstance(theirs, str) else theirs[1]
    return not ours or not yours or bool(set(ours) & set(yours))


def has_prefix(side: str) -> bool:
    """Whether a side of a rule starts with an optional prefix."""
    return _OPTIONAL.match(side) is not None


def choices_in(sides: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Variable -> its allowed values, empty for any; `ValueError` where the sides disagree."""
    choices: dict[str, tuple[str, ...]] = {}
    for side in sides:
        for name, listed in _VARIABLE.findall(side):
            given = tuple(listed.split("|")) if listed else ()
            if given and choices.get(name) and choices[name] != given:
                raise ValueError(f"{{{name}}} is given two lists of choices")
            choices[name] = given or choices.get(name, ())
    return choices


def parse(side: str, separator: str, keep: bool, choices: Mapping[str, tuple[str, ...]]) -> Pattern:
    """The pattern of one side, with its optional prefix or without; `ValueError` for a malformed one."""
    text = _OPTIONAL.sub(r"\1" if keep else "", side, count=1)
    components: list[str | tuple[str, tuple[str, ...]]] = []
    for component in text.split(separator):
        variable = _VARIABLE.fullmatch(component)
        if variable is None and (not component or set(component) & set("{}[]|")):
            raise ValueError(f"pattern {side!r}: {component!r} is neither a name nor one variable")
        components.append(component if variable is None else (variable[1], choices[variable[1]]))
    return Pattern(tuple(components), separator)
