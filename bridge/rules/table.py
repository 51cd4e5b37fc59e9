"""Rule tables: which torch tensor is which Flax leaf, read in both directions.

A family's table is plain data, `RULES`, a tuple of `(torch pattern, flax pattern, transform)` in the order in which the
Flax modules hold their parameters.

- Torch names are dotted, Flax paths joined by "/".
- `{name}` matches one component, `{name:a|b}` one of those given (stated once, on either side). A variable occurs on
  both sides.
- `[prefix.]` at the start of a torch pattern and `[prefix/]` at the start of its Flax pattern are there on both sides
  or on neither: a checkpoint of the base model alone has no prefix.
- A transform is a name of `bridge.rules.transforms`, or a `Transform` itself where the layout has parameters (heads,
  stacked layers). A torch pattern may be a tuple of patterns for a transform that fuses. Where torch holds the fused
  tensor, the other pattern is the tuple, and the transform maps the leaves to torch.
- Rows without variables are found in a dict: a table may have one for every tensor of a model.

Seven names in the transform's place are not layout changes:

- `buffer` (Flax pattern None): Flax has no such leaf; conversion keeps the tensor beside the Flax weights.
- `tied`: this torch tensor repeats what Flax holds once at the path.
- `tied_always`: the same regardless of the config: torch gets both names even if the config ties nothing.
- `tied_in_torch`: torch may leave this tensor out because it repeats the one at the path; Flax holds both.
- `spare`: copied unchanged; a leaf that Flax always has, and torch only with some configs.
- `unread`, beside the row that moves the leaf: its own program does not use the leaf, because the config ties this
  torch tensor to another. It is left out where the two are equal, and an error where they are not.
- `alias`: another spelling in torch checkpoints; the second name, literal too, is the torch name it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

from easytorch.bridge.core.unsupported import is_adapters, is_quantized
from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.rules.patterns import Bindings, Pattern, choices_in, has_prefix, parse
from easytorch.bridge.rules.transforms import Transform, get_transform

Rule = tuple[str | tuple[str, ...], str | tuple[str, ...] | None, str | Transform]
Rules = tuple[Rule, ...]

BUFFER = "buffer"
TIED = "tied"
TIED_ALWAYS = "tied_always"
TIED_IN_TORCH = "tied_in_torch"
# What transformers up to 4.57 tied regardless of the config (`TIED_ALWAYS`): all but a head's matrix.
TIED_ENDINGS = (".bias", ".embed_tokens.weight")
TIES = (TIED, TIED_ALWAYS, TIED_IN_TORCH)
ALIAS = "alias"
UNREAD = "unread"
SPARE = "spare"

# The depth to which a tree of weights is searched for, to name it in an error.
_DEEPEST_TREE = 5

# Names from before transformers 1.0 that checkpoints on the hub still carry.
_LEGACY_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def modern_name(name: str) -> str:
    """The name that a norm's weight from before transformers 1.0 has now; any other is the same."""
    for old, new in _LEGACY_ENDINGS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


@dataclass(frozen=True)
class CompiledRule:
    """One reading of a rule, with or without its prefix. `number` is its place in the table."""

    number: int
    kind: str
    torch: tuple[Pattern, ...]
    leaves: tuple[Pattern, ...]
    layout: Transform | None

    @property
    def transform(self) -> Transform:
        """The transform of a rule that moves data, which a buffer's and a tie's do not."""
        assert self.layout is not None, f"{self.kind} moves no data"
        return self.layout

    @property
    def flax(self) -> Pattern:
        """The Flax pattern of a rule that has one, every rule but a buffer's; the first of several."""
        assert self.leaves, f"{self.kind} has no Flax side"
        return self.leaves[0]

    @property
    def cut(self) -> bool:
        """Whether one torch tensor is several leaves, so that the transform maps those to torch."""
        return len(self.leaves) > 1 and len(self.torch) == 1

    @property
    def exchanged(self) -> bool:
        """Whether several torch tensors are several leaves, converted together in both directions."""
        return min(len(self.leaves), len(self.torch)) > 1

    def order(self, bindings: Bindings) -> tuple[Any, ...]:
        """Sorts instances of the table: by rule, then by variable, numbers as numbers and choices as listed."""
        return (self.number, *(self._rank(name, value) for name, value in bindings))

    def _rank(self, name: str, value: str) -> tuple[int, int, str]:
        choices = {
            part[0]: part[1] for pattern in self.torch for part in pattern.components if not isinstance(part, str)
        }
        if choices.get(name):
            return (0, choices[name].index(value), value)
        return (0, int(value), value) if value.isdecimal() and len(value) < 10 else (1, 0, value)


Match = tuple[CompiledRule, int, Bindings]


class _Side:
    """One side of some rules, by name: literal patterns in a dict, the others in a list."""

    def __init__(self, entries: Iterable[tuple[CompiledRule, int, Pattern]], rules: Rules, *, unique: bool) -> None:
        self._literal: dict[str, list[tuple[CompiledRule, int]]] = {}
        self._patterns: list[tuple[CompiledRule, int, Pattern]] = []
        for rule, part, pattern in entries:
            if pattern.variables:
                self._patterns.append((rule, part, pattern))
            else:
                self._literal.setdefault(pattern.fill(()), []).append((rule, part))
        if unique:
            self._refuse_overlaps(rules)

    def _refuse_overlaps(self, rules: Rules) -> None:
        twice = [(found[0][0].number, found[1][0].number) for found in self._literal.values() if len(found) > 1]
        for name, ((rule, _), *_) in self._literal.items():
            twice += [
                (rule.number, other.number) for other, _, pattern in self._patterns if pattern.match(name) is not None
            ]
        for (rule, _, first), (other, _, second) in combinations(self._patterns, 2):
            if first.overlaps(second):
                twice.append((rule.number, other.number))
        if twice:
            one, another = twice[0]
            raise ValueError(f"ambiguous table: rules {rules[one]!r} and {rules[another]!r} match the same names")

    def matches(self, name: str) -> Iterator[Match]:
        """Every rule whose pattern fits `name`, which of its parts that is, and the bindings."""
        for rule, part in self._literal.get(name, ()):
            yield rule, part, ()
        for rule, part, pattern in self._patterns:
            if (bindings := pattern.match(name)) is not None:
                yield rule, part, bindings


class RuleTable:
    """A compiled table. `weights` are the rules that move data; ties and buffers are separate."""

    def __init__(self, rules: Rules) -> None:
        self._aliases = {str(rule[0]): str(rule[1]) for rule in rules if rule[2:] == (ALIAS,)}
        rows = [(number, rule) for number, rule in enumerate(rules) if rule[2:] != (ALIAS,)]
        compiled = [one for number, rule in rows for one in _compile(number, rule)]
        self.weights = [rule for rule in compiled if rule.layout is not None]
        self.buffers = [rule for rule in compiled if rule.kind == BUFFER]
        self._unread = {rule.flax.fill(()) for rule in compiled if rule.kind == UNREAD}
        ties = [rule for rule in compiled if rule.kind in TIES]
        self._torch = _Side(_torch_side(self.weights), rules, unique=True)
        self._flax = _Side(
            ((rule, part, pattern) for rule in self.weights for part, pattern in enumerate(rule.leaves)),
            rules,
            unique=True,
        )
        self._ties = _Side(_torch_side(ties), rules, unique=True)
        self._tied_to = _Side(((rule, 0, rule.flax) for rule in ties), rules, unique=False)
        self._buffers = _Side(_torch_side(self.buffers), rules, unique=True)

    def torch_rule(self, name: str) -> Match | None:
        """The rule that moves torch tensor `name`, which of its parts the tensor is, and the bindings."""
        return next(self._torch.matches(name), None)

    def flax_rule(self, path: str) -> tuple[CompiledRule, Bindings] | None:
        """The rule that moves leaf `path`, and the bindings."""
        found = self.leaf_rule(path)
        return None if found is None else (found[0], found[2])

    def leaf_rule(self, path: str) -> Match | None:
        """The rule that moves leaf `path`, which of its leaves that is, and the bindings."""
        return next(self._flax.matches(path), None)

    def tie(self, name: str) -> tuple[CompiledRule, str] | None:
        """The tie of torch tensor `name` and the path it repeats."""
        return next(((rule, rule.flax.fill(bindings)) for rule, _, bindings in self._ties.matches(name)), None)

    def tied_to(self, path: str) -> Iterator[tuple[CompiledRule, str]]:
        """Every tie whose data is at leaf `path`, with the torch name that repeats it."""
        for rule, _, bindings in self._tied_to.matches(path):
            yield rule, rule.torch[0].fill(bindings)

    def knows(self, name: str) -> bool:
        """Whether any row names the torch tensor."""
        return self.torch_rule(name) is not None or self.tie(name) is not None or self.is_buffer(name)

    def is_buffer(self, name: str) -> bool:
        """Whether `name` is a torch tensor that the tree does not hold."""
        return next(self._buffers.matches(name), None) is not None

    def is_spare(self, name: str) -> bool:
        """Whether a torch model may lack `name` although the tree always holds it."""
        found = self.torch_rule(name)
        return found is not None and found[0].kind == SPARE

    def is_unread(self, path: str) -> bool:
        """Whether leaf `path` is not used by its program."""
        return path in self._unread

    def torch_names(self, names: Iterable[str]) -> dict[str, str]:
        """The table's name -> the given name: equal except for legacy names, which are aliases."""
        known: dict[str, str] = {}
        for given in names:
            name = self._modern(given)
            if name in known:
                raise CheckpointError(f"stands twice, as {known[name]!r} and as {given!r}; remove one", tensor=name)
            known[name] = given
        return known

    def _modern(self, name: str) -> str:
        return modern_name(self._aliases.get(name, name))

    def unknown_torch(self, name: str) -> str:
        """The error message for a torch name without a rule."""
        if is_quantized(name):
            return (
                "belongs to quantized weights, which are not converted, and config.json has no `quantization_config`; "
                "dequantize the model first (`model.dequantize()`, then `save_pretrained`)"
            )
        if is_adapters(name):
            return (
                "belongs to a model with an adapter (PEFT), and adapters are not converted; save what "
                "`PeftModel.merge_and_unload()` returns"
            )
        known = [pattern.like(name) for rule in (*self.weights, *self.buffers) for pattern in rule.torch]
        return f"{_unknown(nearest(name, known))}; if Flax has no such leaf, {(name, None, BUFFER)!r}"

    def unknown_flax(self, path: str, paths: Iterable[str] = ()) -> str:
        """The error message for a Flax path without a rule. paths: all paths of the tree."""
        trees = self._trees(paths)
        if trees == {"params", "batch_stats"}:
            return (
                "stands in a tree with statistics, and the rules name its leaves without their collection; they are "
                "`params/...` and `batch_stats/...` there"
            )
        if trees:
            listed = ", ".join(sorted(trees))
            return f"stands beside or in several trees of weights, {listed}; choose one by `params_key` (--params-key)"
        known = [pattern.like(path) for rule in self.weights for pattern in rule.leaves]
        return _unknown(nearest(path, known))

    def _knows_leaf(self, keys: list[str]) -> bool:
        return self.leaf_rule("/".join(keys)) is not None

    def _trees(self, paths: Iterable[str]) -> set[str]:
        """The prefixes under which a tree has leaves that the table knows: `net/params`."""
        found = set()
        for path in paths:
            keys = path.split("/")
            # A leaf of the root's own tree belongs to no other: `bert/...` is known without its prefix too.
            known = (depth for depth in range(min(len(keys), _DEEPEST_TREE)) if self._knows_leaf(keys[depth:]))
            if depth := next(known, 0):
                found.add("/".join(keys[:depth]))
        return found


def compile_rules(rules: Sequence[Any]) -> RuleTable:
    """The table ready for use; `ValueError` for a malformed or ambiguous one, or a transform without an inverse."""
    return _table(as_rules(rules))


@lru_cache(maxsize=64)
def _table(rules: Rules) -> RuleTable:
    return RuleTable(rules)


def as_rules(rules: Sequence[Any]) -> Rules:
    """The table as tuples, where a user may have written lists; `ValueError` for a malformed row."""
    return tuple(_row(number, row) for number, row in enumerate(rules))


def _row(number: int, given: Any) -> Rule:
    rule = tuple(tuple(one) if isinstance(one, list) else one for one in given) if _listed(given) else given
    if not isinstance(rule, tuple) or len(rule) != 3:
        raise ValueError(f"rule {number} is {rule!r}; a rule is (torch pattern, flax pattern, transform)")
    torch_side, flax_side, change = rule
    for names in (torch_side, () if flax_side is None else flax_side):
        if not isinstance(names, str) and not (_listed(names) and all(isinstance(name, str) for name in names)):
            raise ValueError(f"rule {number} {rule!r}: {names!r} is neither a name nor a tuple of names")
    if not isinstance(change, str | Transform):
        raise ValueError(f"rule {number} {rule!r}: {change!r} is no layout; give the name of one, or a Transform")
    return torch_side, flax_side, change


def _unknown(nearest_name: str) -> str:
    return f"no rule of this family names it{nearest_name}; leave it out (`--drop`), or add a rule (`--rules`)"


def _listed(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _torch_side(rules: Iterable[CompiledRule]) -> Iterator[tuple[CompiledRule, int, Pattern]]:
    return ((rule, part, pattern) for rule in rules for part, pattern in enumerate(rule.torch))


def _compile(number: int, rule: Rule) -> list[CompiledRule]:
    """The one or two readings of a rule: without and with its optional prefix."""
    torch_side, flax_side, change = rule
    torch_patterns = (torch_side,) if isinstance(torch_side, str) else tuple(torch_side)
    transform: Transform | None = None
    kind: str
    if isinstance(change, Transform):
        transform, kind = change, change.name
    else:
        kind = change
        if kind not in (BUFFER, UNREAD, *TIES):
            transform = get_transform("identity" if kind == SPARE else kind)
    if transform is not None and transform.to_torch is None:
        raise ValueError(
            f"rule {number} {rule!r}: the transform {kind!r} has no inverse, so the table reads only one way"
        )
    flax_patterns = (flax_side,) if isinstance(flax_side, str) else tuple(flax_side or ())
    side, many = ("Flax", flax_patterns) if len(flax_patterns) > 1 else ("torch", torch_patterns)
    both = transform is not None and (len(torch_patterns), len(flax_patterns)) == (transform.parts, transform.leaves)
    lone = min(len(flax_patterns), len(torch_patterns)) <= 1 and (transform is None or transform.leaves == 1)
    if not (both or (lone and len(many) == (1 if transform is None else transform.parts))):
        raise ValueError(f"rule {number} {rule!r}: {kind!r} does not take {len(many)} {side} patterns")
    if (not flax_patterns) != (kind == BUFFER):
        raise ValueError(f"rule {number} {rule!r}: a rule without a Flax pattern is a {BUFFER!r}, and only that")
    sides = [*torch_patterns, *flax_patterns]
    choices = choices_in(sides)
    if len({has_prefix(side) for side in sides}) > 1 and transform is not None:
        raise ValueError(f"rule {number} {rule!r}: an optional prefix stands on both sides or on neither")
    readings = []
    for keep in (False, True) if any(has_prefix(side) for side in sides) else (False,):
        torch = tuple(parse(side, ".", keep, choices) for side in torch_patterns)
        leaves = tuple(parse(side, "/", keep, choices) for side in flax_patterns)
        if leaves and len({pattern.variables for pattern in (*torch, *leaves)}) > 1:
            raise ValueError(f"rule {number} {rule!r}: a variable stands on one side only")
        readings.append(CompiledRule(number, kind, torch, leaves, transform))
    return readings
