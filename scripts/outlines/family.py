"""A family's outline: which of its keys matter, what their values may be, and the rows of each class."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

from easytorch.bridge.core.config import Config
from easytorch.bridge.names.flax_convention import convention_rules, outlined_rules
from easytorch.bridge.names.native_rules import native_rules
from easytorch.bridge.names.outline import read_outline
from easytorch.bridge.names.outlines.language import value_of
from easytorch.bridge.rules.table import Rules
from easytorch.bridge.schemes.easydel_tree import EasydelTree
from scripts.outlines.explain import FEWEST, Explainer, Unexplained, explain, written_value
from scripts.outlines.samples import LABELS, LISTS, STRETCHED, TIE, Built, Sampler, Settings, same_keys

# Configs that a class is explained by.
_SAMPLES = 40
# Sizes that go with few others, to see what has to.
_ODD = (7, 3, 1000)


class Family:
    """Tries the keys of one family, and writes its outline."""

    def __init__(self, model_type: str, seed: int = 0) -> None:
        self.sampler = Sampler(model_type)
        self._random = random.Random(f"{model_type} {seed}")
        self._small = self._buildable_start()
        # Held at their default, as some value of them is refused or cannot be explained.
        self.held: dict[str, Any] = {}
        self.fits: list[str] = []
        self.affecting: set[str] = set()

    def _buildable_start(self) -> Settings:
        sampler = self.sampler
        for small in (sampler.small(), *(sampler.drawn(self._random, often=1.1) for _ in range(60))):
            small.pop("id2label", None)
            usual = sampler.buildable(small, sampler.default)
            if usual is None:
                continue
            for key in sampler.keys.values():
                if key.kind == "maybe" and sampler.buildable({**small, key.name: None}, sampler.default) != usual:
                    # The number is needed, whatever the annotation says.
                    sampler.keys[key.name] = replace(key, kind="size", values=key.numbers)
            return small
        raise Unexplained(f"no small {sampler.model_type} can be built")

    def outline(self) -> dict[str, Any]:
        """The content of the family's file."""
        sampler = self.sampler
        affecting = self.affecting = self._affecting()
        made: dict[str, str] = {}
        for key in sampler.keys.values():
            if key.default is None and key.kind == "size":
                self._made(self._samples(sampler.default, {key.name: None}), made)
        self._find_fits(made)
        switches = [key for key in affecting if sampler.keys[key].kind in ("flag", "word")]
        classes: dict[str, Any] = {}
        default = sampler.default
        for name in sampler.classes:
            try:
                described = self._described(name, switches, made)
                unexpected = self._unexpected(name)
                private = {} if sampler.public(name) else {"public": False}
                classes[name] = described | private | ({"unexpected": unexpected} if unexpected else {})
            except (Unexplained, ValueError) as error:
                print(f"{sampler.model_type}: {name} is left out: {error}", file=sys.stderr)
                classes[name] = None
        if not any(classes.values()):
            raise Unexplained("no class can be explained")
        content = {
            "default": default,
            "labels": sampler.config_class().num_labels,
            "keys": dict(self._fields(affecting)),
            "made": made,
            "same": same_keys(sampler.config_class),
            "fits": self.fits,
            "classes": _shared(classes),
        }
        return content

    def _described(self, name: str, switches: list[str], made: dict[str, str]) -> dict[str, Any]:
        """The entry of a class in the file, for all its configs or else for those with some switch at its default."""
        failed: Exception | None = None
        for held in ([], *([one] for one in switches), switches):
            samples = self._samples(name, dict.fromkeys(held))
            try:
                if len(samples) < _SAMPLES // 2:
                    raise Unexplained(f"{len(samples)} configs can be built")
                self._made(samples, made)
                found = self._explained([one for _, one in samples], switches, made)
                where = [f"{key}={written_value(self.sampler.keys[key].default)}" for key in held]
                # Span classification has two outputs, and some classes say so.
                labels = {one.values[LABELS] for _, one in samples}
                where += [f"{LABELS}={number}" for number in labels if len(labels) == 1]
                return found | {"tie": self._tie(name, samples)} | ({"where": where} if where else {})
            except Unexplained as error:
                failed = failed or error
                if len(samples) < _SAMPLES // 2:
                    break
        raise Unexplained(failed)

    def _explained(self, samples: list[Built], switches: list[str], made: dict[str, str]) -> dict[str, Any]:
        """`explain`; where a size that is none stands for one made of others, that is found too."""
        samples = [_filled_in(one, made) for one in samples]
        # Few keys make a short search; one that matters by others alone (a head's size by the number of heads) is not
        # among them.
        keys = {LABELS, *self.affecting}
        with suppress(Unexplained):
            return explain(samples, switches, keys)
        keys = set(samples[0].values)
        try:
            return explain(samples, switches, keys)
        except Unexplained:
            values = [one.values for one in samples]
            sizes = [key for key in values[0] if all(type(one.get(key)) is int for one in values)]
            for key in self.sampler.keys.values():
                if key.kind != "size" or not any(one[key.name] is None for one in values):
                    continue
                heads = [size for size in sizes if size.endswith(("_heads", "n_head"))]
                quotients = [f"{one}/{other}" for one, other in product(sizes, heads) if one not in heads]
                for expression in [f"{start}{size}" for start in ("4*", "", "2*") for size in sizes] + quotients:
                    more = {**made, key.name: expression}
                    try:
                        found = explain([_filled_in(one, more) for one in samples], switches, keys)
                    except Unexplained:
                        continue
                    made[key.name] = more[key.name]
                    return found
            raise

    def _unexpected(self, name: str) -> list[str]:
        import transformers

        found = getattr(transformers, name, None)
        return sorted(getattr(found, "_keys_to_ignore_on_load_unexpected", None) or ())

    def _affecting(self) -> set[str]:
        """The keys that change names, shapes or ties of some class; those of which a value is refused are held."""
        sampler = self.sampler
        affecting: set[str] = set()
        starts = [self._small]
        tried = (sampler.default, sampler.classes[-1])
        for names in (sampler.classes, tried):
            more: list[Settings] = []
            for name, start in product(names, starts):
                usual = sampler.buildable(start, name)
                if usual is None:
                    continue
                known = _without_values(sampler.built(start, name)) if name in tried else None
                for key in sampler.keys.values():
                    if key.name in affecting or key.name in self.held:
                        continue
                    others = [value for value in key.values if value != start.get(key.name, key.default)]
                    for value in others if key.kind == "word" else others[: 2 if None in key.values else 1]:
                        changed = {**start, key.name: value}
                        found = sampler.buildable(changed, name)
                        if found is not None and found != usual:
                            affecting.add(key.name)
                        if found is not None and key.kind in ("flag", "word") and name in tried:
                            # What Flax has no place for is not seen in the model.
                            if _without_values(sampler.built(changed, name)) != known:
                                affecting.add(key.name)
                            more.append(changed)
            starts = [one for place, one in enumerate(more) if one not in more[:place]][:4]
        for key in sampler.keys.values():
            if key.kind in ("flag", "word", "share", "number", "activation"):
                for name, value in product((sampler.default, sampler.classes[-1]), key.values):
                    usual = sampler.buildable(self._small, name)
                    if usual is not None and sampler.buildable({**self._small, key.name: value}, name) is None:
                        self.held[key.name] = key.default
            if key.name in affecting and key.kind in ("share", "number", "activation"):
                self.held[key.name] = key.default
        return affecting - self.held.keys()

    def _find_fits(self, made: Mapping[str, str]) -> None:
        """Which sizes must be multiples of others, which tokens a row of a table: as odd ones of each are refused."""
        sampler, name = self.sampler, self.sampler.default
        right: list[Settings] = []
        wrong: dict[str, list[Settings]] = {}
        names = [name, *[one for one in sampler.classes if one != name][-1:]]
        starts = [self._small, *(self._drawn(names[0]) for _ in range(2))]
        for start, name in product(starts, names):
            if start is None or sampler.buildable(start, name) is None:
                continue
            right.append(start)
            for key in sampler.keys.values():
                if key.kind in ("size", "token", "tokens") and key.name not in self.held:
                    odds: tuple[int, ...] = _ODD if key.values and key.values[-1] and key.values[-1] > 16 else _ODD[:2]
                    for odd in odds if key.kind == "size" else (1000, 96):
                        changed = sampler.with_lists({**start, key.name: odd})
                        if sampler.buildable(changed, name) is None:
                            wrong.setdefault(key.name, []).append(changed)
                        else:
                            right.append(changed)
        self.fits += [f"{key.name}#{sampler.count_of(key)}" for key in sampler.keys.values() if key.kind in LISTS]
        sizes = [key.name for key in sampler.keys.values() if key.kind in ("size", "token", "tokens")]
        full = [self._full(one, made) for one in right]
        for key, cases in wrong.items():
            left = [self._full(one, made) for one in cases]
            # The outline has no answer where a size cannot be made.
            left = [settings for settings in left if all(settings[one] is not None for one in made)]
            for sign, one, other in sorted(product("%<", sizes, [*sizes, "2"]), key=_in_two_parts):
                if (
                    key not in (one, other, *_made_of(made.get(one, "")))
                    or one == other
                    or (sign == "%" and "token" in one + other)
                ):
                    continue
                broken = [settings for settings in left if not _holds(one, sign, other, settings)]
                if broken and all(_holds(one, sign, other, settings) for settings in full):
                    if f"{one}{sign}{other}" not in self.fits:
                        self.fits.append(f"{one}{sign}{other}")
                    left = [settings for settings in left if _holds(one, sign, other, settings)]
            for one in (key, *(one for one, expression in made.items() if key in _made_of(expression))):
                # Rotary angles come in pairs, but not however they are scaled.
                if left and not any(_holds(one, "%", "2", settings) for settings in left):
                    self.fits.append(f"{one}%2")
                    left = []
            if left:
                self.held[key] = self.sampler.keys[key].default
                print(f"{sampler.model_type}: {key} is held at {self.held[key]!r}", file=sys.stderr)

    def _full(self, settings: Settings, made: Mapping[str, str]) -> Settings:
        full = {**{key.name: key.default for key in self.sampler.keys.values()}, **settings, "2": 2}
        for key, expression in made.items():
            full[key] = value_of(expression, full) if full[key] is None else full[key]
        return full

    def _drawn(self, name: str) -> Settings | None:
        for _ in range(40):
            drawn = self.sampler.drawn(self._random, dict.fromkeys(self.held))
            if self.sampler.buildable(drawn, name) is not None:
                return drawn
        return None

    def _samples(self, name: str, held: Mapping[str, Any], count: int = _SAMPLES) -> list[tuple[Settings, Built]]:
        found: list[tuple[Settings, Built]] = []
        for number in range(6 * count):
            if len(found) < count:
                settings = self.sampler.drawn(
                    self._random, {**dict.fromkeys(self.held), **held}, often=0.9 if number % 2 else 0.5
                )
                built = self.sampler.built(settings, name)
                if built is not None:
                    found.append((settings, built))
        return found

    def _made(self, samples: list[tuple[Settings, Built]], made: dict[str, str]) -> None:
        """Expressions for the keys that config.json leaves out."""
        for key in self.sampler.keys.values():
            if key.default is not None or key.kind != "size" or key.name in made:
                continue
            there = [one for settings, one in samples if key.name not in settings]
            numbers = [one.values[key.name] for one in there]
            if len(numbers) >= FEWEST and all(type(number) is int for number in numbers):
                others = [Built({k: v for k, v in one.values.items() if k != key.name}, *_rest(one)) for one in there]
                made[key.name] = Explainer(others, ()).number(list(enumerate(numbers)))

    def _stretches(self, key: str, kind: str) -> bool:
        """Whether the config class takes rotary angles that are stretched so."""
        angles = {**STRETCHED[kind], "rope_theta": 10000.0}
        return self.sampler.buildable({**self._small, key: angles}, self.sampler.default) is not None

    def _tie(self, name: str, samples: list[tuple[Settings, Built]]) -> bool | str:
        """Whether the config's setting says it, where no weight is tied; "always" where its class overrides that."""
        untied = [(settings, one) for settings, one in samples if not one.ties]
        if any(one.tie != bool(one.values[TIE]) for _, one in untied):
            raise Unexplained("ties by something else than the config's setting")
        for settings, _ in untied[:1]:
            untied_by_config = self.sampler.built({**settings, TIE: False}, name)
            if untied_by_config is not None and untied_by_config.tie:
                return "always"
        return any(one.tie for _, one in untied)

    def _fields(self, affecting: set[str]) -> Iterator[tuple[str, list[Any]]]:
        for key in self.sampler.keys.values():
            if key.name.endswith("rope_parameters"):
                known = [kind for kind in STRETCHED if self._stretches(key.name, kind)]
                yield key.name, ["rotary", None, *([known] if known != [*STRETCHED] else ())]
            elif (
                key.name in self.held
                or key.kind == "only"
                or (key.name in affecting and key.kind not in ("size", "flag", "word", "token", "tokens"))
            ):
                yield key.name, ["only", _plain(key.default)]
            elif key.kind in ("word", *LISTS):
                yield key.name, [key.kind, key.default, list(key.values)]
            else:
                yield key.name, [key.kind, float(key.default) if key.kind in ("share", "number") else key.default]
        if TIE not in self.sampler.keys and getattr(self.sampler.config_class(), TIE, False):
            yield TIE, ["flag", True]


def _without_values(one: Built | None) -> tuple | None:
    return None if one is None else _rest(one)


def _filled_in(one: Built, made: Mapping[str, str]) -> Built:
    values = dict(one.values)
    for key, expression in made.items():
        if values[key] is None:
            values[key] = value_of(expression, values)
    return Built(values, *_rest(one))


def _rest(one: Built) -> tuple:
    return one.rows, one.ties, one.base, one.apart, one.tie


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda one: repr(one)))


def _in_two_parts(condition: tuple[str, str, str]) -> bool:
    """Whether it is on sizes of two parts of a config, which seldom have to do with one another."""
    _, one, other = condition
    return one.rpartition(".")[0] != other.rpartition(".")[0] and other != "2"


def _made_of(expression: str) -> list[str]:
    return re.split(r"[*/+]", expression)


def _holds(one: str, sign: str, other: str, settings: Settings) -> bool:
    left, right = settings.get(one), settings.get(other)
    if type(left) is not int or type(right) is not int:
        return True
    if sign == "%" and not right:
        return False
    return left % right == 0 if sign == "%" else left < right


def _shared(classes: dict[str, Any]) -> dict[str, Any]:
    """Rows that another class has too are named by it: `{"all of": class, "below": "bert.", "without": [...]}`."""
    made: dict[str, Any] = {}
    for name, described in classes.items():
        if described is None:
            made[name] = None
            continue
        best: tuple[int, Any] = (0, None)
        for other, theirs in classes.items():
            if theirs is None or other == name or _refers(made, other, name):
                continue
            for start in ("", f"{described['base']}."):
                rows = [[start + row[0], _under(start, row[1]), *row[2:]] for row in theirs["rows"]]
                shared = [row for row in rows if row in described["rows"]]
                names = {row[0] for row in shared}
                if any(row[0] in names for row in rows if row not in described["rows"]):
                    continue  # one of two rows of that name, which `without` would leave out both
                if len(shared) < 4 or len(shared) < 0.6 * len(rows):
                    continue
                places = [described["rows"].index(row) for row in shared]
                if places != list(range(places[0], places[0] + len(places))):
                    continue
                if len(shared) > best[0]:
                    reference: dict[str, Any] = {"all of": other}
                    if start:
                        reference["below"] = start
                    without = [
                        old[0] for old, row in zip(theirs["rows"], rows, strict=True) if row not in described["rows"]
                    ]
                    if without:
                        reference["without"] = without
                    best = len(shared), (places[0], places[-1] + 1, reference)
        made[name] = dict(described)
        if best[1] is not None:
            begin, end, reference = best[1]
            made[name]["rows"] = [*described["rows"][:begin], reference, *described["rows"][end:]]
    return made


def _refers(made: dict[str, Any], name: str, target: str) -> bool:
    """Whether the rows of `name` lead to those of `target`."""
    if made.get(name) is None:
        return False
    inside = [row["all of"] for row in made[name]["rows"] if isinstance(row, dict)]
    return target in inside or any(_refers(made, one, target) for one in inside)


def _under(start: str, leaf: str | None) -> str | None:
    return start.replace(".", "/") + leaf if leaf is not None and "/" in leaf else leaf


def written(content: Mapping[str, Any]) -> str:
    """The file's text: one row or key per line."""
    lines = ["{"]
    for key in ("default", "labels", "made", "same", "fits"):
        lines.append(f"  {json.dumps(key)}: {json.dumps(content[key])},")
    lines.append('  "keys": {')
    lines.append(",\n".join(f"    {json.dumps(key)}: {json.dumps(field)}" for key, field in content["keys"].items()))
    lines.append('  },\n  "classes": {')
    classes = []
    for name, described in content["classes"].items():
        if described is None:
            classes.append(f"    {json.dumps(name)}: null")
            continue
        parts = []
        for key, value in described.items():
            if isinstance(value, list) and value:
                rows = ",\n".join(f"        {json.dumps(row)}" for row in value)
                parts.append(f"      {json.dumps(key)}: [\n{rows}\n      ]")
            else:
                parts.append(f"      {json.dumps(key)}: {json.dumps(value)}")
        classes.append(f"    {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n    }")
    return "\n".join(lines) + "\n" + ",\n".join(classes) + "\n  }\n}\n"


def differences(model_type: str, seed: int, configs: int, only: str | None = None) -> Iterator[str]:
    """Disagreements between the outline of a family and transformers, for further configs of every class."""
    sampler = Sampler(model_type)
    outline = read_outline(model_type)
    assert outline is not None, model_type
    generator = random.Random(f"further {model_type} {seed}")
    for name in [name for name, found in outline.classes.items() if found is not None and only in (None, name)]:
        answered = 0
        for number in range(40 * configs):
            if answered == configs:
                break
            settings = sampler.drawn(generator, often=0.95 if number % 2 else 0.6)
            outlined = outline.architecture(sampler.config(settings, None), name)
            if outlined is None:
                continue
            answered += 1
            built = sampler.architecture(settings, name)
            if isinstance(built, str):
                yield f"{name} {settings}: transformers refuses it: {built}"
                continue
            yield from (f"{name} {settings}: {text}" for text in compared(outlined, built))
        if not answered:
            yield f"{name}: no config of {40 * configs} was answered"


def compared(outlined: Any, built: Any) -> Iterator[str]:
    """The differences between two architectures, of an outline and of a model."""
    ours, theirs = list(outlined.shapes.items()), list(built.shapes.items())
    if ours != theirs:
        yield f"weights {[one for one in ours if one not in theirs]} for {[one for one in theirs if one not in ours]}"
    for what in ("name", "base", "tie"):
        if getattr(outlined, what) != getattr(built, what):
            yield f"{what}: {getattr(outlined, what)!r} for {getattr(built, what)!r}"
    names = built.names
    config = Config(Path("config.json"), {})
    easydel = [_plain_rows(EasydelTree().rules(config, one, None)) for one in (outlined, built)]
    if easydel[0] != easydel[1]:
        yield from (f"EasyDeL's {row}" for one, other in permutations(easydel) for row in one if row not in other)
    ties = {names.hub_name(repeat): names.hub_name(source) for repeat, source in names.ties.items()}
    if ties != outlined.names.ties:
        yield f"ties {outlined.names.ties} for {ties}"
    if outlined.names.floating != names.floating:
        yield f"floating: {outlined.names.floating ^ names.floating}"
    if native_rules(names.model.config.model_type) is not None:
        return  # whatever the model, its table is the one in `easytorch/models`
    rules = _plain_rows(convention_rules(names, names.tensors))
    ours = list(outlined_rules(outlined.names, names.tensors) or ())
    if ours != rules:
        yield f"rows {[one for one in ours if one not in rules]} for {[one for one in rules if one not in ours]}"


def _plain_rows(rules: Rules) -> list[tuple]:
    """A table's rows, transforms by name."""
    return [(*row[:2], getattr(row[2], "name", row[2])) for row in rules]
