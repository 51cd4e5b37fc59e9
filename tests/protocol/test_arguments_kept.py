"""No function changes what it is given: dicts, tensors, configs and models."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from easytorch import protocol
from easytorch.cache_names import cache_keyword
from easytorch.protocol import LossConfig, compute_loss
from tests.protocol.shared_models import IDS, shared

SEGMENTS = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])


def cache_of(name: str):
    return protocol.init_cache(shared(name), 2, 8)


def snapshot(value):
    """A deep copy that compares by content."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), value.requires_grad, value.detach().clone().tolist())
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: snapshot(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(one) for one in value]
    if isinstance(value, nn.Module):
        state = {"state": snapshot(value.state_dict(keep_vars=True)), "training": [m.training for m in value.modules()]}
        names = {name: len(module.__dict__) for name, module in value.named_modules()}
        return state | {"attributes": names, "config": snapshot(getattr(value, "config", None))}
    if isinstance(value, transformers.PreTrainedConfig | transformers.GenerationConfig):
        return value.to_dict() | {"attention": getattr(value, "_attn_implementation", None)}
    return copy.deepcopy(value)


def tree_of(model):
    return protocol.unflatten({name: one.detach().clone() for name, one in model.named_parameters()})


CALLS = {
    "compute_loss": lambda m: compute_loss(m, **m.batch, loss_kwargs=m.words, loss_config=m.loss_config)[1].loss,
    "compute_loss of segments": lambda m: compute_loss(m, **m.batch, segment_ids=m.segments)[1].loss,
    "flatten": lambda m: protocol.flatten(m.tree),
    "unflatten": lambda m: protocol.unflatten(m.flat),
    "split_module": lambda m: protocol.split_module(m),
    "split_params": lambda m: protocol.split_params(m),
    "split_params_dict": lambda m: protocol.split_params_dict(m, m.tree),
    "graphdef": lambda m: protocol.graphdef(m).config.update({"vocab_size": 3}),
    "merge": lambda m: protocol.merge_module(*protocol.split_module(m)).train(),
    "to_flax": lambda m: protocol.to_flax(m),
    "to_torch": lambda m: protocol.to_torch(m).config.update({"vocab_size": 3}),
    "lazy_init": lambda m: protocol.lazy_init(type(m), m.config),
    "prepare": lambda m: protocol.prepare_inputs_for_generation(m, m.batch["input_ids"], 8, attention_mask=m.mask),
    "update": lambda m: protocol.update_inputs_for_generation(m, m.output, m.kwargs),
    "metadata": lambda m: (protocol.create_cache_metadata(m, 2, 8), protocol.create_paged_metadata(m, 1.0, 4, 8)),
    "init_cache": lambda m: protocol.init_cache(m, 2, 8, torch.tensor([0, 1])),
    "merge_params_dict of another": lambda m: protocol.merge_params_dict(copy.deepcopy(m), m.tree),
    "to_state": lambda m: protocol.to_state(m, step=3),
    "get_module_repr": lambda m: protocol.get_module_repr(m),
}


@pytest.mark.parametrize("training", [False, True])
def test_what_is_given_is_left_as_it_is(training):
    """Dicts, tensors, configs and models of every function that returns something new."""
    model = copy.deepcopy(shared("llama")).train(training)
    given = SimpleNamespace(
        batch={"input_ids": IDS.clone(), "labels": IDS.clone(), "attention_mask": torch.ones_like(IDS)},
        words={"z_loss": 0.1, "shift_labels": IDS.clone()},
        loss_config=LossConfig(class_weights=torch.ones(97)),
        segments=SEGMENTS.clone(),
        tree=tree_of(model),
        mask=torch.ones_like(IDS),
        flat={name: one.detach().clone() for name, one in model.named_parameters()},
        output=SimpleNamespace(**cache_keyword(cache_of("llama"))),
        kwargs={"attention_mask": torch.ones_like(IDS), "position_ids": IDS.clone(), "token_type_ids": IDS.clone()},
    )
    kept = {name: value for name, value in vars(given).items() if name not in ("output", "loss_config")}
    before, model_before = snapshot(kept), snapshot(model)
    for name, one in vars(given).items():
        object.__setattr__(model, name, one)
    attributes = {name: len(module.__dict__) for name, module in model.named_modules()}
    for name, call in CALLS.items():
        call(model)
        assert snapshot(kept) == before, name
        after = snapshot(model)
        assert after | {"attributes": None} == model_before | {"attributes": None}, name
        assert {key: len(module.__dict__) for key, module in model.named_modules()} == attributes, name
    assert model.loss_config.z_loss == 0.0
