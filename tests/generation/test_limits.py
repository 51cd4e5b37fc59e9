"""The ends of what sampling, the loop and the engine accept, one beyond each, and the words of what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from easytorch.generation import generate_tokens
from easytorch.generation.decode import end_tokens
from easytorch.generation.engine import LLM, Engine, SamplingParams
from easytorch.generation.engine.request import Request
from easytorch.generation.engine.sampler import sample
from easytorch.generation.sampling import Sampler, SamplingConfig, keep_min_p, keep_top_k
from tests.generation.engine.traffic import model_of

ENDS = {
    SamplingConfig: [
        {"temperature": 0.0}, {"temperature": 1e30}, {"top_k": 1}, {"top_p": 1.0}, {"top_p": 1e-9},
        {"repetition_penalty": 1e-9},
    ],
    SamplingParams: [
        {"temperature": 0.0}, {"temperature": 1e30}, {"top_k": -1}, {"top_k": 0}, {"top_p": 1.0}, {"top_p": 1e-9},
        {"min_p": 0.0}, {"min_p": 1.0}, {"presence_penalty": -2.0}, {"presence_penalty": 2.0}, {"n": 1},
        {"frequency_penalty": -2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1e-9}, {"max_tokens": 1},
        {"max_tokens": None, "min_tokens": 99}, {"min_tokens": 16}, {"logprobs": 0}, {"logprobs": 20}, {"seed": -1},
        {"logit_bias": {0: -100}}, {"logit_bias": {0: 100.0}}, {"stop": []}, {"stop_token_ids": [0]}, {"top_k": 2},
        {"allowed_token_ids": [0]}, {"bad_words": []}, {"bad_words": ["a"]},
    ],
}  # fmt: skip
BEYOND = {
    SamplingConfig: [
        {"temperature": -1e-9}, {"temperature": math.inf}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0.0},
        {"top_p": 1.0001}, {"top_p": math.nan}, {"repetition_penalty": 0.0}, {"repetition_penalty": math.nan},
    ],
    SamplingParams: [
        {"temperature": -1e-9}, {"temperature": math.inf}, {"temperature": math.nan}, {"temperature": True},
        {"top_k": -2}, {"top_k": 1.0}, {"top_k": True}, {"top_p": 0.0}, {"top_p": 1.0001}, {"top_p": "1"},
        {"min_p": -1e-9}, {"min_p": 1.0001}, {"presence_penalty": -2.01}, {"presence_penalty": 2.01},
        {"frequency_penalty": -2.01}, {"frequency_penalty": 2.01}, {"repetition_penalty": 0.0}, {"n": 0},
        {"repetition_penalty": math.inf}, {"max_tokens": 0}, {"min_tokens": 17}, {"min_tokens": -1}, {"logprobs": 21},
        {"logprobs": -1}, {"seed": 1.0}, {"seed": True}, {"stop_token_ids": [-1]}, {"stop_token_ids": ["a"]},
        {"logit_bias": {0: -100.1}}, {"logit_bias": {0: 100.1}}, {"logit_bias": {-1: 1.0}}, {"stop": ""},
        {"logit_bias": {0: True}}, {"stop": [3]}, {"structured_outputs": {"regex": "a"}}, {"stop": 3}, {"stop": b"a"},
        {"stop_token_ids": 5}, {"stop_token_ids": "ab"}, {"stop_token_ids": {5}}, {"logit_bias": [(5, 1.0)]},
        {"stop_token_ids": iter([5])}, {"include_stop_str_in_output": "false"}, {"ignore_eos": 1},
        {"skip_special_tokens": None}, {"allowed_token_ids": []}, {"allowed_token_ids": [-1]}, {"bad_words": "a"},
        {"bad_words": [""]}, {"bad_words": [3]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDS)
def test_the_ends_of_each_range_are_accepted_and_one_beyond_is_named(kind):
    for given in ENDS[kind]:
        made = kind(**given)
        assert {name: getattr(made, name) for name in given} == given
    for given in BEYOND[kind]:
        with pytest.raises(ValueError, match=next(iter(given))):
            kind(**given)


def test_the_defaults_are_those_documented():
    """vLLM's and transformers': what a caller who says nothing gets."""
    config, params = SamplingConfig(), SamplingParams()
    assert vars(config) == {"temperature": 0.0, "top_k": None, "top_p": None, "repetition_penalty": 1.0, "seed": None}
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.stop_strings) == (16, 0, None, ())
    assert (params.include_stop_str_in_output, params.ignore_eos, params.skip_special_tokens) == (False, False, True)
    assert SamplingParams(stop="a").stop_strings == ("a",) and SamplingParams(stop=["a", "b"]).stop_strings == (
        "a",
        "b",
    )
    assert SamplingParams(temperature=9e-6).greedy and not SamplingParams(temperature=1e-5).greedy


def test_temperatures_whose_quotients_overflow_take_the_likeliest():
    """1e-45 is not 0, and logits divided by it are infinite: the first of several, not the largest."""
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    for temperature in (1e-6, 1e-40, 5e-324):
        config = SamplingConfig(temperature=temperature, top_p=0.9, seed=1)
        sampler = Sampler(config, torch.tensor([[0]]), torch.ones(1, 1), [], 0, torch.device("cpu"))
        assert sampler(logits).tolist() == [1]
        assert sample(logits, [request_of(SamplingParams(temperature=temperature, top_p=0.9, seed=1))]) == [1]


def request_of(params):
    return Request(
        request_id="0", prompt=None, prompt_length=1, tokens=[5], params=params, seed=1, max_length=9,
        end_tokens=frozenset(), stop_tokens=frozenset(), text=None,
    )  # fmt: skip


IDS = torch.tensor([[5, 9, 33], [4, 7, 12]])
REFUSED_CALLS = [
    ({"input_ids": IDS[0]}, r"input_ids must be integers .*torch.int64 \(3,\)"),
    ({"input_ids": IDS / 2}, "torch.float32"),
    ({"input_ids": IDS[:, :0]}, r"\(2, 0\)"),
    ({"input_ids": IDS[:0]}, r"\(0, 3\)"),
    ({"attention_mask": torch.ones(2, 4)}, r"attention_mask \(2, 4\) must have the shape of input_ids \(2, 3\)"),
    ({"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "leaves a row without any token"),
    ({"input_ids": torch.tensor([[97]])}, "token 97 is outside the 97 of LlamaForCausalLM"),
    ({"max_new_tokens": -1}, "max_new_tokens must not be negative, got -1"),
    ({"cache": "paged"}, "cache must be 'dynamic' or 'static', or None .* got 'paged'|cache must be"),
    ({"temperature": -1.0}, "temperature"),
]


@pytest.mark.parametrize(("given", "match"), REFUSED_CALLS, ids=str)
def test_a_call_that_does_not_fit_runs_nothing(make_model, given, match):
    model = make_model("llama")
    model.forward = None  # not called
    with pytest.raises(ValueError, match=match):
        next(iter(generate_tokens(model, **{"input_ids": IDS, "max_new_tokens": 2, **given})))


def test_no_new_tokens_and_the_last_token_of_the_vocabulary_are_accepted(make_model):
    model = make_model("llama")
    assert list(generate_tokens(model, IDS, max_new_tokens=0)) == []
    assert len(list(generate_tokens(model, torch.tensor([[96]]), max_new_tokens=1))) == 1


def test_a_model_without_a_head_is_refused():
    import transformers

    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    with pytest.raises(ValueError, match="T5EncoderModel is not a causal language model"):
        next(iter(generate_tokens(transformers.T5EncoderModel(transformers.T5Config(**sizes)), IDS, max_new_tokens=1)))


def test_the_arguments_are_left_as_they_are(make_model):
    model, ids = make_model("llama"), IDS.clone()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    kept, state = (ids.clone(), mask.clone()), {name: one.clone() for name, one in model.state_dict().items()}
    settings = model.generation_config.to_dict()
    sampled = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}
    for cache in ("dynamic", "static"):
        tokens = list(generate_tokens(model, ids, mask, max_new_tokens=3, cache=cache, **sampled))
        assert len({one.data_ptr() for one in tokens}) == 3 and not any(one.requires_grad for one in tokens)
    assert torch.equal(ids, kept[0]) and torch.equal(mask, kept[1]) and not model.training
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert model.generation_config.to_dict() == settings
    logits = torch.randn(2, 97)
    before = logits.clone()
    Sampler(SamplingConfig(**sampled), ids, mask, [3], 0, torch.device("cpu"))(logits)
    keep_top_k(logits, 3)
    assert torch.equal(logits, before)


def test_ends_of_a_filter_by_the_likeliest():
    """A token exactly min_p times as likely as the likeliest stays, as in transformers; 0 keeps all."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert keep_min_p(logits, 0.5).isfinite().tolist() == [[True, True, False, False]]
    assert keep_min_p(logits, 0.0).isfinite().all() and keep_min_p(logits, 1.0).isfinite().sum() == 1
    assert keep_top_k(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), 1).isfinite().tolist() == [[False, True, True, False]]


def test_end_tokens_are_those_given_else_those_of_the_model(make_model):
    model = make_model("llama")
    model.generation_config.eos_token_id = 7
    assert end_tokens(model) == [7] and end_tokens(model, 3) == [3] and end_tokens(model, [3, 4]) == [3, 4]
    assert end_tokens(model, []) == []
    model.generation_config.eos_token_id = [7, 8]
    assert end_tokens(model) == [7, 8]
    model.generation_config.eos_token_id = None
    assert end_tokens(model) == []


@pytest.fixture(scope="module")
def engine():
    return Engine(model_of("llama"), max_memory=1 << 20, page_size=4)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda e: e.add_request([5], {"n": 1}), TypeError, "params must be SamplingParams, not dict"),
        (lambda e: e.add_request([5.0]), ValueError, "token 5.0; tokens are ints from 0 to 96"),
        (lambda e: e.add_request([-1]), ValueError, "token -1"),
        (lambda e: e.add_request([97]), ValueError, "token 97"),
        (lambda e: e.add_request([]), ValueError, "the prompt has no tokens"),
        (lambda e: e.stream([5], SamplingParams(n=2)), ValueError, "streaming supports n=1 only, got n=2"),
        (lambda e: LLM(e.model, max_memory=1 << 20).generate([[5], [6]], [SamplingParams()]), ValueError, "2 prompts"),
        (lambda e: LLM(e.model, max_memory=1 << 20).chat([{"role": "user"}]), ValueError, "chat needs a tokenizer"),
        (lambda e: e.add_request(b"abc"), ValueError, "a prompt is text or a list of ints, not bytes"),
        (lambda e: e.add_request(torch.tensor(5)), ValueError, "a prompt is text or a list of ints, not Tensor"),
        (lambda e: LLM(e.model, max_memory=1 << 20).generate(None), ValueError, "one or several, not NoneType"),
        (lambda e: LLM(e.model, max_memory=1 << 20).generate([5], {"n": 1}), TypeError, "must be SamplingParams, one"),
        (lambda e: LLM(e.model, max_memory=1 << 20).generate({"text": "x"}), ValueError, "has prompt or prompt_token"),
        (
            lambda e: Engine(e.model, max_memory=1 << 20, prefix_reuse="no"),
            ValueError,
            "prefix_reuse='no' must be True",
        ),
        (lambda e: Engine(e.model, max_memory=True), TypeError, "max_memory=True must be an int"),
        (lambda e: Engine(e.model, max_memory="1"), TypeError, "max_memory='1' must be an int"),
        (lambda e: Engine(e.model, max_memory=1 << 20, max_requests=0), ValueError, "max_requests=0"),
        (lambda e: Engine(e.model, max_memory=1 << 20, page_size=0), ValueError, "page_size=0"),
        (lambda e: Engine(e.model, max_memory=1 << 20, max_model_length=0), ValueError, "max_model_length=0"),
    ],
)
def test_what_the_engine_refuses_leaves_it_empty(engine, call, error, match):
    with pytest.raises(error, match=match):
        call(engine)
    assert not engine.has_unfinished_requests and engine.stats().waiting == 0
    assert engine.stats().free_pages == engine.stats().num_pages


def test_request_ids_are_given_or_made_and_never_shared(engine):
    assert engine.add_request([5], request_id="0") == "0"
    made = engine.add_request([5])
    assert made != "0"
    with pytest.raises(ValueError, match="request '0' exists already"):
        engine.add_request([6], request_id="0")
    with pytest.raises(ValueError, match="2 requests are running or queued"):
        engine.reset_prefix_cache()
    assert engine.stats().waiting == 2 and engine.stats().prompt_tokens == 2
    assert engine.abort("0") is True and engine.abort("0") is False and engine.has_unfinished_requests
    engine.abort_all()
    engine.reset_prefix_cache()
    assert not engine.has_unfinished_requests and engine.step() == []


def test_a_request_may_fill_the_engine_to_its_last_token(engine):
    """One token more is refused (tests/generation/engine/test_engine.py)."""
    longest = engine.max_model_length
    prompt = [5] * (longest - 1)
    llm = LLM(engine.model, max_memory=1 << 20, page_size=4)
    for params in (SamplingParams(max_tokens=1, temperature=0.0), SamplingParams(max_tokens=None, temperature=0.0)):
        output = llm.generate(prompt, params)[0]
        assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"
        assert output.prompt_token_ids == prompt and output.finished
    stats = llm.engine.stats()
    assert stats.free_pages == stats.num_pages and stats.generated_tokens == 2 and stats.steps >= 2


def test_prompts_are_lists_arrays_tensors_and_vllm_s_dicts(engine):
    llm = LLM(engine.model, max_memory=1 << 20)
    params = SamplingParams(max_tokens=2, temperature=0.0)
    (expected,) = [output.outputs[0].token_ids for output in llm.generate([5, 9], params)]
    one, two = torch.tensor([5, 9]), torch.tensor([[5, 9], [5, 9]])
    dict_ = {"prompt_token_ids": [5, 9]}
    for prompts in (one, one.numpy(), two, two.numpy(), [one, one], dict_, [dict_, one.numpy()], ((5, 9),)):
        found = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in found] == [expected] * len(found)
        assert all(output.prompt_token_ids == [5, 9] for output in found)
