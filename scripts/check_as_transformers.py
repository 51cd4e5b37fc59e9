"""transformers' own tests of models (its ModelTesterMixin), with our native classes in place of its classes.

    pip download --no-binary :all: --no-deps transformers==VERSION && tar xzf transformers-VERSION.tar.gz
    python scripts/check_as_transformers.py transformers-VERSION/tests                all families
    python scripts/check_as_transformers.py transformers-VERSION/tests llama bert     some
    python scripts/check_as_transformers.py transformers-VERSION/tests llama --only tied --show
    python scripts/check_as_transformers.py CHECKOUT/tests llama                      the family's own tests

The source archive has what its tests of all models share, and not the files of each family: here the tiny configs and
inputs of tests/models/ stand in for those. Where the folder has generation/test_utils.py, those tests run too. A
checkout of transformers' repository has each family's tests, and they run as they are. What fails runs again with
transformers' class; a failure counts where that one passes. The exit code is 1 where one counts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import logging
import os
import sys
import time
import types
import unittest
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402

from scripts.family_suites import files_of, folder_of, load, native_names  # noqa: E402
from tests.models.families import ENCODERS, FAMILIES, IMAGE_TEXT, SEQ2SEQ, TOWERS  # noqa: E402
from tests.models.image_text_families import image_text_inputs  # noqa: E402
from tests.models.tower_families import tower_inputs  # noqa: E402

Tests = dict[str, unittest.TestCase]
BATCH, LENGTH = 2, 7
# It asserts that the default attention is called "sdpa"; ours is called "easytorch".
DESIGNED = ("test_sdpa_can_dispatch",)
# of machines with a GPU, of other packages, or of the hub
NOT_HERE = (
    "flash_attn",
    "deepspeed",
    "multi_gpu",
    "model_parallelism",
    "kernels_can_load",
    "torch_compile_for_training",
)


def shared_tests(folder: Path) -> Any:
    """`test_modeling_common` of transformers' tests as a module of a package, what it imports beside it or empty."""
    package = types.ModuleType("transformers_tests")
    package.__path__ = [str(folder)]
    sys.modules["transformers_tests"] = package
    for name, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        if (folder / f"{name.replace('.', '/')}.py").exists():
            continue
        parent, _, _ = name.partition(".")
        empty = types.ModuleType(f"transformers_tests.{name}")
        setattr(empty, mixin, type(mixin, (), {}))
        sys.modules.setdefault(f"transformers_tests.{parent}", types.ModuleType(f"transformers_tests.{parent}"))
        sys.modules[f"transformers_tests.{name}"] = empty
    return importlib.import_module("transformers_tests.test_modeling_common")


class ModelTester:
    """What transformers' tests ask a family's `ModelTester` for."""

    is_training = True
    batch_size, seq_length = BATCH, LENGTH
    num_choices = 2

    def __init__(self, family: str, common: Any) -> None:
        self.family, self.common = family, common
        config = self.get_config()
        text = config.get_text_config()
        for source in (text, config):
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "image_size"):
                if isinstance(value := getattr(source, name, None), int):
                    setattr(self, name, value)
        self.key_length = self.encoder_seq_length = self.decoder_seq_length = self.seq_length
        if family in (*TOWERS, *IMAGE_TEXT):
            ids = self.inputs().get("input_ids")
            self.batch_size = 2
            self.seq_length = self.key_length = self.encoder_seq_length = LENGTH if ids is None else ids.shape[1]

    def get_config(self) -> Any:
        return FAMILIES[self.family].config()

    def inputs(self) -> dict[str, Any]:
        head = FAMILIES[self.family].heads[0]
        if self.family in TOWERS:
            return dict(tower_inputs(head) or {})
        if self.family in IMAGE_TEXT:
            return dict(image_text_inputs(head) or {})
        torch.manual_seed(0)
        ids = torch.randint(3, 96, (BATCH, LENGTH))
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.family in SEQ2SEQ:
            given |= {"decoder_input_ids": ids.flip(0), "decoder_attention_mask": torch.ones_like(ids)}
        return given

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        return self.get_config(), self.inputs()

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


def suite(family: str, common: Any, source: Any) -> type[unittest.TestCase]:
    """The tests of a family's classes in `source`, named as transformers names them."""
    row = FAMILIES[family]
    classes = tuple(getattr(source, name) for name in row.heads)
    bases: tuple[type, ...] = (common.ModelTesterMixin, unittest.TestCase)
    mixin = common.GenerationTesterMixin
    if vars(mixin).keys() - type("empty", (), {}).__dict__.keys() and family not in (*TOWERS, *ENCODERS):
        bases = (common.ModelTesterMixin, mixin, unittest.TestCase)

    def set_up(self: Any) -> None:
        self.model_tester = ModelTester(family, common)

    members = {
        "all_model_classes": classes,
        "setUp": set_up,
        "is_encoder_decoder": family in SEQ2SEQ,
        "_is_composite": bool(row.config().sub_configs),
        "has_attentions": row.attentions > 0,
        "test_all_params_have_gradient": False,
        "has_experts": False,
    }
    return type(f"{row.config_class.__name__.removesuffix('Config')}ModelTest", bases, members)


def outcome(case: unittest.TestCase) -> str:
    """ "" if the test passes, else "skipped" or the error."""
    result = unittest.TestResult()
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.run(result)
    failed = [*result.failures, *result.errors]
    if failed:
        return str(failed[0][1])
    return "skipped" if result.skipped else ""


def tests_of(folder: Path, family: str) -> tuple[Tests, Tests, Callable[[], AbstractContextManager[None]]]:
    """The tests over our classes and over transformers', by name, and what is to stand around each of ours."""
    if files := files_of(folder, family):
        names = functools.partial(native_names, folder_of(family))
        with names():
            ours = load(folder, files, "native_tests")
        return ours, load(folder, files, "stock_tests"), names
    common = shared_tests(folder)
    made = [
        suite(family, common, source)
        for source in (importlib.import_module(f"easytorch.models.{family}"), transformers)
    ]
    ours, theirs = ({name: one(name) for name in unittest.TestLoader().getTestCaseNames(one)} for one in made)
    return ours, theirs, contextlib.nullcontext


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="transformers' folder of tests")
    parser.add_argument("families", nargs="*", default=tuple(FAMILIES), metavar="FAMILY")
    parser.add_argument("--only", default="", help="tests with this in their name")
    parser.add_argument("--skip", action="append", default=[], help="no tests with this in their name")
    parser.add_argument("--show", action="store_true", help="the traceback of each failure")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.disable(logging.WARNING)
    folder = arguments.tests.resolve()
    counted, totals = 0, dict.fromkeys(("passed", "skipped", "both"), 0)
    # one run for families whose tests stand in one folder
    families = {folder_of(name) if files_of(folder, name) else name: name for name in reversed(arguments.families)}
    for family in reversed(families.values()):
        start, here = time.perf_counter(), dict.fromkeys(("passed", "skipped", "both", "ours"), 0)
        ours, theirs, around = tests_of(folder, family)
        for name, case in ours.items():
            if arguments.only not in name or any(part in name for part in (*NOT_HERE, *DESIGNED, *arguments.skip)):
                continue
            with around():
                found = outcome(case)
            if found in ("", "skipped"):
                here[found or "passed"] += 1
                continue
            if name in theirs and outcome(theirs[name]) not in ("", "skipped"):
                here["both"] += 1
                continue
            here["ours"] += 1
            last = found.strip().splitlines()[-1]
            print(f"FAILED {family} {name}: {last[:300]}", flush=True)
            if arguments.show:
                print(found)
        counted += here["ours"]
        for key in totals:
            totals[key] += here[key]
        print(f"{family}: {here} {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{counted} failures of ours alone; {totals}")
    return int(counted > 0)


if __name__ == "__main__":
    sys.exit(main())
