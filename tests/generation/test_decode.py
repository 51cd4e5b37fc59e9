"""The decode loop against `generate` of transformers."""

from __future__ import annotations

import pytest
import torch

from easytorch.cache.static import bucket
from easytorch.generation import generate_tokens
from easytorch.generation.decoders import align_right

CACHES = ["dynamic", "static"]


@pytest.fixture
def batch():
    """Ids (3, 11) and a mask with padding on the left of the first row and the third."""
    ids = torch.randint(2, 97, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[2, :1] = 0
    return ids, mask


def generate(model, ids, mask, **settings):
    tokens = list(generate_tokens(model, ids, mask, **settings))
    return torch.stack(tokens, dim=1) if tokens else torch.empty(len(ids), 0, dtype=torch.int64)


def expected(model, ids, mask, **settings):
    return model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **settings)[:, ids.shape[1] :]


def to_the_right(ids, mask):
    """The same rows with their padding on the right."""
    order = torch.argsort(1 - mask, dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)


@pytest.mark.parametrize(
    ("name", "cache"),
    [(name, cache) for name in ("native_llama", "llama", "gpt2", "gemma3_text", "mistral") for cache in CACHES]
    + [("native_bloom", cache) for cache in CACHES]
    + [("bloom", "dynamic")],
)
def test_greedy_equals_transformers(make_model, batch, name, cache):
    model = make_model(name)
    want = expected(model, *batch, max_new_tokens=20)
    assert len(want.unique()) > 5
    assert torch.equal(generate(model, *batch, max_new_tokens=20, cache=cache), want)


@pytest.mark.parametrize("cache", CACHES)
def test_greedy_tokens_need_no_logits(make_model, batch, cache, monkeypatch):
    model = make_model("native_llama")
    want = expected(model, *batch, max_new_tokens=6)

    def logits(*_):
        raise AssertionError("logits were computed")

    monkeypatch.setattr("easytorch.layers.heads.linear", logits)
    assert torch.equal(generate(model, *batch, max_new_tokens=6, cache=cache), want)
    model.register_forward_hook(lambda *_: None)  # whoever listens sees them
    for sampled in ({}, {"temperature": 1.0}, {"repetition_penalty": 1.5}):
        with pytest.raises(AssertionError, match="logits were computed"):
            generate(model, *batch, max_new_tokens=1, cache=cache, **sampled)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("native", [False, True], ids=["transformers", "native"])
@pytest.mark.parametrize("layer_types", ["sliding_attention", "full_attention", "chunked_attention"])
def test_settings_that_the_model_does_not_read_change_nothing(make_model, batch, native, layer_types, cache):
    """Any config keeps `layer_types` and windows; a Llama attends everywhere with them too."""
    stray = {"layer_types": [layer_types] * 2, "sliding_window": 3, "attention_chunk_size": 3}
    want = expected(make_model("llama"), *batch, max_new_tokens=12)
    model = make_model("native_llama" if native else "llama", settings=stray)
    assert model.config.layer_types == stray["layer_types"]
    assert torch.equal(generate(model, *batch, max_new_tokens=12, cache=cache), want)


@pytest.mark.parametrize(
    "name", ["llama4_text", "native_gemma3_text", "native_mistral", "native_cohere2", "native_gemma2"]
)
def test_every_layer_has_its_own_mask_in_a_static_cache(make_model, batch, name):
    model = make_model(name)
    want = expected(model, *batch, max_new_tokens=12)
    assert len(want.unique()) > 5
    assert torch.equal(generate(model, *batch, max_new_tokens=12, cache="static"), want)
    model.config.sliding_window = model.config.attention_chunk_size = 64  # the window counts
    assert not torch.equal(generate(model, *batch, max_new_tokens=12, cache="static"), want)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(make_model, batch, attention):
    model = make_model("llama", attn_implementation=attention)
    assert torch.equal(
        generate(model, *batch, max_new_tokens=12, cache="static"), expected(model, *batch, max_new_tokens=12)
    )


@pytest.mark.parametrize("cache", CACHES)
def test_side_of_the_padding_does_not_matter(llama, batch, cache):
    left = generate(llama, *batch, max_new_tokens=10, cache=cache)
    assert torch.equal(generate(llama, *to_the_right(*batch), max_new_tokens=10, cache=cache), left)


@pytest.mark.parametrize("cache", CACHES)
def test_a_row_is_what_it_is_alone(llama, batch, cache):
    ids, mask = batch
    together = generate(llama, ids, mask, max_new_tokens=10, cache=cache)
    for row in range(len(ids)):
        alone = ids[row : row + 1, mask[row].bool()]
        assert torch.equal(generate(llama, alone, None, max_new_tokens=10, cache=cache)[0], together[row])


@pytest.mark.parametrize("cache", CACHES)
def test_every_row_ends_by_itself(llama, batch, cache):
    free = expected(llama, *batch, max_new_tokens=25)
    ends = [int(free[0, 3]), int(free[1, 9])]
    want = expected(llama, *batch, max_new_tokens=25, eos_token_id=ends, pad_token_id=0)
    got = generate(llama, *batch, max_new_tokens=25, eos_token_id=ends, pad_token_id=0, cache=cache)
    assert torch.equal(got, want)
    assert (got[0] == 0).any(), "a row that ended is padded while the others go on"


def test_stops_when_every_row_has_ended(llama, batch):
    ids, mask = batch
    end = int(expected(llama, ids[:1], mask[:1], max_new_tokens=4)[0, -1])
    got = generate(llama, ids[:1], mask[:1], max_new_tokens=50, eos_token_id=end)
    assert got.shape[1] <= 4 and int(got[0, -1]) == end


def test_end_tokens_of_the_generation_config(make_model, batch):
    model = make_model("llama")
    model.generation_config.eos_token_id = int(expected(model, *batch, max_new_tokens=6)[1, 5])
    assert torch.equal(generate(model, *batch, max_new_tokens=30), expected(model, *batch, max_new_tokens=30))
    assert generate(model, *batch, max_new_tokens=30, eos_token_id=[]).shape[1] == 30


@pytest.mark.parametrize("penalty", [1.5, 0.8])
def test_repetition_penalty_equals_transformers(llama, batch, penalty):
    ids = batch[0]
    settings = {"max_new_tokens": 20, "repetition_penalty": penalty}
    assert torch.equal(generate(llama, ids, None, **settings), expected(llama, ids, None, **settings))


def test_seed_decides_the_sample_and_the_cache_does_not(llama, batch):
    settings = {"max_new_tokens": 15, "temperature": 1.5, "top_k": 40, "top_p": 0.95}
    first = generate(llama, *batch, seed=1, cache="dynamic", **settings)
    assert torch.equal(generate(llama, *batch, seed=1, cache="static", **settings), first)
    assert not torch.equal(generate(llama, *batch, seed=2, cache="static", **settings), first)


def test_tokens_come_one_at_a_time(llama, batch):
    calls = []
    handle = llama.register_forward_hook(lambda *_: calls.append(1))
    tokens = generate_tokens(llama, *batch, max_new_tokens=1000)
    assert not calls
    first = next(tokens)
    handle.remove()
    assert len(calls) == 1 and first.shape == (3,) and first.dtype == torch.int64
    assert not first.requires_grad


def test_no_tokens(llama, batch):
    assert generate(llama, *batch, max_new_tokens=0).shape == (3, 0)


def test_peft_model(make_model, batch):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model("llama"), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    want = expected(model.eval(), *batch, max_new_tokens=8)
    for cache in CACHES:
        assert torch.equal(generate(model, *batch, max_new_tokens=8, cache=cache), want)


def test_arguments_are_checked_before_anything_runs(llama, make_model, batch):
    ids, mask = batch
    for arguments, settings, message in [
        ((ids[0], mask[0]), {}, "input_ids must be integers"),
        ((ids.float(), mask), {}, "input_ids must be integers"),
        ((ids[:, :0], mask[:, :0]), {}, "neither of them 0"),
        ((ids, mask[:, 1:]), {}, "attention_mask"),
        ((ids, torch.zeros_like(mask)), {}, "without any token"),
        ((ids, mask * torch.tensor([[1], [0], [1]])), {}, "without any token"),
        ((ids, mask * torch.tensor([[0], [1], [1]])), {}, "without any token"),
        ((ids + 97, mask), {}, "is outside the 97 of LlamaForCausalLM; the tokenizer is another model's"),
        ((ids * 0 + 97, mask), {}, "token 97 is outside the 97 of LlamaForCausalLM"),
        ((ids, mask), {"max_new_tokens": -1}, "max_new_tokens"),
        ((ids, mask), {"cache": "paged"}, "'dynamic' or 'static'"),
        ((ids, mask), {"temperature": -1}, "temperature"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate_tokens(llama, *arguments, **settings)
    with pytest.raises(ValueError, match="takes no position_ids; use cache='dynamic'"):
        generate_tokens(make_model("bloom"), ids, mask, cache="static")


def test_models_that_do_not_continue_text_are_refused(batch):
    import transformers

    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=97, num_hidden_layers=1))
    with pytest.raises(ValueError, match="BertForMaskedLM is not a causal language model"):
        generate_tokens(bert, *batch)
    with pytest.raises(ValueError, match="decoder_input_ids are for encoder-decoders"):
        generate_tokens(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1)), *batch, decoder_input_ids=0)


def test_too_many_tokens_for_the_positions_are_reported(llama, batch, caplog):
    generate_tokens(llama, *batch, max_new_tokens=250)
    assert "pass the 256 positions LlamaForCausalLM was made for" in caplog.text


def test_align_right_keeps_the_order_and_drops_empty_columns():
    ids = torch.tensor([[5, 6, 0, 7, 0], [0, 8, 9, 0, 0]])
    aligned, mask = align_right(ids, ids > 0, 1)
    assert aligned.tolist() == [[5, 6, 7], [1, 8, 9]]
    assert mask.tolist() == [[True, True, True], [False, True, True]]


@pytest.mark.parametrize(("length", "expected"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128)])
def test_buckets_are_powers_of_two(length, expected):
    assert bucket(length, 16) == expected
