"""Gemma as DeepMind keeps it: every layout, and a forward pass written from its modules against transformers'."""

import json
import re
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from easytorch.bridge import convert
from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.schemes.gemma_config import gemma_config

TINY = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
# Name -> model_type and what differs from `TINY`.
MODELS = {
    "gemma MQA": ("gemma", {"num_key_value_heads": 1}),
    "gemma MHA": ("gemma", {"num_key_value_heads": 4}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8}),
    "gemma3_text": ("gemma3_text", {"num_hidden_layers": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3", {}),
}
TOKENS = np.array([1, 5, 9, 40, 3, 17, 2])


def model(name: str) -> torch.nn.Module:
    family, changes = MODELS[name]
    settings = TINY | changes
    if family == "gemma3":
        text = settings | {"model_type": "gemma3_text"}
        settings = {"text_config": text, "vision_config": VISION, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family].from_dict(settings)
    config._attn_implementation = "eager"
    kind = transformers.AutoModelForImageTextToText if family == "gemma3" else transformers.AutoModelForCausalLM
    made = kind.from_config(config).eval()
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    model(name).to(dtype).save_pretrained(folder)
    return folder


def read_tree(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in flat(ocp.StandardCheckpointer().restore(folder)).items()}


def same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return set(first) == set(second) and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def released(leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names Gemma was released under; `_compat.flatten_and_remap_params` of the library."""

    def name(path):
        if path.startswith("vision_encoder/"):
            return path.replace("vision_encoder", "SigLiPFromPatches_0", 1)
        return f"transformer/{path}" + ("/w" if path.endswith(("mlp/linear", "mlp/gating_einsum")) else "")

    return {name(path): leaf for path, leaf in leaves.items()}


def semi_flat(leaves: dict[str, np.ndarray]) -> dict:
    """`{"transformer/layer_0/attn/q_einsum": {"w": ...}}`."""
    tree: dict = {}
    for path, leaf in leaves.items():
        where, _, last = path.rpartition("/")
        tree.setdefault(where, {})[last] = leaf
    return tree


def stacked(leaves: dict[str, np.ndarray], pattern: int) -> dict[str, np.ndarray]:
    """Layers that attend alike along a first axis; `_compat.stack_params` of the library."""
    made: dict = {}
    for path, leaf in leaves.items():
        found = re.match(r"(transformer/)layer_(\d+)(/.*)", path)
        if found is None:
            made[path] = leaf
            continue
        name = f"{found[1]}stacked_layers/attention_type_{int(found[2]) % pattern}{found[3]}"
        made.setdefault(name, []).append((int(found[2]), leaf))
    return {
        path: np.stack([leaf for _, leaf in sorted(value, key=lambda one: one[0])])
        if isinstance(value, list)
        else value
        for path, value in made.items()
    }


def save(folder: Path, tree: dict) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_comes_back(tmp_path, name):
    source = saved(name, tmp_path / "torch", torch.bfloat16)
    convert(source, tmp_path / "nested", to="gemma")
    leaves = read_tree(tmp_path / "nested")
    pattern = 6 if "gemma3" in name else 2
    layouts = {
        "nested": tmp_path / "nested",
        "flat": save(tmp_path / "flat", semi_flat(released(leaves))),
        "stacked": save(tmp_path / "stacked", semi_flat(stacked(released(leaves), pattern))),
        "kauldron": save(
            tmp_path / "kauldron", {"params": nested(leaves), "opt_state": {"m": np.ones(2)}, "step": np.int32(1)}
        ),
    }
    for layout, folder in layouts.items():
        convert(folder, tmp_path / f"back-{layout}", to="torch", config=source)
        assert same_weights(source, tmp_path / f"back-{layout}"), layout


def test_shapes(tmp_path):
    """The shapes of the library's parameters: 4 heads of 8, 2 for keys, width 24, 40 inside."""
    leaves = {}
    for name in MODELS:
        convert(saved(name, tmp_path / f"torch {name}"), tmp_path / name, to="gemma")
        leaves[name] = {path: leaf.shape for path, leaf in read_tree(tmp_path / name).items()}
    assert leaves["gemma2"]["layer_3/attn/q_einsum/w"] == (4, 24, 8)
    assert leaves["gemma2"]["layer_3/attn/kv_einsum/w"] == (2, 2, 24, 8)
    assert leaves["gemma2"]["layer_3/attn/attn_vec_einsum/w"] == (4, 8, 24)
    assert leaves["gemma2"]["layer_3/mlp/gating_einsum"] == (2, 40, 24)
    assert leaves["gemma2"]["layer_3/mlp/linear"] == (40, 24)
    assert leaves["gemma MQA"]["layer_0/attn/kv_einsum/w"] == (2, 1, 24, 8)
    assert leaves["gemma MQA"]["layer_0/mlp/gating_einsum"] == (2, 24, 40)
    assert leaves["gemma MHA"]["layer_0/attn/qkv_einsum/w"] == (3, 4, 24, 8)
    assert leaves["gemma3_text"]["layer_7/attn/_query_norm/scale"] == (8,)
    tower = "vision_encoder/siglip_encoder/Transformer/encoderblock_1/MultiHeadDotProductAttention_0"
    assert leaves["gemma3"][f"{tower}/query/kernel"] == (16, 2, 8)
    assert leaves["gemma3"][f"{tower}/out/kernel"] == (2, 8, 16)
    assert leaves["gemma3"]["embedder/mm_input_projection/w"] == (16, 24)


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + scale)


def rope(x, base):
    """(T, N, H): `gm/math/_positional_embeddings.py`."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] / base ** (2 * np.arange(half) / x.shape[-1])
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1
    )


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(x, p, base, softcap):
    if "qkv_einsum" in p:
        query, key, value = np.einsum("td,sndh->stnh", x, p["qkv_einsum"]["w"])
    else:
        query = np.einsum("td,ndh->tnh", x, p["q_einsum"]["w"])
        key, value = np.einsum("td,ckdh->ctkh", x, p["kv_einsum"]["w"])
    if "_query_norm" in p:
        query, key = rms_norm(query, p["_query_norm"]["scale"]), rms_norm(key, p["_key_norm"]["scale"])
    query, key = rope(query, base) * TINY["head_dim"] ** -0.5, rope(key, base)
    groups = query.shape[1] // key.shape[1]
    logits = np.einsum("tnh,snh->nts", query, np.repeat(key, groups, 1))
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    logits = np.where(np.tri(len(x), dtype=bool), logits, -np.inf)
    encoded = np.einsum("nts,snh->tnh", softmax(logits), np.repeat(value, groups, 1))
    return np.einsum("tnh,nhd->td", encoded, p["attn_vec_einsum"]["w"])


def feed_forward(x, p):
    # Gemma 1's is (2, D, F), the others' (2, F, D).
    equation = "td,cdf->ctf" if p["gating_einsum"].shape[1] == TINY["hidden_size"] else "td,cfd->ctf"
    gate, up = np.einsum(equation, x, p["gating_einsum"])
    gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return (gelu * up) @ p["linear"]


def forward(family: str, params: dict) -> np.ndarray:
    """Logits in float64 by `gm/nn/_modules.py` and `_transformer.py`, of a nested tree."""
    table = params["embedder"]["input_embedding"]
    x = table[TOKENS] * np.sqrt(TINY["hidden_size"])
    for number in range(sum(name.startswith("layer_") for name in params)):
        layer = params[f"layer_{number}"]
        local = family == "gemma3_text" and number % 6 != 5
        base = 1e6 if family == "gemma3_text" and not local else 1e4
        y = attention(
            rms_norm(x, layer["pre_attention_norm"]["scale"]), layer["attn"], base, 50.0 if family == "gemma2" else None
        )
        x = x + (rms_norm(y, layer["post_attention_norm"]["scale"]) if "post_attention_norm" in layer else y)
        y = feed_forward(rms_norm(x, layer["pre_ffw_norm"]["scale"]), layer["mlp"])
        x = x + (rms_norm(y, layer["post_ffw_norm"]["scale"]) if "post_ffw_norm" in layer else y)
    logits = rms_norm(x, params["final_norm"]["scale"]) @ table.T
    return 30 * np.tanh(logits / 30) if family == "gemma2" else logits


@pytest.mark.parametrize("name", ["gemma MQA", "gemma MHA", "gemma2", "gemma3_text"])
def test_forward(tmp_path, name):
    made = model(name)
    made.save_pretrained(tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "gemma", to="gemma")
    tree = nested({path: leaf.astype(np.float64) for path, leaf in read_tree(tmp_path / "gemma").items()})
    with torch.no_grad():
        wanted = made(torch.from_numpy(TOKENS[None])).logits[0].numpy()
    np.testing.assert_allclose(forward(MODELS[name][0], tree), wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["gemma MQA", "gemma2"])
def test_no_config_is_needed(tmp_path, name):
    """The shapes tell the sizes, the generation the rest: the same logits."""
    made = model(name)
    made.save_pretrained(tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "made", to="gemma")
    bare = save(tmp_path / "bare", nested(read_tree(tmp_path / "made")))
    convert(bare, tmp_path / "back", to="torch")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    with torch.no_grad():
        tokens = torch.from_numpy(TOKENS[None])
        torch.testing.assert_close(again(tokens).logits, made(tokens).logits)


def test_gemma3_of_unknown_size_needs_a_config(tmp_path):
    convert(saved("gemma3_text", tmp_path / "torch"), tmp_path / "made", to="gemma")
    bare = save(tmp_path / "bare", nested(read_tree(tmp_path / "made")))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        convert(bare, tmp_path / "back", to="torch")


def published(layers, heads, kv_heads, size, width, inner, words, vision=False):
    """Path -> shape of a Gemma 3 as published; sizes of `gm/nn/_gemma.py`."""
    shapes = {"embedder/input_embedding": (words, width), "final_norm/scale": (width,)}
    for number in range(layers):
        here = f"layer_{number}"
        shapes |= {f"{here}/{norm}/scale": (width,) for norm in ("pre_attention_norm", "post_attention_norm")}
        shapes |= {
            f"{here}/attn/_query_norm/scale": (size,),
            f"{here}/attn/attn_vec_einsum/w": (heads, size, width),
            f"{here}/attn/kv_einsum/w": (2, kv_heads, width, size),
            f"{here}/mlp/linear": (inner, width),
        }
    root = "SigLiPFromPatches_0/siglip_encoder"
    if vision:
        shapes |= {f"{root}/embedding/kernel": (14, 14, 3, 1152), f"{root}/pos_embedding": (1, 4096, 1152)}
        for number in range(27):
            block = f"{root}/Transformer/encoderblock_{number}"
            shapes |= {
                f"{block}/LayerNorm_0/scale": (1152,),
                f"{block}/MlpBlock_0/Dense_0/kernel": (1152, 4304),
                f"{block}/MultiHeadDotProductAttention_0/query/kernel": (1152, 16, 72),
            }
    return shapes


def test_published_gemma_3():
    """The configs of the 1B and the 27B are what transformers has for them."""
    small = gemma_config(published(26, 4, 1, 256, 1152, 6912, 262144))
    config = transformers.CONFIG_MAPPING[small["model_type"]].from_dict(small)
    assert (config.model_type, config.sliding_window, config.query_pre_attn_scalar) == ("gemma3_text", 512, 256)
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (26, 1152, 256)
    assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2
    large = gemma_config(published(62, 32, 16, 128, 5376, 21504, 262144, vision=True))
    config = transformers.CONFIG_MAPPING[large["model_type"]].from_dict(large)
    text, vision = config.text_config, config.vision_config
    assert (text.sliding_window, text.query_pre_attn_scalar, text.num_key_value_heads) == (1024, 168, 16)
    rope = text.rope_parameters
    assert (rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"]) == (1e6, 1e4)
    assert (rope["full_attention"]["rope_type"], rope["full_attention"]["factor"]) == ("linear", 8.0)
    assert rope["sliding_attention"]["rope_type"] == "default"
    assert (vision.image_size, vision.patch_size, vision.num_hidden_layers) == (896, 14, 27)
    assert (vision.hidden_size, vision.num_attention_heads, vision.intermediate_size) == (1152, 16, 4304)


def test_padded_vocabulary(tmp_path):
    """DeepMind's Gemma 2 has 256128 rows, transformers' 256000."""
    source = saved("gemma2", tmp_path / "torch")
    state = load_file(source / "model.safetensors")
    name = "model.embed_tokens.weight"
    longer = dict(state, **{name: torch.cat([state[name], torch.zeros(6, 24)])})
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "longer").mkdir()
    save_file(longer, tmp_path / "longer/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "longer/config.json").write_text(json.dumps(config | {"vocab_size": 56}))
    convert(tmp_path / "longer", tmp_path / "gemma", to="gemma")
    (tmp_path / "gemma/config.json").unlink()
    report = convert(tmp_path / "gemma", tmp_path / "back", to="torch", config=source)
    assert any("144 of" in note and "embed_tokens.weight is (50, 24)" in note for note in report.notes)
    assert same_weights(source, tmp_path / "back")
