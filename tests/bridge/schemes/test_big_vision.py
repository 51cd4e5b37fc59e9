"""Google's ViT and SigLIP npz files: computed with flax.linen on one side and transformers on the other."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict

from easytorch.bridge import convert
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.numpy_files.npz import Npz
from easytorch.bridge.schemes.big_vision_tree import without_class_position

# Two heads of six, so that no two sizes of a kernel are alike.
WIDTH, HEADS, LAYERS, MLP, PATCH, SIDE, CLASSES, WORDS, LENGTH, OUT = 12, 2, 3, 20, 4, 12, 5, 23, 7, 12


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        x = nn.gelu(nn.Dense(MLP)(x))
        return nn.Dense(width)(x)


class Block(nn.Module):
    """The layers of big_vision's `Encoder1DBlock`, named as flax names them by itself."""

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(y, y)
        return x + MlpBlock()(nn.LayerNorm()(x)), None


class Encoder(nn.Module):
    scanned: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scanned:
            stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, _ = stack(name="encoderblock")(x, None)
        else:
            for number in range(LAYERS):
                x, _ = Block(name=f"encoderblock_{number}")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


class Pool(nn.Module):
    @nn.compact
    def __call__(self, x):
        probe = self.param("probe", nn.initializers.normal(), (1, 1, x.shape[-1]))
        x = nn.MultiHeadDotProductAttention(num_heads=HEADS)(jnp.tile(probe, [len(x), 1, 1]), x)
        return (x + MlpBlock()(nn.LayerNorm()(x)))[:, 0]


class Positions(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param("pos_embedding", nn.initializers.normal(), (1, *x.shape[1:]))


class TokenEncoder(Encoder):
    @nn.compact
    def __call__(self, x):
        x = Positions(name="posembed_input")(x)
        for number in range(LAYERS):
            x, _ = Block(name=f"encoderblock_{number}")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


def patches(image):
    x = nn.Conv(WIDTH, (PATCH, PATCH), strides=(PATCH, PATCH), padding="VALID", name="embedding")(image)
    return x.reshape(len(x), -1, WIDTH)


class Vit(nn.Module):
    """vision_transformer's: the class token first, then positions for it and the patches."""

    pre_logits: bool = False

    @nn.compact
    def __call__(self, image):
        x = patches(image)
        token = self.param("cls", nn.initializers.normal(), (1, 1, WIDTH))
        x = TokenEncoder(name="Transformer")(jnp.concatenate([jnp.tile(token, [len(x), 1, 1]), x], 1))
        if self.pre_logits:
            return nn.tanh(nn.Dense(WIDTH, name="pre_logits")(x[:, 0]))
        return nn.Dense(CLASSES, name="head")(x[:, 0])


class Image(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, image):
        x = patches(image)
        x = x + self.param("pos_embedding", nn.initializers.normal(), (1, *x.shape[1:]))
        return Pool(name="MAPHead_0")(Encoder(self.scanned, name="Transformer")(x))


class Text(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, words):
        x = nn.Embed(WORDS, WIDTH)(words)
        x = x + self.param("pos_embedding", nn.initializers.normal(), (1, *x.shape[1:]))
        return nn.Dense(OUT, name="head")(Encoder(self.scanned, name="Encoder_0")(x)[:, -1])


class Siglip(nn.Module):
    scanned: bool = False

    @nn.compact
    def __call__(self, image, words):
        one, other = Image(self.scanned, name="img")(image), Text(self.scanned, name="txt")(words)
        one, other = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (one, other))
        scale = self.param("t", nn.initializers.ones, (1,))
        return one @ other.T * jnp.exp(scale) + self.param("b", nn.initializers.normal(), (1,))


RNG = np.random.default_rng(0)
PICTURES = RNG.standard_normal((2, SIDE, SIDE, 3)).astype(np.float32)
TEXTS = RNG.integers(2, WORDS, (2, LENGTH))


def random_params(model, *inputs):
    """Parameters of which none is zero or one, and the output with them."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))["params"]
    params = jax.tree.map(lambda leaf: RNG.standard_normal(leaf.shape).astype(np.float32) / 2, shapes)
    output = jax.jit(model.apply)({"params": params}, *inputs)
    return flatten_dict(params, sep="/"), np.asarray(output)


def before_linen(leaves):
    """The names from before flax.linen, as in the published ViT files."""
    changes = {"MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1", "MlpBlock_0": "MlpBlock_3"}
    changes["LayerNorm_1"] = "LayerNorm_2"
    return {"/".join(changes.get(part, part) for part in name.split("/")): leaf for name, leaf in leaves.items()}


def torch_inputs():
    return {"pixel_values": torch.from_numpy(PICTURES.transpose(0, 3, 1, 2).copy())}


def same_leaves(file, leaves):
    found = np.load(file)
    assert set(found.files) == set(leaves)
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


@pytest.fixture(scope="module")
def vit():
    return random_params(Vit(), PICTURES)


@pytest.fixture(scope="module", params=["layers", "scanned"])
def siglip(request):
    return random_params(Siglip(request.param == "scanned"), PICTURES, TEXTS)


@pytest.mark.parametrize("names", ["before linen", "linen", "positions in the encoder", "optimizer"])
def test_vit_computes_the_same(names, vit, tmp_path):
    leaves, logits = vit
    if names == "before linen":
        leaves = before_linen(leaves)
    elif names == "positions in the encoder":
        leaves = {name.replace("/posembed_input", ""): leaf for name, leaf in leaves.items()}
    elif names == "optimizer":
        leaves = {f"opt/target/{name}": leaf for name, leaf in leaves.items()} | {"opt/state/step": np.int32(3)}
    np.savez(tmp_path / "vit.npz", **leaves)
    convert(tmp_path / "vit.npz", tmp_path / "torch", to="torch", verify=True)
    config = json.loads((tmp_path / "torch/config.json").read_text())
    assert (config["image_size"], config["patch_size"], config["num_attention_heads"]) == (SIDE, PATCH, HEADS)
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / "torch").eval()
    with torch.no_grad():
        np.testing.assert_allclose(model(**torch_inputs()).logits, logits, rtol=1e-5, atol=1e-5)


def test_vit_is_written_as_published(vit, tmp_path):
    leaves = before_linen(vit[0])
    np.savez_compressed(tmp_path / "vit.npz", **leaves)
    convert(tmp_path / "vit.npz", tmp_path / "torch", to="torch")
    convert(tmp_path / "torch", tmp_path / "again", to="big_vision", verify=True)
    same_leaves(tmp_path / "again/model.npz", leaves)
    convert(tmp_path / "torch", tmp_path / "one.npz", to="big_vision")
    same_leaves(tmp_path / "one.npz", leaves)


def test_pre_logits_are_the_pooler(tmp_path):
    leaves, pooled = random_params(Vit(pre_logits=True), PICTURES)
    np.savez(tmp_path / "vit.npz", **before_linen(leaves))
    convert(tmp_path / "vit.npz", tmp_path / "torch", to="torch")
    model = transformers.ViTModel.from_pretrained(tmp_path / "torch").eval()
    with torch.no_grad():
        np.testing.assert_allclose(model(**torch_inputs()).pooler_output, pooled, rtol=1e-5, atol=1e-5)


def test_a_class_token_without_a_position(vit, tmp_path):
    """big_vision's `pool_type="tok"`: positions are added before the class token joins the patches."""
    leaves = dict(vit[0])
    positions = leaves.pop("Transformer/posembed_input/pos_embedding")
    leaves["pos_embedding"] = positions[:, 1:]
    np.savez(tmp_path / "vit.npz", **leaves)
    convert(tmp_path / "vit.npz", tmp_path / "torch", to="torch")
    model = transformers.ViTModel.from_pretrained(tmp_path / "torch", add_pooling_layer=False)
    found = model.embeddings.position_embeddings.detach().numpy()
    np.testing.assert_array_equal(found[:, 1:], positions[:, 1:])
    assert not found[:, 0].any()


def test_siglip_computes_the_same(siglip, tmp_path):
    leaves, logits = siglip
    np.savez(tmp_path / "siglip.npz", **{f"params/{name}": leaf for name, leaf in leaves.items()})
    convert(tmp_path / "siglip.npz", tmp_path / "torch", to="torch", verify=True)
    model = transformers.SiglipModel.from_pretrained(tmp_path / "torch").eval()
    with torch.no_grad():
        found = model(input_ids=torch.from_numpy(TEXTS), **torch_inputs()).logits_per_image
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)
    convert(tmp_path / "torch", tmp_path / "again", to="big_vision", verify=True)
    if not any("encoderblock/" in name for name in leaves):
        same_leaves(tmp_path / "again/model.npz", {f"params/{name}": leaf for name, leaf in leaves.items()})
    convert(tmp_path / "again", tmp_path / "torch again", to="torch")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("torch", "torch again"))
    assert one == other


def test_bfloat16_survives(vit, tmp_path):
    leaves = {name: leaf.astype(ml_dtypes.bfloat16) for name, leaf in before_linen(vit[0]).items()}
    np.savez(tmp_path / "vit.npz", **leaves)
    convert(tmp_path / "vit.npz", tmp_path / "torch", to="torch")
    convert(tmp_path / "torch", tmp_path / "again", to="big_vision")
    with Npz().open(tmp_path / "again/model.npz") as reader:
        for name, leaf in leaves.items():
            assert reader.read(name).dtype == leaf.dtype
            assert reader.read(name).tobytes() == np.ascontiguousarray(leaf).tobytes()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda leaves: leaves.pop("Transformer/encoderblock_1/MlpBlock_3/Dense_0/bias"), "is missing"),
        (lambda leaves: leaves.update(extra=np.ones(3)), "'extra'.*no rule of this family"),
        (lambda leaves: leaves.update(head=np.ones(3)), "head"),
        (lambda leaves: leaves.update({"cls": np.ones((1, 2, WIDTH), np.float32)}), "has shape"),
    ],
)
def test_leaves_that_are_no_vit(change, match, vit, tmp_path):
    leaves = before_linen(vit[0])
    change(leaves)
    np.savez(tmp_path / "vit.npz", **leaves)
    with pytest.raises(CheckpointError, match=match):
        convert(tmp_path / "vit.npz", tmp_path / "torch", to="torch")
    assert not (tmp_path / "torch").exists()


def test_a_family_without_names(tmp_path):
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(CheckpointError, match="no names for 'bert'; it has for vit, siglip"):
        convert(tmp_path / "bert", tmp_path / "out", to="big_vision")


def test_a_position_of_the_class_token_is_not_dropped():
    positions = np.arange(10, dtype=np.float32).reshape(1, 5, 2)
    with pytest.raises(CheckpointError, match="its class token has a position"):
        without_class_position.to_flax([positions])
    positions[:, 0] = 0
    assert np.array_equal(without_class_position.to_flax([positions]), positions[:, 1:])
    assert np.array_equal(without_class_position.to_torch(positions[:, 1:])[0], positions)
