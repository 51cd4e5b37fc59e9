"""Rule tables: which torch tensor is which Flax leaf, read in both directions.

A family's table is plain data, `RULES`, a tuple of `(torch pattern, flax pattern, transform)` in the order in which the
Flax modules hold their parameters.

- Torch names are dotted, Flax paths joined by "/".
- `{name}` stands for one component, `{name:a|b}` for one of those given (stated once, on either side). A variable
  stands on both sides.
- `[prefix.]` at the start of a torch pattern and `[prefix/]` at the start of its Flax pattern are there on both sides
  or on neither: a checkpoint of the base model alone has no prefix.
- A transform is a name of `bridge.transforms`. A torch pattern may be a tuple of patterns for a transform that fuses.

Three names in the transform's place say what is not a change of layout:

- `buffer` (Flax pattern None): Flax has no such leaf; conversion keeps the tensor beside the Flax weights.
- `tied`: this torch tensor repeats what Flax holds once at the path.
- `tied_in_torch`: torch may leave this tensor out because it repeats the one at the path; Flax holds both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.patterns import Bindings, Pattern, choices_in, has_prefix, parse
from easytorch.bridge.transforms import Transform, transform_called

Rule = tuple[str | tuple[str, ...], str | None, str]
Rules = tuple[Rule, ...]

BUFFER = "buffer"
TIED = "tied"
TIED_IN_TORCH = "tied_in_torch"

# Names from before transformers 1.0 that checkpoints on the hub still carry.
_LEGACY_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(frozen=True)
class CompiledRule:
    """One reading of a rule, with or without its prefix. `number` is its place in the table."""

    number: int
    kind: str
    torch: tuple[Pattern, ...]
    path: Pattern | None
    transform: Transform | None

    @property
    def flax(self) -> Pattern:
        """The Flax pattern of a rule that has one: every rule but a buffer's."""
        assert self.path is not None, f"{self.kind} has no Flax side"
        return self.path

    def order(self, bindings: Bindings) -> tuple:
        """Sorts instances of the table: by rule, then by variable, numbers as numbers and choices as listed."""
        return (self.number, *(self._rank(name, value) for name, value in bindings))

    def _rank(self, name: str, value: str) -> tuple:
        choices = {
            part[0]: part[1] for pattern in self.torch for part in pattern.components if not isinstance(part, str)
        }
        if choices.get(name):
            return (0, choices[name].index(value), value)
        return (0, int(value), value) if value.isdecimal() and len(value) < 10 else (1, 0, value)


class RuleTable:
    """A compiled table. `weights` are the rules that move data; ties and buffers stand apart."""

    def __init__(self, rules: Rules) -> None:
        compiled = [one for number, rule in enumerate(rules) for one in _compile(number, rule)]
        self.weights = [rule for rule in compiled if rule.transform is not None]
        self.buffers = [rule for rule in compiled if rule.kind == BUFFER]
        self.ties = [rule for rule in compiled if rule.kind in (TIED, TIED_IN_TORCH)]
        _refuse_overlaps([(rule.number, pattern) for rule in self.weights for pattern in rule.torch], rules)
        _refuse_overlaps([(rule.number, rule.flax) for rule in self.weights], rules)
        _refuse_overlaps([(rule.number, pattern) for rule in self.ties for pattern in rule.torch], rules)
        _refuse_overlaps([(rule.number, pattern) for rule in self.buffers for pattern in rule.torch], rules)

    def torch_rule(self, name: str) -> tuple[CompiledRule, int, Bindings] | None:
        """The rule that moves torch tensor `name`, which of its parts the tensor is, and the bindings."""
        for rule in self.weights:
            for part, pattern in enumerate(rule.torch):
                if (bindings := pattern.match(name)) is not None:
                    return rule, part, bindings
        return None

    def flax_rule(self, path: str) -> tuple[CompiledRule, Bindings] | None:
        """The rule that moves Flax leaf `path`, and the bindings."""
        for rule in self.weights:
            if (bindings := rule.flax.match(path)) is not None:
                return rule, bindings
        return None

    def tie(self, name: str) -> tuple[CompiledRule, str] | None:
        """The tie of torch tensor `name` and the Flax path it repeats."""
        for rule in self.ties:
            if (bindings := rule.torch[0].match(name)) is not None:
                return rule, rule.flax.fill(bindings)
        return None

    def tied_to(self, path: str) -> Iterator[tuple[CompiledRule, str]]:
        """Every tie whose data stands at Flax leaf `path`, with the torch name that repeats it."""
        for rule in self.ties:
            if (bindings := rule.flax.match(path)) is not None:
                yield rule, rule.torch[0].fill(bindings)

    def is_buffer(self, name: str) -> bool:
        """Whether `name` is a torch tensor that Flax has no place for."""
        return any(rule.torch[0].match(name) is not None for rule in self.buffers)

    def torch_names(self, names: Iterable[str]) -> dict[str, str]:
        """Each name as the table knows it -> as given: the same but for legacy names, which are read as aliases."""
        known: dict[str, str] = {}
        for given in names:
            name = self._modern(given)
            if name in known:
                raise CheckpointError(f"stands twice, as {known[name]!r} and as {given!r}; remove one", tensor=name)
            known[name] = given
        return known

    def _modern(self, name: str) -> str:
        for old, new in _LEGACY_ENDINGS.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name

    def unknown_torch(self, name: str) -> str:
        """What to say about a torch name without a rule."""
        known = [pattern.like(name) for rule in (*self.weights, *self.buffers) for pattern in rule.torch]
        return f"no rule of this family names it{nearest(name, known)}; remove it or add a rule"

    def unknown_flax(self, path: str) -> str:
        """What to say about a Flax path without a rule."""
        known = [rule.flax.like(path) for rule in self.weights]
        return f"no rule of this family names it{nearest(path, known)}; remove it or add a rule"


@lru_cache(maxsize=64)
def compile_rules(rules: Rules) -> RuleTable:
    """The table ready for use; `ValueError` for a malformed or ambiguous one, or a transform without an inverse."""
    return RuleTable(rules)


def _compile(number: int, rule: Rule) -> list[CompiledRule]:
    """The one or two readings of a rule: without and with its optional prefix."""
    if not isinstance(rule, tuple) or len(rule) != 3:
        raise ValueError(f"rule {number} is {rule!r}; a rule is (torch pattern, flax pattern, transform)")
    torch_side, flax_side, kind = rule
    torch_patterns = (torch_side,) if isinstance(torch_side, str) else tuple(torch_side)
    special = kind in (BUFFER, TIED, TIED_IN_TORCH)
    transform = None if special else transform_called(kind)
    if transform is not None and transform.to_torch is None:
        raise ValueError(
            f"rule {number} {rule!r}: the transform {kind!r} has no inverse, so the table reads only one way"
        )
    if len(torch_patterns) != (1 if transform is None else transform.parts):
        raise ValueError(f"rule {number} {rule!r}: {kind!r} does not take {len(torch_patterns)} torch patterns")
    if (flax_side is None) != (kind == BUFFER):
        raise ValueError(f"rule {number} {rule!r}: a rule without a Flax pattern is a {BUFFER!r}, and only that")
    sides = [*torch_patterns, *([] if flax_side is None else [flax_side])]
    choices = choices_in(sides)
    if len({has_prefix(side) for side in sides}) > 1 and transform is not None:
        raise ValueError(f"rule {number} {rule!r}: an optional prefix stands on both sides or on neither")
    readings = []
    for keep in (False, True) if any(has_prefix(side) for side in sides) else (False,):
        torch = tuple(parse(side, ".", keep, choices) for side in torch_patterns)
        flax = None if flax_side is None else parse(flax_side, "/", keep, choices)
        if flax is not None and any(pattern.variables != flax.variables for pattern in torch):
            raise ValueError(f"rule {number} {rule!r}: a variable stands on one side only")
        readings.append(CompiledRule(number, kind, torch, flax, transform))
    return readings


def _refuse_overlaps(patterns: list[tuple[int, Pattern]], rules: Rules) -> None:
    for (first, one), (second, other) in combinations(patterns, 2):
        if one.overlaps(other):
            raise ValueError(f"ambiguous table: rules {rules[first]!r} and {rules[second]!r} match the same names")
