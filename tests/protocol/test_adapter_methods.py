"""transformers' methods for adapters in our models: all that ask for a version of PEFT, which ours is."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations import PeftAdapterMixin
from transformers.utils.peft_utils import check_peft_version

import easytorch
from easytorch import protocol
from easytorch.function_globals import global_of
from easytorch.models.llama import LlamaForCausalLM
from easytorch.protocol import adapter_methods

peft = pytest.importorskip("peft")
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


IDS = torch.arange(3, 12)[None]


@pytest.mark.parametrize("auto", [easytorch.AutoModelForCausalLM, transformers.AutoModelForCausalLM])
def test_transformers_own_classes_take_adapters_with_the_peft_there_is(auto: Any, tmp_path: Any, monkeypatch: Any):
    """Whatever PEFT their methods ask for: the instance has its own, in its copies and from a file too."""
    monkeypatch.setattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "999.0")
    monkeypatch.setattr(adapter_methods, "MIN_PEFT_VERSION", "999.0")
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = auto.from_config(transformers.BioGptConfig(**sizes))
    protocol.apply_lora_to_layers(model, 2, "fc1", init=False)
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    with torch.no_grad():
        adapted = model.eval()(IDS).logits
        for one in (copied.eval(), read.eval()):
            assert one.active_adapters() == ["default"] and torch.equal(one(IDS).logits, adapted)
        copied.disable_adapters()
        assert not torch.equal(copied(IDS).logits, adapted) and torch.equal(model(IDS).logits, adapted)
    model.add_adapter(peft.LoraConfig(target_modules=["fc2"]), "second")
    model.delete_adapter("second")
    model.set_adapter("default")
    model.save_pretrained(tmp_path)
    protocol.unwrap_lora_to_layers(model)
    assert ("add_adapter" in vars(model)) == hasattr(model, "easytorch_report")
    torch.testing.assert_close(model(IDS).logits, adapted)
    assert type(model) is transformers.BioGptForCausalLM and "add_adapter" not in vars(type(model))
