"""MaxText's names and layouts: both ways, and a forward pass written from its layers against transformers'."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
import transformers
from safetensors.torch import load_file

from easytorch.bridge import convert
from easytorch.bridge.checkpoint import open_checkpoint
from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.orbax_trees.tree import OrbaxReader
from easytorch.bridge.schemes.registry import recognise

TINY = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen2": {"hidden_size": 32},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 6},
    "gemma3_text": {"tie_word_embeddings": True, "num_hidden_layers": 8, "query_pre_attn_scalar": 8},
}
TOKENS = np.array([[1, 5, 9, 40, 3, 17, 2]])


def model(family: str, **changes: object) -> torch.nn.Module:
    settings = TINY | FAMILIES[family] | changes
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family].from_dict(settings)
    config._attn_implementation = "eager"
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in made.parameters():
        # Norms at their initial value would hide what is done with them.
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made


def saved(made: torch.nn.Module, folder: Path) -> Path:
    made.save_pretrained(folder)
    return folder


def read_tree(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in flat(ocp.StandardCheckpointer().restore(folder)).items()}


def same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    raw = torch.uint8
    return set(first) == set(second) and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name].view(raw), second[name].view(raw))
        for name in first
    )


@pytest.mark.parametrize("target", ["maxtext", "maxtext-unscanned"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits_come_back(tmp_path, family, target):
    """Bit for bit, factors and all: leaves that are computed with are float32."""
    for dtype in (torch.bfloat16, torch.float16) if family == "llama" else (torch.bfloat16,):
        source = saved(model(family).to(dtype), tmp_path / f"torch-{dtype}")
        convert(source, tmp_path / f"{dtype}", to=target)
        convert(tmp_path / f"{dtype}", tmp_path / f"back-{dtype}", to="torch")
        assert same_weights(source, tmp_path / f"back-{dtype}")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_float32_comes_back_within_a_rounding(tmp_path, family):
    source = saved(model(family), tmp_path / "torch")
    convert(source, tmp_path / "maxtext", to="maxtext")
    assert {leaf.dtype.name for leaf in read_tree(tmp_path / "maxtext").values()} == {"float32"}
    convert(tmp_path / "maxtext", tmp_path / "back", to="torch")
    given, back = (load_file(tmp_path / name / "model.safetensors") for name in ("torch", "back"))
    for name in given:
        # One rounding each way of a factor; of 1 + weight, half a unit in the last place of 1.
        torch.testing.assert_close(back[name], given[name], rtol=2**-23, atol=2**-24)


def test_factors_of_two_are_exact(tmp_path):
    source = saved(model("llama", head_dim=16), tmp_path / "torch")
    convert(source, tmp_path / "maxtext", to="maxtext")
    convert(tmp_path / "maxtext", tmp_path / "back", to="torch")
    assert same_weights(source, tmp_path / "back")


def reference_llama(state: dict[str, np.ndarray], *, interleave: bool) -> dict[str, np.ndarray]:
    """The scanned tree as `llama_or_mistral_ckpt.py` builds it, step by step."""
    heads, kv_heads, size = TINY["num_attention_heads"], TINY["num_key_value_heads"], TINY["head_dim"]

    def turned(kernel):
        half = size // 2
        woven = np.empty_like(kernel)
        woven[..., 0::2], woven[..., 1::2] = kernel[..., :half], kernel[..., half:]
        return woven if interleave else kernel

    def layers(name, change, axis):
        stack = [change(state[f"model.layers.{n}.{name}.weight"]) for n in range(TINY["num_hidden_layers"])]
        return np.stack(stack, axis)

    def split(count):
        return lambda weight: weight.T.reshape(-1, count, size)

    attention, mlp = "decoder/layers/self_attention", "decoder/layers/mlp"
    tree = {
        "token_embedder/embedding": state["model.embed_tokens.weight"],
        "decoder/decoder_norm/scale": state["model.norm.weight"],
        "decoder/logits_dense/kernel": state["lm_head.weight"].T,
        f"{attention}/query/kernel": turned(layers("self_attn.q_proj", split(heads), 1)) / np.sqrt(np.float64(size)),
        f"{attention}/key/kernel": turned(layers("self_attn.k_proj", split(kv_heads), 1)),
        f"{attention}/value/kernel": layers("self_attn.v_proj", split(kv_heads), 1),
        f"{attention}/out/kernel": layers("self_attn.o_proj", lambda w: w.T.reshape(heads, size, -1), 1),
        f"{mlp}/wi_0/kernel": layers("mlp.gate_proj", np.transpose, 1),
        f"{mlp}/wi_1/kernel": layers("mlp.up_proj", np.transpose, 1),
        f"{mlp}/wo/kernel": layers("mlp.down_proj", np.transpose, 1),
        "decoder/layers/pre_self_attention_layer_norm/scale": layers("input_layernorm", np.array, 1),
        "decoder/layers/post_self_attention_layer_norm/scale": layers("post_attention_layernorm", np.array, 1),
    }
    return {f"params/params/{name}": leaf.astype(np.float32) for name, leaf in tree.items()}


@pytest.mark.parametrize(("rope", "interleave"), [(None, True), ("default", False)])
def test_llama_leaf_by_leaf(tmp_path, rope, interleave):
    source = saved(model("llama"), tmp_path / "torch")
    if rope is not None:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"maxtext_rope_type": rope}))
    convert(source, tmp_path / "maxtext", to="maxtext")
    state = {name: tensor.numpy() for name, tensor in load_file(source / "model.safetensors").items()}
    wanted, found = reference_llama(state, interleave=interleave), read_tree(tmp_path / "maxtext")
    assert set(found) == set(wanted)
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotary(x, *, interleaved: bool):
    """(T, N, H), as MaxText's `LLaMARotaryEmbedding` without scaling and `RotaryEmbedding`."""
    size = x.shape[-1]
    angle = np.arange(len(x))[:, None] / 10000.0 ** (2 * np.arange(size // 2) / size)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : size // 2], x[..., size // 2 :])
    turned = first * cos - second * sin, second * cos + first * sin
    return np.stack(turned, -1).reshape(x.shape) if interleaved else np.concatenate(turned, -1)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(x, layer, *, interleaved, factor=1.0, softcap=None):
    """Queries are taken as they stand: their factor is in the kernel, but for families that give one."""
    query, key, value = (np.einsum("td,dnh->tnh", x, layer[name]["kernel"]) for name in ("query", "key", "value"))
    if "bias" in layer["query"]:
        query, key, value = (
            one + layer[name]["bias"] for one, name in ((query, "query"), (key, "key"), (value, "value"))
        )
    if "query_norm" in layer:
        query, key = rms_norm(query, layer["query_norm"]["scale"]), rms_norm(key, layer["key_norm"]["scale"])
    query, key = rotary(query, interleaved=interleaved) * factor, rotary(key, interleaved=interleaved)
    groups = query.shape[1] // key.shape[1]
    scores = np.einsum("tnh,snh->nts", query, np.repeat(key, groups, 1))
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    mixed = np.einsum("nts,snh->tnh", softmax(scores), np.repeat(value, groups, 1))
    return np.einsum("tnh,nhd->td", mixed, layer["out"]["kernel"])


def mlp(x, layer, activation):
    gated = activation(x @ layer["wi_0"]["kernel"]) * (x @ layer["wi_1"]["kernel"])
    return gated @ layer["wo"]["kernel"]


def experts(x, block):
    """Two of the experts for every token, their weights made to sum to one."""
    scores = softmax(x @ block["gate"]["kernel"])
    out = np.zeros_like(x)
    for place, row in enumerate(scores):
        best = np.argsort(-row)[:2]
        for expert in best:
            gated = silu(x[place] @ block["wi_0"][expert]) * (x[place] @ block["wi_1"][expert])
            out[place] += row[expert] / row[best].sum() * (gated @ block["wo"][expert])
    return out


def forward(family: str, params: dict, tokens: np.ndarray) -> np.ndarray:
    """Logits of MaxText's decoder from an unscanned tree, in float64; `models/llama2.py`, `mixtral.py`, `qwen3.py`."""
    x = params["token_embedder"]["embedding"][tokens]
    factor = TINY["head_dim"] ** -0.5 if "qwen" in family else 1.0
    names = ("pre_self_attention_layer_norm", "post_self_attention_layer_norm")
    if family == "gemma":
        names = ("pre_self_attention_norm", "pre_ffw_norm")
    for number in range(TINY["num_hidden_layers"]):
        layer = params["decoder"][f"layers_{number}"]
        before, after = (layer[name]["scale"] for name in names)
        x = x + attention(rms_norm(x, before), layer["self_attention"], interleaved=family == "llama", factor=factor)
        y = rms_norm(x, after)
        block = layer.get("MoeBlock_0", layer.get("moe_block"))
        x = x + (mlp(y, layer["mlp"], gelu if family == "gemma" else silu) if block is None else experts(y, block))
    x = rms_norm(x, params["decoder"]["decoder_norm"]["scale"])
    if family == "gemma":
        # `normalize_embedding_logits`: the factor of the embedding is taken off again.
        return x @ params["token_embedder"]["embedding"].T / np.sqrt(TINY["hidden_size"])
    return x @ params["decoder"]["logits_dense"]["kernel"]


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma"])
def test_forward(tmp_path, family):
    changes = {"rms_norm_eps": 1e-6, **({"hidden_size": 32} if family == "qwen2" else {})}
    made = model(family, **changes)
    convert(saved(made, tmp_path / "torch"), tmp_path / "maxtext", to="maxtext-unscanned")
    tree = nested({name: leaf.astype(np.float64) for name, leaf in read_tree(tmp_path / "maxtext").items()})
    with torch.no_grad():
        wanted = made(torch.from_numpy(TOKENS)).logits[0].numpy()
    logits = forward(family, tree["params"]["params"], TOKENS[0])
    np.testing.assert_allclose(logits, wanted, rtol=2e-4, atol=2e-5)


def test_a_run_of_maxtext(tmp_path):
    """`<run>/checkpoints/<step>/items`: beside the optimizer, stacked along the first axis, vocabulary padded."""
    source = saved(model("llama"), tmp_path / "torch")
    convert(source, tmp_path / "maxtext", to="maxtext")
    leaves = read_tree(tmp_path / "maxtext")
    for name in leaves:
        if "/decoder/layers/" in name:
            leaves[name] = np.moveaxis(leaves[name], 1, 0)
    embedding = "params/params/token_embedder/embedding"
    leaves[embedding] = np.pad(leaves[embedding], ((0, 14), (0, 0)))
    head = "params/params/decoder/logits_dense/kernel"
    leaves[head] = np.pad(leaves[head], ((0, 0), (0, 14)))
    tree = nested(leaves) | {"opt_state": {"mu": nested(leaves)}, "step": np.int32(3)}
    with ocp.CheckpointManager(tmp_path / "run/checkpoints", item_names=("items",)) as manager:
        manager.save(3, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))
        manager.wait_until_finished()
    report = convert(tmp_path / "run/checkpoints", tmp_path / "back", to="torch", config=source)
    notes = " ".join(report.notes)
    assert "opt_state, step" in notes
    for leaf in ("token_embedder/embedding", "decoder/logits_dense/kernel"):
        assert f"elements of {leaf} are left out" in notes
    given, back = (load_file(tmp_path / name / "model.safetensors") for name in ("torch", "back"))
    assert set(given) == set(back)
    for name in given:
        torch.testing.assert_close(back[name], given[name], rtol=2**-23, atol=0)


def test_whose_names_they_are(tmp_path):
    def scheme(**shapes):
        return recognise(
            {name.replace(".", "/"): TensorInfo("", s, "float32") for name, s in shapes.items()}, None
        ).name

    common = {"token_embedder.embedding": (5, 4), "decoder.decoder_norm.scale": (4,)}
    query = "self_attention.query.kernel"
    assert scheme(**common, **{f"decoder.layers.{query}": (4, 2, 2, 2)}) == "maxtext"
    assert scheme(**common, **{f"decoder.layers_0.{query}": (4, 2, 2)}) == "maxtext-unscanned"
    assert scheme(**common, **{f"decoder.layers_0.{query}": (4, 4)}) not in ("maxtext", "maxtext-unscanned")


def test_other_families_are_refused(tmp_path, tiny_torch):
    with pytest.raises(CheckpointError, match="known here for llama"):
        convert(tiny_torch, tmp_path / "out", to="maxtext")
    assert not (tmp_path / "out").exists()


def test_no_room_for_the_parts_of_a_stack(tmp_path, monkeypatch):
    source = saved(model("llama"), tmp_path / "torch")
    convert(source, tmp_path / "maxtext", to="maxtext")
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr("easytorch.bridge.storage.temp_arrays._LEAST_BYTES", 1)

    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("easytorch.bridge.storage.temp_arrays.tempfile.TemporaryFile", full)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/\.back\..*no room to put \d+ bytes aside"):
        convert(tmp_path / "maxtext", tmp_path / "back", to="torch")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["maxtext", "torch"]


def test_a_stack_is_read_once(tmp_path, monkeypatch):
    """However many layers are in it, and in whatever order they are written."""
    source = saved(model("llama"), tmp_path / "torch")
    convert(source, tmp_path / "maxtext", to="maxtext")
    read, seen = OrbaxReader.read, []
    monkeypatch.setattr(OrbaxReader, "read", lambda self, name: seen.append(name) or read(self, name))
    monkeypatch.setattr("easytorch.bridge.storage.temp_arrays._LEAST_BYTES", 1)
    convert(tmp_path / "maxtext", tmp_path / "back", to="torch")
    assert sorted(seen) == sorted(read_tree(tmp_path / "maxtext"))
    given, back = (load_file(tmp_path / name / "model.safetensors") for name in ("torch", "back"))
    assert all(torch.allclose(given[name], back[name], rtol=1e-6) for name in given)


@pytest.mark.parametrize("layers", [1, 5, 6, 7])
def test_gemma_3_of_any_depth_comes_back(tmp_path, layers):
    """Six layers are scanned at a time; of fewer there is only what is left over."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    config = transformers.Gemma3TextConfig(**sizes, num_hidden_layers=layers, vocab_size=12)
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "maxtext", to="maxtext")
    with open_checkpoint(tmp_path / "maxtext") as checkpoint:
        assert checkpoint.scheme == "maxtext"
        assert len(checkpoint.in_scheme("torch").reader.tensors) == 13 * layers + 2


def test_queries_carry_the_scale_that_the_config_says(tmp_path):
    """MaxText scales the weights of Gemma 2's queries, not the scores: by what need not be head_dim."""
    for scalar in (5, 12):
        made = model("gemma2", query_pre_attn_scalar=scalar)
        convert(saved(made, tmp_path / f"torch{scalar}"), tmp_path / f"maxtext{scalar}", to="maxtext")
        tree = read_tree(tmp_path / f"maxtext{scalar}")
        leaves = [leaf.astype(np.float64) for name, leaf in tree.items() if name.endswith("query/kernel")]
        weights = [one for name, one in made.named_parameters() if name.endswith("q_proj.weight")]
        scaled = sum(float((leaf**2).sum()) for leaf in leaves)
        plain = sum(float(one.detach().double().square().sum()) for one in weights)
        assert leaves and scaled == pytest.approx(plain / scalar, rel=1e-5)
