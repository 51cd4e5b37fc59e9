"""Writes the outlines of families (`bridge/names/outlines/<model_type>.json`) from what transformers builds of small
configs.

    scripts/outline_tables.py t5 bart ...     writes these
    scripts/outline_tables.py                 writes every one that is there again
    scripts/outline_tables.py --check         builds further configs of every class and compares; exit 1 on a difference

Configs are drawn at random, built on the meta device, and the weights of all of them explained: each number of layers
and each dimension as an expression of the config's keys, each weight that only some models have by a condition. A class
that cannot be explained is left out and said, so that it is converted with transformers, and so is every value of a key
that was not tried or was refused.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.outlines.family import Family, Unexplained, differences, written  # noqa: E402

OUTLINES = ROOT / "bridge" / "names" / "outlines"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="MODEL_TYPE", help="every one that is there without")
    parser.add_argument("--check", action="store_true", help="compare what is there, write nothing")
    parser.add_argument("--configs", type=int, default=12, help="further configs of each class (12)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    wrong = 0
    for family in options.families or sorted(file.stem for file in OUTLINES.glob("*.json")):
        if not options.check:
            try:
                content = Family(family, options.seed).outline()
            except Unexplained as error:
                print(f"{family} is left out: {error}", flush=True)
                continue
            (OUTLINES / f"{family}.json").write_text(written(content))
        found = list(differences(family, options.seed, options.configs))
        wrong += len(found)
        print(f"{family}: {len(found)} differences", *found[:8], sep="\n  ", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
