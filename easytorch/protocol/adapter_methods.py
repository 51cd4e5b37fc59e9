"""transformers' methods for adapters, with every PEFT that has what they call.

Each of them first asks for a version of PEFT: 0.20 in transformers 5.23, 0.22 in 5.24, which was released before that
PEFT was; what they call is the same. Ours ask for the lower one.
"""

from __future__ import annotations

from typing import Any

from packaging.version import Version
from transformers.integrations import PeftAdapterMixin
from transformers.utils.peft_utils import check_peft_version

from easytorch.function_globals import global_of, with_global

LOWEST = "0.20.0"
_CHECK = "check_peft_version"


def _check(min_version: str) -> None:
    check_peft_version(min(min_version, LOWEST, key=Version))


AdapterMethods: Any = type(
    "AdapterMethods",
    (),
    {
        name: with_global(method, _CHECK, _check)
        for name, method in vars(PeftAdapterMixin).items()
        if global_of(method, _CHECK) is not None
    },
)
