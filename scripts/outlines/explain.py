"""Explains what was built of several configs: each count and size as an expression of keys, each weight by a condition.

The language of the expressions and conditions is `bridge.names.outlines.language`'s.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce
from itertools import combinations, product
from operator import or_
from typing import Any

from easytorch.bridge.names.outlines.language import holds, value_of
from scripts.outlines.samples import Built

Indexes = tuple[int, ...]
# Samples that an expression must be right in.
FEWEST = 6


class Unexplained(Exception):
    """Something that no expression or condition of the language says."""


class Explainer:
    """Expressions over the keys of some configs."""

    def __init__(self, samples: Sequence[Built], switches: Iterable[str], keys: Collection[str] = ()) -> None:
        """keys: those that expressions may use; None allows all."""
        self._settings = [sample.values for sample in samples]
        first = [key for key in self._settings[0] if not keys or key in keys]
        self._sizes = [key for key in first if all(_is_size(values[key]) for values in self._settings)]
        self._sizes = [key for key in self._sizes if len({values[key] for values in self._settings}) > 1]
        # Those that are None in some configs: only where they are a number in all that matter.
        self._partly = [
            key
            for key in first
            if key not in self._sizes and all(_is_size(v[key]) or v[key] is None for v in self._settings)
        ]
        self._switches = [key for key in switches if len({repr(values[key]) for values in self._settings}) > 1]
        self._atoms = self._true()
        self._numbers: dict[tuple[tuple[int, int], ...], str] = {}

    def number(self, found: Sequence[tuple[int, int]]) -> str:
        """The expression that is the number of each (sample, number)."""
        known = tuple(found)
        if known not in self._numbers:
            self._numbers[known] = self._searched(found)
        return self._numbers[known]

    def _searched(self, found: Sequence[tuple[int, int]]) -> str:
        if len({sample for sample, _ in found}) < FEWEST:
            raise Unexplained("too few samples")
        for expression in self._expressions(found):
            if all(value_of(expression, self._settings[sample]) == number for sample, number in found):
                return expression
        raise Unexplained(f"no expression for {sorted({number for _, number in found})}")

    def _expressions(self, found: Sequence[tuple[int, int]]) -> Iterator[str]:
        yield str(found[0][1])
        there = {sample for sample, _ in found}
        keys = self._sizes + [k for k in self._partly if all(self._settings[s][k] is not None for s in there)]
        yield from keys
        yield from (f"{many}*{key}" for many in (2, 3, 4) for key in keys)
        yield from (f"{one}*{other}" for one, other in combinations(keys, 2))
        yield from (f"{one}/{other}" for one, other in product(keys, keys) if one != other)
        yield from (f"{key}+{more}" for key in keys for more in (1, 2, 3))
        yield from (f"{key}/{less}" for key in keys for less in (2, 4))
        yield from (f"{one}+{other}" for one, other in combinations(keys, 2))
        for one, other in product(keys, keys):
            if one != other:
                yield from (f"{one}/{other}*{one}/{other}{more}" for more in ("", "+1", "+2"))
                yield f"{one}+2*{other}"
                yield from (f"{many}*{one}*{other}" for many in (2, 3))
                yield f"2*{one}+{other}"
        for one, other, third in combinations(keys, 3):
            yield f"{one}*{other}*{third}"
        for one, other in combinations(keys, 2):
            yield from (f"{third}*{one}/{other}" for third in keys)
            yield from (f"{third}*{other}/{one}" for third in keys)
            yield from (f"{one}*{third}+2*{other}*{third}" for third in keys)
            yield from (f"{other}*{third}+2*{one}*{third}" for third in keys)
            yield from (f"{one}+2*{other}*{third}" for third in keys)
            yield from (f"{other}+2*{one}*{third}" for third in keys)
            yield from (f"{one}*{third}/{other}*2+{one}" for third in keys)

    def condition(self, cases: Sequence[tuple[int, Indexes, bool]]) -> list[str]:
        """A condition that holds in exactly those cases (sample, loop indexes, whether) whose last field is True."""
        if all(there for _, _, there in cases):
            return []
        # A bit for each case.
        there = sum(1 << place for place, case in enumerate(cases) if case[2])
        gone = ((1 << len(cases)) - 1) ^ there
        of_sample: dict[int, int] = {}
        for place, (sample, _, _) in enumerate(cases):
            of_sample[sample] = of_sample.get(sample, 0) | 1 << place
        where: dict[str, int] = {}
        for depth in range(max(len(indexes) for _, indexes, _ in cases)):
            first = sum(1 << place for place, (_, indexes, _) in enumerate(cases) if indexes[depth] == 0)
            where |= {f"{'ijk'[depth]}=0": first, f"{'ijk'[depth]}>0": (there | gone) ^ first}
        for atom, truth in self._atoms.items():
            where[atom] = sum(bits for sample, bits in of_sample.items() if truth[sample])
        excluded = {atom: gone & ~so for atom, so in where.items() if so & there == there and gone & ~so}
        for count in (1, 2, 3):
            for atoms in combinations(excluded, count):
                if reduce(or_, (excluded[atom] for atom in atoms)) == gone:
                    return list(atoms)
        raise Unexplained("no condition")

    def _true(self) -> dict[str, list[bool]]:
        """Every condition on keys, and in which samples it holds."""
        atoms: list[str] = []
        for key in self._switches:
            values = {repr(settings[key]): settings[key] for settings in self._settings}
            atoms += [f"{key}{sign}{written_value(value)}" for value in values.values() for sign in ("=", "!=")]
        atoms += [f"{left}{sign}{right}" for left, right in combinations(self._sizes, 2) for sign in ("!=", "=")]
        return {atom: [holds(atom, settings) for settings in self._settings] for atom in atoms}


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def written_value(value: object) -> str:
    """`value` as conditions have it."""
    return {True: "true", False: "false", None: "null"}[value] if value in (True, False, None) else str(value)


# A part of a template: a count, in which points may stand, or a name.
_PART = re.compile(r"\{[^}]*\}|[^.]+")


class Folded:
    """The names of several models with a count in each place where they have a running number."""

    def __init__(self, names: Sequence[Sequence[str]], explain: Explainer) -> None:
        """names: of each sample."""
        self._explain = explain
        self._counts: dict[str, str | None] = {}
        self._names = names

    def template(self, name: str) -> tuple[str, Indexes]:
        """`name` with its numbers replaced by counters, and the numbers."""
        parts: list[str] = []
        indexes: list[int] = []
        for part in name.split("."):
            if part.isdecimal():
                count = self._count(".".join(parts), len(indexes))
                if count is not None:
                    indexes.append(int(part))
                    part = f"{{{count}}}"
            parts.append(part)
        return ".".join(parts), tuple(indexes)

    def _count(self, start: str, depth: int) -> str | None:
        """How many there are below `start`, a template; None where they are the same ones in all samples."""
        if start not in self._counts:
            self._counts[start] = None
            pieces = _PART.findall(start)
            found: list[tuple[int, int]] = []
            for sample, names in enumerate(self._names):
                below: dict[Indexes, set[int]] = {}
                for name in names:
                    parts = name.split(".")
                    if len(parts) <= len(pieces) or not parts[len(pieces)].isdecimal():
                        continue
                    if all(
                        p == q or (p.startswith("{") and q.isdecimal()) for p, q in zip(pieces, parts, strict=False)
                    ):
                        outer = tuple(int(q) for p, q in zip(pieces, parts, strict=False) if p.startswith("{"))
                        below.setdefault(outer, set()).add(int(parts[len(pieces)]))
                for numbers in below.values():
                    if numbers != set(range(len(numbers))):
                        return None
                    found.append((sample, len(numbers)))
            if len({count for _, count in found}) > 1:
                self._counts[start] = self._explain.number(found)
        return self._counts[start]


def merged(orders: Iterable[Sequence[str]]) -> list[str]:
    """One order of all elements of `orders`."""
    made: list[str] = []
    for order in orders:
        place = 0
        for item in order:
            if item in made:
                place = made.index(item) + 1
            else:
                made.insert(place, item)
                place += 1
    return made


def explain(samples: Sequence[Built], switches: Sequence[str], keys: Collection[str]) -> dict[str, Any]:
    """The rows and ties of a class, as the outline holds them, by expressions of `keys`."""
    explainer = Explainer(samples, switches, keys)
    folded = Folded([[row[0] for row in sample.rows] for sample in samples], explainer)
    rows = _table(
        explainer,
        [
            [
                (*folded.template(name), (kind, _leaf(folded, name, path, kind)), dims)
                for name, path, kind, dims in one.rows
            ]
            for one in samples
        ],
    )
    ties = _table(
        explainer,
        [
            [(*folded.template(name), ("", folded.template(source)[0]), None) for name, source in one.ties]
            for one in samples
        ],
    )
    base = {(sample.base, sample.apart) for sample in samples}
    if len(base) > 1:
        raise Unexplained(f"base models {base}")
    return {
        "base": samples[0].base,
        "inside": samples[0].apart,
        "rows": rows,
        "ties": [[row[0], row[1], *row[4:]] for row in ties],
    }


def _leaf(folded: Folded, name: str, path: str | None, kind: str) -> str | None:
    """The leaf's own name where it stands where the weight does, the whole path elsewhere."""
    if path is None:
        return None
    *start, last = path.split("/")
    if kind not in ("tied", "tied_always") and start == name.split(".")[:-1]:
        return last
    return "/".join(_PART.findall(folded.template(path.replace("/", "."))[0]))


def _table(explainer: Explainer, samples: list[list[tuple[str, Indexes, tuple, tuple | None]]]) -> list[list[Any]]:
    # (template, kind, leaf, whether it is needed) -> {(sample, indexes): dims}
    found: dict[tuple, dict[tuple[int, Indexes], tuple | None]] = {}
    orders = []
    for number, rows in enumerate(samples):
        order = []
        for template, indexes, (kind, leaf), dims in rows:
            key = (template, kind, leaf, None if dims is None else len(dims))
            found.setdefault(key, {})[number, indexes] = dims
            order.append(key)
        orders.append(list(dict.fromkeys(order)))
    ranges = {key: _ranges(key[0], samples, explainer) for key in found}
    table: list[list[Any]] = []
    ordered = merged(orders)
    loops = _loops_apart([key[0] for key in ordered], samples)
    for key in ordered:
        template, kind, leaf, rank = key
        there = found[key]
        cases = [(number, indexes, (number, indexes) in there) for number, indexes in ranges[key]]
        if {case[:2] for case in cases} < there.keys():
            raise Unexplained(f"{template}: outside of its loop")
        try:
            when = explainer.condition(cases)
            sizes = None
            if rank is not None:
                sizes = [
                    explainer.number(sorted({(number, dims[place]) for (number, _), dims in there.items() if dims}))
                    for place in range(rank)
                ]
        except Unexplained as error:
            raise Unexplained(f"{template}: {error}") from None
        table.append([loops[template], leaf, kind, sizes, *when])
    return table


def _loops_apart(templates: Sequence[str], samples: list) -> dict[str, str]:
    """Each template as the outline has it: rows of one count are repeated together, so that another loop over the same
    things, after the first, has a count of its own, `{num_local_experts*1}`."""
    places: dict[str, dict[tuple[int, Indexes], int]] = {}
    for number, rows in enumerate(samples):
        for place, (template, indexes, *_) in enumerate(rows):
            places.setdefault(template, {})[number, indexes] = place
    again: dict[str, int] = {}
    made: dict[str, str] = {}
    before = ""
    for template in templates:
        for depth, start in enumerate(_starts(template)):
            if before.startswith(start) and not _together(places[before], places[template], depth):
                again[start] = again.get(start, 0) + 1
                break
        text = template
        for start in reversed(_starts(template)):
            text = start[:-1] + "*1" * again.get(start, 0) + "}" + text[len(start) :]
        made[template] = text
        before = template
    return made


def _starts(template: str) -> list[str]:
    """A template up to each of its counts."""
    return [template[: found.end()] for found in re.finditer(r"\{[^}]*\}", template)]


def _together(one: dict[tuple[int, Indexes], int], other: dict[tuple[int, Indexes], int], depth: int) -> bool:
    """Whether the second row of `one` stands after the first of `other` in the loop number `depth`."""
    first: dict[tuple[int, Indexes], int] = {}
    for (sample, indexes), place in other.items():
        if indexes[depth] == 0:
            where = sample, indexes[:depth]
            first[where] = min(place, first.get(where, place))
    return all(
        place > first.get((sample, indexes[:depth]), -1)
        for (sample, indexes), place in one.items()
        if indexes[depth] == 1
    )


def _ranges(template: str, samples: list, explainer: Explainer) -> list[tuple[int, Indexes]]:
    counts = re.findall(r"\{([^}]*)\}", template)
    made = []
    for number, settings in enumerate(explainer._settings):
        sizes = [value_of(count, settings) or 0 for count in counts]
        made += [(number, indexes) for indexes in product(*map(range, sizes))]
    return made
