"""Finds weights that a conversion loses: each tensor is changed alone, and a round trip must return it.

    python scripts/perturb_bridge.py                            every family, every target, ties and a sample of tensors
    python scripts/perturb_bridge.py --family t5 --target easydel --each 0 --seed 7

For every family (a tiny model of random weights) and every `--to`, torch -> target -> torch:

- every tensor different from every other;
- of weights that the class ties, each repeat changed alone, the original changed alone, all of them apart, and each of
  the two missing; with `tie_word_embeddings` true and false, whatever the tensors say;
- all tensors of one shape alike but for one (`--each`: how many of them, 0 for all).

A tensor must come back bit for bit, or be absent where it repeats one that came back, or, of tied weights that differ,
be refused by a `CheckpointError` on the way there. Prints a line a family and target, and the losses; the exit code is
1 where there is one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

State = dict[str, np.ndarray]
# torch name -> the one it repeats.
Ties = Mapping[str, str]


def _cases() -> ModuleType:
    """tests/bridge/perturb_cases.py."""
    path = ROOT / "tests" / "bridge" / "perturb_cases.py"
    spec = importlib.util.spec_from_file_location("perturb_cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


@dataclass
class Model:
    """A family's tiny model: its config.json, the shapes and dtypes of what checkpoints of it hold, and its ties."""

    family: str
    content: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    integers: State
    ties: Ties
    seed: int

    def state(self, alike: bool = False) -> State:
        """Random weights, the tied ones equal; `alike`: all tensors of one shape are equal."""
        made: State = dict(self.integers)
        for name, shape in self.shapes.items():
            source = self.ties.get(name, name)
            made[name] = made[source] if source in made else self.values(shape if alike else source, shape)
        return made

    def values(self, key: object, shape: tuple[int, ...]) -> np.ndarray:
        """Random numbers that depend on the seed and `key` alone."""
        rng = np.random.default_rng([self.seed, zlib.crc32(repr(key).encode())])
        return rng.normal(size=shape).astype(np.float32)


def model_of(family: str, seed: int) -> Model:
    """The model of a family of tests/bridge/perturb_cases.py."""
    import torch
    import transformers

    from easytorch.bridge.core.config import Config
    from easytorch.bridge.names.architecture import architecture_of

    name, arguments = _cases().FAMILIES[family]
    model_class = getattr(transformers, name)
    settings = model_class.config_class(**arguments)
    content = {**settings.to_dict(), "architectures": [name]}
    content = json.loads(json.dumps(content, default=str))
    tied = {**content, "tie_word_embeddings": True} if "tie_word_embeddings" in content else content
    names = architecture_of(Config(Path("config.json"), tied), 10_000).names
    with torch.device("cpu"):
        buffers = {key: tensor for key, tensor in model_class(settings).state_dict().items() if key in names.tensors}
    ties = {}
    for repeat, source in names.model.all_tied_weights_keys.items():
        one, other = names.hub_name(repeat), names.hub_name(source)
        if one is not None and other is not None:
            ties[one] = other
    shapes = {key: tuple(tensor.shape) for key, tensor in names.tensors.items() if tensor.dtype.is_floating_point}
    # A tied original first, so that its repeats take its values.
    shapes = dict(sorted(shapes.items(), key=lambda entry: entry[0] in ties))
    integers = {key: tensor.numpy() for key, tensor in buffers.items() if not tensor.is_floating_point()}
    return Model(family, content, shapes, integers, ties, seed)


@dataclass(frozen=True)
class Case:
    """One checkpoint: what was done to it, whether it may be refused, and `tie_word_embeddings` where that is set."""

    title: str
    state: State
    refusable: bool = False
    tie: bool | None = None


def cases_of(model: Model, each: int) -> Iterator[Case]:
    """The checkpoints of a model. each: how many tensors are changed alone, 0 for all."""
    whole = model.state()
    yield Case("all different", whole)
    declared = (True, False) if "tie_word_embeddings" in model.content else (None,)
    for tie in declared:
        for repeat, source in model.ties.items():
            other = model.values(f"{repeat} alone", whole[repeat].shape)
            yield Case(f"{repeat} changed, tie={tie}", {**whole, repeat: other}, True, tie)
            yield Case(f"{source} missing, tie={tie}", _without(whole, source), True, tie)
            yield Case(f"{repeat} missing, tie={tie}", _without(whole, repeat), tie is False, tie)
        for source in dict.fromkeys(model.ties.values()):
            other = model.values(f"{source} alone", whole[source].shape)
            yield Case(f"{source} changed, tie={tie}", {**whole, source: other}, True, tie)
        apart = {name: model.values(f"{name} apart", whole[name].shape) for name in model.ties}
        if len(apart) > 1:
            yield Case(f"all ties apart, tie={tie}", {**whole, **apart}, True, tie)
    alike = model.state(alike=True)
    names = [name for name in model.shapes if name not in model.ties]
    rng = np.random.default_rng(model.seed)
    chosen = names if each == 0 or each >= len(names) else rng.choice(names, each, replace=False).tolist()
    for name in chosen:
        changed = {one: model.values("changed", alike[name].shape) for one in alike if model.ties.get(one, one) == name}
        yield Case(f"{name} changed among alike", {**alike, **changed})


def _without(state: State, name: str) -> State:
    return {key: array for key, array in state.items() if key != name}


@dataclass
class Outcome:
    """The result for one family and target."""

    counts: Counter = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)


def write(folder: Path, model: Model, case: Case) -> None:
    """The checkpoint of a case, as torch's."""
    from safetensors.numpy import save_file

    folder.mkdir()
    content = model.content if case.tie is None else {**model.content, "tie_word_embeddings": case.tie}
    (folder / "config.json").write_text(json.dumps(content))
    arrays = {name: np.asarray(array, order="C") for name, array in case.state.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def lost(state: State, back: State, ties: Ties, exact: bool) -> list[str]:
    """The tensors of `state` that are lost or changed in `back`; one that is absent may be tied to another."""
    found = []
    for name, array in state.items():
        group = ties.get(name, name)
        partners = [one for one in back if ties.get(one, one) == group]
        where = [name] if name in back else partners
        if not any(_same(array, back[one], exact) for one in where):
            found.append(f"{name} {'differs' if name in back else 'is lost'}")
        elif name not in back and not all(_same(array, back[one], exact) for one in where):
            found.append(f"{name} is lost beside {where}")
    for name, array in back.items():
        given = [state[one] for one in state if ties.get(one, one) == ties.get(name, name)]
        if name not in state and not any(_same(array, one, exact) for one in given):
            found.append(f"{name} is nobody's")
    return found


def _same(one: np.ndarray, other: np.ndarray, exact: bool) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.tobytes() == other.tobytes() if exact else bool(np.allclose(one, other, rtol=1e-6, atol=1e-6))


def run(model: Model, target: str, each: int, work: Path, verify: bool = False) -> Outcome:
    """Every case of a family through one target; one that the target has no names for is only counted."""
    from safetensors.numpy import load_file

    from easytorch.bridge.convert import convert
    from easytorch.bridge.errors import CheckpointError

    outcome = Outcome()
    exact = not (target == "gguf" and "gemma" in model.family) and not target.startswith("maxtext")
    for number, case in enumerate(cases_of(model, each)):
        folder = Path(tempfile.mkdtemp(dir=work))
        try:
            write(folder / "torch", model, case)
            try:
                convert(folder / "torch", folder / "there", to=target, verify=verify)
            except CheckpointError as error:
                if number == 0:
                    outcome.counts["unsupported"] += 1
                    outcome.losses += [] if _no_names(str(error)) else [f"{case.title}: {error}"]
                    return outcome
                outcome.counts["refused"] += 1
                if not case.refusable:
                    outcome.losses.append(f"{case.title}: refused, {error}")
                continue
            try:
                convert(folder / "there", folder / "back", to="torch", verify=verify)
            except CheckpointError as error:
                outcome.counts["lost"] += 1
                outcome.losses.append(f"{case.title}: no way back, {error}")
                continue
            found = lost(case.state, load_file(folder / "back" / "model.safetensors"), model.ties, exact)
            outcome.losses += [f"{case.title}: {loss}" for loss in found]
            outcome.counts["lost" if found else "returned"] += 1
        finally:
            shutil.rmtree(folder)
    return outcome


def _no_names(message: str) -> bool:
    return any(
        words in message
        for words in (
            "has no name",
            "no names for",
            "names are",
            "known here for",
            "not written or read here",
            "has names for",
        )
    )


def main() -> None:
    from easytorch.bridge.jobs.targets import target_names

    families = list(_cases().FAMILIES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=families, help="only this one; may be given again")
    parser.add_argument("--target", action="append", choices=target_names(), help="only this one; may be given again")
    parser.add_argument("--each", type=int, default=3, help="tensors changed alone, 0 for all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verify", action="store_true", help="with `convert --verify`, which is slower")
    given = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as work:
        for family in given.family or families:
            model = model_of(family, given.seed)
            for target in given.target or target_names():
                outcome = run(model, target, given.each, Path(work), given.verify)
                counts = ", ".join(f"{count} {kind}" for kind, count in outcome.counts.items())
                print(f"{family:16} {target:18} {counts}", flush=True)
                for loss in outcome.losses:
                    failed = True
                    print(f"    seed {given.seed}, {loss}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
