"""Weights in few bits: against their decoded weights in plain layers, saved and loaded, and under adapters."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch
import transformers
from torch import nn

import easytorch
from easytorch import protocol
from easytorch.layers.quantized import QuantizedLinear, QuantizedStacks
from easytorch.layers.quantized_formats import STORAGE, FormatSettings, quantize_weight
from easytorch.models.llama import LlamaForCausalLM
from easytorch.protocol import QuantizationConfig

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SIZES | {"num_key_value_heads": 2}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mixtral": transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "gpt_oss": transformers.GptOssConfig(**GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4),
    "mpt": transformers.MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=97),  # not native
}
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:.*fan_in_fan_out")
IDS = torch.tensor([[5, 9, 33, 71, 8], [4, 4, 90, 12, 60]])
# The relative error of weights that are normally distributed; of a binary sqrt(1 - 2 / pi).
ERRORS = {
    "int8": 0.01, "int4": 0.13, "nf4": 0.1, "fp8": 0.03, "fp8_e5m2": 0.06, "mxfp8": 0.04, "mxfp4": 0.15,
    "nvfp8": 0.03, "nvfp4": 0.11, "affine": 0.1, "ternary": 0.45, "binary": 0.61,
}  # fmt: skip


@functools.cache
def made(name: str):
    torch.manual_seed(0)
    return easytorch.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()


def model_of(name: str):
    return copy.deepcopy(made(name))


@pytest.mark.parametrize("format_", STORAGE)
def test_formats(format_):
    weight = torch.randn(48, 130, generator=torch.Generator().manual_seed(0))
    weight[3, :64] = 0.0
    settings = FormatSettings(format_, STORAGE[format_][1])
    quantized = quantize_weight(weight, settings)
    decoded = quantized.dequantize()
    error = float((decoded - weight).norm() / weight.norm())
    assert ERRORS[format_] / 4 < error < ERRORS[format_]
    assert format_ == "binary" or not decoded[3, :64].any()
    empty = quantize_weight(weight.to("meta"), settings)
    for one, other in ((quantized.data, empty.data), (quantized.scale, empty.scale)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    if format_ in ("mxfp8", "mxfp4"):
        mantissa, _ = torch.frexp(quantized.scale)
        assert torch.equal(mantissa, torch.full_like(mantissa, 0.5))
    if format_ in ("mxfp4", "nvfp4"):
        scale = quantized.scale.repeat_interleave(settings.group_size, 1)[:, :130]
        numbers = {abs(float(one)) for one in (decoded / scale.clamp(min=1e-30)).flatten()}
        assert all(abs(one * 2 - round(one * 2)) < 1e-5 for one in numbers) and bool((scale >= 0).all())
        assert quantized.nbytes == quantized.data.numel() + 4 * quantized.scale.numel()  # half a byte a number


def by_definition(group: torch.Tensor, format_: str) -> torch.Tensor:
    """A group (n,) of numbers rounded to the format, by the words of `quantize_weight`."""
    magnitudes, signs = group.abs(), group.sign()
    if format_ == "binary":
        return torch.where(group < 0, -1.0, 1.0) * magnitudes.mean()
    if format_ == "ternary":
        kept = magnitudes > 0.7 * magnitudes.mean()
        return signs * kept * magnitudes[kept].mean()
    if format_ == "mxfp4":
        scale = 2.0 ** (math.floor(math.log2(float(magnitudes.max()))) - 2)
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * scale
        return signs * numbers[(magnitudes[:, None] - numbers).abs().argmin(1)]
    levels = 2 ** int(format_) - 1
    low, high = min(0.0, float(group.min())), max(0.0, float(group.max()))
    scale = (high - low) / levels
    zero = round(-low / scale)
    return (((group / scale).round() + zero).clamp(0, levels) - zero) * scale


@pytest.mark.parametrize("format_", ["binary", "ternary", "mxfp4", "2", "3"])
def test_formats_are_their_definitions(format_):
    """Of groups on both sides of 0 and on one alone, and of a last group that is shorter."""
    weight = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    weight = torch.cat([weight, weight.abs() + 3.0, -weight.abs() - 3.0])
    bits = int(format_) if format_.isdecimal() else None
    decoded = quantize_weight(weight, FormatSettings("affine" if bits else format_, 32, bits)).dequantize()
    expected = [torch.cat([by_definition(group, format_) for group in row.split(32)]) for row in weight]
    torch.testing.assert_close(decoded, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_layers_train_as_they_did():
    """Quantized and decoded again, each in the mode it was in."""
    model = model_of("mixtral").train()
    model.model.layers[0].eval()
    modes = {name: one.training for name, one in model.named_modules()}
    for change in (lambda: protocol.quantize(model, "int8"), lambda: protocol.dequantize(model)):
        change()
        assert {name: one.training for name, one in model.named_modules()} == modes


@pytest.mark.parametrize("bits", range(2, 9))
def test_affine_bits(bits):
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    decoded = quantize_weight(weight, FormatSettings("affine", 64, bits)).dequantize()
    assert all(len(group.unique()) <= 2**bits for row in decoded for group in row.split(64))
    step = (weight.unflatten(1, (2, 64)).abs().amax(-1) * 2 / (2**bits - 2)).repeat_interleave(64, 1)
    assert bool(((decoded - weight).abs() <= step * 1.01).all())


@pytest.mark.parametrize("format_", ["int8", "nf4", "mxfp4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_models(name, format_, tmp_path):
    model = model_of(name)
    kept = {key: one.clone() for key, one in model.named_parameters()}
    assert protocol.quantize(model, format_, group_size=None if format_ == "mxfp4" else 32) is model
    replaced = [one for one in model.modules() if isinstance(one, QuantizedLinear | QuantizedStacks)]
    assert any(isinstance(one, QuantizedStacks) for one in replaced) == (name in ("mixtral", "gpt_oss"))
    assert type(model.get_output_embeddings()) is nn.Linear
    left = dict(model.named_parameters())
    assert all(torch.equal(one, kept[key]) for key, one in left.items()) and len(left) < len(kept)
    with torch.no_grad():
        logits = model(IDS).logits
        plain = protocol.dequantize(copy.deepcopy(model))
        assert dict(plain.named_parameters()).keys() == kept.keys()
        assert {key: one.shape for key, one in plain.named_parameters()} == {
            key: one.shape for key, one in kept.items()
        }
        torch.testing.assert_close(logits, plain(IDS).logits, rtol=1e-4, atol=1e-5)
        assert float((logits - made(name)(IDS).logits).norm()) > 0
        model.save_pretrained(tmp_path / "small")
        again = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
        assert torch.equal(again(IDS).logits, logits)
        made(name).save_pretrained(tmp_path / "large")
        settings = model.config.quantization_config
        direct = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "large", quantization_config=settings)
        assert torch.equal(direct(IDS).logits, logits)
    before = {key: one.clone() for key, one in protocol.graphother(again).items() if one.dtype != torch.float32}
    again.to(torch.bfloat16)
    assert {one.weight.dtype for one in again.modules() if isinstance(one, QuantizedLinear)} <= {torch.bfloat16}
    assert {one.dtype for one in protocol.dequantize(copy.deepcopy(again)).parameters()} == {torch.bfloat16}
    assert all(torch.equal(one, before[key]) for key, one in protocol.graphother(again).items() if key in before)
    assert again(IDS).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llama", "gpt2", "mpt"])
def test_adapters_train_over_codes(name):
    peft = pytest.importorskip("peft")
    model, pattern = model_of(name), "q_proj|up_proj|c_attn|c_fc|Wqkv"
    protocol.quantize(model, "nf4", group_size=32)
    plain, wrapped = protocol.dequantize(copy.deepcopy(model)), copy.deepcopy(model)
    for one in (model, plain):
        protocol.apply_lora_to_layers(one, 4, pattern, rngs=0)
    wrapped = peft.PeftModel(wrapped, copy.deepcopy(model.peft_config["default"]))  # PEFT's own
    found = []
    for one in (plain, model, wrapped):
        trained = {key.removeprefix("base_model.model."): p for key, p in one.named_parameters() if p.requires_grad}
        for index, parameter in enumerate(trained.values()):
            generator = torch.Generator().manual_seed(index)
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        output = one(input_ids=IDS, labels=IDS)
        output.loss.backward()
        found.append((output.logits, {key: p.grad for key, p in trained.items()}))
    (expected, right), *others = found
    for logits, gradients in others:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        assert gradients.keys() == right.keys() and gradients
        for key, gradient in right.items():
            torch.testing.assert_close(gradients[key], gradient, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="merge=False"):
        protocol.unwrap_lora_to_layers(model)
    with pytest.raises(ValueError, match="dequantize"):
        next(one for one in model.modules() if hasattr(one, "lora_A")).merge()
    protocol.unwrap_lora_to_layers(model, merge=False)
    assert any(isinstance(one, QuantizedLinear) for one in model.modules())


@pytest.mark.parametrize("safe", [False, True])
def test_an_adapter_of_peft_itself_is_not_merged_into_a_decoded_copy(safe):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(protocol.quantize(model_of("llama"), "int8"), settings)
    before = model(IDS).logits
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="nothing can be merged into them"):
            merge(safe_merge=safe)
        assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
def test_simulated(name):
    model, rounded = model_of(name), model_of(name)
    protocol.quantize(model, QuantizationConfig("int4", group_size=32, simulate=True))
    protocol.quantize(rounded, "int4", group_size=32)
    torch.testing.assert_close(model(IDS).logits, rounded(IDS).logits, rtol=1e-4, atol=1e-5)
    model(IDS, labels=IDS).loss.backward()
    originals = [one for key, one in model.named_parameters() if key.endswith(".original")]
    assert originals and all(one.grad.abs().sum() > 0 for one in originals)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "mpt"])
def test_simulated_weights_are_saved_and_given_back(name, tmp_path):
    model, plain = model_of(name), model_of(name)
    protocol.quantize(model, "int4", group_size=32, simulate=True)
    rounded = model(IDS).logits
    for format_ in ("int4", "int8"):
        for simulate in (False, True):
            with pytest.raises(ValueError, match="is quantized already"):
                protocol.quantize(model, format_, simulate=simulate)
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path).eval()
    assert torch.equal(again(IDS).logits, plain(IDS).logits)
    moved = {key: one + 0.01 for key, one in plain.state_dict().items()}
    model.load_state_dict(moved)
    assert not torch.equal(model(IDS).logits, rounded)
    protocol.dequantize(model)
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(moved)
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    protocol.quantize(model, "int8")


@pytest.mark.parametrize("convert", [protocol.to_flax, protocol.to_torch, protocol.transform_fn])
def test_what_needs_plain_weights_says_so(convert):
    with pytest.raises(TypeError, match="are quantized, and are not converted"):
        convert(protocol.quantize(model_of("llama"), "int8"))


def test_settings_of_other_types():
    for given, match in (({"pattern": 3}, "pattern=3"), ({"simulate": "no"}, "simulate='no'")):
        with pytest.raises(TypeError, match=match):
            QuantizationConfig(**given)
    bare = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 0}))
    with pytest.raises(ValueError, match="no layer to quantize but heads and routers"):
        protocol.quantize(bare)


def test_settings():
    model = model_of("mixtral").quantize(QuantizationConfig("8bit", pattern="self_attn", block_size=16), False)
    names = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, QuantizedLinear)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not any(isinstance(one, QuantizedStacks) for one in model.modules())
    assert model.model.layers[0].self_attn.q_proj.quantized.group_size == 16
    assert not model.config.quantization_config.quantize_tensors, "so that it is read again as it is"


@pytest.mark.parametrize("native_loader", [True, False])
def test_a_class_of_linear_layers_that_is_transformers_own(native_loader, tmp_path):
    """Falcon's, which multiplies and then adds."""
    config = transformers.FalconConfig(vocab_size=97, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    source = easytorch if native_loader else transformers
    model = source.AutoModelForCausalLM.from_config(config).eval()
    before = model(IDS).logits
    protocol.quantize(model, "int8")
    assert (model(IDS).logits - before).norm() / before.norm() < 0.02
    model.save_pretrained(tmp_path)
    again = source.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_what_does_not_fit_leaves_the_model_as_it_was():
    model = model_of("llama")
    modules, weights = str(model), {name: one.clone() for name, one in model.named_parameters()}
    for arguments, match in (
        (("int3",), "unknown format 'int3'"),
        (("",), "unknown format ''"),
        ((QuantizationConfig(pattern="encoder"),), "no layer of LlamaForCausalLM has 'encoder'"),
    ):
        with pytest.raises(ValueError, match=match):
            model.quantize(*arguments)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = torch.inf
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight has infinities"):
        model.quantize("int4")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = weights["model.layers.1.mlp.up_proj.weight"][3, 3]
    assert str(model) == modules and not getattr(model.config, "quantization_config", None)
    assert all(torch.equal(one, weights[name]) for name, one in model.named_parameters())
    with pytest.raises(TypeError, match="must be a QuantizationConfig"):
        model.quantize({"dtype": "int8"})
    with pytest.raises(ValueError, match="not quantized"):
        protocol.dequantize(model)
    model.quantize()
    with pytest.raises(ValueError, match="quantized already"):
        model.quantize()


@pytest.mark.parametrize(
    "settings",
    [
        {"group_size": 0}, {"group_size": 4, "block_size": 8}, {"bits": 4}, {"dtype": "affine", "bits": 9},
        {"pattern": "("}, {"dtype": "mxfp4", "group_size": 16}, {"jax_native": True},
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings(settings):
    with pytest.raises(ValueError, match=next(reversed(settings))):
        QuantizationConfig(**settings)


def test_one_device():
    model = model_of("llama")
    rules = (("embed_tokens|lm_head", ("tp", None)), ("layers/.*/weight", ("fsdp",)), ("norm", None))
    assert model.shard_model(rules) is model and model.gather_model(dict(rules)) is model
    assert set(model.params_sharding.values()) == {None}

    class Mesh:
        def __init__(self, devices: int) -> None:
            self.size = devices

    assert model.shard_model(mesh=Mesh(1)) is model
    for call, error, match in (
        (lambda: model.shard_model(mesh=Mesh(4)), TypeError, "4 devices must be a torch DeviceMesh"),
        (lambda: model.shard_model(rules, Mesh(4)), TypeError, "4 devices must be a torch DeviceMesh"),
        (lambda: model.shard_model((("nrom", None),)), ValueError, "no parameter matches the partition rule 'nrom'"),
        (lambda: model.shard_model((("(", None),)), ValueError, "regular expression"),
        (lambda: model.gather_model(["norm"]), TypeError, "pairs"),
        (lambda: model.gather_model(mesh="tp"), TypeError, "DeviceMesh"),
    ):
        with pytest.raises(error, match=match):
            call()


def test_a_mesh_of_jax_is_refused():
    jax, model = pytest.importorskip("jax"), model_of("llama")
    of_jax = jax.sharding.Mesh(jax.devices("cpu")[:1], ("tp",))
    for call in (model.shard_model, model.gather_model):
        with pytest.raises(TypeError, match="a JAX mesh shards JAX arrays"):
            call(mesh=of_jax)


def test_experts_are_pickled():
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    config = transformers.Qwen3MoeConfig(**sizes, **experts, num_attention_heads=4, num_key_value_heads=2)
    model = easytorch.AutoModelForCausalLM.from_config(config).eval().quantize("int8", group_size=32)
    again = pickle.loads(pickle.dumps(model))
    tokens = torch.tensor([[5, 9, 33]])
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert type(again.model.layers[0].mlp.experts) is type(model.model.layers[0].mlp.experts)


@pytest.mark.parametrize("auto", [easytorch.AutoModelForCausalLM, LlamaForCausalLM], ids=["auto", "class"])
def test_a_name_for_from_pretrained(auto, tmp_path):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4)
    easytorch.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = auto.from_pretrained(tmp_path, quantization_config="int8")
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantizedLinear)
    with pytest.raises(TypeError, match=r"quantization_config must be .* or a name such as 'int8', not int"):
        auto.from_pretrained(tmp_path, quantization_config=8)


def test_models_of_one_config_are_quantized_each_by_itself(tmp_path):
    config = transformers.LlamaConfig(**SIZES)
    build = LlamaForCausalLM
    plain, fine, coarse = (build(config).eval() for _ in range(3))
    fine.quantize("nf4", group_size=16)
    coarse.quantize("int8", group_size=16)
    for name, model in (("plain", plain), ("fine", fine), ("coarse", coarse)):
        model.save_pretrained(tmp_path / name)
        again = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert not hasattr(config, "quantization_config") and plain.config is config
    shared = fine.model.config
    assert fine.config is shared and fine.model.layers[0].self_attn.config is shared and shared is not config
    coarse.dequantize()
    assert fine.config.quantization_config is not None and not hasattr(coarse.config, "quantization_config")
