"""Adapters that PEFT itself merged, wrapped or saved, beside what this package does with them."""

from __future__ import annotations

import copy

import peft
import pytest
import torch

from easytorch import protocol
from easytorch.protocol import adapters
from tests.protocol.shared_models import IDS, shared

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


def filled(model) -> None:
    """Gives the adapter values, whose B is zero when it is new."""
    protocol.merge_lora_params(
        model, {name: 0.1 * torch.randn(one.shape) for name, one in protocol.split_lora_params(model).items()}
    )


@pytest.mark.parametrize("init", [True, "pissa"])
def test_dropping_adapters_that_peft_merged(init):
    """`layer.merge()` is PEFT's; what it added is not left in the weights."""
    model = copy.deepcopy(shared("llama"))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    model.apply_lora_to_layers(4, "q_proj", rngs=0, init=init)
    filled(model)
    for layer in adapters.wrapped_layers(model).values():
        layer.merge()
    model.unwrap_lora_to_layers(merge=False)
    for name, one in model.state_dict().items():
        torch.testing.assert_close(one, before[name], rtol=0, atol=0 if init == "pissa" else 1e-6)


def test_functions_take_what_is_inside_of_pefts_wrapper(tmp_path):
    """Names are the model's, and go back; what would leave the wrapper around other layers is refused."""
    wrapped = peft.get_peft_model(copy.deepcopy(shared("llama")), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    optimizer = torch.optim.AdamW([one for one in wrapped.parameters() if one.requires_grad], lr=0.1)
    wrapped(IDS, labels=IDS).loss.backward()
    optimizer.step()
    state = protocol.to_state(wrapped, optimizer, step=2)
    assert not any("base_model" in name for name in [*state.graphstate, *state.optimizer.slots])
    state.save(tmp_path / "state")
    again = protocol.load_state(tmp_path / "state", model_class=type(shared("llama"))).model.eval()
    assert torch.equal(again(IDS).logits, wrapped.eval()(IDS).logits)
    assert protocol.load_state(tmp_path / "state", model_class=type(again)).restore(wrapped, optimizer) == 2
    values = {name: one.clone() for name, one in protocol.split_params(wrapped).items()}
    adapter = {name: one.clone() for name, one in protocol.split_lora_params(wrapped).items()}
    assert set(adapter) == set(protocol.split_lora_params(again))
    assert protocol.merge_lora_params(wrapped, {name: one * 0 for name, one in adapter.items()}) is wrapped
    assert not any(one.any() for one in protocol.split_lora_params(wrapped).values())
    assert protocol.merge_params(wrapped, values) is wrapped
    assert all(torch.equal(one, adapter[name]) for name, one in protocol.split_lora_params(wrapped).items())
    for call in (
        lambda: protocol.unwrap_lora_to_layers(wrapped),
        lambda: protocol.apply_lora_to_layers(wrapped, 4, adapter_name="other"),
        lambda: protocol.load_adapter(wrapped, tmp_path, "other"),
        lambda: protocol.generate(wrapped, IDS),
    ):
        with pytest.raises(TypeError, match="is PEFT's wrapper"):
            call()


def test_an_adapter_that_began_with_random_numbers_is_saved_by_no_file_of_its_own(tmp_path, caplog):
    model = copy.deepcopy(shared("llama")).apply_lora_to_layers(4, "q_proj", rngs=0, init="pissa_niter_2")
    filled(model)
    for save in (lambda: model.save_pretrained(tmp_path), lambda: protocol.save_pretrained(model, tmp_path, step=1)):
        with pytest.raises(ValueError, match="draws random numbers: whoever loads its files draws others"):
            save()
    assert not list(tmp_path.iterdir())
    model.to_state().save(tmp_path / "state")
    again = protocol.load_state(tmp_path / "state", model_class=type(model)).model.eval()
    assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)
    wrapped = peft.get_peft_model(
        copy.deepcopy(shared("llama")),
        peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa_niter_2"),
    )
    wrapped.save_pretrained(tmp_path / "theirs")  # PEFT writes it
    copy.deepcopy(shared("llama")).load_adapter(tmp_path / "theirs")
    assert "near those that it was trained with, and not the same" in caplog.text


def test_adapters_added_under_the_name_of_none():
    with pytest.raises(ValueError, match="'__base__' stands for no adapter"):
        copy.deepcopy(shared("llama")).add_adapter(peft.LoraConfig(target_modules=["q_proj"]), "__base__")
