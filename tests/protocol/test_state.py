"""Models as data: split, merged, mapped by torch.func, filled, saved with an optimizer's slots."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, LlamaConfig, MptConfig, Qwen3MoeConfig, T5Config, ViTConfig

import easytorch
from easytorch import protocol
from easytorch.bridge.errors import CheckpointError

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "num_key_value_heads": 2}
T5 = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
VIT = {name: size for name, size in SIZES.items() if name != "vocab_size"} | {"image_size": 16, "patch_size": 8}
MODELS = {
    "llama": ("AutoModelForCausalLM", LlamaConfig(**SIZES)),
    "llama-tied": ("AutoModelForCausalLM", LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen3_moe": ("AutoModelForCausalLM", Qwen3MoeConfig(**SIZES, **MOE)),
    "bert": ("AutoModelForMaskedLM", BertConfig(**SIZES, max_position_embeddings=40)),
    "t5": ("AutoModelForSeq2SeqLM", T5),
    "vit": ("AutoModelForImageClassification", ViTConfig(**VIT)),
    "mpt": ("AutoModelForCausalLM", MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=97, max_seq_len=32)),
}
IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60]])


def build(name: str, seed: int = 0) -> nn.Module:
    auto, config = MODELS[name]
    torch.manual_seed(seed)
    model = getattr(easytorch, auto).from_config(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(name: str) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {
            "pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16),
            "labels": torch.tensor([0, 1]),
        }
    return {"input_ids": IDS, "labels": IDS}


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


def test_split_apply_and_merge(name):
    model = build(name)
    graphdef, graphstate, graphother = protocol.split_module(model)
    assert graphstate.keys() == dict(model.named_parameters()).keys()
    assert all(one.data_ptr() == dict(model.named_parameters())[key].data_ptr() for key, one in graphstate.items())
    with torch.no_grad():
        expected = model(**batch(name))
        applied = graphdef.apply({**graphstate, **graphother}, **batch(name))
        again = protocol.merge_module(graphdef, graphstate, graphother)
        assert type(again) is type(model) and not again.training
        for output in (applied, again(**batch(name))):
            assert torch.equal(output.loss, expected.loss) and torch.equal(output.logits, expected.logits)
    for key, parameter in again.named_parameters():
        assert parameter.data_ptr() == graphstate[key].data_ptr() and parameter.requires_grad
    assert graphdef == model.graphdef if hasattr(model, "graphdef") else graphdef == protocol.graphdef(model)


def test_what_is_frozen_stays_so():
    """In a module that is merged anew, and in one whose parameters are the given tensors."""
    model = build("llama")
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 == 0)
    flags = {name: one.requires_grad for name, one in model.named_parameters()}
    again = protocol.merge_module(*protocol.split_module(model))
    assert {name: one.requires_grad for name, one in again.named_parameters()} == flags
    empty = protocol.lazy_init(type(model), model.config)
    for name, parameter in empty.named_parameters():
        parameter.requires_grad_(flags[name])
    protocol.merge_params(empty, protocol.graphstate(model))
    assert {name: one.requires_grad for name, one in empty.named_parameters()} == flags


def test_gradients_of_the_state_are_those_of_the_model(name):
    model = build(name)
    graphdef, graphstate, graphother = protocol.split_module(model)
    found = torch.func.grad(lambda one: graphdef.apply({**one, **graphother}, **batch(name)).loss)(graphstate)
    model(**batch(name)).loss.backward()
    for key, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[key], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_several_states_at_once():
    models = [build("llama", seed) for seed in range(3)]
    graphdef, _, graphother = models[0].split_module()
    stacked = {key: torch.stack([model.graphstate[key] for model in models]) for key in models[0].graphstate}
    logits = torch.vmap(lambda one: graphdef.apply({**one, **graphother}, input_ids=IDS).logits)(stacked)
    with torch.no_grad():
        for model, found in zip(models, logits, strict=True):
            torch.testing.assert_close(found, model(input_ids=IDS).logits)


def test_a_model_without_memory_is_filled(name):
    model = build(name)
    empty = protocol.lazy_init(getattr(easytorch, MODELS[name][0]), copy.deepcopy(MODELS[name][1])).eval()
    assert all(one.is_meta for one in (*empty.parameters(), *empty.buffers()))
    assert protocol.merge_params(empty, protocol.unflatten(protocol.split_params(model))) is empty
    with torch.no_grad():
        assert torch.equal(empty(**batch(name)).logits, model(**batch(name)).logits)
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, empty.get_buffer(key)), key


def test_a_tied_weight_stays_tied():
    model, other = build("llama-tied"), build("llama-tied", seed=1)
    alias = {"lm_head.weight": other.lm_head.weight.detach()}
    model.merge_params_dict(alias)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight, other.lm_head.weight)
    both = {"lm_head.weight": torch.ones(97, 32), "model.embed_tokens.weight": torch.zeros(97, 32)}
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' and 'lm_head.weight' are one tensor"):
        model.merge_params_dict(both)


def test_a_weight_that_was_untied_stays_so(tmp_path):
    """Whatever the config says: that is what a refused merge into a tied head advises."""
    model = build("llama-tied")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    model.to_state(torch.optim.SGD(model.parameters(), lr=0.1), step=3).save(tmp_path / "state")
    again = protocol.load_state(tmp_path / "state", model_class=type(model)).model
    assert torch.equal(again(**batch("llama-tied")).logits, model(**batch("llama-tied")).logits)
    assert again.lm_head.weight is not again.model.embed_tokens.weight


def test_expanded_values_are_numbers_of_their_own():
    empty = type(build("llama")).lazy_init(copy.deepcopy(MODELS["llama"][1]))
    given = {name: torch.tensor(0.5).expand(one.shape) for name, one in build("llama").split_params().items()}
    empty.merge_params(given)
    with torch.no_grad():
        empty.model.norm.weight[0] = 2.0
    assert empty.model.norm.weight[1] == 0.5


def test_values_that_are_the_models_own_memory():
    """Two weights exchanged by name: neither may be read after it was written."""
    model = build("llama")
    first, second = (f"model.layers.{number}.mlp.up_proj.weight" for number in (0, 1))
    before = {key: one.clone() for key, one in model.graphstate.items()}
    state = model.graphstate
    model.merge_params_dict({first: state[second], second: state[first]})
    assert torch.equal(model.graphstate[first], before[second])
    assert torch.equal(model.graphstate[second], before[first])


WRONG = {
    "unknown": (
        lambda state: {**state, "model.norm.wieght": torch.ones(32)},
        r"'model.norm.wieght' is no .*'model.norm.weight'",
    ),
    "missing": (
        lambda state: {key: one for key, one in state.items() if "norm" not in key},
        "and 4 more of .* is not given",
    ),
    "shape": (lambda state: state | {"model.norm.weight": torch.ones(31)}, r"has the shape \(31,\), and \(32,\)"),
    "array": (
        lambda state: state | {"model.norm.weight": torch.ones(32).numpy()},
        "is ndarray and must be a torch.Tensor",
    ),
    "complex": (lambda state: state | {"model.norm.weight": torch.ones(32) * 1j}, "is torch.complex64"),
    "twice": (lambda state: {**state, "model": {"norm.weight": torch.ones(32)}}, "is the path of two tensors"),
    "none": (lambda state: None, "are a dict of tensors"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_leaves_the_model_as_it_was(wrong):
    model = build("llama")
    before = {key: one.clone() for key, one in model.graphstate.items()}
    change, message = WRONG[wrong]
    given = change({key: one + 1 for key, one in before.items()})
    with pytest.raises((ValueError, TypeError), match=message):
        model.merge_params(given)
    assert all(torch.equal(one, before[key]) for key, one in model.graphstate.items())


def test_nested_and_flat():
    leaves = {"a.b.0": torch.ones(1), "a.b.1": torch.zeros(2), "c": torch.ones(())}
    tree = protocol.unflatten(leaves)
    assert tree["a"]["b"]["1"] is leaves["a.b.1"] and protocol.flatten(tree) == leaves
    with pytest.raises(ValueError, match="another tensor has a part of this path"):
        protocol.unflatten({"a": 1, "a.b": 2})
    with pytest.raises(ValueError, match="two tensors"):
        protocol.flatten({"a": {"b": 1}, "a.b": 2})


def test_parts_of_a_dict():
    model = build("llama")
    parts = model.split_params_dict()
    assert list(parts["params"]) == list(model.graphstate) and list(parts["buffers"]) == list(model.graphother)
    assert model.split_params_dict({"model": {"norm": {"weight": 1}}}) == {
        "params": {"model.norm.weight": 1},
        "buffers": {},
    }
    with pytest.raises(ValueError, match=r"'model\.nrm' is no parameter or buffer"):
        model.split_params_dict({"model.nrm": 1})


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.8, 0.9), amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=6),
    "muon": lambda parameters: torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}


def train(model, optimizer) -> None:
    def closure():
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_bit_for_bit(kind, dtype, tmp_path):
    model = build("llama-tied").to_dtype(dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer)
    model.to_state(optimizer, step=1).save(tmp_path / "state")
    again = build("llama-tied", seed=1).to_dtype(dtype)
    optimizer_again = OPTIMIZERS[kind](again.parameters())
    state = protocol.load_state(tmp_path / "state", model_class=type(model))
    assert state.restore(again, optimizer_again) == 1
    for _ in range(2):
        train(model, optimizer)
        train(again, optimizer_again)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))


def test_a_schedule_and_groups_go_on_bit_for_bit(tmp_path):
    def made(seed):
        model = build("llama", seed=seed)
        norms = [one for one in model.parameters() if one.dim() == 1]
        others = {"params": [one for one in model.parameters() if one.dim() > 1], "weight_decay": 0.1, "foreach": True}
        rate = {"lr": torch.tensor(0.1)}  # schedulers write into a tensor
        optimizer = torch.optim.AdamW([{"params": norms, "foreach": False} | rate, others], lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def go_on(model, optimizer, schedule):
        for _ in range(2):
            train(model, optimizer)
            schedule.step()

    parts = made(0)
    go_on(*parts)
    model, optimizer, schedule = parts
    model.to_state(optimizer, step=2).save(tmp_path / "state")
    position = copy.deepcopy(schedule.state_dict())
    go_on(*parts)
    state = protocol.load_state(tmp_path / "state", model_class=type(model))
    for _ in range(2):  # what was restored first does not change the state
        again = made(1)
        assert state.restore(again[0], again[1]) == 2
        again[2].load_state_dict(position)
        go_on(*again)
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again[0].parameters(), strict=True))
        assert float(again[1].param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"])


def test_steps_of_a_fused_optimizer_are_beside_the_parameters():
    """On an accelerator a fused or capturable optimizer refuses a step that is on the CPU."""
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer)
    for fused in (True, False):
        state = model.to_state(optimizer).optimizer
        state.groups[0]["fused"] = fused
        other = protocol.lazy_init(type(model), model.config)
        there = torch.optim.AdamW(other.parameters())
        state.restore(there, other)
        assert {slots["step"].is_meta for slots in there.state.values()} == {fused}


def test_slots_keep_their_dtype_and_follow_names():
    """Float32 moments of a bf16 model, in an optimizer whose groups list the parameters in another order."""
    model = build("llama").to_dtype(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moment = torch.randn(parameter.shape)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment**2}
    state = model.to_state(optimizer)
    other = torch.optim.AdamW(reversed(list(model.parameters())))
    state.restore(model, other)
    for parameter in model.parameters():
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
        assert other.state[parameter]["exp_avg"].dtype is torch.float32


def test_a_state_is_restored_as_often_as_one_likes():
    """Into several optimizers, which share no slot with one another nor with the state."""
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    state = copy.deepcopy(model.to_state(optimizer, step=1))
    kept = copy.deepcopy(state.optimizer.slots)
    models, found = [copy.deepcopy(model) for _ in range(2)], []
    for one in models:
        other = torch.optim.AdamW(one.parameters(), lr=7.0, betas=(0.1, 0.2), weight_decay=3.0)
        state.restore(one, other)
        settings = [
            {key: one for key, one in made.param_groups[0].items() if key != "params"} for made in (other, optimizer)
        ]
        assert settings[0] == settings[1]
        train(one, other)
        found.append([{slot: value.clone() for slot, value in other.state[p].items()} for p in one.parameters()])
    for first, second in zip(*found, strict=True):
        assert all(torch.equal(first[slot], second[slot]) for slot in first)
    for name, slots in kept.items():
        assert all(torch.equal(state.optimizer.slots[name][slot], value) for slot, value in slots.items())


def test_a_state_whose_optimizer_does_not_fit_changes_no_model():
    model, changed = build("llama"), build("llama", seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    state, before = model.to_state(optimizer), {name: one.clone() for name, one in changed.state_dict().items()}
    some = [one for one in changed.parameters() if one.dim() > 1]
    for wrong in (torch.optim.SGD(changed.parameters(), lr=0.1), torch.optim.AdamW(some)):
        with pytest.raises(ValueError, match="optimizer"):
            state.restore(changed, wrong)
        assert all(torch.equal(one, before[name]) for name, one in changed.state_dict().items()) and not wrong.state
    with pytest.raises(ValueError, match="holds no optimizer"):
        model.to_state().restore(changed, torch.optim.AdamW(changed.parameters()))
    assert all(torch.equal(one, before[name]) for name, one in changed.state_dict().items())


def test_tensors_that_share_memory_are_saved(tmp_path):
    model = build("llama")
    model.register_buffer("first_rows", model.model.embed_tokens.weight.detach()[:3])
    model.to_state().save(tmp_path / "state")
    saved = load_file(tmp_path / "state" / "train_state.safetensors")
    assert torch.equal(saved["buffers/first_rows"], saved["params/model.embed_tokens.weight"][:3])


@pytest.mark.parametrize(("format_", "init"), [(None, True), (None, "pissa"), ("int8", True), ("nf4", True)])
def test_adapters_and_quantized_layers_are_restored(format_, init, tmp_path):
    model = build("llama")
    if format_ is not None:
        protocol.quantize(model, format_)
    protocol.apply_lora_to_layers(model, 2, "q_proj", rngs=0, init=init, adapter_name="one")
    protocol.apply_lora_to_layers(model, 4, "q_proj|v_proj", rngs=1, adapter_name="two")
    model.set_adapter("one")
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
    protocol.compute_loss(model, input_ids=IDS)[1].loss.backward()
    optimizer.step()
    protocol.to_state(model, optimizer, step=1).save(tmp_path / "state")
    state = protocol.load_state(tmp_path / "state", model_class=type(model))
    again = state.model.eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.active_adapters() == ["one"] and list(again.peft_config) == ["one", "two"]
    assert again.peft_config["one"].init_lora_weights == init
    other = torch.optim.AdamW([one for one in again.parameters() if one.requires_grad], lr=0.1)
    assert state.restore(again, other) == 1


@pytest.mark.parametrize("adapters", [False, True])
def test_a_state_keeps_what_is_frozen(adapters, tmp_path):
    """With adapters also what is frozen once they are taken out; a state without the lists loads as ever."""
    model = build("llama-tied")
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    if adapters:
        model.apply_lora_to_layers(2, "q_proj|v_proj")
        model.model.layers[0].self_attn.q_proj.lora_A.requires_grad_(False)
    model.to_state().save(tmp_path / "state")
    again = protocol.load_state(tmp_path / "state", model_class=type(model)).model
    for change in (lambda one: one, protocol.unwrap_lora_to_layers if adapters else lambda one: one):
        one, two = ({name: p.requires_grad for name, p in change(m).named_parameters()} for m in (model, again))
        assert one == two and len(set(one.values())) == 2
    file = tmp_path / "state" / "train_state.json"
    content = json.loads(file.read_text())
    for frozen, match in ((["no"], "has no parameter 'no'"), ("no", "frozen must be a list of names")):
        file.write_text(json.dumps(content | {"frozen": frozen}))
        with pytest.raises(CheckpointError, match=match):
            protocol.load_state(tmp_path / "state", model_class=type(model))
    file.write_text(json.dumps({key: one for key, one in content.items() if not key.startswith("frozen")}))
    old = protocol.load_state(tmp_path / "state", model_class=type(model)).model
    assert all(one.requires_grad == (not adapters or "lora_" in name) for name, one in old.named_parameters())


def test_states_that_do_not_fit(tmp_path):
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = model.to_state(optimizer, step=4)
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(ValueError, match=r"that of torch.optim.adamw.AdamW, and the optimizer is torch.optim.sgd.SGD"):
        state.restore(model, other)
    bert = build("bert")
    before = {key: one.clone() for key, one in bert.graphstate.items()}
    with pytest.raises(ValueError, match="is no parameter or buffer of BertForMaskedLM"):
        state.restore(bert)
    assert all(torch.equal(one, before[key]) for key, one in bert.graphstate.items())
    with pytest.raises(ValueError, match="has a parameter that is not one of LlamaForCausalLM"):
        model.to_state(torch.optim.SGD(bert.parameters(), lr=1.0))
    slots = {key: dict(values) for key, values in state.optimizer.slots.items()}
    slots["model.norm.weight"]["exp_avg"] = torch.ones(31)
    cut = protocol.OptimizerState(state.optimizer.kind, slots, state.optimizer.groups)
    with pytest.raises(ValueError, match=r"the slot 'exp_avg' of 'model.norm.weight' has the shape \(31,\)"):
        cut.restore(optimizer, model)
    factored = torch.optim.Adafactor(model.parameters())
    train(model, factored)
    for slot, name in (("row_var", "lm_head.weight"), ("col_var", "lm_head.weight"), ("variance", "model.norm.weight")):
        state = model.to_state(factored).optimizer
        state.slots[name][slot] = state.slots[name][slot].repeat(2, *[1] * (state.slots[name][slot].dim() - 1))
        with pytest.raises(ValueError, match=f"the slot '{slot}' of '{name}' has the shape"):
            state.restore(factored, model)
    with pytest.raises(TypeError, match="to_state: optimizer='adamw' must be an Optimizer or None"):
        model.to_state("adamw")
    with pytest.raises(TypeError, match="Linear has no config to save"):
        protocol.to_state(torch.nn.Linear(2, 2)).save(tmp_path / "linear")
    with pytest.raises(ValueError, match="step=-1 must be"):
        model.to_state(step=-1)
    with pytest.raises(ValueError, match="holds no optimizer"):
        model.to_state().restore(model, optimizer)


def test_folders_that_are_no_state(tmp_path):
    model = build("llama")
    with pytest.raises(CheckpointError, match=r"train_state.json: is not there"):
        protocol.load_state(tmp_path, model_class=type(model))
    model.to_state(step=2).save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="exists already"):
        model.to_state(step=2).save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="does not fit BertForMaskedLM"):
        protocol.load_state(tmp_path / "state", model_class=transformers.BertForMaskedLM)
    config = tmp_path / "state" / "config.json"
    whole = config.read_text()
    for content, message in {
        "{": "is not valid JSON",
        "[]": "holds a JSON list",
        json.dumps(json.loads(whole) | {"hidden_size": "x"}): "is damaged",
    }.items():
        config.write_text(content)
        with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
            protocol.load_state(tmp_path / "state", model_class=type(model))
    config.unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        protocol.load_state(tmp_path / "state", model_class=type(model))
    config.write_text(whole)
    file = tmp_path / "state" / "train_state.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is damaged"):
        protocol.load_state(tmp_path / "state", model_class=type(model))
    text = tmp_path / "state" / "train_state.json"
    wrong = {
        "[]": "holds a JSON list, not an object",
        "{": "is not valid JSON",
        json.dumps({"format": "easytorch train state", "version": 2}): "is no train state of version 1",
    }
    for content, message in wrong.items():
        text.write_text(content)
        with pytest.raises(CheckpointError, match=rf"train_state\.json: {message}"):
            protocol.load_state(tmp_path / "state", model_class=type(model))


def test_optimizers_whose_state_no_file_holds(tmp_path):
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[model.model.norm.weight]["function"] = print
    with pytest.raises(TypeError, match=r"slots/model\.norm\.weight/function is builtin_function_or_method"):
        model.to_state(optimizer).save(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


def test_values_that_a_model_cannot_take():
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = easytorch.AutoModelForCausalLM.from_config(config)
    before = {name: one.clone() for name, one in model.split_params().items()}
    last = list(before)[-1]
    for wrong, message in (
        (before[last].to(torch.int8), "is torch.int8, and torch.float32"),
        (before[last].to("meta"), "on the meta device"),
        (before[last].to_sparse(), "pass its to_dense"),
    ):
        with pytest.raises(ValueError, match=message):
            model.merge_params({name: one + 1 for name, one in before.items()} | {last: wrong})
        assert all(torch.equal(one, before[name]) for name, one in model.split_params().items())
    model.apply_lora_to_layers(2, "q_proj", rngs=0)
    adapter = model.split_lora_params()
    for wrong in (torch.complex64, torch.int8):
        with pytest.raises(ValueError, match=r"and torch\.float32 in the model"):
            model.merge_lora_params({name: one.to(wrong) for name, one in adapter.items()})
    for call, argument in ((protocol.flatten, None), (protocol.unflatten, [1]), (model.merge_lora_params, [1])):
        with pytest.raises(TypeError, match="a dict of tensors"):
            call(argument)
    with pytest.raises(TypeError, match="takes a LlamaConfig, not BertConfig"):
        type(model).lazy_init(transformers.BertConfig())


def test_accelerates_optimizer_is_the_one_inside(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = build("llama")
    prepared, optimizer = accelerate.Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))
    train(prepared, optimizer)
    protocol.to_state(prepared, optimizer, step=1).save(tmp_path / "state")
    state = protocol.load_state(tmp_path / "state", model_class=type(model))
    before = {name: one.clone() for name, one in state.optimizer.slots["model.norm.weight"].items()}
    optimizer.optimizer.state.clear()
    assert state.optimizer.kind == "torch.optim.adamw.AdamW" and state.restore(prepared, optimizer) == 1
    assert all(torch.equal(one, before[name]) for name, one in optimizer.state[model.model.norm.weight].items())


@pytest.mark.parametrize("slot", ["exp_avg", "step"])
def test_slots_of_another_shape_are_refused_before_they_are_saved(slot):
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    optimizer.state[model.lm_head.weight][slot] = torch.zeros(3)
    with pytest.raises(ValueError, match=f"the slot '{slot}' of 'lm_head.weight'"):
        model.to_state(optimizer, step=1)
