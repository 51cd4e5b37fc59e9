"""Streamed text: whole characters only, and together what decoding at once gives."""

from __future__ import annotations

import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from easytorch.generation import stream_text
from easytorch.generation.text import decode_incrementally

SAMPLE = "Grüße, 世界! 👩‍🔬 naïve  café\n\tend … ok"


def byte_tokenizer(decoder):
    """Tokens for single bytes: all of them ("byte-level", as GPT-2), or all but ASCII ("byte-fallback", as Llama)."""
    import tokenizers
    import transformers

    if decoder == "byte-level":
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
    else:
        pieces = [chr(i) if i < 128 else f"<0x{i:02X}>" for i in range(256)]
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
        model.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    model.add_special_tokens(["<end>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")


@pytest.fixture(params=["byte-level", "byte-fallback"])
def tokenizer(request):
    return byte_tokenizer(request.param)


def test_pieces_join_to_the_whole_and_hold_whole_characters(tokenizer):
    ids = tokenizer(SAMPLE)["input_ids"]
    assert len(ids) == len(SAMPLE.encode())
    pieces = list(decode_incrementally(tokenizer, ids))
    assert "".join(pieces) == SAMPLE
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(pieces) == len(SAMPLE), "each character comes as soon as it is complete"


def test_broken_bytes_do_not_hold_back_what_follows(tokenizer):
    start = tokenizer("é")["input_ids"][0]
    pieces = list(decode_incrementally(tokenizer, [start] * 6 + tokenizer("ab")["input_ids"]))
    text = "".join(pieces)
    assert text.endswith("ab") and pieces[-1] == "b"
    assert set(text[:-2]) == {"\ufffd"}


def test_bytes_that_are_no_text_break_no_character_after_them():
    """Any tokens of bytes give, streamed, what they give at once."""
    tokenizer = byte_tokenizer("byte-level")
    codes = {byte: tokenizer.convert_tokens_to_ids(letter) for byte, letter in bytes_to_unicode().items()}
    for broken in range(1, 9):
        ids = [codes[byte] for byte in b"\x80" * broken + "€👍".encode() + b"\xe2\x82" + "é!".encode()]
        pieces = list(decode_incrementally(tokenizer, ids))
        assert "".join(pieces) == "\ufffd" * broken + "€👍\ufffdé!" == tokenizer.decode(ids)
        assert "👍" in pieces and "!" in pieces
        for end in range(len(ids)):  # what is held back comes at the end, and nothing twice
            assert "".join(decode_incrementally(tokenizer, ids[:end])) == tokenizer.decode(ids[:end])


def test_incomplete_end_is_shown_at_the_end(tokenizer):
    ids = tokenizer("a€")["input_ids"][:-1]
    pieces = list(decode_incrementally(tokenizer, ids))
    assert pieces[0] == "a" and set(pieces[1]) == {"\ufffd"}


def test_special_tokens_are_left_out(tokenizer):
    ids = [*tokenizer("ab")["input_ids"], tokenizer.eos_token_id, *tokenizer("c")["input_ids"]]
    assert "".join(decode_incrementally(tokenizer, ids)) == "abc"


def test_words_with_leading_spaces():
    """A tokenizer that drops the space of a text's first word keeps those between streamed pieces."""
    import tokenizers
    import transformers

    vocabulary = {"▁the": 0, "▁cat": 1, "s": 2, "<unk>": 3, "!": 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.decoder = tokenizers.decoders.Metaspace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")
    ids = [0, 1, 2, 0, 1, 4]
    pieces = list(decode_incrementally(tokenizer, ids))
    assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False) == "the cats the cat!"
    assert len(pieces) == len(ids)


def test_stream_text(tokenizer):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.5, eos_token_id=None, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = tokenizer("ab", return_tensors="pt")["input_ids"]
    want = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=tokenizer.eos_token_id)[0, 2:]
    pieces = list(stream_text(model, tokenizer, "ab", max_new_tokens=40))
    assert pieces == list(decode_incrementally(tokenizer, want.tolist()))
    assert len(pieces) > 1
