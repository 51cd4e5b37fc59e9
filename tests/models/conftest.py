"""Tiny configs, and pairs of our model and transformers' with the same weights."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch

from tests.models.families import FAMILIES
from tests.models.stock_classes import stock


def pair(
    name: str, config, reference: str | dict[str, str] = "sdpa", **kwargs
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(ours, transformers' with `reference` attention), same weights, perturbed so that none is 0 or 1."""
    family = importlib.import_module(f"easytorch.models.{config.model_type.replace('-', '_')}")
    torch.manual_seed(0)
    theirs = stock(name)._from_config(copy.deepcopy(config), attn_implementation=reference)
    kept = theirs.state_dict(keep_vars=True)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        for key, buffer in theirs.named_buffers():
            if key in kept and buffer.is_floating_point():  # as the biases of routers, which are trained too
                buffer.add_(0.1 * torch.randn_like(buffer))
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
def memory_of_nan():
    """Memory that is allocated and not filled holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture
def llama_config():
    return FAMILIES["llama"].config


@pytest.fixture
def bert_config():
    return FAMILIES["bert"].config
