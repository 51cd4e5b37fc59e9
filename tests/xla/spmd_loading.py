"""Loading and saving over a mesh of four virtual devices: run by test_spmd.py in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch_xla
from safetensors.torch import load_file
from transformers import LlamaConfig, OPTConfig

import easytorch
from easytorch.distributed import gather_model, make_mesh, params_sharding, shard_batch, shard_model
from easytorch.distributed.shards import load_shards, model_tensors, save_shards
from easytorch.models.llama import LlamaForCausalLM

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def shards_of(tensor):
    """The shape of each device's part."""
    return [tuple(part.shape) for part, _ in torch_xla._XLAC._get_local_shards([tensor.detach()])[0]]


def main(folder: Path) -> None:
    mesh = make_mesh("fsdp=2,tp=2", "xla")
    configs = {
        "llama": LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=32),
        "opt": OPTConfig(**SIZES, ffn_dim=64, max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0),
    }
    ids = torch.randint(0, 96, (4, 8))
    for name, config in configs.items():
        torch.manual_seed(0)
        plain = easytorch.AutoModelForCausalLM.from_config(config).eval()
        plain.save_pretrained(folder / name)
        with torch.no_grad():
            want = plain(input_ids=ids, use_cache=False).logits
        rules = None if name == "llama" else {"fc1.weight": ("tp", "fsdp"), "fc2.weight": ("fsdp", "tp")}
        model = easytorch.AutoModelForCausalLM.from_pretrained(folder / name, mesh=mesh, partition_rules=rules)
        batch = shard_batch({"input_ids": ids}, mesh)
        with torch.no_grad():
            got = model.eval()(**batch, use_cache=False).logits
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
        weights = dict(model.named_parameters())
        if name == "llama":
            assert shards_of(weights["model.layers.0.mlp.down_proj.weight"]) == [(16, 32)] * 4
            assert params_sharding(model)["model.layers.0.mlp.down_proj.weight"] == ("fsdp", "tp")
        else:
            assert shards_of(weights["model.decoder.layers.0.fc1.weight"]) == [(32, 16)] * 4
        model.save_pretrained(folder / f"{name} again")
        again = easytorch.AutoModelForCausalLM.from_pretrained(folder / f"{name} again").state_dict()
        assert again.keys() == plain.state_dict().keys()
        assert all(torch.equal(again[key], value) for key, value in plain.state_dict().items())
        if name == "llama":
            in_shards(model, plain, folder / "shards")
        assert gather_model(model) is model
        assert not any(torch_xla._XLAC._get_xla_sharding_spec(one.detach()) for one in model.parameters())
        with torch.no_grad():
            torch.testing.assert_close(model(**batch, use_cache=False).logits.cpu(), want, rtol=1e-4, atol=1e-5)
    refusals(mesh, configs["llama"])
    print("ok")


def in_shards(model, plain, folder: Path) -> None:
    """A file for each device, which any mesh reads, and these devices too."""
    folder.mkdir()
    save_shards(model_tensors(model), folder, lambda: None)
    files = sorted(folder.iterdir())
    parts = [load_file(file)["model.layers.0.mlp.down_proj.weight"] for file in files]
    assert [part.shape for part in parts] == [(16, 32)] * 4
    read = {key: torch.zeros_like(value) for key, value in plain.state_dict().items()}
    load_shards(read, folder)
    assert all(torch.equal(read[key], value) for key, value in plain.state_dict().items())
    stored = {key: shards_of(one) for key, one in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_shards(model_tensors(model), folder)
    assert all(torch.equal(one.detach().cpu(), plain.get_parameter(key)) for key, one in model.named_parameters())
    assert stored == {key: shards_of(one) for key, one in model.named_parameters()}


def refusals(mesh, config) -> None:
    def why(call) -> str:
        try:
            call()
        except (ValueError, NotImplementedError) as error:
            return str(error)
        raise AssertionError("it was taken")

    assert "dp, fsdp, ep, tp" in why(lambda: make_mesh("sp=4", "xla"))
    assert "needs 3 devices" in why(lambda: make_mesh("fsdp=3", "xla"))
    assert "3 rows" in why(lambda: shard_batch({"input_ids": torch.zeros(3, 2)}, mesh))
    odd = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "intermediate_size": 63}))
    assert "63" in why(lambda: shard_model(odd, mesh=mesh))
    shard_model(odd, mesh=mesh, uneven="replicate")
    assert params_sharding(odd)["model.layers.0.mlp.down_proj.weight"] == ("fsdp", None)
    assert "sharded already" in why(lambda: shard_model(odd, mesh=mesh))
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    assert "has no values" in why(lambda: shard_model(empty, mesh=mesh))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
