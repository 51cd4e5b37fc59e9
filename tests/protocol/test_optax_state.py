"""Train states between torch and optax: after a conversion both take the same steps."""

from __future__ import annotations

import copy

import flax.training.train_state
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
from transformers import BertConfig, LlamaConfig, Qwen3MoeConfig, ResNetConfig, T5Config

import easytorch
from easytorch import protocol
from easytorch.bridge.core.nested import flat

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "num_key_value_heads": 2}
T5 = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
RESNET = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
MODELS = {
    "llama": ("AutoModelForCausalLM", LlamaConfig(**SIZES)),
    "llama-tied": ("AutoModelForCausalLM", LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen3_moe": ("AutoModelForCausalLM", Qwen3MoeConfig(**SIZES, **MOE)),
    "bert": ("AutoModelForMaskedLM", BertConfig(**SIZES, max_position_embeddings=40)),
    "t5": ("AutoModelForSeq2SeqLM", T5),
    "resnet": ("AutoModelForImageClassification", RESNET),
}
PAIRS = {
    "adamw": (
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-8),
        optax.chain(optax.identity(), optax.adamw(1e-2, weight_decay=0.1)),
    ),
    "sgd": (lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9), optax.sgd(1e-2, momentum=0.9)),
    "nesterov": (
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
        optax.sgd(1e-2, momentum=0.9, nesterov=True),
    ),
    "centered": (
        lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, alpha=0.9, centered=True, eps=1e-3),
        optax.rmsprop(1e-2, decay=0.9, eps=1e-3, eps_in_sqrt=False, centered=True),
    ),
    "adagrad": (
        lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, eps=1e-7),
        optax.adagrad(1e-2, initial_accumulator_value=0.0, eps=1e-14),
    ),
    "rmsprop": (
        lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, alpha=0.9),
        optax.rmsprop(1e-2, decay=0.9, eps=1e-8, eps_in_sqrt=False),
    ),
}


def build(name: str, seed: int = 0):
    auto, config = MODELS[name]
    torch.manual_seed(seed)
    return getattr(easytorch, auto).from_config(copy.deepcopy(config))


def step(model, optimizer, seed: int) -> None:
    """A step with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def gradients(model) -> dict:
    """The gradients of `model` as a tree like that of its weights."""
    state = model.state_dict(keep_vars=True)
    own = {name: one if one.grad is None else one.grad for name, one in state.items()}
    tree = protocol.transform_fn(model)(own)
    return tree["params"] if set(tree) == {"params", "batch_stats"} else tree


def params_of(model) -> dict:
    tree = protocol.to_flax(model, copy=True)
    return tree["params"] if set(tree) == {"params", "batch_stats"} else tree


def same(one, two) -> None:
    first, second = flat(one), flat(two)
    assert first.keys() == second.keys() and first
    for name, value in first.items():
        np.testing.assert_allclose(np.asarray(value), np.asarray(second[name]), rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "adamw") for name in MODELS), *(("llama", kind) for kind in PAIRS if kind != "adamw")]
)
def test_both_take_the_same_steps(name, kind):
    make, tx = PAIRS[kind]
    model = build(name)
    optimizer = make(model.parameters())
    for number in range(3):
        step(model, optimizer, number)
    params = params_of(model)
    tree = protocol.to_optax(model, optimizer, step=3, opt_state=tx.init(params))
    step(model, optimizer, 3)
    updates, opt_state = tx.update(gradients(model), tree["opt_state"], params)
    theirs = optax.apply_updates(params, updates)
    same(theirs, params_of(model))
    # and back into another model, which goes on from there
    other = build(name, seed=1)
    optimizer_other = make(other.parameters())
    given = {"step": 4, "params": theirs, "opt_state": opt_state}
    if name == "resnet":
        given["batch_stats"] = protocol.to_flax(model)["batch_stats"]
    assert protocol.from_optax(given, other, optimizer_other) == 4
    step(model, optimizer, 4)
    step(other, optimizer_other, 4)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-6)


def test_flax_train_states_through_orbax(tmp_path):
    tx = optax.adamw(1e-2)
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    tree = protocol.to_optax(model, optimizer, step=1, opt_state=tx.init(params_of(model)))
    jax_state = flax.training.train_state.TrainState(
        step=tree["step"], apply_fn=None, params=tree["params"], tx=tx, opt_state=tree["opt_state"]
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", jax_state)
    with ocp.StandardCheckpointer() as checkpointer:
        plain = checkpointer.restore(tmp_path / "state")
    for given in (plain, jax_state, jax.tree.map(np.asarray, jax_state)):
        other = build("llama", seed=1)
        optimizer_other = torch.optim.AdamW(other.parameters(), lr=1e-2)
        assert protocol.from_optax(given, other, optimizer_other) == 1
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            for slot in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[one][slot], optimizer_other.state[two][slot])


def test_plain_sgd_keeps_no_slots():
    model, other = build("llama"), build("llama", seed=1)
    optimizer, optimizer_other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    step(model, optimizer, 0)
    theirs = optax.sgd(0.1).init(params_of(model))
    tree = protocol.to_optax(model, optimizer, step=1, opt_state=theirs)
    assert tree["opt_state"] == theirs and protocol.to_optax(model, optimizer, step=1)["opt_state"] == {}
    assert protocol.from_optax(tree, other, optimizer_other) == 1
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    for change in (
        lambda state: protocol.to_optax(model, optimizer, step=1, opt_state=state),
        lambda state: protocol.from_optax(tree | {"opt_state": state}, other, optimizer_other),
    ):
        with pytest.raises(ValueError, match=r"is a slot, and SGD without momentum keeps none"):
            change(optax.adam(0.1).init(params_of(model)))


def test_states_over_some_parameters_are_refused():
    """Muon's has Adam's slots for what is no matrix: they are not of every parameter."""
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    muon = optax.contrib.muon(0.1).init(params_of(model))
    with pytest.raises(ValueError, match="make it by init over all parameters of this model"):
        protocol.to_optax(model, optimizer, step=1, opt_state=muon)
    with pytest.raises(ValueError, match="make it by init over all parameters of this model"):
        protocol.from_optax({"step": 1, "params": params_of(model), "opt_state": muon}, model, optimizer)
    for other, reason in (("Muon", "corrects the bias of the momentum"), ("Adafactor", "factors the two largest")):
        with pytest.raises(ValueError, match=f"{other} goes on from its slots as no optimizer of optax: .*{reason}"):
            protocol.to_optax(model, getattr(torch.optim, other)([model.lm_head.weight]), step=1, opt_state=muon)


def test_slots_keep_float32_beside_bf16_weights():
    model = build("llama").to_dtype(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moment = torch.randn(parameter.shape)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment**2}
    tree = protocol.to_optax(model, optimizer, step=1)
    other = build("llama", seed=1).to_dtype(torch.bfloat16)
    optimizer_other = torch.optim.AdamW(other.parameters())
    protocol.from_optax(tree, other, optimizer_other)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two) and two.dtype is torch.bfloat16
        assert torch.equal(optimizer.state[one]["exp_avg"], optimizer_other.state[two]["exp_avg"])


def test_leaves_of_several_dtypes_keep_their_values():
    model, other = build("llama"), build("llama", seed=1)
    optimizer, optimizer_other = (torch.optim.AdamW(one.parameters()) for one in (model, other))
    step(model, optimizer, 0)
    tree = protocol.to_optax(model, optimizer, step=1)
    parts = {"params": tree["params"], **tree["opt_state"]["0"]}
    for name in ("params", "mu", "nu"):
        *path, last = next(iter(flat(parts[name]))).split("/")
        node = parts[name]
        for one in path:
            node = node[one]
        node[last] = node[last].astype(jax.numpy.bfloat16)
    protocol.from_optax(tree, other, optimizer_other)
    found = protocol.to_optax(other, optimizer_other, step=1)
    again = flat({"params": found["params"], **found["opt_state"]["0"]})
    for name, leaf in flat(parts).items():
        np.testing.assert_array_equal(np.asarray(leaf, again[name].dtype), again[name], err_msg=name)


def test_batch_statistics_keep_float32_beside_bf16_weights():
    model, other = build("resnet").bfloat16(), build("resnet", seed=1).bfloat16()
    for one in (*model.buffers(), *other.buffers()):
        if one.is_floating_point():
            one.data = one.data.float()
    with torch.no_grad():
        for one in model.buffers():
            one.add_(0.123456) if one.is_floating_point() else None
    optimizer, optimizer_other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    protocol.from_optax(protocol.to_optax(model, optimizer, step=1), other, optimizer_other)
    for one, two in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two) or not one.is_floating_point()


@pytest.mark.parametrize("kind", ["chain", "injected", "plain"])
def test_schedules_go_on_where_they_were(kind):
    schedule = optax.linear_schedule(0.0, 1.0, 10)
    tx = {
        "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)),
        "injected": lambda: optax.inject_hyperparams(optax.adam)(schedule),
        "plain": lambda: optax.sgd(schedule),
    }[kind]()
    model = build("llama")
    optimizer = (torch.optim.SGD if kind == "plain" else torch.optim.Adam)(model.parameters(), lr=1e-2)
    for number in range(3):
        step(model, optimizer, number)
    params = params_of(model)
    expected = tx.init(params)
    for _ in range(3):
        _, expected = tx.update(jax.tree.map(np.zeros_like, params), expected, params)
    found = protocol.to_optax(model, optimizer, step=3, opt_state=tx.init(params))["opt_state"]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    counts = [
        [int(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(one) if "count" in str(path[-1])]
        for one in (found, expected)
    ]
    assert counts[0] == counts[1] and counts[0] and set(counts[0]) == {3}


def test_before_the_first_step():
    tx = optax.adam(1e-2)
    model = build("llama")
    expected = tx.init(params_of(model))
    tree = protocol.to_optax(model, torch.optim.Adam(model.parameters()), step=0, opt_state=expected)
    same({"state": list(tree["opt_state"][0])}, {"state": list(expected[0])})


WRONG = {
    "kind": (lambda p: torch.optim.Adadelta(p), None, "Adadelta keeps slots that optax has not; Adam, AdamW, SGD"),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), None, "Adam with amsgrad=True keeps slots"),
    "dampening": (lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, dampening=0.1), None, "with dampening=0.1"),
    "other": (
        lambda p: torch.optim.Adam(p),
        optax.sgd(1.0, momentum=0.9),
        r"has not one place for \['count', 'mu', 'nu'\]",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_optimizers_that_are_not_carried_over(wrong):
    make, tx, message = WRONG[wrong]
    model = build("llama")
    optimizer = make(model.parameters())
    with pytest.raises(ValueError, match=message):
        protocol.to_optax(model, optimizer, step=0, opt_state=None if tx is None else tx.init(params_of(model)))


def test_states_that_do_not_fit_leave_both_as_they_were():
    model = build("llama")
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    good = protocol.to_optax(model, optimizer, step=1)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    moments = copy.deepcopy(good["opt_state"]["0"])
    leaf = moments["mu"]["model"]["norm"]
    leaf["kernel" if "kernel" in leaf else next(iter(leaf))] = np.zeros(31, np.float32)
    cases = {
        "has no 'step'": {key: one for key, one in good.items() if key != "step"},
        "has 0 parts": {**good, "opt_state": {}},
        "has 2 parts": {**good, "opt_state": [good["opt_state"], good["opt_state"]]},
        r"norm": {**good, "opt_state": {"0": moments}},
    }
    for message, given in cases.items():
        with pytest.raises((ValueError, RuntimeError), match=message):
            protocol.from_optax(given, model, optimizer)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(int(values["step"]) == 1 for values in optimizer.state.values())


def test_numbers_that_are_not_floating_are_refused():
    model = build("llama")
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    good = protocol.to_optax(model, optimizer, step=1)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    moments = good["opt_state"]["0"]
    integers = jax.tree.map(lambda one: np.asarray(one).astype(np.int32), good["params"])
    cases = [
        ({**good, "params": integers}, "params has .* in int32"),
        ({**good, "params": jax.tree.map(lambda one: np.asarray(one).astype(bool), good["params"])}, "in bool"),
        ({**good, "opt_state": {"0": {**moments, "mu": integers}}}, "mu has .* in int32"),
        *(({**good, "step": wrong}, "step=.* must be an int") for wrong in (-1, 2.5, True, "x", np.zeros(2), np.nan)),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            protocol.from_optax(given, model, optimizer)
    for wrong in (-1, True):
        with pytest.raises((ValueError, TypeError), match="step="):
            protocol.to_optax(model, optimizer, step=wrong)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_several_steps_as_one():
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        step(model, optimizer, number)
    params = params_of(model)
    tx = optax.MultiSteps(optax.adamw(1e-2), 2)
    tree = protocol.to_optax(model, optimizer, step=3, opt_state=tx.init(params))
    assert int(tree["opt_state"].gradient_step) == 3 and protocol.from_optax(tree, model, optimizer) == 3
    _, half = tx.update(jax.tree.map(np.ones_like, params), tree["opt_state"], params)
    with pytest.raises(ValueError, match=r"the gradients of 1 mini steps of optax\.MultiSteps"):
        protocol.from_optax({**tree, "opt_state": half}, model, optimizer)


def test_the_dtypes_and_classes_of_a_state_are_kept():
    model = build("llama")
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    for tx in (optax.adam(1e-2, mu_dtype=jax.numpy.bfloat16), optax.named_chain(("adam", optax.adam(1e-2)))):
        expected = tx.init(params_of(model))
        found = protocol.to_optax(model, optimizer, step=1, opt_state=expected)["opt_state"]
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert [one.dtype for one in jax.tree.leaves(found)] == [one.dtype for one in jax.tree.leaves(expected)]


def test_slots_of_fewer_bits_are_widened_so_that_torch_can_step():
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    params, tx = params_of(model), optax.adamw(1e-2, mu_dtype=jax.numpy.bfloat16)
    _, opt_state = tx.update(jax.tree.map(np.ones_like, params), tx.init(params), params)
    protocol.from_optax({"step": 1, "params": params, "opt_state": opt_state}, model, optimizer)
    step(model, optimizer, 1)
    assert all(slots["exp_avg"].dtype == torch.float32 for slots in optimizer.state.values())


def test_slots_of_several_dtypes_keep_their_own():
    model = build("llama").to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for one in model.parameters():
        one.grad = torch.full_like(one, 0.25)
    optimizer.step()
    wide = torch.full((32,), 1.0009765)
    optimizer.state[model.model.norm.weight]["exp_avg_sq"] = wide
    tree = protocol.to_optax(model, optimizer, step=1)
    other = build("llama", seed=1).to(torch.bfloat16)
    restored = torch.optim.AdamW(other.parameters())
    protocol.from_optax(tree, other, restored)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        for slot in ("exp_avg", "exp_avg_sq"):
            before, after = optimizer.state[one][slot], restored.state[two][slot]
            assert before.dtype == after.dtype and torch.equal(before, after)


@pytest.mark.parametrize("kind", ["adagrad", "rmsprop"])
def test_steps_that_optax_does_not_count_are_the_train_states(kind):
    model = build("llama")
    optimizer = PAIRS[kind][0](model.parameters())
    for seed in range(3):
        step(model, optimizer, seed)
    given, again = protocol.to_optax(model, optimizer, step=3), build("llama", seed=1)
    other = PAIRS[kind][0](again.parameters())
    assert protocol.from_optax(given, again, other) == 3
    assert {float(slots["step"]) for slots in other.state.values()} == {3.0}


def test_parameters_of_unlike_steps_are_refused():
    model = build("llama")
    optimizer = PAIRS["adamw"][0](model.parameters())
    step(model, optimizer, 0)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    for parameter in model.model.parameters():
        parameter.grad = None
    optimizer.step()
    with pytest.raises(ValueError, match=r"have taken \[1, 2\] steps, and optax counts them together"):
        protocol.to_optax(model, optimizer, step=2)
