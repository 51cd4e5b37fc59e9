"""Every rope type against transformers' own functions, bit for bit, and the tables against its models' embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from easytorch.kernels.rotary.frequencies import ROPE_TYPES, Frequencies, cos_sin, inverse_frequencies

utils = pytest.importorskip("transformers.modeling_rope_utils")

TRAINED = 32
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, part": {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, part": {"rope_type": "dynamic", "factor": 3.0, "partial_rotary_factor": 0.25},
    "yarn": {"rope_type": "yarn", "factor": 8.0},
    "yarn, part": {"rope_type": "yarn", "factor": 8.0, "partial_rotary_factor": 0.5},
    "yarn, betas": {"rope_type": "yarn", "factor": 40.0, "beta_fast": 16, "beta_slow": 2},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn, untruncated": {"rope_type": "yarn", "factor": 8.0, "truncate": False},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.8},
    "yarn, factor of the lengths": {"rope_type": "yarn", "factor": None},
    "yarn, not stretched": {"rope_type": "yarn", "factor": 1.0},
    "longrope": {"rope_type": "longrope"},
    "longrope, factor": {"rope_type": "longrope", "factor": 8.0},
    "longrope, attention factor": {"rope_type": "longrope", "attention_factor": 1.3},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama3, part": {
        "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
        "partial_rotary_factor": 0.5,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional, factor": {"rope_type": "proportional", "factor": 8.0, "partial_rotary_factor": 0.5},
    "proportional, whole": {"rope_type": "proportional"},
}  # fmt: skip
HEAD_DIM = 24


def _config(name: str, theta: float = 10_000.0) -> Any:
    from transformers import LlamaConfig

    rope = {"rope_theta": theta, **ROPES[name]}
    pairs = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    if rope["rope_type"] == "longrope":
        rope |= {"short_factor": [1.0 + 0.1 * i for i in range(pairs)], "long_factor": [1.0 + i for i in range(pairs)]}
    if rope["rope_type"] in ("yarn", "longrope", "llama3"):
        rope["original_max_position_embeddings"] = TRAINED
    return LlamaConfig(
        hidden_size=2 * HEAD_DIM, num_attention_heads=2, head_dim=HEAD_DIM, max_position_embeddings=4 * TRAINED,
        rope_parameters=rope,
    )  # fmt: skip


def test_every_rope_type_of_transformers_is_here() -> None:
    assert set(utils.ROPE_INIT_FUNCTIONS) | {"default"} <= set(ROPE_TYPES)
    assert {rope["rope_type"] for rope in ROPES.values()} | {"default"} == set(ROPE_TYPES)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("seq_len", [None, 8, TRAINED, TRAINED + 1, 4 * TRAINED + 5, 1000])
@pytest.mark.parametrize("name", ROPES)
def test_the_bits_of_transformers(name: str, seq_len: int | None, theta: float) -> None:
    config = _config(name, theta)
    inverse, factor = utils.ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, None, seq_len=seq_len)
    for length in [seq_len] if seq_len is None else [seq_len, torch.tensor(seq_len)]:
        got = inverse_frequencies(
            config.rope_parameters, head_dim=HEAD_DIM, max_position_embeddings=4 * TRAINED, seq_len=length
        )
        assert got.attention_factor == factor
        assert got.inverse.dtype == torch.float32
        # as a tensor the length makes the base of dynamic a float32; as a number it is a float64
        if isinstance(length, torch.Tensor):
            torch.testing.assert_close(got.inverse, inverse, rtol=1e-6, atol=0.0)
        else:
            assert torch.equal(got.inverse, inverse)


def test_the_default_type() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = _config("linear")
    expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    got = inverse_frequencies({"rope_theta": 1e4}, head_dim=HEAD_DIM, max_position_embeddings=TRAINED)
    assert torch.equal(got.inverse, expected) and got.attention_factor == factor
    part = inverse_frequencies(
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, head_dim=HEAD_DIM, max_position_embeddings=TRAINED
    )
    assert part.inverse.shape == (HEAD_DIM // 4,)


@pytest.mark.parametrize("name", ["linear", *[n for n in ROPES if n.startswith(("dynamic", "longrope", "yarn, m"))]])
def test_the_layer_follows_the_length_as_transformers_does(name: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from easytorch.layers.rotary import PartialRotaryEmbedding

    config = _config(name)
    ours, theirs = PartialRotaryEmbedding(config), LlamaRotaryEmbedding(config)
    for length in (5, TRAINED, TRAINED + 1, 4 * TRAINED, 4 * TRAINED + 7, 600, 6):  # grows, then starts again
        positions = torch.arange(length)[None].repeat(2, 1)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.empty(0, dtype=dtype)
            torch.testing.assert_close(ours(x, positions), theirs(x, positions), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_the_length_dependence_compiles(name: str) -> None:
    from easytorch.layers.rotary import RotaryEmbedding

    module = RotaryEmbedding(_config(name))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (8, 300):
        positions = torch.arange(length)[None]
        torch.testing.assert_close(compiled(torch.empty(0), positions), module(torch.empty(0), positions))


@pytest.mark.parametrize(("model", "interleaved", "section"), [
    ("qwen2_vl", False, [6, 3, 3]), ("qwen3_vl", True, [6, 3, 3]), ("qwen3_vl", True, [16, 8, 8]),
    ("qwen3_vl", True, [2, 1, 1]),
])  # fmt: skip
def test_multimodal_sections(model: str, interleaved: bool, section: list[int]) -> None:
    from importlib import import_module

    classes = {"qwen2_vl": ("Qwen2VLTextConfig", "Qwen2VLRotaryEmbedding"),
               "qwen3_vl": ("Qwen3VLTextConfig", "Qwen3VLTextRotaryEmbedding")}  # fmt: skip
    config_name, module_name = classes[model]
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    config = getattr(import_module(f"transformers.models.{model}.configuration_{model}"), config_name)(
        hidden_size=2 * HEAD_DIM, num_attention_heads=2, head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": section},
    )  # fmt: skip
    theirs = getattr(module, module_name)(config)
    positions = torch.randint(0, 90, (3, 2, 7))
    frequencies = Frequencies(theirs.inv_freq, theirs.attention_scaling)
    got = cos_sin(positions, frequencies, mrope_section=section, mrope_interleaved=interleaved)
    torch.testing.assert_close(got, theirs(torch.empty(0), positions), rtol=0, atol=0)


def test_errors() -> None:
    sizes = {"head_dim": 8, "max_position_embeddings": 64}
    with pytest.raises(ValueError, match=r"no rope type is called 'yaml'; known: default, linear, .*proportional"):
        inverse_frequencies({"rope_type": "yaml", "rope_theta": 1e4}, **sizes)
    with pytest.raises(ValueError, match="rope type 'linear' needs 'factor' in rope_parameters"):
        inverse_frequencies({"rope_type": "linear", "rope_theta": 1e4}, **sizes)
    half = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.4}
    with pytest.raises(ValueError, match="'linear' turns 3 of the 8 numbers of a head, which must be pairs"):
        inverse_frequencies(half, **sizes)
    with pytest.raises(ValueError, match="'dynamic' turns 2 of the 8 numbers of a head, and needs four at least"):
        inverse_frequencies(half | {"rope_type": "dynamic", "partial_rotary_factor": 0.25}, **sizes)
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}
    with pytest.raises(ValueError, match=r"turns 8 of the 8 .*: long_factor must have 4 entries, got 3"):
        inverse_frequencies(longrope, **sizes)
    frequencies = inverse_frequencies({"rope_theta": 1e4}, **sizes)
    with pytest.raises(ValueError, match=r"mrope_section \[1, 1, 1\] must add up to the 4 pairs"):
        cos_sin(torch.zeros(3, 1, 5), frequencies, mrope_section=[1, 1, 1])
    with pytest.raises(ValueError, match=r"position_ids must be \(3, ..., T\), got \(2, 1, 5\)"):
        cos_sin(torch.zeros(2, 1, 5), frequencies, mrope_section=[2, 1, 1])
