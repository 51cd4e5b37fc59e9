"""A call goes on with the captured step of the one before, while the model and the shapes are the same."""

from __future__ import annotations

import gc
import threading
import types
import weakref

import pytest
import torch
from transformers import StoppingCriteriaList

from easytorch.generation import captured, generate_tokens
from easytorch.layers.kept_steps import KeptSteps
from easytorch.protocol import captured_generation
from tests.generation.engine.traffic import model_of
from tests.generation.recorded_graph import recorded_graphs

IDS = torch.randint(2, 97, (3, 11), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :5], MASK[2, :1] = 0, 0
SHORT = IDS[:, 2:9]


@pytest.fixture
def graphs(monkeypatch):
    with recorded_graphs(monkeypatch) as counts:
        yield counts


def by_tokens(model, ids=IDS, mask=MASK, cache=None, **settings):
    steps = generate_tokens(model, ids, mask, cache=cache, max_new_tokens=9, **{"eos_token_id": []} | settings)
    return torch.stack(list(steps), 1)


def by_generate(model, ids=IDS, mask=MASK, cache=None, **settings):
    torch.manual_seed(5)
    given = {"disable_compile": True} if cache == "dynamic" else {}
    given |= {"do_sample": False, "pad_token_id": 0, "eos_token_id": None} | settings
    return model.generate(ids, attention_mask=mask, max_new_tokens=9, **given)


WAYS = {"tokens": (by_tokens, captured), "generate": (by_generate, captured_generation)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next", "mamba2"])
def test_a_second_call_captures_nothing(family, way, graphs):
    """Nor does one of another prompt, whose tokens are those of the ordinary loop."""
    generate, module = WAYS[way]
    model = model_of(family)
    others = [(IDS, MASK), (IDS.flip(1), torch.ones_like(MASK)), (SHORT, torch.ones_like(SHORT)), (IDS, MASK)]
    expected = [generate(model, ids, mask, cache="dynamic") for ids, mask in others]
    assert graphs["captured"] == 0
    for (ids, mask), want in zip(others, expected, strict=True):
        assert torch.equal(generate(model, ids, mask), want)
    if (family, way) == ("mamba2", "generate"):  # transformers' loop captures attention's models alone
        return
    assert graphs["captured"] == 1 and len(module._KEPT) == 1
    assert graphs["replayed"] == 7 + 3 * 8  # of nine tokens, the prompt's among them; the first step was eager


def test_sampling_goes_on_with_its_own_seed_and_history(graphs):
    model = model_of("llama")
    settings = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}
    for case in ({"seed": 3}, {"seed": 4}, {"seed": 3, "temperature": 0.5}, {"seed": 3, "top_p": 0.5}):
        given = settings | case
        assert torch.equal(by_tokens(model, **given), by_tokens(model, cache="dynamic", **given))
    assert graphs["captured"] == 1
    for case in ({"top_k": 5}, {"top_p": None}, {"repetition_penalty": 1.0}, {"temperature": 0.0}):
        given = settings | {"seed": 3} | case
        assert torch.equal(by_tokens(model, **given), by_tokens(model, cache="dynamic", **given))
    assert graphs["captured"] == 5
    ended = by_tokens(model, cache="dynamic")[:, 3].tolist()
    for eos in (ended, ended[:1], ended):
        given = {"eos_token_id": eos, "pad_token_id": 1}
        assert torch.equal(by_tokens(model, **given), by_tokens(model, cache="dynamic", **given))


def _replaced(linear):
    linear.weight.data = linear.weight.data * -2


def _transposed(linear):
    linear.weight.data = linear.weight.data.t()  # a square one: where it was


CHANGES = {
    "strides": lambda model: _transposed(model.model.layers[0].self_attn.q_proj),
    "weights": lambda model: _replaced(model.model.layers[0].mlp.down_proj),
    "dtype": lambda model: model.to(torch.float64),
    "adapter": lambda model: model.apply_lora_to_layers(2, "q_proj"),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "a number": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 2.0),
    "a number of the config": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "a hook": lambda model: model.model.norm.register_forward_hook(lambda module, given, output: output * -1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_is_captured_anew(change, way, graphs):
    generate = WAYS[way][0]
    model = model_of("llama")
    generate(model)
    assert graphs["captured"] == 1
    CHANGES[change](model)
    assert torch.equal(generate(model), generate(model, cache="dynamic"))
    assert graphs["captured"] == (1 if change == "a hook" else 2)


@pytest.mark.parametrize("way", WAYS)
def test_weights_changed_in_place_are_seen(way, graphs):
    generate = WAYS[way][0]
    model = model_of("llama")
    before = generate(model)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-3)
    after = generate(model)
    assert not torch.equal(after, before) and torch.equal(after, generate(model, cache="dynamic"))
    assert graphs["captured"] == 1


@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_ends_with_the_model(way, graphs):
    generate, module = WAYS[way]
    model = model_of("llama")
    model.helper = types.MethodType(repr, model)  # an attribute that leads back to the model
    generate(model)
    assert len(module._KEPT) == 1
    gone = weakref.ref(model.model.layers[0].mlp.down_proj.weight)
    del model
    gc.collect()
    assert len(module._KEPT) == 0 and gone() is None


@pytest.mark.parametrize("way", WAYS)
def test_calls_under_inference_mode_and_outside_have_steps_of_their_own(way, graphs):
    """What was made under inference mode is not to be written to outside of it."""
    generate = WAYS[way][0]
    model = model_of("llama")
    want = generate(model, cache="dynamic")
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert torch.equal(generate(model), want)


def test_a_run_that_is_left_early_or_fails(graphs):
    model = model_of("llama")
    want = by_tokens(model, cache="dynamic")
    run = generate_tokens(model, IDS, MASK, max_new_tokens=9, eos_token_id=[])
    for _ in range(5):
        next(run)
    run.close()
    assert graphs["captured"] == 1
    assert torch.equal(by_tokens(model), want) and graphs["captured"] == 1
    run = generate_tokens(model, IDS, MASK, max_new_tokens=9, eos_token_id=[])
    next(run)
    other = by_tokens(model)  # while another one runs, which has taken what was kept
    assert torch.equal(other, want)
    assert torch.equal(torch.stack([*run], 1), want[:, 1:])
    run = generate_tokens(model, IDS, MASK, max_new_tokens=9, eos_token_id=[])
    next(run)
    with pytest.raises(ZeroDivisionError):
        run.throw(ZeroDivisionError)
    assert torch.equal(by_tokens(model), want)


@pytest.mark.parametrize("settings", [{"cache_implementation": "static"}, {}], ids=str)
def test_a_criterion_that_generates_with_another_model(settings, graphs):
    """Its step is not the one of the call that it runs in."""
    model, other = model_of("llama"), model_of("qwen2")
    want, of_other = by_generate(model, cache="dynamic"), by_generate(other, **settings)
    found = []

    def criterion(ids, scores, **kwargs):
        found.append(by_generate(other, **settings))
        return torch.zeros(len(ids), dtype=torch.bool)

    for _ in range(2):
        assert torch.equal(by_generate(model, stopping_criteria=StoppingCriteriaList([criterion])), want)
    assert len(found) == 18 and all(torch.equal(one, of_other) for one in found)


def test_a_step_is_one_call_s_at_a_time():
    kept: KeptSteps[int] = KeptSteps()

    class Model:
        pass

    model, found = Model(), []
    kept.put(model, 1)
    threads = [threading.Thread(target=lambda: found.append(kept.take(model, lambda one: True))) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(found, key=str) == [1, *[None] * 7]
    kept.put(model, 2)
    assert kept.take(model, lambda one: one == 3) is None and len(kept) == 0, "what does not fit is freed"
