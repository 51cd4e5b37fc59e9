"""Finds leaves that a conversion loses, or ignores silently: perturb_bridge.py for trees.

    python scripts/perturb_leaves.py                            every family, every tree it has names for
    python scripts/perturb_leaves.py --family resnet --target flax --each 0 --seed 7

The tree of every family (tests/bridge/perturb_cases.py) is saved with one leaf changed, missing, resized or added, and
converted to torch and back. A changed leaf must come back, with all others; a missing, resized or added one must be
refused or noted in the report. Prints a line a family and target, and the losses; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from easytorch.bridge.convert import convert  # noqa: E402 - a script of the checkout
from easytorch.bridge.core.nested import flat, nested  # noqa: E402
from easytorch.bridge.errors import CheckpointError  # noqa: E402
from easytorch.bridge.load_tree import load_tree  # noqa: E402
from easytorch.bridge.save_tree import save_tree  # noqa: E402
from scripts.perturb_bridge import Case, Model, State, _cases, model_of, write  # noqa: E402

# Trees that say by their names whose they are: EasyDeL's do by the container, which `save_tree` does not write.
TARGETS = ("flax", "maxtext", "maxtext-unscanned", "t5x", "big_vision", "gemma")


def harmed(model: Model, tree: State, each: int) -> Iterator[tuple[str, State, bool]]:
    """(what was done, the tree, whether it must come back). each: how many leaves, 0 for all."""
    rng = np.random.default_rng(model.seed)
    names = sorted(tree)
    yield "as it is", tree, True
    for name in names if each == 0 or each >= len(names) else rng.choice(names, each, replace=False).tolist():
        leaf = tree[name]
        yield f"{name} changed", {**tree, name: model.values(f"{name} alone", leaf.shape).astype(leaf.dtype)}, True
        yield f"{name} missing", {one: array for one, array in tree.items() if one != name}, False
        yield f"{name}_more added", {**tree, f"{name}_more": leaf}, False
        if leaf.ndim:
            yield f"{name} longer", {**tree, name: np.concatenate([leaf, leaf[:1]])}, False


def losses(model: Model, target: str, each: int, work: Path) -> Iterator[str]:
    """The failures of a family's trees in the names of `target`; none where `target` cannot hold the family."""
    write(work / "torch", model, Case("whole", model.state()))
    try:
        convert(work / "torch", work / "tree", to=target)
    except CheckpointError:
        return
    config = json.loads((work / "torch" / "config.json").read_text())
    tree = _leaves(work / "tree", work / "torch")
    for what, leaves, comes_back in harmed(model, tree, each):
        folder = Path(tempfile.mkdtemp(dir=work))
        try:
            save_tree(nested(leaves), folder / "harmed", config=config)
            report = convert(folder / "harmed", folder / "torch", to="torch")
            if not comes_back:
                if not report.notes:
                    yield f"{what}: taken, and nothing is said"
                continue
            convert(folder / "torch", folder / "back", to=target)
            back = _leaves(folder / "back", work / "torch")
            if back.keys() != leaves.keys():
                yield f"{what}: {sorted(back.keys() ^ leaves.keys())} are on one side alone"
            # MaxText's scaled queries round where the factor is no power of two.
            wrong = [one for one in back.keys() & leaves.keys() if not np.allclose(back[one], leaves[one], 1e-6, 1e-6)]
            if wrong:
                yield f"{what}: {wrong} differ"
        except CheckpointError as error:
            if comes_back:
                yield f"{what}: refused, {error}"
        finally:
            shutil.rmtree(folder)


def _leaves(folder: Path, config: Path) -> State:
    return {name: np.asarray(leaf) for name, leaf in flat(load_tree(folder, config=config)).items()}


def main() -> None:
    families = list(_cases().FAMILIES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=families, help="only this one; may be given again")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one; may be given again")
    parser.add_argument("--each", type=int, default=3, help="leaves that are harmed, 0 for all of them")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    failed = False
    for family in given.family or families:
        model = model_of(family, given.seed)
        for target in given.target or TARGETS:
            with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as work:
                found = list(losses(model, target, given.each, Path(work)))
            print(f"{family:16} {target:18} {len(found)} losses", flush=True)
            for loss in found:
                failed = True
                print(f"    seed {given.seed}, {loss}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
