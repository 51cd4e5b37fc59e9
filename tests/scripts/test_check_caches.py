"""A sample of `scripts/check_caches.py`: a native model, one with recurrent layers, and a class of transformers."""

from __future__ import annotations

import pytest

from tests.scripts_loaded import load_script


def test_every_kind_of_cache(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("check_caches")
    caches = ["StaticCache", "QuantizedCache_fp8", "ours_static", "ours_int8", "pages"]
    for models, ways in ((["gemma2", "apertus"], ["beams", "turns"]), (["qwen3_next", "t5"], ["lookup", "several"])):
        arguments = ["--models", *models, "--caches", *caches, "--ways", *ways]
        assert script.main(arguments) == 0, capsys.readouterr().out
    arguments = ["--models", "gemma2", "qwen3_next", "deepseek_v3", "mamba2", "t5", "--caches", "default", "--ways"]
    assert script.main([*arguments, "outputs", "assisted"]) == 0, capsys.readouterr().out
    inner = script.generate  # another token of ours is noticed
    script.generate = lambda model, *rest: [
        one + type(model).__module__.startswith("easytorch") for one in inner(model, *rest)
    ]
    assert script.main(["--models", "llama", "--caches", "ours_int8", "--ways", "greedy"]) == 1
