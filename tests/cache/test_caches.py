"""Caches as `past_key_values`: generation is token for token that of transformers' own caches."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
import transformers

import easytorch
from easytorch import protocol
from easytorch.cache import RaggedPagesCache, RaggedPagesMetadata, TransformerCache, memory, ragged_pages
from easytorch.cache.page_table import PageTable
from easytorch.cache_names import CACHE, STATES

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SIZES | {"num_key_value_heads": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 97}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]}
WINDOW = GROUPED | {"sliding_window": 3}
MAMBA = {"vocab_size": 97, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 1, "num_heads": 8, "head_dim": 8}
CONFIGS = {
    "llama": transformers.LlamaConfig(**GROUPED),
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=3),
    "gpt_oss": transformers.GptOssConfig(**WINDOW, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "gemma2": transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=4),
    "bloom": transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
    # not native
    "gpt_neo": transformers.GPTNeoConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, max_position_embeddings=64,
        attention_types=[[["global"], 2]],
    ),
    "qwen3_next": transformers.Qwen3NextConfig(**GROUPED, head_dim=8, **LINEAR, **EXPERTS),
    "mamba2": transformers.Mamba2Config(**MAMBA, n_groups=1),
    "t5": transformers.T5Config(**T5, decoder_start_token_id=0),
}  # fmt: skip
IDS = torch.tensor([[5, 9, 33, 71, 8, 2], [0, 0, 90, 12, 60, 3]])
MASK = (IDS != 0).long()
GREEDY = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@functools.cache
def model_of(name: str):
    torch.manual_seed(0)
    auto = easytorch.AutoModelForSeq2SeqLM if name == "t5" else easytorch.AutoModelForCausalLM
    return auto.from_config(copy.deepcopy(CONFIGS[name])).eval()


@functools.cache
def expected(name: str, padded: bool, beams: int = 1) -> torch.Tensor:
    return generated(name, padded, None, beams)


def generated(name: str, padded: bool, cache, beams: int = 1) -> torch.Tensor:
    ids, mask = (IDS, MASK) if padded else (IDS.clamp(min=4), torch.ones_like(IDS))
    key = STATES if name == "mamba2" else CACHE
    given = {} if cache is None else {key: cache}
    return model_of(name).generate(ids, attention_mask=mask, num_beams=beams, **GREEDY, **given)


def pages_of(name: str, num_pages: int = 12, page_size: int = 4) -> RaggedPagesCache:
    metadata = protocol.create_paged_metadata(model_of(name), 1.0, page_size, 32)
    return protocol.init_ragged_pages(model_of(name), dataclasses.replace(metadata, num_pages=num_pages))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("name", CONFIGS)
def test_generation_with_a_cache(name, kind, padded):
    cache = protocol.init_cache(model_of(name), 2, 16, kind=kind)
    assert torch.equal(generated(name, padded, cache), expected(name, padded))


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4", "fp8"])
def test_a_quantized_cache_keeps_its_last_tokens(kind):
    model = model_of("llama")
    cache = protocol.init_cache(model, 2, 40, kind=kind, residual_length=4, group_size=8)
    exact = protocol.init_cache(model, 2, 40, kind="dynamic")
    ids = torch.randint(4, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for part in ids.split([9, 1, 1, 1, 1, 7], dim=1):
            found, right = (model(part, past_key_values=one).logits for one in (cache, exact))
    error = float((found - right).norm() / right.norm())
    assert 0 < error < {"int8": 0.01, "fp8": 0.03}.get(kind, 0.1)
    codes = cache.layers[0]._quantized_keys.weight
    assert codes.nbytes < exact.layers[0].keys.nbytes / (1.5 if kind in ("int8", "fp8") else 2)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2]))
    again = model(ids[:, :1], past_key_values=cache).logits
    assert again.shape[0] == 2 and cache.get_seq_length() == 21
    # beams reorder codes without rounding them again
    beams = generated("llama", False, protocol.init_cache(model, 4, 40, kind="int8", residual_length=4), 2)
    assert beams.shape[0] == 2


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "gemma2", "bloom", "gpt_neo"])
def test_generation_with_pages(name, padded, beams, monkeypatch):
    calls = []
    inner = RaggedPagesCache.attend_pages
    monkeypatch.setattr(RaggedPagesCache, "attend_pages", lambda *args, **kw: calls.append(1) or inner(*args, **kw))
    pages = pages_of(name, 40)
    assert torch.equal(generated(name, padded, pages, beams), expected(name, padded, beams))
    by_pages = name not in ("bloom", "gpt_neo", "mistral") and not padded
    assert bool(calls) == by_pages, "native models attend to the pages themselves where there is no mask"
    assert pages.free_pages == 40 - len({page for row in pages.table.rows for page in row})
    pages.reset()
    assert pages.free_pages == 40 and sum(pages.table.holders) == 0


def test_pages_are_shared_until_they_are_written_to():
    model, pages = model_of("llama"), pages_of("llama")
    with torch.no_grad():
        model(IDS[:1], past_key_values=pages)
        assert pages.free_pages == 10
        pages.batch_repeat_interleave(3)
        assert pages.free_pages == 10 and pages.block_tables.tolist() == [pages.table.rows[0]] * 3
        step = torch.tensor([[7], [8], [9]])
        found = model(step, past_key_values=pages).logits
        assert pages.free_pages == 8, "the full page is shared, the last one has two copies"
        right = model(torch.cat([IDS[:1].expand(3, -1), step], 1)).logits[:, -1:]
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
        pages.crop(-1)
        again = model(step.flip(0), past_key_values=pages).logits
        torch.testing.assert_close(again, model(torch.cat([IDS[:1].expand(3, -1), step.flip(0)], 1)).logits[:, -1:])


def test_a_row_may_have_the_longest_length():
    model = model_of("llama")
    metadata = dataclasses.replace(protocol.create_paged_metadata(model, 1.0, 4, 6), num_pages=4)
    pages = protocol.init_ragged_pages(model, metadata)
    with torch.no_grad():
        model(IDS, past_key_values=pages)
        with pytest.raises(ValueError, match="max_model_length=6, and a row would have 7 tokens"):
            model(IDS[:, :1], past_key_values=pages)


@pytest.mark.parametrize("kind", ["static", "dynamic", "int8"])
def test_a_cache_takes_the_rows_and_tokens_that_it_is_for(kind):
    cache = model_of("llama").init_cache(2, 5, kind=kind)
    assert [cache.has_room(0, *given) for given in ((2, 5), (2, 6), (3, 1))] == [True, False, False]
    token = torch.ones(2, 2, 1, 8)
    for _ in range(5):
        assert cache.has_room(0, 2, 1)
        cache.update(token, token, 0)
    assert not cache.has_room(0, 2, 1) and cache.has_room(1, 2, 5), "each layer has its own"
    with pytest.raises(ValueError, match="is for 5 tokens, and holds 5 with 1 to come"):
        cache.update(token, token, 0)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_rows_of_a_quantized_cache_are_chosen(kind):
    """Beams first, then copies and rows: each step applies to what the one before left."""
    model = model_of("llama")
    ids = torch.randint(4, 97, (3, 12), generator=torch.Generator().manual_seed(1))
    order, rows = torch.tensor([2, 2, 0]), torch.tensor([0, 3, 5])
    cache, right = (protocol.init_cache(model, 3, 40, kind=kind, residual_length=4, group_size=8) for _ in range(2))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[order].repeat_interleave(2, 0)[rows], past_key_values=right)
        cache.reorder_cache(order)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(rows)
        step = torch.tensor([[7], [8], [9]])
        found, expected = (model(step, past_key_values=one).logits for one in (cache, right))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pages", [6, 9, 23])
def test_a_page_table_never_loses_a_page(pages):
    generator = torch.Generator().manual_seed(0)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    table, length = PageTable(pages, 3), 0
    table.rows = [[] for _ in range(2)]
    for _ in range(600):
        match draw(4):
            case 0:
                before = copy.deepcopy(vars(table))
                try:
                    copies = table.reserve(length, length + 1 + draw(4))
                except MemoryError:
                    assert vars(table) == before
                    table.truncate(0)
                    length = 0
                    continue
                written = [page for row in table.rows for page in row[length // 3 :]]
                assert len(written) == len(set(written)), "two rows write to one page"
                assert all(table.holders[source] >= 1 for source, _ in copies)
                length = 3 * len(table.rows[0]) - draw(3)
            case 1:
                table.select([draw(len(table.rows)) for _ in range(1 + draw(5))])
            case 2:
                length = draw(length + 1)
                table.truncate(length)
        held = [page for row in table.rows for page in row]
        assert [held.count(page) for page in range(pages)] == table.holders
        assert all(3 * len(row) >= length for row in table.rows), "every token has its page"
        assert sorted(table.free) == sorted(set(range(pages)) - set(held))


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt_neo", "mistral"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_the_inputs_of_a_step(name, kind):
    model, tokens = model_of(name), IDS
    kwargs = protocol.prepare_inputs_for_generation(model, IDS, 16, 0, kind=kind)
    found = []
    with torch.no_grad():
        for _ in range(7):
            output = model(tokens, **kwargs)
            kwargs = protocol.update_inputs_for_generation(model, output, kwargs)
            tokens = output.logits[:, -1:].argmax(-1)
            found.append(tokens)
    assert torch.equal(torch.cat(found, 1), expected(name, True)[:, IDS.shape[1] :])


def test_the_reference_s_call_and_transformers():
    model = model_of("llama")
    for kwargs in (
        model.prepare_inputs_for_generation(IDS, max_length=16, pad_token_id=0, kind="dynamic"),
        model.prepare_inputs_for_generation(IDS, 16, 0, kind="dynamic"),
        model.prepare_inputs_for_generation(IDS, 16, 0, starts=torch.tensor([0, 2]), kind="dynamic"),
        model.prepare_inputs_for_generation(IDS, max_length=16, attention_mask=MASK, kind="dynamic"),
    ):
        assert torch.equal(kwargs["attention_mask"], MASK) and isinstance(kwargs[CACHE], TransformerCache)
        assert kwargs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3]]
    assert not easytorch.AutoModel.from_config(transformers.BertConfig(**SIZES)).can_generate()
    assert "input_ids" in model.prepare_inputs_for_generation(IDS, attention_mask=MASK)


def test_pages_fit_the_memory_that_is_free(monkeypatch):
    model = model_of("llama")
    monkeypatch.setattr(ragged_pages, "free_and_total", lambda device: (600_000, 1_000_000))
    metadata = model.create_paged_metadata(0.9, 16, 64)
    page = 2 * 16 * 2 * (8 + 8) * 4
    assert metadata.page_bytes == page and metadata.num_pages == 500_000 // page
    assert metadata.max_num_pages_per_req == 4
    with pytest.raises(ValueError, match=f"of {page} bytes.*600000 are free"):
        model.create_paged_metadata(0.41, 16, 64)


def test_the_memory_of_a_container(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:   800 kB\n", encoding="ascii")
    (tmp_path / "max").write_text("512000\n", encoding="ascii")
    (tmp_path / "current").write_text("12000\n", encoding="ascii")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUPS", ())
    assert memory.free_and_total(torch.device("cpu")) == (800 * 1024, 1000 * 1024)
    monkeypatch.setattr(memory, "_CGROUPS", ((tmp_path / "max", tmp_path / "current"),))
    assert memory.free_and_total(torch.device("cpu")) == (500_000, 512_000)
    (tmp_path / "max").write_text("1000000\n", encoding="ascii")  # of which the rest of the machine has taken some
    assert memory.free_and_total(torch.device("cpu")) == (800 * 1024, 1_000_000)
    (tmp_path / "max").write_text("max\n", encoding="ascii")
    assert memory.free_and_total(torch.device("cpu")) == (800 * 1024, 1000 * 1024)
    with pytest.raises(ValueError, match="num_pages"):
        memory.free_and_total(torch.device("meta"))


@pytest.mark.parametrize("kind", ["int8", "dynamic"])
def test_a_refused_crop_leaves_the_cache_as_it_was(kind):
    """The layers before the one that refuses too: a quantized one, or a window that has let tokens go."""
    types = ["sliding_attention", "full_attention"]
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16 if kind == "int8" else 3}
    config = transformers.Gemma3TextConfig(**SIZES | sizes, layer_types=types if kind == "int8" else types[::-1])
    torch.manual_seed(0)
    model = easytorch.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache, untouched = model.init_cache(2, 64, kind=kind), model.init_cache(2, 64, kind=kind)
        model(IDS, past_key_values=cache)
        model(IDS, past_key_values=untouched)
        with pytest.raises((ValueError, RuntimeError), match=r"cannot be cropped|crop` was called"):
            cache.crop(-2)
        assert [layer.get_seq_length() for layer in cache.layers] == [IDS.shape[1]] * 2
        logits = [model(IDS[:, :1], past_key_values=one).logits for one in (cache, untouched)]
    assert torch.equal(*logits)


def test_what_does_not_fit_is_one_error():
    llama, metadata = model_of("llama"), protocol.create_paged_metadata(model_of("llama"), 1.0, 4, 32)
    bert = easytorch.AutoModelForMaskedLM.from_config(transformers.BertConfig(**SIZES))
    longer, made = llama.init_cache(2, 9), llama.create_cache_metadata(2, 8)
    small = dataclasses.replace(metadata, num_pages=2)
    for call, match in (
        (lambda: protocol.init_cache(bert, 1, 8), "takes no cache"),
        (lambda: llama.init_cache(0, 8), "batch_size=0"),
        (lambda: llama.init_cache(1, 8, kind="paged"), "kind='paged'"),
        (lambda: llama.init_cache(2, 8, shardings={}), "several devices"),
        (lambda: llama.init_cache(1, 1.5), "max_length=1.5"),
        (lambda: llama(IDS, past_key_values=llama.init_cache(2, 4)), "is for 4 tokens"),
        (lambda: llama(IDS, past_key_values=llama.init_cache(1, 8)), "is for 1 rows, and 2 are given"),
        (lambda: llama.init_cache(1, 8, kind="int8", group_size=0), "group_size=0"),
        (lambda: llama.init_cache(1, 8, kind="int8", residual_length=-1), "residual_length=-1"),
        (lambda: llama.init_cache(2, 8, torch.tensor([1, 2, 3])), r"starts \(3,\)"),
        (lambda: llama.init_cache(2, 8, torch.tensor([9, -1])), "must be from 0 to max_length=8"),
        (lambda: pages_of("llama").crop(1), "as a negative number"),
        (lambda: protocol.create_paged_metadata(llama, 1.5, 4, 8), "hbm_utilization=1.5"),
        (lambda: protocol.create_paged_metadata(llama, 0.5, 0, 8), "page_size=0"),
        (lambda: protocol.create_paged_metadata(model_of("qwen3_next"), 0.5, 4, 8), "linear_attention"),
        (lambda: protocol.create_paged_metadata(model_of("t5"), 0.5, 4, 8), "encoder"),
        (lambda: llama.init_ragged_pages(page_size=4), "give metadata"),
        (lambda: llama.init_ragged_pages(metadata, page_size=4), "give metadata"),
        (lambda: llama.init_ragged_pages(dataclasses.replace(small, layers=(0, 1, 2))), "3 layers"),
        (lambda: llama.init_ragged_pages(dataclasses.replace(small, k_headdim=5)), "head_dim. of .* the model has"),
        (lambda: llama(IDS, past_key_values=llama.init_ragged_pages(small)), "no_grad"),
        (lambda: llama.prepare_inputs_for_generation(IDS, 4, 0), "max_length=4"),
        (lambda: llama.compute_loss(IDS, past_key_values=longer, cache_metadata=made), "max_length=9"),
        (lambda: protocol.update_inputs_for_generation(llama, llama(IDS, use_cache=False), {}), "use_cache"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call()
    for call, match in (
        (lambda: llama.init_ragged_pages(made), "must be a RaggedPagesMetadata, not TransformerMetadata"),
        (lambda: llama.prepare_inputs_for_generation(IDS.tolist(), 8, 0), "a tensor of tokens .*, not list"),
        (lambda: llama.compute_loss(IDS, cache_metadata=3), "create_cache_metadata .*, not int"),
    ):
        with pytest.raises(TypeError, match=match):
            call()
    pages = llama.init_ragged_pages(small)
    with torch.no_grad(), pytest.raises(MemoryError, match="2 of 2 pages left, and 4 are needed"):
        llama(IDS, past_key_values=pages)
    with torch.no_grad():  # a call that found too few pages leaves the number of rows open
        llama(IDS[:1], past_key_values=pages)
    with torch.no_grad(), pytest.raises(ValueError, match="has 2 rows, and 1 are given"):
        pages = pages_of("llama")
        llama(IDS, past_key_values=pages)
        llama(IDS[:1], past_key_values=pages)
    assert isinstance(metadata, RaggedPagesMetadata)


def test_a_config_without_a_padding_token():
    """CodeGen's: transformers' own classes keep configs of every age."""
    config = transformers.CodeGenConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4)
    model = easytorch.AutoModelForCausalLM.from_config(config).eval()
    assert protocol.create_cache_metadata(model, 2, 16).pad_token_id == 0
    cache = protocol.init_cache(model, 2, 16)
    with torch.no_grad():
        expected = model.generate(IDS[:2], **GREEDY)
        assert torch.equal(model.generate(IDS[:2], past_key_values=cache, **GREEDY), expected)


@pytest.mark.parametrize("newer", [False, True])
def test_pages_of_falcon(newer):
    """One head of keys for all queries, and Falcon 40B's groups, whose keys are cached for each head."""
    config = transformers.FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2,
        new_decoder_architecture=newer,
    )  # fmt: skip
    model = easytorch.AutoModelForCausalLM.from_config(config).eval()
    metadata = protocol.create_paged_metadata(model, 1.0, 4, 16)
    assert metadata.num_kv_heads == (4 if newer else 1)
    pages = protocol.init_ragged_pages(model, dataclasses.replace(metadata, num_pages=12))
    expected = model.generate(IDS.clamp(min=4), **GREEDY)
    assert torch.equal(model.generate(IDS.clamp(min=4), past_key_values=pages, **GREEDY), expected)
