"""GGUF, against the gguf package's reader and writer and transformers' loading of `gguf_file=`."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from easytorch.bridge import convert, inspect
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import numpy_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.gguf_files import blocks
from easytorch.bridge.formats.gguf_files.blocks import PLAIN, CastOverflow, can_unpack, packed, unpack
from easytorch.bridge.formats.gguf_files.config import OWN_CONFIG, llama3_factors
from easytorch.bridge.formats.gguf_files.file import Gguf, GgufReader
from easytorch.bridge.formats.gguf_files.sentencepiece_model import UNIGRAM, read_vocabulary
from easytorch.bridge.formats.gguf_files.vocabulary import add_fields, write_tokenizer
from easytorch.bridge.formats.gguf_files.walk import Header

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ENCODER = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Family -> class and config. Whether transformers itself reads the architecture from GGUF: with our config.json given.
MODELS = {
    "llama": ("LlamaForCausalLM", {**SMALL, "tie_word_embeddings": False}, True),
    "llama3": ("LlamaForCausalLM", {**SMALL, "tie_word_embeddings": True, "rope_parameters": LLAMA3}, True),
    "mistral": ("MistralForCausalLM", SMALL, False),
    "mixtral": ("MixtralForCausalLM", {**SMALL, "num_local_experts": 4}, False),
    "qwen2": ("Qwen2ForCausalLM", SMALL, True),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**SMALL, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        True,
    ),
    "qwen3": ("Qwen3ForCausalLM", {**SMALL, "head_dim": 32}, True),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
        True,
    ),
    "gemma": ("GemmaForCausalLM", {**SMALL, "head_dim": 32}, False),
    "gemma2": ("Gemma2ForCausalLM", {**SMALL, "head_dim": 32, "query_pre_attn_scalar": 32}, True),
    "gemma3_text": ("Gemma3ForCausalLM", {**SMALL, "head_dim": 32, "query_pre_attn_scalar": 32}, True),
    "phi3": ("Phi3ForCausalLM", SMALL, True),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 48, "n_positions": 64}, True),
    "bloom": ("BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 48}, True),
    "falcon": (
        "FalconForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 48},
        True,
    ),
    "falcon grouped": (
        "FalconForCausalLM",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 48,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
        },
        False,
    ),
    "stablelm": ("StableLmForCausalLM", SMALL, True),
    "stablelm normed": ("StableLmForCausalLM", {**SMALL, "qk_layernorm": True, "use_qkv_bias": True}, False),
    "starcoder2": ("Starcoder2ForCausalLM", SMALL, True),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 48,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
        True,
    ),
    "bert": ("BertModel", ENCODER, False),
}


@pytest.fixture(autouse=True)
def quiet():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture
def saved(tmp_path):
    """`saved(name)`: the model, with weights that tell every tensor apart, and the folder it is saved in."""

    def save(name: str, dtype: torch.dtype = torch.float32) -> tuple[transformers.PreTrainedModel, Path]:
        class_name, settings, _ = MODELS[name]
        model_class = getattr(transformers, class_name)
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**settings)).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model = model.to(dtype)
        model.save_pretrained(tmp_path / "hf")
        return model, tmp_path / "hf"

    return save


def outputs(model: torch.nn.Module) -> torch.Tensor:
    ids = {"input_ids": torch.arange(3, 19)[None]}
    if model.config.is_encoder_decoder:
        ids["decoder_input_ids"] = ids["input_ids"]
    with torch.no_grad():
        return model(**ids)[0]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`, as it is there."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name, saved, tmp_path):
    model, folder = saved(name)
    convert(folder, tmp_path / "gguf", to="gguf")
    (tmp_path / "gguf" / "config.json").unlink()
    convert(tmp_path / "gguf" / "model.gguf", tmp_path / "back", to="torch")
    got, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "back", folder))
    # What llama.cpp has no place for: BERT's pooler, kept beside.
    assert got.keys() == expected.keys()
    added = "gemma" in name
    for key, array in expected.items():
        if added and key.endswith("norm.weight"):
            # The norms of Gemma have 1 added there, in float32.
            np.testing.assert_allclose(got[key], array, rtol=0, atol=1e-6)
        else:
            assert np.array_equal(got[key], array), key
    if MODELS[name][2]:
        loaded = type(model).from_pretrained(tmp_path / "gguf", gguf_file="model.gguf", config=model.config)
        torch.testing.assert_close(outputs(loaded.eval()), outputs(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_config_from_metadata_alone(name, saved, tmp_path):
    """As of a file that llama.cpp's converter wrote, without our key."""
    model, folder = saved(name)
    convert(folder, tmp_path / "gguf", to="gguf")
    with GgufReader([tmp_path / "gguf" / "model.gguf"]) as reader:
        del reader.fields[OWN_CONFIG]
        config = reader.config()
    if name == "mistral":  # which is llama there
        assert config["model_type"] == "llama"
        return
    made = type(model.config).from_dict(config)
    expected = model.config.to_dict()
    got = made.to_dict()
    same_at_all = (
        *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"),
        *("num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "moe_intermediate_size"),
        *("tie_word_embeddings", "architectures", "d_kv", "feed_forward_proj", "new_decoder_architecture"),
        *("multi_query", "use_qkv_bias", "qk_layernorm", "use_parallel_residual", "use_bias", "attention_bias"),
    )
    for key in same_at_all:
        assert got.get(key) == expected.get(key), key
    rebuilt = type(model)(made)
    assert {key: value.shape for key, value in rebuilt.state_dict().items()} == {
        key: value.shape for key, value in model.state_dict().items()
    }
    if name == "llama3":
        rope = {key: got["rope_parameters"][key] for key in LLAMA3}
        assert rope == LLAMA3


def test_names_and_layouts_by_hand(saved, tmp_path):
    _, folder = saved("mixtral")
    convert(folder, tmp_path / "out.gguf", to="gguf")
    expected = load_file(folder / "model.safetensors")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    here = "model.layers.1."
    assert np.array_equal(tensors["blk.1.attn_q.weight"], permuted(expected[f"{here}self_attn.q_proj.weight"], 4))
    assert np.array_equal(tensors["blk.1.attn_k.weight"], permuted(expected[f"{here}self_attn.k_proj.weight"], 2))
    assert np.array_equal(tensors["blk.1.attn_v.weight"], expected[f"{here}self_attn.v_proj.weight"])
    for kind, weight in {"gate": "w1", "down": "w2", "up": "w3"}.items():
        experts = [expected[f"{here}block_sparse_moe.experts.{number}.{weight}.weight"] for number in range(4)]
        assert np.array_equal(tensors[f"blk.1.ffn_{kind}_exps.weight"], np.stack(experts))
    assert len(tensors) == 3 + 2 * 10


def test_gemma_norms(saved, tmp_path):
    _, folder = saved("gemma2", torch.bfloat16)
    convert(folder, tmp_path / "out.gguf", to="gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    norm = transformers.Gemma2ForCausalLM.from_pretrained(folder).model.norm.weight
    assert tensors["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert np.array_equal(tensors["output_norm.weight"].data, norm.detach().float().numpy() + 1)
    assert tensors["blk.0.attn_q.weight"].tensor_type == gguf.GGMLQuantizationType.BF16


@pytest.mark.parametrize("dtype", ["q8_0", "f16", "bf16", "f32", None])
def test_stored_as(dtype, saved, tmp_path):
    """Matrices as asked, all else float32; the numbers are the gguf package's own."""
    model, folder = saved("llama", torch.bfloat16)
    report = convert(folder, tmp_path / "out.gguf", to="gguf", dtype=dtype, verify=True)
    kind = gguf.GGMLQuantizationType[(dtype or "bf16").upper()]
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert report.bytes == sum(tensor.n_bytes for tensor in reader.tensors)
    assert {tensor.tensor_type for name, tensor in tensors.items() if "norm" in name} == {gguf.GGMLQuantizationType.F32}
    assert {tensor.tensor_type for name, tensor in tensors.items() if "norm" not in name} == {kind}
    down = model.model.layers[1].mlp.down_proj.weight.detach().float().numpy()
    assert np.array_equal(tensors["blk.1.ffn_down.weight"].data, gguf.quantize(down, kind))
    assert (
        reader.fields["general.file_type"].contents()
        == gguf.LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{kind.name}"]
    )
    convert(tmp_path / "out.gguf", tmp_path / "back", to="torch", verify=True)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    error = (outputs(loaded) - outputs(model.float())).square().mean().sqrt() / outputs(model).square().mean().sqrt()
    assert error < (2e-2 if dtype == "q8_0" else 1e-3)


def test_rows_that_blocks_do_not_divide(saved, tmp_path):
    MODELS["odd"] = ("LlamaForCausalLM", {**SMALL, "intermediate_size": 88}, True)
    try:
        _, folder = saved("odd")
    finally:
        del MODELS["odd"]
    convert(folder, tmp_path / "out.gguf", to="gguf", dtype="q8_0", verify=True)
    tensors = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert tensors["blk.0.ffn_down.weight"] == gguf.GGMLQuantizationType.F16
    assert tensors["blk.0.ffn_up.weight"] == gguf.GGMLQuantizationType.Q8_0


def test_parts(saved, tmp_path):
    model, folder = saved("llama3")
    report = convert(folder, tmp_path / "gguf", to="gguf", max_shard_size="60KB", verify=True)
    assert len(report.files) > 2
    assert report.files[0] == f"model-00001-of-{len(report.files):05d}.gguf"
    readers = [gguf.GGUFReader(tmp_path / "gguf" / file) for file in report.files]
    counts = {reader.fields["split.tensors.count"].contents() for reader in readers}
    assert counts == {sum(len(reader.tensors) for reader in readers)}
    assert [reader.fields["split.no"].contents() for reader in readers] == list(range(len(readers)))
    convert(tmp_path / "gguf", tmp_path / "back", to="torch", verify=True)
    state = load_file(tmp_path / "back" / "model.safetensors")
    assert all(np.array_equal(array, model.state_dict()[name].numpy()) for name, array in state.items())
    (tmp_path / "gguf" / report.files[1]).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        inspect(tmp_path / "gguf")


def test_llama3_factors_are_transformers_own():
    config = transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / (LLAMA3["rope_theta"] ** (torch.arange(0, 16, 2).float() / 16))
    np.testing.assert_allclose(llama3_factors(16, LLAMA3), (plain / scaled).numpy(), rtol=1e-5)


@pytest.mark.parametrize("kind", [kind.name for kind in gguf.GGML_QUANT_SIZES if kind.name not in PLAIN])
def test_packed_types(kind, monkeypatch):
    number = gguf.GGMLQuantizationType[kind]
    block, width = gguf.GGML_QUANT_SIZES[number]
    raw = np.random.default_rng(0).integers(0, 256, (7, 3 * width), dtype=np.uint8)
    with np.errstate(all="ignore"):
        try:
            expected = gguf.dequantize(raw, number)
        except NotImplementedError:
            assert not can_unpack(kind)
            return
    for at_once in (1 << 20, 4 * block):
        monkeypatch.setattr(blocks, "_AT_ONCE", at_once)
        got = unpack(raw.reshape(-1), kind, (7, 3 * block))
        assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_packing_in_pieces(kind, monkeypatch):
    array = np.random.default_rng(0).normal(size=(2, 96, 64)).astype(np.float32).transpose(0, 2, 1)
    expected = gguf.quantize(np.ascontiguousarray(array), gguf.GGMLQuantizationType[kind]).tobytes()
    for at_once in (1 << 20, 1000, 96):
        monkeypatch.setattr(blocks, "_AT_ONCE", at_once)
        assert b"".join(piece.tobytes() for piece in packed(array, kind)) == expected


def test_every_plain_type_is_read(tmp_path):
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    expected = {}
    for kind, dtype in PLAIN.items():
        raw = rng.integers(0, 256, (3, 5 * numpy_dtype(dtype).itemsize), dtype=np.uint8)
        expected[f"{kind}.weight"] = raw.view(numpy_dtype(dtype))
        number = gguf.GGMLQuantizationType[kind]
        if kind == "BF16":
            writer.add_tensor(f"{kind}.weight", raw, raw_dtype=number)
        else:
            writer.add_tensor(f"{kind}.weight", raw.view(numpy_dtype(dtype)), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufReader([tmp_path / "x.gguf"]) as reader:
        for name, array in expected.items():
            assert reader.read(name).dtype == array.dtype
            assert reader.read(name).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("dtype", "message"), [("float64", "f16 or bf16"), ("bool", "no dtype"), ("uint16", "no dtype")]
)
def test_what_gguf_cannot_hold(dtype, message):
    # Vectors too: nothing is rounded that nobody asked to be.
    for name, shape in (("w.weight", (2, 2)), ("output_norm.weight", (2,)), ("blk.0.attn_q.bias", (2,))):
        with pytest.raises(ValueError, match=message):
            Gguf().layout([TensorInfo(name, shape, dtype)], 1 << 30)


def test_a_name_that_ggml_would_cut_is_refused():
    """It has 64 bytes for a name, the last of them a zero."""
    for length in (63, 64):
        info = TensorInfo("\u00e9" + "x" * (length - 9) + ".weight", (2, 2), "float32")
        assert len(info.name.encode()) == length
        if length == 63:
            Gguf().layout([info], 1 << 30)
        else:
            with pytest.raises(CheckpointError, match="more than ggml's names"):
                Gguf().layout([info], 1 << 30)


def test_a_projector_beside_a_model_is_not_it(tmp_path):
    for name in ("llava.gguf", "mmproj-llava.gguf"):
        (tmp_path / name).write_bytes(b"")
    assert Gguf().detect(tmp_path) == tmp_path / "llava.gguf"


@pytest.mark.parametrize("dtype", ["int4", "float64", "q4_0"])
def test_a_dtype_that_gguf_does_not_write_is_answered_with_those_it_does(dtype):
    with pytest.raises(ValueError, match=f"'{dtype}': .*q8_0, f32, f16 or bf16"):
        Gguf().storing(dtype)


def test_eight_bit_floats_become_bfloat16():
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        array = np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)).reshape(2, 128)
        info = TensorInfo("w.weight", array.shape, dtype)
        got = Gguf().reads_back(info, array)
        assert got.dtype.name == "bfloat16"
        assert np.array_equal(got.astype(np.float32), array.astype(np.float32), equal_nan=True)


def bare(*, entries: bytes = b"", count: int = 0, tensors: bytes = b"", tensor_count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, count) + entries + tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ALIGNED = text("general.alignment") + struct.pack("<II", 4, 24)
NESTED = text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
HOSTILE = {
    "another format": b"PK\x03\x04" + bytes(100),
    "nothing": b"",
    "an old version": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "too many entries": bare(count=2**60),
    "too many tensors": bare(tensor_count=2**60),
    "a long key": bare(entries=struct.pack("<Q", 2**62), count=1) + bytes(100),
    "a long array": bare(entries=text("a") + struct.pack("<IIQ", 9, 6, 2**61), count=1) + bytes(100),
    "a long array of text": bare(entries=text("a") + struct.pack("<IIQ", 9, 8, 2**61), count=1) + bytes(100),
    "deep arrays": bare(entries=NESTED, count=1),
    "an unknown value": bare(entries=text("a") + struct.pack("<II", 77, 0), count=1) + bytes(100),
    "a key twice": bare(entries=(text("a") + struct.pack("<II", 4, 0)) * 2, count=2),
    "no power of two": bare(entries=ALIGNED, count=1, tensors=tensor("w", (2,), 0, 0), tensor_count=1) + bytes(99),
    "many dimensions": bare(tensors=tensor("w", (1,) * 5, 0, 0), tensor_count=1) + bytes(99),
    "an unknown type": bare(tensors=tensor("w", (2,), 99, 0), tensor_count=1) + bytes(99),
    "a huge tensor": bare(tensors=tensor("w", (2**40, 2**40), 0, 0), tensor_count=1) + bytes(99),
    "an offset beyond": bare(tensors=tensor("w", (2,), 0, 1 << 20), tensor_count=1) + bytes(99),
    "an odd offset": bare(tensors=tensor("w", (2,), 0, 4), tensor_count=1) + bytes(99),
    "half a block": bare(tensors=tensor("w", (17,), 8, 0), tensor_count=1) + bytes(99),
    "a name twice": bare(tensors=tensor("w", (2,), 0, 0) + tensor("w", (2,), 0, 32), tensor_count=2) + bytes(199),
    "an overlap": bare(tensors=tensor("w", (12,), 0, 0) + tensor("v", (2,), 0, 32), tensor_count=2) + bytes(199),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile(content, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        inspect(file)


def test_every_truncation_is_noticed(saved, tmp_path):
    _, folder = saved("bert")
    convert(folder, tmp_path / "out.gguf", to="gguf", dtype="q8_0")
    content = (tmp_path / "out.gguf").read_bytes()
    for length in range(0, len(content), 501):
        (tmp_path / "out.gguf").write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            inspect(tmp_path / "out.gguf")


def test_a_file_cut_within_its_last_padding_is_noticed(tmp_path):
    """Whole padding and none is written, and no part of it."""
    head = bare(tensors=tensor("w", (3,), 0, 0), tensor_count=1)
    head += bytes(-len(head) % 32)
    for padding in range(21):
        content = head + bytes(12) + bytes(padding)
        if padding in (0, 20):
            assert Header(tmp_path, content, len(content)).tensors[0].nbytes == 12
            continue
        with pytest.raises(CheckpointError, match="within the padding of the last tensor"):
            Header(tmp_path, content, len(content))


@pytest.mark.parametrize("kind", ["Q8_0"])
def test_numbers_that_no_block_holds_are_refused(kind):
    for number in (8.4e6, 1e30, -1e9):
        array = np.zeros((2, 32), np.float32)
        array[1, 7] = number
        with pytest.raises(CastOverflow, match=f"the largest {kind} is"):
            list(packed(array, kind))
    array[1, 7] = 8.3e6
    assert np.isfinite(blocks.rounded(array, kind)).all()


BYTE_LEVEL = {
    "version": "1.0",
    "added_tokens": [{"id": 9, "content": "<|end|>", "special": True, "normalized": False}],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "vocab": {"<p>": 0, "<b>": 1, "<e>": 2, "a": 3, "b": 4, "c": 5, "ab": 6, "abc": 7, "\u0120": 8},
        "merges": [["a", "b"], ["ab", "c"]],
    },
}


def test_a_byte_level_tokenizer(saved, tmp_path):
    _, folder = saved("qwen2")
    (folder / "tokenizer.json").write_text(json.dumps(BYTE_LEVEL))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ x }}"})
    )
    convert(folder, tmp_path / "gguf", to="gguf")
    fields = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").fields
    content = {key.removeprefix("tokenizer."): field.contents() for key, field in fields.items()}
    assert content["ggml.model"] == "gpt2"
    assert content["ggml.pre"] == "gpt-2"
    assert content["ggml.tokens"][3:11] == ["a", "b", "c", "ab", "abc", "\u0120", "<|end|>", "[PAD10]"]
    assert len(content["ggml.tokens"]) == SMALL["vocab_size"]
    assert content["ggml.token_type"][3:11] == [1, 1, 1, 1, 1, 1, 3, 5]
    assert content["ggml.merges"] == ["a b", "ab c"]
    assert content["ggml.eos_token_id"] == 9
    assert content["chat_template"] == "{{ x }}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf")
    assert tokenizer("abc ab<|end|>")["input_ids"] == [7, 8, 6, 9]


def test_a_tokenizer_goes_from_file_to_file_and_to_torch(saved, tmp_path):
    _, folder = saved("qwen2")
    (folder / "tokenizer.json").write_text(json.dumps(BYTE_LEVEL))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": "{{ x }}"}))
    convert(folder, tmp_path / "first.gguf", to="gguf")
    convert(tmp_path / "first.gguf", tmp_path / "second.gguf", to="gguf", dtype="q8_0")
    first, second = (gguf.GGUFReader(tmp_path / f"{name}.gguf").fields for name in ("first", "second"))
    of_tokenizer = [key for key in first if key.startswith("tokenizer.")]
    assert len(of_tokenizer) > 5
    for key in of_tokenizer:
        assert (first[key].types, first[key].contents()) == (second[key].types, second[key].contents())
    report = convert(tmp_path / "second.gguf", tmp_path / "torch", to="torch")
    assert not any("tokenizer" in note for note in report.notes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "torch")
    assert tokenizer("abc ab<|end|>")["input_ids"] == [7, 8, 6, 9]
    assert tokenizer.chat_template == "{{ x }}" and tokenizer.eos_token == "<|end|>"


def test_a_tokenizer_transformers_cannot_read_is_reported(saved, tmp_path):
    _, folder = saved("qwen2")
    convert(folder, tmp_path / "x.gguf", to="gguf")
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [b"\xe4\xbd".decode("utf-8", "surrogateescape")]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "easytorch.bridge.formats.gguf_files.tokenizer.add_tokenizer",
            lambda writer, _: add_fields(writer, fields, {"tokenizer.ggml.model": 8}),
        )
        convert(folder, tmp_path / "broken.gguf", to="gguf")
    (tmp_path / "in").mkdir()
    (tmp_path / "broken.gguf").rename(tmp_path / "in/broken.gguf")
    report = convert(tmp_path / "in", tmp_path / "torch", to="torch")
    assert any(note.startswith("the tokenizer in broken.gguf is not carried") for note in report.notes)
    convert(tmp_path / "in", tmp_path / "again.gguf", to="gguf")
    with registry.open_reader(tmp_path / "again.gguf")[1] as reader:
        assert reader.fields["tokenizer.ggml.tokens"] == fields["tokenizer.ggml.tokens"]


SCALARS = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 2**31, "int32": -70000}
SCALARS |= {"uint64": 2**40, "int64": -(2**40), "float32": 0.5, "float64": 0.1, "bool": True, "string": "text"}


def test_metadata_of_anybody_goes_along(saved, tmp_path):
    """From file to file: every field with its type, also what no config holds, and the file's own factors."""
    _, folder = saved("llama3")
    convert(folder, tmp_path / "ours.gguf", to="gguf")
    ours = gguf.GGUFReader(tmp_path / "ours.gguf")
    theirs = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(theirs, "llama")
    for key, field in ours.fields.items():
        if not key.startswith(("GGUF.", "general.", "easytorch.")):
            writer.add_key_value(key, field.contents(), field.types[0])
    writer.add_name("Mine")
    writer.add_author("somebody")
    writer.add_custom_alignment(64)
    for kind, value in SCALARS.items():
        writer.add_key_value(f"mine.{kind}", value, gguf.GGUFValueType[kind.upper()])
        writer.add_key_value(
            f"mine.list.{kind}", [value] * 3, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[kind.upper()]
        )
    writer.add_string("llama.setting.of.tomorrow", "kept")
    for tensor in ours.tensors:
        # As other programs round them: within what is taken for Llama 3.1's.
        data = np.nextafter(tensor.data, np.float32(9)) if tensor.name == "rope_freqs.weight" else tensor.data
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    given = gguf.GGUFReader(theirs)
    wanted = {
        key: (field.types, field.contents())
        for key, field in given.fields.items()
        if not key.startswith("GGUF.") and key not in ("general.alignment", "general.file_type")
    }
    assert len(wanted) > 40
    convert(theirs, tmp_path / "parts", to="gguf", max_shard_size="60KB")
    for source, dtype in ((theirs, None), (theirs, "q8_0"), (tmp_path / "parts", None)):
        out = tmp_path / f"{source.stem}-{dtype}.gguf"
        convert(source, out, to="gguf", dtype=dtype, verify=True)
        got = gguf.GGUFReader(out)
        found = {key: (field.types, field.contents()) for key, field in got.fields.items() if key in wanted}
        assert {key: (found.get(key), one) for key, one in wanted.items() if found.get(key) != one} == {}
        factors = [
            one.data.tobytes() for reader in (given, got) for one in reader.tensors if one.name == "rope_freqs.weight"
        ]
        assert len(factors) == 2 and factors[0] == factors[1]
    # Another config in the place of the file's own is what the new file says.
    content = {**json.loads((folder / "config.json").read_text()), "rms_norm_eps": 0.25}
    (tmp_path / "other.json").write_text(json.dumps(content))
    convert(theirs, tmp_path / "other.gguf", to="gguf", config=tmp_path / "other.json")
    fields = gguf.GGUFReader(tmp_path / "other.gguf").fields
    assert fields["llama.attention.layer_norm_rms_epsilon"].contents() == 0.25
    assert "llama.setting.of.tomorrow" not in fields
    assert fields["general.author"].contents() == "somebody" and fields["mine.uint8"].contents() == 200


def piece(text_: str, score: float, kind: int = 1) -> bytes:
    raw = text_.encode()
    body = b"\x0a" + bytes([len(raw)]) + raw + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(body)]) + body


def test_what_a_sentencepiece_model_does_not_say_is_its_default(tmp_path):
    """A space before the text, and runs of spaces as one."""
    for normalizer, said in ((b"", True), (b"\x1a\x05\x0a\x03nmt", True), (b"\x1a\x04\x18\x00\x20\x00", False)):
        (tmp_path / "tokenizer.model").write_bytes(piece("a", -0.5) + normalizer)
        found = read_vocabulary(tmp_path / "tokenizer.model")
        assert (found.dummy_prefix, found.remove_spaces, found.model_type) == (said, said, UNIGRAM)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"])
def test_the_tokenizer_beside_a_file_is_the_original(tmp_path, name):
    (tmp_path / name).write_text("the original")
    # there is no such file: to read it would be a reason
    assert write_tokenizer(tmp_path / "x.gguf", {"tokenizer.ggml.model": "llama"}, tmp_path) is None
    assert [one.name for one in tmp_path.iterdir()] == [name]
    assert write_tokenizer(tmp_path / "x.gguf", {"tokenizer.ggml.model": "llama"}, tmp_path / "other") is not None


def test_a_sentencepiece_tokenizer(saved, tmp_path):
    _, folder = saved("gemma")
    trainer = b"\x12\x02\x18\x02"  # BPE
    normalizer = b"\x1a\x02\x18\x00"  # no space before the text
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("<0x0A>", 0.0, 6), ("\u2581a", -0.5, 1)]
    (folder / "tokenizer.model").write_bytes(b"".join(piece(*one) for one in pieces) + trainer + normalizer)
    convert(folder, tmp_path / "out.gguf", to="gguf")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    content = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.ggml.")}
    assert content["tokenizer.ggml.model"] == "llama"
    assert content["tokenizer.ggml.tokens"][:5] == ["<unk>", "<s>", "<0x0A>", "\u2581a", "[PAD4]"]
    assert content["tokenizer.ggml.scores"][:5] == [0, 0, 0, -0.5, -10000]
    assert content["tokenizer.ggml.token_type"][:5] == [2, 3, 6, 1, 5]
    assert content["tokenizer.ggml.add_space_prefix"] is False
    (folder / "tokenizer.model").write_bytes(b"\x0a\xff\xff\xff\xff\x0f")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
        convert(folder, tmp_path / "bad.gguf", to="gguf")


def test_an_architecture_llama_cpp_has_not(tiny_torch, tmp_path):
    config = json.loads((tiny_torch / "config.json").read_text())
    (tiny_torch / "config.json").write_text(json.dumps({**config, "model_type": "vit"}))
    with pytest.raises(CheckpointError, match="vit"):
        convert(tiny_torch, tmp_path / "out.gguf", to="gguf")
    with pytest.raises(ValueError, match="q8_0, f32, f16 or bf16"):
        convert(tiny_torch, tmp_path / "out.gguf", to="gguf", dtype="q4_k_m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_position_embeddings": -1}, "`context_length` is a number from 0 to 4294967295"),
        ({"max_position_embeddings": 2**32}, "max_position_embeddings is 4294967296"),
        ({"rms_norm_eps": 1e39}, r"rms_norm_eps is 1e\+39, .* is a float32"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e300}}, "`rope.freq_base` is a float32"),
    ],
    ids=["negative", "beyond 32 bits", "beyond float32", "nan", "rotary"],
)
def test_numbers_that_the_metadata_does_not_hold(saved, tmp_path, change, message):
    source = saved("llama")[1]
    file = source / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        convert(source, tmp_path / "new.gguf", to="gguf")
    assert not (tmp_path / "new.gguf").exists()


def test_several_files(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        save_file({"w": np.ones(1, np.float32)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        inspect(tmp_path)
