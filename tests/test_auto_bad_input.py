"""Checkpoints that cannot be used: one clear error each, with what is wrong, where, and what to do."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertConfig, GPT2Config, GPT2Model, LlamaConfig

import easytorch
from easytorch.bridge.errors import CheckpointError
from easytorch.models.bert import BertForSequenceClassification
from easytorch.models.llama import LlamaForCausalLM

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
load = easytorch.AutoModelForCausalLM.from_pretrained


@pytest.fixture
def llama(tmp_path) -> Path:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, edit) -> Path:
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, {"format": "pt"})
    return file


def test_a_missing_weight(llama) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    file = change(llama, lambda weights: weights.pop(name))
    with pytest.raises(CheckpointError, match=r"is missing.*strict=False") as error:
        load(llama)
    assert error.value.tensor == name and error.value.file == str(file)
    assert torch.isfinite(load(llama, strict=False)(torch.tensor([[4]])).logits).all()
    with pytest.raises(CheckpointError, match=name):
        LlamaForCausalLM.from_pretrained(llama)


def test_a_missing_head_of_a_checkpoint_of_that_very_class(llama) -> None:
    change(llama, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(llama)
    easytorch.AutoModel.from_pretrained(llama)


def test_a_renamed_weight_is_found_by_its_nearest_name(llama) -> None:
    def rename(weights):
        weights["model.layers.0.mlp.upproj.weight"] = weights.pop("model.layers.0.mlp.up_proj.weight")

    change(llama, rename)
    with pytest.raises(CheckpointError, match=r"up_proj.*nearest known name: 'model\.layers\.0\.mlp\.upproj\.weight'"):
        load(llama)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "something.weight"])
def test_a_left_over_weight(llama, name) -> None:
    def add(weights):
        weights[name] = torch.zeros(2, 2)

    change(llama, add)
    with pytest.raises(CheckpointError, match="has no place for it") as error:
        load(llama)
    assert error.value.tensor == name
    load(llama, strict=False)


def test_a_wrong_shape(llama) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"

    def cut(weights):
        weights[name] = weights[name][:-1].contiguous()

    change(llama, cut)
    with pytest.raises(CheckpointError, match=r"\(31, 32\).*\(32, 32\).*ignore_mismatched_sizes=True") as error:
        load(llama)
    assert error.value.tensor == name
    model, info = load(llama, ignore_mismatched_sizes=True, output_loading_info=True)
    assert {entry[0] for entry in info["mismatched_keys"]} == {name}
    assert torch.isfinite(model(torch.tensor([[4]])).logits).all()


def test_heads_of_other_sizes_are_a_wrong_shape_too(tmp_path) -> None:
    BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"classifier"):
        easytorch.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)


@pytest.mark.parametrize("size", [0, 4, 100, -10])
def test_truncated_safetensors(llama, size) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="truncated or corrupt") as error:
        load(llama)
    assert error.value.file == str(file)


def test_a_corrupt_header_and_a_missing_shard(llama) -> None:
    file = llama / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:8] + b"x" + good[9:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(llama)
    file.write_bytes(good)
    model = load(llama)
    file.unlink()
    model.save_pretrained(llama, max_shard_size="20KB")
    sorted(llama.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(CheckpointError, match=r"the shard .* is missing"):
        load(llama)


def test_bin_files_are_only_read_as_weights(llama) -> None:
    weights = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    file = llama / "pytorch_model.bin"
    torch.save(weights, file)
    assert torch.equal(load(llama).lm_head.weight, weights["lm_head.weight"])
    with pytest.raises(ValueError, match="weights_only=False"):
        load(llama, weights_only=False)
    good = file.read_bytes()
    for broken in (good[: len(good) // 2], b""):
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match="truncated"):
            load(llama)

    class Evil:
        def __reduce__(self):
            return (llama.joinpath("ran").write_text, ("",))

    torch.save({"a": Evil()}, file)
    with pytest.raises(CheckpointError, match="not a pickle of plain tensors"):
        load(llama)
    torch.save([1], file)
    with pytest.raises(CheckpointError, match="holds a list"):
        load(llama)
    assert not (llama / "ran").exists()


def test_no_config_no_weights_no_folder(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        load(tmp_path)
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"from_flax=True needs flax_model\.msgpack"):
        load(tmp_path, from_flax=True)
    for absent in (tmp_path / "absent", str(tmp_path / "absent"), "./absent"):
        with pytest.raises(FileNotFoundError, match="there is no such folder"):
            load(absent)


@pytest.mark.parametrize(
    "content, words",
    [({"model_type": "lama"}, "nearest known name: 'llama'"), ({}, "model_type"), ("{", "JSON")],
    ids=str,
)
def test_a_config_that_says_nothing_known(tmp_path, content, words) -> None:
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(CheckpointError, match=words) as error:
        load(tmp_path)
    assert error.value.file == str(tmp_path / "config.json") and "\n" not in str(error.value)


def test_an_architecture_without_that_head(tmp_path) -> None:
    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"AutoModelForMaskedLM has no class for the architecture 'gpt2'.*bert"):
        easytorch.AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_layers_of_plugged_architectures(tmp_path) -> None:
    model = GPT2Model(
        GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    )
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"h\.2\..* has no place for it"):
        easytorch.AutoModel.from_pretrained(tmp_path, num_hidden_layers=2)
    file = change(tmp_path, lambda weights: weights.pop("h.1.attn.c_attn.weight"))
    with pytest.raises(CheckpointError, match=r"h\.1\.attn\.c_attn\.weight.*is missing") as error:
        easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert error.value.file == str(file)
    easytorch.AutoModelForCausalLM.from_pretrained(tmp_path, strict=False)
    with pytest.raises(CheckpointError, match=r"wte\.weight.*ignore_mismatched_sizes"):
        easytorch.AutoModel.from_pretrained(tmp_path, vocab_size=50)


FLAX = Path(__file__).resolve().parents[2] / "shared" / "fixtures" / "flax" / "llama"


@pytest.mark.skipif(not FLAX.is_dir(), reason=f"no Flax fixtures at {FLAX}")
def test_flax_checkpoints_that_are_broken(tmp_path) -> None:
    config = json.loads((FLAX / "config.json").read_text())
    weights = (FLAX / "flax_model.msgpack").read_bytes()
    (tmp_path / "flax_model.msgpack").write_bytes(weights)
    for changes, words in (
        ({"num_hidden_layers": 1}, "has no place for it"),
        ({"num_hidden_layers": 3}, "is missing"),
        ({"vocab_size": 11}, "ignore_mismatched_sizes"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=words) as error:
            load(tmp_path)
        assert "flax_model.msgpack" in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "flax_model.msgpack").write_bytes(weights[:-50])
    with pytest.raises(CheckpointError, match=r"flax_model\.msgpack"):
        load(tmp_path)


@pytest.fixture(params=["model.safetensors", "pytorch_model.bin", "transformers"])
def experts(request, tmp_path):
    """A checkpoint of experts one by one: its folder, its weights, and what writes others; of a native class and of one
    of transformers' own."""

    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    if request.param == "transformers":
        config = transformers.Ernie4_5_MoeConfig(**sizes, moe_num_experts=4, moe_k=2, moe_layer_start_index=1)
    else:
        config = transformers.Qwen3MoeConfig(**sizes, num_experts=4, head_dim=8)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()

    def write(changed):
        if request.param == "pytorch_model.bin":
            torch.save(changed, tmp_path / request.param)
        else:
            save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})

    return tmp_path, weights, write


EXPERT = "model.layers.1.mlp.experts.1."


def test_experts_stored_one_by_one_are_all_there(experts) -> None:
    """transformers stacks those that it finds: without the second the third would stand in its place."""
    folder, weights, write = experts
    write(weights)
    easytorch.AutoModelForCausalLM.from_pretrained(folder)
    others = {name: one for name, one in weights.items() if not name.startswith(EXPERT)}
    own = {name.removeprefix(EXPERT): one for name, one in weights.items() if name.startswith(EXPERT)}
    assert len(own) == 3
    first = re.escape(f"{EXPERT}down_proj.weight")
    for changed, match in [
        (
            {EXPERT + name: one for name, one in own.items() if "up" not in name},
            "experts.1.up_proj.weight': is missing",
        ),
        ({}, rf"{first}': is missing from the checkpoint \(and 2 more\), and"),
        (
            {EXPERT.replace("experts.1", "experts.7") + name: one for name, one in own.items()},
            f"{first}': is missing.*experts.7.down",
        ),
        ({EXPERT + name.replace("up_", "upp_"): one for name, one in own.items()}, "up_proj.* name: .*1.upp_proj"),
        ({EXPERT + name: one[:3] for name, one in own.items()}, rf"{first}': has shape \(3, .* 3 of the 4 experts"),
    ]:
        write(others | changed)
        with pytest.raises(CheckpointError, match=match):
            easytorch.AutoModelForCausalLM.from_pretrained(folder)
    native = type(easytorch.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)))
    if native.__module__.startswith("easytorch"):
        write(others)
        with pytest.raises(CheckpointError, match="stacks the experts"):
            easytorch.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        with pytest.raises(CheckpointError, match="stacks the experts"):
            native.from_pretrained(None, config=transformers.AutoConfig.from_pretrained(folder), state_dict=others)


def test_files_of_a_variant_and_pickles_are_those_that_are_checked(experts) -> None:
    """Not the files beside them, which are not loaded."""
    folder, weights, write = experts
    cut = {name: one for name, one in weights.items() if not name.startswith(EXPERT)}
    load = easytorch.AutoModelForCausalLM.from_pretrained
    write(cut)
    save_file(weights, folder / "model.half.safetensors", metadata={"format": "pt"})
    load(folder, variant="half")
    save_file(cut, folder / "model.half.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.half\.safetensors: .*experts\.1\..* is missing"):
        load(folder, variant="half")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").write_bytes(b"cut off")
    load(folder, use_safetensors=False)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)


def test_experts_are_read_as_they_are_stacked(experts, monkeypatch) -> None:
    """Not ahead of it by threads, which would hold all of them beside the stacks."""
    from transformers import core_model_loading

    folder, weights, write = experts
    write(weights)
    pools, spawn = set(), core_model_loading.spawn_materialize
    monkeypatch.setattr(
        core_model_loading, "spawn_materialize", lambda pool, *a, **k: (pools.add(pool), spawn(pool, *a, **k))[1]
    )
    easytorch.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert pools == {None} and "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    easytorch.AutoModelForCausalLM.from_pretrained(folder)
    assert len(pools) == 2 and os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "0"


def test_weights_and_codes_of_experts_may_stand_side_by_side() -> None:
    """Of some experts the codes, of others the weight; and two kinds of experts of one layer."""
    from easytorch.protocol.expert_checks import check_experts

    kind = transformers.LlamaForCausalLM
    codes = {f"a.experts.{number}.w1.{leaf}": torch.zeros(2) for number in range(3) for leaf in ("qweight", "scales")}
    check_experts(kind, None, {"state_dict": codes | {"a.experts.3.w1.weight": torch.zeros(4, 4)}})
    kinds = {f"a.experts.{number}.w1.weight": torch.zeros(2 if number < 2 else 4, 4) for number in range(4)}
    check_experts(kind, None, {"state_dict": kinds})
    with pytest.raises(CheckpointError, match=r"'a\.experts\.3\.w1\.weight': is missing"):
        check_experts(kind, None, {"state_dict": codes | {"a.experts.4.w1.weight": torch.zeros(4, 4)}})
