"""scripts/check_weights.py: files through Flax and back, fewer bits, and offloading, of one family of each block."""

from __future__ import annotations

import pytest

from scripts import check_weights

# Of decoder, experts, latent attention, recurrent and hybrid, encoder, encoder-decoder, tower, images and text.
BLOCKS = ("qwen3", "gpt_oss", "deepseek_v3", "mamba2", "qwen3_next", "bert", "t5", "vit", "whisper", "llava")


@pytest.mark.parametrize("family", BLOCKS)
def test_files_through_flax_and_back(family: str) -> None:
    check_weights.files(family)


@pytest.mark.parametrize("family", BLOCKS)
def test_fewer_bits(family: str) -> None:
    check_weights.quantized(family, ("int8", "mxfp4"))


@pytest.mark.parametrize("family", BLOCKS)
def test_fewer_bits_on_disk(family: str) -> None:
    check_weights.offloaded(family)
