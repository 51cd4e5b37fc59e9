"""One of two processes that `accelerate launch` started: transformers' Trainer and accelerate's loop with our models,
against transformers' own; prints "rank r ok"."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import easytorch
from easytorch.distributed import make_mesh
from tests.processes import leave_group

STEPS, ROWS = 3, 4
IDS = torch.arange(2 * STEPS * ROWS * 12).view(-1, 12) * 7 % 96
Losses = list[float]


def trained(model: Any, folder: Path) -> Losses:
    """The losses of transformers' Trainer."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=ROWS, use_cpu=True, report_to=[], save_strategy="no",
        logging_steps=1, disable_tqdm=True, learning_rate=1e-2, max_grad_norm=0.5, lr_scheduler_type="constant",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def by_accelerate(model: Any, *, prepare_model: bool = True) -> Losses:
    """The losses of a loop as accelerate's users write it."""
    _forget()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    loader: Any = torch.utils.data.DataLoader(list(IDS), batch_size=ROWS)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    model = accelerator.prepare(model) if prepare_model else model
    losses = []
    for ids in list(loader)[:STEPS]:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def _forget() -> None:
    """accelerate keeps the state of the first Accelerator; the process group stays."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    assert PartialState().num_processes == 2


def same(found: Losses, expected: Losses, case: str) -> None:
    worst = max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))
    assert worst < 1e-4, (case, found, expected)


def main(folder: Path) -> None:
    ours, stock = easytorch.AutoModelForCausalLM, transformers.AutoModelForCausalLM
    llama = str(folder / "llama")
    both = [trained(auto.from_pretrained(llama), folder / "trainer") for auto in (stock, ours)]
    same(both[1], both[0], "Trainer over DistributedDataParallel")
    same(by_accelerate(ours.from_pretrained(llama)), by_accelerate(stock.from_pretrained(llama)), "accelerate, DDP")

    # sharded over our mesh; accelerate has the batches and the optimizer
    by_mesh = by_accelerate(ours.from_pretrained(llama, mesh=make_mesh("fsdp=2")), prepare_model=False)
    same(by_mesh, by_accelerate(stock.from_pretrained(llama)), "accelerate, our FSDP2")
    # transformers' own meshes, of which accelerate takes none on a CPU: in a loop by hand
    expected = by_hand(stock.from_pretrained(llama))
    for settings in ({"tp_size": 2}, {"fsdp_size": 2}):
        model = ours.from_pretrained(llama, distributed_config=DistributedConfig(**settings))
        assert isinstance(model.model.layers[0].self_attn.q_proj.weight, DTensor), settings
        same(by_hand(model), expected, str(settings))
        model.save_pretrained(folder / f"saved-{settings}")
        dist.barrier()
        saved = ours.from_pretrained(folder / f"saved-{settings}")
        for name, parameter in model.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(saved.get_parameter(name), full), (settings, name)


def by_hand(model: Any) -> Losses:
    """Without accelerate, the ranks given the same batches."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), []
    for ids in IDS.split(ROWS)[:STEPS]:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    main(Path(sys.argv[1]))
    dist.barrier()
    print(f"rank {dist.get_rank()} ok\n", end="", flush=True)
    leave_group()
