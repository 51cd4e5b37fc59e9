"""What is refused of files, states, adapters and quantization settings, by message."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig

from easytorch import protocol
from easytorch.bridge.errors import CheckpointError
from easytorch.cache import TransformerCache
from easytorch.protocol import QuantizationConfig
from easytorch.protocol.batching import _ours
from easytorch.protocol.checkpoint_files import check_config, check_torch_files
from easytorch.protocol.compressed_loading import compressed_weight
from easytorch.protocol.torchao_loading import int4_weight
from tests.protocol.shared_models import IDS, MODELS, ONE, shared


class Disk:
    """A module with a buffer that no construction computes."""

    def __new__(cls):
        module = nn.Linear(2, 2, device="meta")
        module.register_buffer("seen", torch.zeros(3, device="meta"))
        return module


def parts(**changes):
    made = {
        "qdata": torch.zeros(4, 8, dtype=torch.uint8),
        "scale": torch.ones(2, 4),
        "zero_point": torch.zeros(2, 4),
    }
    made |= changes
    return {name: value for name, value in made.items() if value is not None}


def compressed(**changes):
    made = {"codes": torch.zeros(4, 8, dtype=torch.int8), "weight_scale": torch.ones(4, 1)}
    made |= changes
    return lambda: compressed_weight("q", {key: one for key, one in made.items() if one is not None}, Path("a.st"))


FILE = Path("a.st")
REFUSED_FILES = {
    "int4 lacks a part": (lambda: int4_weight("q", parts(scale=None), FILE), "a.st.*scale.* is missing beside q"),
    "int4 has a part": (lambda: int4_weight("q", parts(extra=IDS), FILE), "extra.* is beside q, and is not read"),
    "int4 of a rank": (lambda: int4_weight("q", parts(qdata=torch.zeros(4, 2, 4)), FILE), "an Int4Tensor has"),
    "int4 of a dtype": (lambda: int4_weight("q", parts(qdata=torch.zeros(4, 8)), FILE), "float32 beside scales"),
    "int4 of other zeros": (lambda: int4_weight("q", parts(zero_point=torch.zeros(1, 4)), FILE), "zero points"),
    "compressed without scales": (compressed(weight_scale=None), "weight_scale.* is missing beside its codes"),
    "compressed of a rank": (compressed(codes=torch.zeros(2, 4, 8, dtype=torch.int8)), "matrices are read"),
    "compressed of a dtype": (compressed(codes=torch.zeros(4, 8)), "float32; int8, float8_e4m3fn"),
    "compressed of other zeros": (compressed(weight_zero_point=torch.zeros(2, 1)), "beside scales"),
    "compressed zeros of a fraction": (compressed(weight_zero_point=torch.full((4, 1), 0.5)), "is no integer"),
    "compressed groups": (compressed(weight_g_idx=torch.zeros(7, dtype=torch.int32)), "for each of 8 columns"),
    "compressed groups beyond": (compressed(weight_g_idx=torch.ones(8, dtype=torch.int32)), "one of 1 groups"),
}


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_a_packed_weight_that_does_not_fit_names_its_file(case):
    call, match = REFUSED_FILES[case]
    with pytest.raises(CheckpointError, match=f"(?s){match}") as caught:
        call()
    assert "a.st" in str(caught.value) and "q" in str(caught.value)


def test_a_config_that_is_none_names_its_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json") as caught:
        check_config(tmp_path)
    assert str(tmp_path) in str(caught.value)
    for content, match in (("{}", "has no `model_type`"), ('{"model_type": "lama"}', "nearest known name: 'llama'")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=match):
            check_config(tmp_path)
    (tmp_path / "config.json").write_text('{"auto_map": {}}')
    check_config(tmp_path)
    with pytest.raises(ValueError, match="weights_only=False would run"):
        check_torch_files(tmp_path, {"weights_only": False})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"the shard 'gone\.safetensors' is missing"):
        check_torch_files(tmp_path, {})


def quantized(**settings):
    return lambda: QuantizationConfig(**settings)


REFUSED = {
    "lazy config": (lambda: protocol.lazy_init(transformers.LlamaForCausalLM, {}), TypeError, "not dict"),
    "lazy config of another": (
        lambda: protocol.lazy_init(transformers.LlamaForCausalLM, BertConfig()),
        TypeError,
        "takes a LlamaConfig, not BertConfig",
    ),
    "shown": (lambda: protocol.get_module_repr({}), TypeError, "a torch.nn.Module is shown, not dict"),
    "no mapping": (lambda: protocol.flatten([1]), TypeError, "a dict of tensors, nested or flat, not list"),
    "a name of a number": (
        lambda: protocol.unflatten({3: ONE}),
        TypeError,
        "names of parameters are str, and 3 is int",
    ),
    "a name in a name": (lambda: protocol.unflatten({"a": ONE, "a.b": ONE}), ValueError, "a"),
    "a buffer of nothing": (
        lambda: protocol.merge_params(Disk(), {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}),
        ValueError,
        "the buffer 'seen' is on the meta device",
    ),
    "a value that is none": (
        lambda: protocol.merge_params_dict(nn.Linear(2, 2), {"bias": 1}),
        TypeError,
        "'bias' is int",
    ),
    "a value of a shape": (
        lambda: protocol.merge_params_dict(nn.Linear(2, 2), {"bias": ONE.float()[:1]}),
        ValueError,
        r"'bias' has the shape \(1,\)",
    ),
    "a value of integers": (lambda: protocol.merge_params_dict(nn.Linear(2, 2), {"bias": ONE}), ValueError, "int64"),
    "a sparse value": (
        lambda: protocol.merge_params_dict(nn.Linear(2, 2), {"bias": ONE.float().to_sparse()}),
        ValueError,
        "to_dense",
    ),
    "a value of meta": (
        lambda: protocol.merge_params_dict(nn.Linear(2, 2), {"bias": torch.zeros(2, device="meta")}),
        ValueError,
        "meta",
    ),
    "an unknown name": (lambda: protocol.merge_params_dict(nn.Linear(2, 2), {"bais": ONE}), ValueError, "name: 'bias'"),
    "a missing name": (
        lambda: protocol.merge_params(nn.Linear(2, 2), {"bias": ONE.float()}),
        ValueError,
        "'weight' of Linear is not given",
    ),
    "to flax of no model": (lambda: protocol.to_flax(nn.Linear(2, 2)), TypeError, "Linear is no model of transformers"),
    "to flax of an adapter": (
        lambda: protocol.to_flax(type("Adapted", (nn.Module,), {"merge_and_unload": 1})()),
        TypeError,
        "has an adapter",
    ),
    "save's order": (lambda: shared("llama").save_pretrained("x", True, step=1), TypeError, "name the arguments"),
    "save's step": (lambda: protocol.save_pretrained(shared("llama"), "x", step=-1), ValueError, "step=-1"),
    "save's state": (
        lambda: protocol.save_pretrained(shared("llama"), "x", float_dtype="bf16", state_dict={}),
        ValueError,
        "state_dict",
    ),
    "save to the hub": (
        lambda: protocol.save_pretrained(shared("llama"), "x", True, float_dtype="bf16"),
        ValueError,
        "float_dtype goes with",
    ),
    "quantize's words": (
        lambda: protocol.quantize(shared("llama"), QuantizationConfig("int8"), group_size=8),
        ValueError,
        "group_size: give",
    ),
    "quantize by a number": (lambda: protocol.quantize(shared("llama"), 8), TypeError, "or a name, not int"),
    "nothing to dequantize": (lambda: protocol.dequantize(shared("llama")), ValueError, "is not quantized"),
    "an unknown setting": (quantized(size=3), TypeError, "has no size"),
    "an unknown format": (quantized(dtype="int3"), ValueError, "unknown format 'int3'"),
    "jax's": (quantized(jax_native=True), ValueError, "jax_native"),
    "two sizes": (quantized(group_size=8, block_size=16), ValueError, "one setting"),
    "a size of 0": (quantized(group_size=0), ValueError, "group_size=0"),
    "a size of True": (quantized(group_size=True), ValueError, "group_size=True"),
    "mx of a size": (quantized(dtype="mxfp4", group_size=16), ValueError, "group_size=16: mxfp4 is 32"),
    "bits of int8": (quantized(bits=8), ValueError, "bits=8"),
    "1 bit": (quantized(dtype="affine", bits=1), ValueError, "bits=1 is a number from 2 to 8"),
    "9 bits": (quantized(dtype="affine", bits=9), ValueError, "bits=9"),
    "a pattern of a number": (quantized(pattern=3), TypeError, "pattern=3 must be a regular"),
    "a pattern that is none": (quantized(pattern="("), ValueError, "is no regular expression"),
    "a flag": (quantized(simulate=1), TypeError, "simulate=1 must be True or False"),
    "an order of int8": (quantized(desc_act=True), ValueError, "desc_act is of GPTQ"),
    "gguf without blocks": (quantized(dtype="gguf"), ValueError, "which needs them"),
    "unknown blocks": (quantized(dtype="gguf", blocks={"q9": "a"}), ValueError, "unknown blocks q9"),
    "blocks of int8": (quantized(blocks={"q4_0": "a"}), ValueError, 'blocks are of "gguf"'),
    "gguf's settings": (
        lambda: QuantizationConfig(dtype="gguf", blocks={"q4_0": "a"}).settings,
        ValueError,
        "are read from files",
    ),
    "adapters' leaves": (lambda: protocol.lora_to_flax(shared("llama"), leaves="haiku"), ValueError, "leaves='haiku'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_named(case):
    call, error, match = REFUSED[case]
    with pytest.raises(error, match=match):
        call()


def test_the_ends_of_quantization_settings_are_taken():
    for settings in (
        {"dtype": "affine", "bits": 2},
        {"dtype": "affine", "bits": 8},
        {"group_size": 1},
        {"group_size": -1},
    ):
        QuantizationConfig(**settings)
    assert QuantizationConfig(group_size=16, block_size=16).group_size == 16
    assert QuantizationConfig(block_size=8).group_size == 8
    with pytest.raises(ValueError, match=r"up_proj\.weight has infinities or NaN"):
        broken = copy.deepcopy(shared("llama"))
        broken.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("inf")
        protocol.quantize(broken)


def test_an_attention_that_batches_cannot_run_is_named():
    config = copy.deepcopy(MODELS["llama"][1])
    config._attn_implementation_internal = "flash"
    with pytest.raises(ValueError, match="this model has 'flash'"):
        _ours(SimpleNamespace(config=config))


def test_a_definition_is_run_with_its_own_tensors_and_all_of_them():
    graphdef, graphstate, graphother = protocol.split_module(shared("llama"))
    state = {**graphstate, **graphother}
    kept = dict(state)
    with torch.no_grad():
        found, expected = graphdef.apply(state, IDS).logits, shared("llama")(IDS).logits
    torch.testing.assert_close(found, expected)
    assert state.keys() == kept.keys() and all(state[name] is one for name, one in kept.items())
    first = next(iter(state))
    for call in (lambda given: graphdef.apply(given, IDS), lambda given: protocol.merge_module(graphdef, given, {})):
        with pytest.raises(ValueError, match=f"{first!r} of LlamaForCausalLM is not given"):
            call({name: one for name, one in state.items() if name != first})
        with pytest.raises(ValueError, match="'more' is no parameter or buffer of LlamaForCausalLM"):
            call({**state, "more": state[first]})


def test_a_cache_of_other_layers_than_its_metadata_is_refused():
    made = protocol.create_cache_metadata(shared("llama"), 2, 8)
    other = copy.deepcopy(shared("llama").config)
    other.num_hidden_layers = 3
    other.layer_types = ["full_attention"] * 3
    with pytest.raises(ValueError, match=r"the metadata has layers \('full_attention', .*\), and the config"):
        TransformerCache(other, made)
    with pytest.raises(ValueError, match="kind='paged' must be one of"):
        TransformerCache(shared("llama").config, made, "paged")
