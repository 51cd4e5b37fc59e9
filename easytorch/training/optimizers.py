"""The optimizers of a run by their names, each from the library that keeps it, and the state that each has."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from easytorch.tpu_platform import is_lazy
from easytorch.training.config import TrainingConfig
from easytorch.training.muon import MuonWithAdamW

Groups = list[dict[str, Any]]


def make_optimizer(model: torch.nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer of `config.optimizer`; it decays matrices and leaves vectors (norms, biases) alone.

    Of "muon" the matrices of layers are Muon's, and AdamW's is the rest: embeddings, head, stacks of experts, vectors.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.optimizer == "muon":
        others = _tables(model)
        matrices = [p for p in parameters if p.dim() == 2 and id(p) not in others]
        if not matrices:
            raise ValueError(f"optimizer (--optimizer) muon: {type(model).__name__} has no matrices to be trained")
        own = {id(p) for p in matrices}
        groups = _decayed([p for p in parameters if id(p) not in own], config)
        return MuonWithAdamW(
            matrices, groups, lr=config.learning_rate, weight_decay=config.weight_decay,
            betas=(config.beta1, config.beta2),
        )  # fmt: skip
    return _MAKERS[config.optimizer](_decayed(parameters, config), config)


def _decayed(parameters: Sequence[torch.nn.Parameter], config: TrainingConfig) -> Groups:
    groups: Groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _tables(model: torch.nn.Module) -> set[int]:
    """The ids of the weights of embeddings and of the head, which Muon is not for."""
    found = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)  # a stage of a pipeline before the last has none
    return found | ({id(weight)} if weight is not None else set())


def _adamw(groups: Groups, config: TrainingConfig) -> torch.optim.Optimizer:
    """The fused kernel, on CPU too; it takes DTensors or plain tensors, not both, as tensor parallelism alone has. On
    torch_xla the step is counted on the device: bias corrections are no numbers to send for each parameter."""
    kinds = {isinstance(p, DTensor) for group in groups for p in group["params"]}
    lazy = any(is_lazy(p.device) for group in groups for p in group["params"])
    way = {"capturable": True} if lazy else {"fused": True} if len(kinds) == 1 else {"foreach": False}
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), **way)


def _lion(groups: Groups, config: TrainingConfig) -> torch.optim.Optimizer:
    from lion_pytorch import Lion

    optimizer: torch.optim.Optimizer = Lion(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))
    return optimizer


def _adafactor(groups: Groups, config: TrainingConfig) -> torch.optim.Optimizer:
    """The schedule's rate is the largest relative step, which scales with the norm of a weight."""
    if any(isinstance(p, DTensor) for group in groups for p in group["params"]):
        raise ValueError(
            "optimizer (--optimizer) adafactor factors whole matrices, and the mesh shards them: train on replicas "
            "(--mesh dp=-1), or with another optimizer"
        )
    return torch.optim.Adafactor(groups, lr=config.learning_rate)


_MAKERS: Mapping[str, Callable[[Groups, TrainingConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw, "lion": _lion, "adafactor": _adafactor,
}  # fmt: skip


def check_installed(name: str) -> None:
    """`ValueError` where the package of an optimizer is missing."""
    if name == "lion" and importlib.util.find_spec("lion_pytorch") is None:
        raise ValueError('optimizer (--optimizer) lion needs lion-pytorch: pip install "easytorch[train]"')


def state_shapes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what an optimizer of `make_optimizer` keeps of a parameter, once a step has changed it."""
    shape = tuple(parameter.shape)
    if isinstance(optimizer, MuonWithAdamW) and optimizer.is_muons(parameter):
        return {"momentum_buffer": shape}
    if isinstance(optimizer, torch.optim.AdamW | MuonWithAdamW):
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    if isinstance(optimizer, torch.optim.Adafactor):
        if len(shape) < 2:
            return {"step": (), "variance": shape}
        return {"step": (), "row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    return {"exp_avg": shape}  # Lion


# Bytes that each keeps beside a float32 weight and its gradient; of Muon in its matrices, of Adafactor next to nothing.
STATE_BYTES = {"adamw": 8, "lion": 4, "muon": 8, "adafactor": 0}
