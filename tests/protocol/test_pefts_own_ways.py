"""Adapters that PEFT itself merged, wrapped or saved, beside what this package does with them."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers

import easytorch
from easytorch import protocol
from easytorch.protocol import adapters
from tests.protocol.shared_models import IDS, SIZES, shared

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


def test_layers_that_peft_takes_for_experts_are_refused():
    """It would adapt the routed experts in the place of the shared ones."""
    config = transformers.Glm4MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, first_k_dense_replace=1,
    )  # fmt: skip
    model = easytorch.AutoModelForCausalLM.from_config(config)
    before = [(name, one.requires_grad) for name, one in model.named_parameters()]
    with pytest.raises(ValueError, match=r"takes down_proj, .*gate_proj, .* of glm4_moe for its experts"):
        model.apply_lora_to_layers(4, "shared_experts")
    assert before == [(name, one.requires_grad) for name, one in model.named_parameters()]
    names = set(model.apply_lora_to_layers(4).split_lora_params())
    assert names and all(".self_attn." in name for name in names)


def test_a_shared_expert_of_each_row():
    """Its input may be tokens of all rows, which carry no row's adapter; here it has its rows."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Qwen2MoeConfig(**SIZES, num_key_value_heads=2, shared_expert_intermediate_size=16, **sizes)
    model = easytorch.AutoModelForCausalLM.from_config(config).eval()
    for name in ("one", "two"):
        model.apply_lora_to_layers(4, r"shared_expert\.", adapter_name=name)
        filled(model)
    with torch.no_grad():
        found = model(IDS, adapter_names=["one", "two"]).logits
        for row, name in enumerate(("one", "two")):
            model.set_adapter(name)
            torch.testing.assert_close(found[row], model(IDS).logits[row], rtol=0, atol=1e-6)
