"""EasyDeL's arguments of `generate`, `save_pretrained` and `push_to_hub`; what is JAX's alone is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import easytorch
from easytorch import protocol

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
IDS = torch.tensor([[5, 9, 33]])


def models() -> dict[str, Any]:
    torch.manual_seed(0)
    llama = easytorch.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
    mpt = easytorch.AutoModelForCausalLM.from_config(
        transformers.MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=97)
    )
    return {"llama": llama.eval(), "mpt": mpt.eval()}


def test_a_key_seeds_one_call() -> None:
    made = models()
    for name, call in (
        ("llama", made["llama"].generate),
        ("mpt", lambda *a, **k: protocol.generate(made["mpt"], *a, **k)),
    ):
        settings = {"max_new_tokens": 8, "do_sample": True, "pad_token_id": 0, "eos_token_id": None}
        state = torch.get_rng_state()
        first, again, other = (call(IDS, prng_key=key, **settings) for key in (1, 1, 2))
        generator = call(IDS, prng_key=torch.Generator().manual_seed(3), **settings)
        assert torch.equal(first, again) and not torch.equal(first, other) and generator.shape == first.shape, name
        assert torch.equal(torch.get_rng_state(), state)
        with pytest.raises(TypeError, match="a key of JAX seeds nothing"):
            call(IDS, prng_key=np.zeros(2, np.uint32), **settings)
        with pytest.raises(ValueError, match=r"trace is JAX's alone.*torch\.compile"):
            call(IDS, trace=True, **settings)
    vit = transformers.ViTConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=4)
    with pytest.raises(ValueError, match="generates nothing"):
        protocol.generate(easytorch.AutoModelForImageClassification.from_config(vit), IDS)


def test_files_in_another_dtype_and_of_a_step(tmp_path: Any) -> None:
    for name, model in models().items():
        before = {key: one.clone() for key, one in model.state_dict().items()}
        protocol.save_pretrained(model, tmp_path / name, float_dtype="bfloat16", step=3)
        folder = tmp_path / name / "checkpoint-3"
        saved = load_file(folder / "model.safetensors")
        assert {one.dtype for one in saved.values()} == {torch.bfloat16}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        assert all(torch.equal(one, before[key].bfloat16()) for key, one in saved.items())
        assert name == "mpt" or "lm_head.weight" not in saved  # tied still
        assert all(torch.equal(one, before[key]) for key, one in model.state_dict().items())
        again = type(model).from_pretrained(folder)
        assert again.dtype == torch.bfloat16
    llama = models()["llama"]
    with pytest.raises(ValueError, match="gather_fns is JAX's alone"):
        llama.save_pretrained(tmp_path / "no", gather_fns={})
    with pytest.raises(ValueError, match="no floating dtype"):
        llama.save_pretrained(tmp_path / "no", float_dtype="int8")
    with pytest.raises(ValueError, match="step=-1"):
        llama.save_pretrained(tmp_path / "no", step=-1)
    assert not (tmp_path / "no").exists()


def test_the_hub_gets_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def upload(self: Any, repo_id: str, **kwargs: Any) -> str:
        calls.append((self.dtype, repo_id, kwargs["private"], kwargs["commit_message"]))
        return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr(transformers.PreTrainedModel, "push_to_hub", upload)
    for model in models().values():
        assert protocol.push_to_hub(model, "me/model", None, "first", True, float_dtype=torch.float16).endswith(
            "me/model"
        )
        assert model.dtype == torch.float32
    llama = models()["llama"]
    llama.push_to_hub("me/model", private=False, commit_message=None)
    assert calls == [(torch.float16, "me/model", True, "first")] * 2 + [(torch.float32, "me/model", False, None)]
    for name in ("gather_fns", "use_temp_dir", "mismatch_allowed"):
        with pytest.raises(ValueError, match=f"{name} is JAX's alone"):
            llama.push_to_hub("me/model", **{name: True})
