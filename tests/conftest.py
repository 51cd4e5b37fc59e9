"""Every test, and every fixture, draws its random numbers from a seed of its own, which a failure shows.

A seed is a function of the name and of `--test-seed N` (also EASYTORCH_TEST_SEED=N; 0 without): a test draws the same
alone as among others, in every run. Another N runs the suite on other numbers.
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

VARIABLE = "EASYTORCH_TEST_SEED"
NUMBER = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--test-seed", type=int, metavar="N", help=f"other random numbers for every test (also {VARIABLE})"
    )


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--test-seed")
    config.stash[NUMBER] = int(os.environ.get(VARIABLE) or 0) if given is None else given
    # hypothesis seeds itself from the clock, and remembers examples in a folder: here it draws by the same N.
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import core, settings

        settings.register_profile("seeded", database=None, print_blob=True)
        settings.load_profile("seeded")
        if config.getoption("--hypothesis-seed", None) is None:
            core.global_force_seed = config.stash[NUMBER]


def seed_of(config: pytest.Config, name: str) -> int:
    return zlib.crc32(f"{config.stash[NUMBER]}:{name}".encode())


def seed_everything(seed: int) -> None:
    """The generators that draw without being given one. torch is not imported for it: its own first seed is fixed."""
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    # By the fixture's name: one of a module draws the same whichever test asks for it first.
    seed_everything(seed_of(request.config, f"{fixturedef.baseid}::{fixturedef.argname}"))
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    seed_everything(seed_of(item.config, item.nodeid))
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        number, seed = item.config.stash[NUMBER], seed_of(item.config, item.nodeid)
        report.sections.append(("random numbers", f"drawn with --test-seed {number}: seed {seed} of this test"))
    return report


@pytest.fixture
def without_native_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """The auto classes load transformers' own classes of every family, as they do of those that are not native."""
    monkeypatch.setattr("easytorch.protocol.native_classes.families", list)
