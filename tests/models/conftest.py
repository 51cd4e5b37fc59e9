"""Tiny configs, and pairs of our model and transformers' with the same weights."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import transformers

from tests.models.families import FAMILIES


def pair(name: str, config, reference: str = "sdpa", **kwargs) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(ours, transformers' with `reference` attention), same weights, perturbed so that none is 0 or 1."""
    family = importlib.import_module(f"easytorch.models.{config.model_type.replace('-', '_')}")
    torch.manual_seed(0)
    theirs = getattr(transformers, name)._from_config(copy.deepcopy(config), attn_implementation=reference)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    ours = getattr(family, name)._from_config(copy.deepcopy(config), **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return ours.eval(), theirs.eval()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Two rows of 11 tokens, the first padded by 3 on the left, the second by 2 on the right."""
    torch.manual_seed(1)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, 9:] = 0
    ids = torch.randint(3, 97, (2, 11)) * mask
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def make_pair():
    return pair


@pytest.fixture
def llama_config():
    return FAMILIES["llama"].config


@pytest.fixture
def bert_config():
    return FAMILIES["bert"].config
