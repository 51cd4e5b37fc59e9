from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from easytorch.training.data import TokenBlocks, read_texts, step_indices, tokenize
from easytorch.training.tokenizer import END_OF_TEXT, train_tokenizer

TEXTS = ["Hello  world,\n\tthis is a text. " * 20, "Ünïcödé and 日本語 too: 🙂."]


@pytest.mark.parametrize("size", [257, 320])
def test_decoding_gives_every_text_back(size):
    tokenizer = train_tokenizer(TEXTS, size)
    assert len(tokenizer) <= size
    for text in [*TEXTS, "never seen: ΑΒΓ \x00"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_257_is_plain_bytes():
    tokenizer = train_tokenizer(TEXTS, 257)
    assert len(tokenizer("日本語 é")["input_ids"]) == len("日本語 é".encode())


def test_a_saved_tokenizer_is_the_same_one(tmp_path):
    tokenizer = train_tokenizer(TEXTS, 320)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    assert loaded.eos_token == loaded.pad_token == END_OF_TEXT


def test_documents_are_packed_with_an_end_after_each(tmp_path):
    tokenizer = train_tokenizer(TEXTS, 300)
    np.save(tmp_path / "tokens.npy", tokenize(TEXTS, tokenizer))
    blocks = TokenBlocks(tmp_path / "tokens.npy", 8, 0.0)
    stream = [*tokenizer(TEXTS[0])["input_ids"], tokenizer.eos_token_id, *tokenizer(TEXTS[1])["input_ids"]]
    got = blocks.batch(np.arange(blocks.train_count))
    assert got.dtype == torch.int64 and got.shape == (blocks.train_count, 8)
    assert got.flatten().tolist() == [*stream, tokenizer.eos_token_id][: got.numel()]


def test_held_out_blocks_are_the_last_ones(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(105, dtype=np.int32))
    blocks = TokenBlocks(tmp_path / "tokens.npy", 10, 0.2)
    assert (blocks.train_count, blocks.eval_count) == (8, 2)
    assert blocks.batch([8, 9])[:, 0].tolist() == [80, 90]


def test_too_little_text_is_refused(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(15, dtype=np.int32))
    with pytest.raises(ValueError, match=r"15 tokens, which is 1 blocks of 10, 1 of them held out"):
        TokenBlocks(tmp_path / "tokens.npy", 10, 0.2)


def test_every_epoch_sees_every_block_once_in_an_order_of_its_own():
    steps = np.concatenate([step_indices(step, 4, 10, seed=0) for step in range(5)])
    first, second = steps[:10], steps[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()
    assert step_indices(2, 4, 10, seed=1).tolist() != step_indices(2, 4, 10, seed=0).tolist()


def test_text_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"empty\.txt has no text"):
        read_texts([str(tmp_path / "empty.txt")])
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        read_texts([str(tmp_path / "latin.txt")])
    with pytest.raises(FileNotFoundError, match=r"text \(--text\): there is no file"):
        read_texts([str(tmp_path / "absent.txt")])
