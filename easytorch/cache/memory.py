"""How much memory a device has, and how much of it is free."""

from __future__ import annotations

from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
# Of the container a process runs in: limit and use, of cgroup v2 and v1.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_and_total(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of `device`. Of a CPU: what Linux can give without swapping, within the container's limit.

    `ValueError` where nothing says so (a CPU without /proc, a device of torch_xla).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # memory that torch has reserved and does not use counts as free
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
    if device.type != "cpu" or not _MEMINFO.exists():
        raise ValueError(f"nothing tells how much memory of {device} is free: give the metadata num_pages")
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    free, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    for limit_file, use_file in _CGROUPS:
        if Path(limit_file).exists() and Path(use_file).exists():
            limit = Path(limit_file).read_text(encoding="ascii").strip()
            if limit.isdigit() and int(limit) < total:
                used = int(Path(use_file).read_text(encoding="ascii"))
                free, total = min(free, int(limit) - used), int(limit)
    return free, total
