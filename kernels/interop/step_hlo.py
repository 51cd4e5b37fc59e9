"""The HLO of a train step as torch_xla traces it for TPUs, on a host without one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_xla

from easytorch.kernels.interop.xla_bridge import lowered_for


def hlo_of_step(loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> bytes:
    """The step of `optimizer` on the loss that `loss_of` computes of tensors on xla: a serialized HLO module, with the
    kernels of TPUs and, under SPMD, the annotations of its tensors.

    Its outputs are the loss, the parameters and the optimizer's state, which should be there before (a first step makes
    it). These tensors are not to be read afterwards: only a TPU could compute what they hold then.
    """
    torch_xla.sync()  # what is pending is no part of the step
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    tensors = [*parameters, *(value for own in optimizer.state.values() for value in own.values())]
    updated = [one for one in tensors if isinstance(one, torch.Tensor) and one.device.type == "xla"]
    with lowered_for("tpu"):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        hlo: bytes = torch_xla._XLAC._get_xla_tensors_hlo_proto([loss.detach(), *updated])
    return hlo
