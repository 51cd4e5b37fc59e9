"""The TPU platform under both of its names, and what differs between them.

torch_xla (torch 2.9): device "xla". Operations are recorded and `sync` runs them as one program; one process has all
devices of its host, and divides a program over them by SPMD.
torch_tpu (torch 2.11 and later, Python 3.12 and later): device "tpu". Operations run eagerly or under
`torch.compile(backend="tpu")`; each process has one device, as on GPUs, and torch.distributed connects them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

LIBRARIES = {"xla": "torch_xla", "tpu": "torch_tpu"}  # device type -> the library that has it
_INSTALL = {
    "xla": "pip install 'easytorch[tpu]', which has torch 2.9",
    "tpu": "pip install torch_tpu, beside torch 2.11 or later on Python 3.12 or later",
}


def is_lazy(device: torch.device) -> bool:
    """Whether tensors of this device are recorded: to read a value cuts the graph, and compiles a program for it."""
    return device.type == "xla"


def sync(device: torch.device) -> None:
    """Run what is recorded on a lazy device as one program; without effect on others."""
    if is_lazy(device):
        import torch_xla

        torch_xla.sync()


def find_device(name: str) -> torch.device:
    """The device "xla" or "tpu", with an index or without, as in "tpu:0"; `ValueError` where its library is missing."""
    kind = name.partition(":")[0]
    if find_spec(LIBRARIES[kind]) is None:
        raise ValueError(f"device {name}: {LIBRARIES[kind]} is not installed ({_INSTALL[kind]})")
    if kind == "xla":
        import torch_xla  # noqa: F401 - without it torch knows the name alone

        return torch.device(name)  # which initializes no device: `use_spmd` may follow
    module = _device_module()
    if not module.is_available():
        raise ValueError(f"device {name}: torch_tpu sees no TPU here; use the device cpu")
    return torch.device(name)


def device_count(kind: str) -> int:
    """The devices of one process: all of its host for "xla", one for "tpu"."""
    if kind != "xla":
        return 1
    import torch_xla.runtime as xr

    count: int = xr.global_runtime_device_count()
    return count


def use_spmd() -> None:
    """Let this process compute on all devices of torch_xla by SPMD, from now on; before tensors are on them."""
    import torch_xla.runtime as xr

    if not xr.is_spmd():
        xr.use_spmd()


def hardware(kind: str) -> str:
    """What computes: "TPU", or "CPU" where torch_xla's devices are the host's."""
    if kind != "xla":
        return "TPU"
    import torch_xla.runtime as xr

    return str(xr.device_type())


def describe() -> list[tuple[str, str]]:
    """(devices, library) of each library that is installed: ("4 x TPU", "torch_xla")."""
    found = []
    if find_spec(LIBRARIES["xla"]) is not None:
        import torch_xla.runtime as xr

        found.append((f"{xr.addressable_device_count()} x {xr.device_type()}", LIBRARIES["xla"]))
    if find_spec(LIBRARIES["tpu"]) is not None and (module := _device_module()).is_available():
        found.append((f"{module.device_count()} x {module.get_device_name()}", LIBRARIES["tpu"]))
    return found


def _device_module() -> Any:
    """`torch.tpu`, which torch_tpu adds: torch loads it as one of its device extensions."""
    import torch_tpu  # noqa: F401 - where TORCH_DEVICE_BACKEND_AUTOLOAD=0 turned that off

    return getattr(torch, "tpu")  # noqa: B009 - unknown to type checkers
