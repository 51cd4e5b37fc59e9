"""The model of several processes: gradients are averaged over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from easytorch.training.data import TokenBlocks
from easytorch.training.processes import Processes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def in_parallel(model: PreTrainedModel, blocks: TokenBlocks, processes: Processes) -> DistributedDataParallel:
    """The model, of which not every parameter need have a gradient: the loss may not depend on it, and an expert may
    see no token. Without `find_unused_parameters` the second step fails then; where every parameter has one, that costs
    a walk over the graph at each step, and a warning of torch's."""
    with processes.together():
        unused = _has_unused(model, blocks.batch([processes.rank % blocks.train_count]).to(processes.device))
    find = processes.any(unused)
    return DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=find)


def _has_unused(model: PreTrainedModel, tokens: torch.Tensor) -> bool:
    """Whether a parameter to be trained is not in the graph of the loss of (1, T) `tokens`."""
    model.train()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    seen, found, nodes = set(), set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(leaf)
        nodes += [below for below, _ in node.next_functions]
    return any(parameter.requires_grad and parameter not in found for parameter in model.parameters())
