"""Models whose weights accelerate keeps elsewhere and brings when a module is called."""

from __future__ import annotations

import pytest
import torch
import transformers

import easytorch
from easytorch import protocol

accelerate = pytest.importorskip("accelerate")
hooks = pytest.importorskip("accelerate.hooks")
IDS = torch.tensor([[5, 9, 33]])


def make():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0
    )
    return easytorch.AutoModelForCausalLM.from_config(config).eval()


def on_cpu(model, folder):
    accelerate.cpu_offload(model, execution_device="cpu")


def on_disk(model, folder):
    accelerate.disk_offload(model, str(folder), execution_device="cpu")


def one_layer(model, folder):
    accelerate.cpu_offload(model.model.layers[1], execution_device="cpu")


def one_hook(model, folder):
    mlp = model.model.layers[0].mlp
    weights = {name: one.detach().clone() for name, one in mlp.state_dict().items()}
    hook = hooks.AlignDevicesHook(execution_device="cpu", offload=True, weights_map=weights, place_submodules=True)
    hooks.add_hook_to_module(mlp, hooks.SequentialHook(hooks.ModelHook(), hook))


def dispatched(model, folder):
    places = dict.fromkeys(["model.embed_tokens", "model.layers.1", "model.norm", "model.rotary_emb"], "cpu")
    places |= {"model.layers.0": "disk", "lm_head": "disk"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


@pytest.mark.parametrize("offload", [on_cpu, on_disk, one_layer, one_hook, dispatched])
def test_offloaded(offload, tmp_path):
    model = make()
    want = model.generate(IDS, max_new_tokens=6, do_sample=False)
    loss, _ = model.compute_loss(IDS, labels=IDS)
    offload(model, tmp_path / "weights")
    assert any(one.is_meta for one in model.parameters())
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), want)
    assert torch.equal(protocol.generate(model, IDS, max_new_tokens=6, do_sample=False), want)
    assert model.compute_loss(IDS, labels=IDS)[0].loss == loss.loss
    for use in (model.to_torch, model.to_flax, model.quantize):
        with pytest.raises(ValueError, match=r"accelerate keeps .* bring them back by accelerate\.hooks\.remove_hook"):
            use()
    if offload is dispatched:  # transformers reads its map
        model.save_pretrained(tmp_path / "saved")
    else:
        with pytest.raises(ValueError, match="save_pretrained: accelerate keeps"):
            model.save_pretrained(tmp_path / "saved")
        hooks.remove_hook_from_module(model, recurse=True)
        model.save_pretrained(tmp_path / "saved")
    again = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.generate(IDS, max_new_tokens=6, do_sample=False), want)


def test_a_weight_that_nothing_brings_is_said():
    model = make()
    accelerate.cpu_offload(model.model.layers[1], execution_device="cpu")
    model.model.norm.to("meta")
    with pytest.raises(ValueError, match=r"generate: 'model.norm.weight' of LlamaForCausalLM is on the meta device"):
        protocol.generate(model, IDS)
