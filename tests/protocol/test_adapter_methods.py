"""transformers' methods for adapters in our models: all that ask for a version of PEFT, which ours is."""

from __future__ import annotations

import inspect

import pytest
from transformers.integrations import PeftAdapterMixin
from transformers.utils.peft_utils import check_peft_version

from easytorch.function_globals import global_of
from easytorch.models.llama import LlamaForCausalLM

pytest.importorskip("peft")
ASKING = [
    name for name, method in vars(PeftAdapterMixin).items()
    if inspect.isfunction(method) and "check_peft_version(" in inspect.getsource(method)
]  # fmt: skip


def test_a_newer_peft_than_there_is_is_not_waited_for() -> None:
    assert {"add_adapter", "set_adapter", "active_adapters", "delete_adapter"} <= set(ASKING)
    with pytest.raises(ValueError, match=r"999\.0"):
        check_peft_version("999.0")
    for name in ASKING:
        checks = (global_of(vars(kind).get(name), "check_peft_version") for kind in LlamaForCausalLM.__mro__)
        next(check for check in checks if check is not None)("999.0")
