"""Show versions, devices, and what each operation picks on each platform."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import easytorch

PACKAGES = (
    "torch", "torch_xla", "torch_tpu", "jax", "jaxlib", "libtpu", "triton", "transformers", "tokenizers", "safetensors",
    "accelerate", "peft", "numpy",
)  # fmt: skip
VARIABLES = (
    "EASYTORCH_", "JAX_", "XLA_", "PJRT_", "LIBTPU_", "TPU_", "TRITON_", "TORCH_", "NCCL_", "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE",
)  # fmt: skip


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show versions, devices, and what each operation would pick on each platform, and why."""
    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        show(facts, Console())


def collect() -> dict[str, Any]:
    """Everything the command shows, as plain data that `json` can write."""
    from easytorch.operations.dispatch.table import choices, cpu_kernels, repeated_calls

    return {
        "easytorch": easytorch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "cpu_kernels": cpu_kernels(),
        "repeated_calls": repeated_calls(),
        "devices": _devices(),
        "operations": [choice._asdict() for choice in choices()],
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)},
    }


def show(facts: dict[str, Any], console: Console) -> None:
    """Print what `collect` found as tables."""
    versions = Table("package", "version", title="Versions", box=box.SIMPLE, title_justify="left")
    for name in ("easytorch", "python", "system"):
        versions.add_row(name, facts[name])
    for name, version in facts["packages"].items():
        versions.add_row(name, version or "[dim]not installed[/dim]")
    devices = Table("platform", "device", "detail", title="Devices", box=box.SIMPLE, title_justify="left")
    cpu = facts["cpu"]
    devices.add_row("cpu", cpu["model"], f"{cpu['cores']} cores, torch uses {cpu['torch_threads']} threads")
    devices.add_row("cpu", "C++ kernels", facts["cpu_kernels"])
    devices.add_row("cpu", "repeated calls", facts["repeated_calls"])
    for device in facts["devices"]:
        devices.add_row(device["platform"], device["name"], device["detail"])
    console.print(versions, devices, operations_table(facts["operations"]))
    variables = facts["environment"]
    console.print("Environment variables", style="italic")
    console.print(
        "".join(f"  {name}={value}\n" for name, value in variables.items()) or "  none set\n", markup=False, emoji=False
    )


def operations_table(choices: list[dict[str, Any]]) -> Table:
    """One row per operation and platform: what the automatic choice runs there, and why."""
    columns = ("operation", "platform", "implementation", "backend", "reason")
    table = Table(title="Operations", box=box.SIMPLE, title_justify="left")
    for column in columns:
        table.add_column("why" if column == "reason" else column, overflow="fold")
    previous = None
    for choice in choices:
        if previous not in (None, choice["operation"]):
            table.add_section()
        previous = choice["operation"]
        table.add_row(*(escape(choice[column]) for column in columns))
    return table


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    import torch

    return {
        "model": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _devices() -> list[dict[str, Any]]:
    """Accelerators that torch, torch_xla and torch_tpu see, and jax's devices."""
    import torch

    from easytorch import tpu_platform

    found = []
    gpu = "rocm" if torch.version.hip else "cuda"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(_device(gpu, properties.name, f"cuda:{index}, {properties.total_memory / 2**30:.1f} GiB"))
    found += [_device("tpu", devices, library) for devices, library in tpu_platform.describe()]
    if importlib.util.find_spec("jax"):
        import jax

        found += [_device("jax", device.device_kind, str(device)) for device in jax.devices()]
    return found


def _device(platform_name: str, name: str, detail: str) -> dict[str, Any]:
    return {"platform": platform_name, "name": name, "detail": detail}
