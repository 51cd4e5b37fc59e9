"""Write docs/models.md: the native families, what each is, its classes, its layers, and the operations it calls.

    python scripts/models_doc.py --write | --check

Everything is read off the tiny model of each family in tests/models/families.py.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/models.md"
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - a script of the checkout
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES  # noqa: E402

from easytorch.auto.overview import blocks  # noqa: E402
from easytorch.bridge.names.native_rules import families  # noqa: E402
from easytorch.operations.dispatch.record import recorded_operations  # noqa: E402
from tests.models.families import FAMILIES, LANGUAGE  # noqa: E402
from tests.models.tower_families import tower_inputs, tower_labels  # noqa: E402

HEAD = """\
# Native models

Written by `python scripts/models_doc.py --write`; `tests/scripts/test_models_doc.py` fails when this page is not what
it would write. These families are modules of EasyTorch, with transformers' names, parameters and call conventions, and
are compared with transformers' classes by `tests/models`: outputs, losses, every gradient, caches, `generate`, files in
both directions, Flax and back. Every other type loads as transformers' own class; [architectures](architectures.md)
lists what runs in each. How to add one: [add a model](add-a-model.md).

Layers: the parts of `easytorch/layers` a family is made of. Operations: what a forward with a loss calls on the CPU.

| Type | What it is | Classes | Layers | Operations |
|---|---|---|---|---|
"""
FOOT = """
Types that transformers makes of the classes of another, which are native then too: {types}.
"""


def row(family: str) -> str:
    """A line of the table."""
    module = importlib.import_module(f"easytorch.models.{family}")
    name = LANGUAGE[family]
    torch.manual_seed(0)
    model = getattr(module, name)(FAMILIES[family].config()).eval()
    what = " ".join((module.__doc__ or "").strip().splitlines()[0].split()).removesuffix(".")
    cells = (family, what, ", ".join(FAMILIES[family].heads), ", ".join(blocks(model)), ", ".join(_operations(model)))
    return "| " + " | ".join(cells) + " |\n"


def _operations(model: Any) -> list[str]:
    """The operations of one forward, by the name under which the registry has them."""
    ids, head = torch.arange(3, 12)[None], type(model).__name__
    inputs = tower_inputs(head)
    given = {"input_ids": ids, "labels": ids} if inputs is None else inputs | tower_labels(head)
    with recorded_operations() as called, torch.no_grad():
        model(**given)  # of an encoder-decoder what its decoder says
    return sorted(called)


def page() -> str:
    """The text of the page. `ValueError` for a family without a row in tests/models/families.py."""
    if missing := sorted(set(families()) - set(FAMILIES)):
        raise ValueError(f"tests/models/families.py has no row for {', '.join(missing)}")
    return HEAD + "".join(row(family) for family in sorted(FAMILIES)) + FOOT.format(types=", ".join(of_others()))


def of_others() -> list[str]:
    """The types that have no file here, and the family that each is made of."""
    family_of = {head: family for family, row in FAMILIES.items() for head in row.heads}
    return [
        f"{name} ({family_of[head]})"
        for name, head in sorted(MODEL_MAPPING_NAMES.items())
        if isinstance(head, str) and head in family_of and name.replace("-", "_") not in families()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    text = page()
    if arguments.write:
        PAGE.write_text(text)
        return 0
    if PAGE.read_text() != text:
        print("docs/models.md is not current: run python scripts/models_doc.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
