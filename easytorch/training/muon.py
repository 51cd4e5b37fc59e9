"""torch.optim.Muon for matrices and torch.optim.AdamW for the rest, as one optimizer, over sharded weights too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

MOMENTUM = 0.95


class MuonWithAdamW(torch.optim.Optimizer):
    """matrices: 2-D parameters. others: AdamW's groups, each with its own weight decay.

    An update is scaled to the size of AdamW's (arXiv:2502.16982), so one learning rate serves both. Newton-Schulz needs
    whole matrices: the momentum of a sharded one is gathered, each rank computes the update and keeps its own shard.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        others: Sequence[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        # "fused" has `load_state_dict` put AdamW's steps beside the weights
        mixed = len({isinstance(one, DTensor) for group in others for one in group["params"]}) > 1
        groups = [{"params": list(matrices), "weight_decay": weight_decay}, *others]
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8, "momentum": MOMENTUM, "fused": not mixed})

    def is_muons(self, parameter: Tensor) -> bool:
        return any(parameter is one for one in self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ValueError("step takes no closure: compute the gradients before it")
        self._step_matrices(self.param_groups[0])
        for group in self.param_groups[1:]:
            self._step_others(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            momentum = state["momentum_buffer"]
            momentum.lerp_(parameter.grad, 1 - group["momentum"])
            nesterov = parameter.grad.lerp(momentum, group["momentum"])
            change = _orthogonal_step(nesterov, group["lr"])
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(change)

    def _step_others(self, group: dict[str, Any]) -> None:
        """AdamW of one group, with this optimizer's own state."""
        parameters = [one for one in group["params"] if one.grad is not None]
        if not parameters:
            return
        inner = torch.optim.AdamW(
            parameters, lr=group["lr"], betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"],
            **({"fused": True} if group["fused"] else {"foreach": False}),
        )  # fmt: skip
        for one in parameters:
            if self.state.get(one):
                inner.state[one] = self.state[one]
        inner.step()
        for one in parameters:
            self.state[one] = inner.state[one]


def _orthogonal_step(update: Tensor, lr: float) -> Tensor:
    """What torch.optim.Muon adds to a weight of zeros for this update, as (M, N) sharded as it is."""
    full = update.full_tensor() if isinstance(update, DTensor) else update
    weight = torch.nn.Parameter(torch.zeros_like(full))
    weight.grad = full
    torch.optim.Muon(
        [weight], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    ).step()
    step = weight.detach()
    if isinstance(update, DTensor):
        return distribute_tensor(step, update.device_mesh, update.placements, src_data_rank=None)
    return step
