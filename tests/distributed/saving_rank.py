"""One of several processes: models over a mesh are saved by all of them; prints "rank r ok"."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import easytorch
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.safetensors_files.torch_safetensors import TorchSafetensors
from easytorch.distributed import make_mesh
from easytorch.distributed.gathering import Gathering, box_of
from tests.processes import leave_group

# meshes for each number of processes; the files of all are compared with those of one process
MESHES = {
    2: (("llama", "fsdp=2"), ("llama", "tp=2"), ("qwen3_moe", "pp=2"), ("olmo", "fsdp=2"), ("deepseek_v3", "ep=2")),
    4: (("qwen3_moe", "fsdp=2,tp=2"), ("qwen3_moe", "dp=2,ep=2"), ("qwen3_moe", "pp=2,fsdp=2")),
}
SIZE = "20KB"


def over(folder: Path, axes: str) -> Any:
    return easytorch.AutoModelForCausalLM.from_pretrained(folder, mesh=make_mesh(axes))


def check_boxes(model: Any) -> None:
    """Each rank's part is what the full tensor has at those places."""
    for name, one in model.state_dict(keep_vars=True).items():
        if not hasattr(one, "full_tensor"):
            continue
        full = one.full_tensor().detach()
        for dim, stretches in enumerate(box_of(one)):
            full = torch.cat([full.narrow(dim, start, stop - start) for start, stop in stretches] or [full[:0]], dim)
        assert torch.equal(full, one.to_local()), name


def check_shards(model: Any, folder: Path) -> None:
    """Each rank writes its own part, and gathers nothing."""
    exchange = Gathering.exchange
    Gathering.exchange = None  # type: ignore[assignment, method-assign]
    model.save_pretrained(folder, distributed_checkpoint=True)
    Gathering.exchange = exchange  # type: ignore[method-assign]
    try:
        model.save_pretrained(folder, distributed_checkpoint=True, push_to_hub=True)
    except ValueError as error:
        assert "distributed_checkpoint does not go with push_to_hub" in str(error), error
    else:
        raise AssertionError("shards were uploaded")
    try:
        model.save_pretrained(folder, state_dict=model.state_dict())
    except ValueError as error:
        assert "state_dict has this rank's s" in str(error), error  # shard of a tensor, or stage
    else:
        raise AssertionError("a part was written for the model")


# (family, bits, pattern of an adapter's layers, mesh): their files too are those of one process
OF_FEW_BITS = (
    ("llama", "int8", None, "fsdp=2"), ("qwen3_moe", "int4", None, "pp=2"), ("llama", "nf4", None, "tp=2"),
    ("qwen3_moe", "int8", None, "dp=2"), ("qwen3_moe", "nf4", None, "ep=2"), ("qwen3_moe", "nf4", None, "tp=2"),
    ("llama", None, "q_proj|up_proj", "fsdp=2"),
    ("qwen3_moe", None, "q_proj|o_proj", "pp=2"), ("llama", "nf4", "q_proj|up_proj", "fsdp=2"),
)  # fmt: skip


def check_few_bits(folder: Path, bits: str | None, adapted: str | None, axes: str) -> None:
    """Quantized models, of which transformers would take the first rank's state dict, and adapters."""
    model = easytorch.AutoModelForCausalLM.from_pretrained(folder)
    if bits is not None:
        model.quantize(bits)
    if adapted is not None:
        model.apply_lora_to_layers(4, adapted, rngs=0)
        model.merge_lora_params({name: one + 0.5 for name, one in model.split_lora_params().items()})
    one, saved = (folder.with_name(f"{folder.name}-{bits}-{bool(adapted)}-{axes}-{which}") for which in ("one", "all"))
    if dist.get_rank() == 0:
        model.save_pretrained(one, max_shard_size=SIZE)
    ids = torch.arange(12).view(1, 12)
    expected = model.eval()(ids).logits.detach()
    model.shard_model(mesh=make_mesh(axes))
    if bits is not None and axes in ("ep=2", "tp=2"):
        torch.testing.assert_close(model(ids).logits.detach(), expected, rtol=1e-4, atol=1e-5)
    asked: list[str] = []
    exchange = Gathering.exchange
    Gathering.exchange = lambda self, requests, turn: (  # type: ignore[method-assign]
        asked.extend(name for names in requests for name in names) or exchange(self, requests, turn)
    )
    model.save_pretrained(saved, max_shard_size=SIZE)
    Gathering.exchange = exchange  # type: ignore[method-assign]
    assert asked and (adapted is None or all("lora_" in name for name in asked)), asked
    dist.barrier()
    names = [sorted(path.name for path in where.iterdir()) for where in (one, saved)]
    assert names[0] == names[1], (bits, adapted, axes, names)
    for name in names[0]:
        assert (one / name).read_bytes() == (saved / name).read_bytes(), (bits, adapted, axes, name)
    if bits is not None and adapted is None:
        try:
            model.save_pretrained(saved, to="flax")
        except ValueError as error:
            assert "does not go with quantized weights" in str(error), error
        else:
            raise AssertionError("quantized weights were written as a tree")


def peak_during(work: Callable[[], object]) -> int:
    """Bytes by which the process grew at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def check_memory(folder: Path) -> None:
    """No rank gathers more than a few tensors: they are 147 MB in all, and a process grows by 20 to 40."""
    model = over(folder / "wide", "fsdp=2")
    assert all(p.to_local().isfinite().all() for p in model.parameters())  # their pages may be the file's till now
    size = sum(p.numel() * 4 for p in model.parameters())
    for to in ("torch", "flax"):
        target = folder / f"wide-{to}"
        grown = peak_during(lambda: model.save_pretrained(target, to=to, max_shard_size="12MB"))  # noqa: B023
        assert grown < 0.45 * size, (to, grown, size)


def failing(number: int, fault: Callable[[], object]) -> Callable[..., None]:
    """A writer of files whose `number`th does not get written."""
    write, count = TorchSafetensors.write, 0

    def instead(self: Any, *args: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            fault()
        write(self, *args)

    return instead


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_faults(folder: Path) -> None:
    """A disk that is full in one rank: one error, the same in each, and what was there stays; so for one that ends."""
    model, target = over(folder / "llama", "fsdp=2"), folder / "faults"
    model.save_pretrained(target, max_shard_size=SIZE)
    if dist.get_rank() == 0:
        (target / "notes.txt").write_text("kept")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dist.barrier()
    before = {one.name: one.read_bytes() for one in target.iterdir()}
    write = TorchSafetensors.write
    for rank in range(2):
        if dist.get_rank() == rank:
            TorchSafetensors.write = failing(2, full)
        try:
            model.save_pretrained(target, max_shard_size=SIZE)
        except CheckpointError as error:
            assert str(error) == f"{target}: cannot be written: No space left on device (rank {rank})", str(error)
        else:
            raise AssertionError("a full disk went unnoticed")
        TorchSafetensors.write = write
        assert {one.name: one.read_bytes() for one in target.iterdir()} == before
        dist.barrier()
    model.save_pretrained(target)  # one file takes the place of several, and what else is there stays
    assert {one.name for one in target.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "notes.txt",
    }  # fmt: skip
    before = {one.name: one.read_bytes() for one in target.iterdir()}
    dist.barrier()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others when one has ended
    if dist.get_rank() == 1:
        TorchSafetensors.write = failing(1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        model.save_pretrained(target, max_shard_size=SIZE)
    except CheckpointError as error:
        assert "another rank does not answer" in str(error), error
    assert {one.name: one.read_bytes() for one in target.iterdir()} == before
    assert not [one for one in folder.iterdir() if one.name.startswith(".")], "a staging folder was left"


def main(folder: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    for family, axes in MESHES[dist.get_world_size()]:
        model = over(folder / family, axes)
        check_boxes(model)
        for to in ("torch", "flax", "orbax"):
            model.save_pretrained(folder / f"{family}-{axes}-{to}", to=to, max_shard_size=SIZE)
        check_shards(model, folder / f"{family}-{axes}-shards")
        model.save_pretrained(folder / f"{family}-{axes}-bfloat16", float_dtype="bfloat16", step=3)
    for family, bits, adapted, axes in OF_FEW_BITS if dist.get_world_size() == 2 else ():
        check_few_bits(folder / family, bits, adapted, axes)
    dist.barrier()
    print(f"rank {dist.get_rank()} ok\n", end="", flush=True)
    if dist.get_world_size() == 2:
        check_memory(folder)
        check_faults(folder)  # which ends one of the two
        print("survived\n", end="", flush=True)
        os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    leave_group()
