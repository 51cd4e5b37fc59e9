"""A family of each further building block over meshes of four virtual devices: run by test_spmd.py. Prints "ok".

The decoder and the experts are in spmd_losses.py, with more meshes.
"""

from __future__ import annotations

import copy
import importlib
import sys

import torch

from easytorch.distributed import make_mesh, shard_model
from tests.models.families import FAMILIES, LANGUAGE
from tests.xla.spmd_losses import SIZES, train

CASES = {
    "latent": ("deepseek_v3", "fsdp=2,tp=2"),
    "recurrent": ("mamba2", "fsdp=4"),
    "delta": ("qwen3_next", "fsdp=4"),
    "encoder-decoder": ("t5", "dp=2,fsdp=2"),
}


def made(family: str):
    torch.manual_seed(0)
    kind = FAMILIES[family]
    model_class = getattr(importlib.import_module(f"easytorch.models.{family}"), LANGUAGE[family])
    config = kind.config(vocab_size=SIZES["vocab_size"], **dict.fromkeys(kind.dropouts, 0.0))
    model = model_class(config).train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def main(blocks: list[str]) -> None:
    # before the first backward pass: autograd makes a queue for each device that it knows then
    meshes = {axes: make_mesh(axes, "xla") for _, axes in CASES.values()}
    for block in blocks:
        family, axes = CASES[block]
        model = made(family)
        over = shard_model(copy.deepcopy(model), mesh=meshes[axes])
        want, gradients, _ = train(model)
        losses, found, programs = train(over, meshes[axes])
        worst = float(((losses - want).abs() / want).max())
        scales = {name: one.norm().clamp(min=1e-3 * one.numel() ** 0.5) for name, one in gradients.items()}
        errors = {name: float((found[name] - one).norm() / scales[name]) for name, one in gradients.items()}
        print(block, family, axes, f"loss {worst:.1e}, gradient {max(errors.values()):.1e}", programs, flush=True)
        assert abs(want[-1] - want[0]) > 0.01, want
        assert worst < 1e-5, (block, losses, want)
        assert max(errors.values()) < 1e-4, errors
        # the first step makes the optimizer's state; all others are one program
        assert programs[:2] == [1, 1] and not any(programs[2:]), programs
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
