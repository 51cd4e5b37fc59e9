"""What a captured step is made of: its inputs, what it may not do, and what it depends on."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import flex_attention

import easytorch
from easytorch.layers.captured_step import CapturedStep, HostReads, StaticInputs
from easytorch.layers.cuda_graph import GraphPool, graph_of
from easytorch.layers.model_snapshot import ModelSnapshot, capture_refusal


def tiny(**settings):
    sizes = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32, **settings)
    model = easytorch.AutoModelForCausalLM.from_config(config).eval()
    model(torch.tensor([[1, 2]]))  # the report on the first forward takes its hooks out
    return model


def test_operators_that_wait_for_the_device():
    x, index = torch.arange(6.0), torch.tensor([0, 2])
    waiting = [
        lambda: x.sum().item(), lambda: bool(x.any()), lambda: x.nonzero(), lambda: x[x > 2], lambda: x.unique(),
        lambda: torch.equal(x, x + 1), lambda: x.masked_select(x > 1), lambda: x.to("meta"),
        lambda: x.clone().index_put_((x > 2,), torch.tensor(1.0)),
    ]  # fmt: skip
    for run in waiting:
        with HostReads() as reads:
            run()
        assert reads.found, run
    with HostReads() as reads:
        x[index], x[1:], x.softmax(0).topk(2), torch.where(x > 1, x, 0.0), x.clone().index_put_((index,), x[index])
        x.to(torch.float64), x.masked_fill(x > 1, 0.0), torch.full((2,), 3.0)
    with torch.compiler.set_stance("force_eager"), HostReads() as others:
        flex_attention(*torch.ones(3, 1, 1, 2, 16))  # an operator of higher order
    assert others.found == []
    assert reads.found == []


def test_static_inputs():
    mask = torch.ones(2, 4, dtype=torch.bool)
    first = {"ids": torch.tensor([[1], [2]]), "masks": {"full": mask, "sliding": None}, "use_cache": True}
    kept = StaticInputs(first)
    ids = kept.call["ids"]
    assert (
        kept.take(first | {"ids": torch.tensor([[7], [8]])}) and ids.tolist() == [[7], [8]] and kept.call["ids"] is ids
    )
    assert first["ids"].tolist() == [[1], [2]] and kept.call["masks"]["full"] is not mask
    for other in (
        {"ids": torch.tensor([[9]])}, {"ids": torch.tensor([[9.0], [9.0]])}, {"use_cache": False}, {"use_cache": 1},
        {"masks": {"full": mask, "sliding": mask}}, {"masks": {"full": mask}}, {"more": 1},
    ):  # fmt: skip
        assert not kept.take(first | other), other
        assert ids.tolist() == [[7], [8]]


def test_a_cpu_has_no_graphs(monkeypatch):
    step = CapturedStep(lambda: 3, torch.device("cpu"))
    assert (step(), step(), step.captured) == (3, 3, False) and step.refusal == "steps on cpu are not captured"
    monkeypatch.setenv("EASYTORCH_CUDA_GRAPHS", "0")
    assert graph_of(torch.device("cuda"), GraphPool()) is None
    monkeypatch.setenv("EASYTORCH_CUDA_GRAPHS", "1")
    assert graph_of(torch.device("cuda"), GraphPool()) is not None
    monkeypatch.setenv("EASYTORCH_CUDA_GRAPHS", "perhaps")
    with pytest.raises(ValueError, match="EASYTORCH_CUDA_GRAPHS='perhaps' is neither on"):
        graph_of(torch.device("cuda"), GraphPool())


def lora(model):
    model.apply_lora_to_layers(2, "q_proj")
    return model


def _assign(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


CHANGES = {
    "weight": _assign,
    "data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
    "dtype": lambda model: model.to_dtype(torch.bfloat16),
    "quantized": lambda model: model.quantize("int8"),
    "adapter": lora,
    "module": lambda model: setattr(model.model.layers[1], "mlp", torch.nn.Identity()),
    "removed": lambda model: delattr(model.model.layers[1], "mlp"),
    "hook": lambda model: model.model.norm.register_forward_hook(lambda *_: None),
    "forward": lambda model: setattr(model.model.norm, "forward", lambda x: x),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "training": lambda model: model.model.layers[0].train(),
    "checked": lambda model: None,  # by the environment
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_snapshot_notices(change, monkeypatch):
    model = tiny()
    snapshot = ModelSnapshot(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        model(torch.tensor([[1, 2, 3]]))
    assert snapshot.holds()
    if change == "checked":
        monkeypatch.setenv("EASYTORCH_CHECK", "1")
    CHANGES[change](model)
    assert not snapshot.holds()
    assert ModelSnapshot(model).holds()


def test_a_snapshot_notices_which_adapter_is_active():
    model = lora(tiny())
    snapshot = ModelSnapshot(model)
    assert snapshot.holds()
    model.disable_adapters()
    assert not snapshot.holds()
    model.enable_adapters()
    assert snapshot.holds()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not snapshot.holds()


def test_reasons(monkeypatch):
    model = tiny()
    assert capture_refusal(model) is None
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: None)
    assert "model.layers.1.mlp has hooks" in capture_refusal(model)
    assert capture_refusal(model, before_prompt=True) is None
    handle.remove()
    model.train()
    assert "training mode" in capture_refusal(model)
    model.eval()
    model.model.norm.to("meta")
    assert capture_refusal(model) == "the model's tensors are on several devices: cpu, meta"
    model = tiny()
    model.set_attn_implementation("flex_attention")
    assert capture_refusal(model) == "the masks of its attention 'flex_attention' are no tensors"
    model = tiny()
    model.config.output_hidden_states = True
    assert "asks for attentions or hidden states" in capture_refusal(model)
    monkeypatch.setenv("EASYTORCH_CHECK", "1")
    assert "EASYTORCH_CHECK=1" in capture_refusal(tiny())
