"""One of two processes: a model over a mesh is written by both and uploaded by the first; prints "rank r ok"."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers

import easytorch
from easytorch.distributed import make_mesh
from easytorch.distributed.together import RankFailedError, by_first
from easytorch.protocol import mesh_upload
from tests.processes import leave_group

SIZE = "20KB"


class Hub:
    """Stands for the Hub's interface, and for the card that transformers makes from what is there."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.uploaded: dict[str, bytes] = {}
        self.refuses = False
        mesh_upload.hf_api = lambda: self  # type: ignore[assignment]
        mesh_upload.create_and_tag_model_card = lambda *_, **__: SimpleNamespace(  # type: ignore[assignment]
            save=lambda path: Path(path).write_text("a card")
        )
        transformers.utils.hub.hf_api = lambda: self  # type: ignore[assignment]

    def create_repo(self, repo_id: str, **settings: Any) -> Any:
        if self.refuses:
            raise PermissionError("no right to write there")
        self.calls.append(("create_repo", settings))
        return SimpleNamespace(repo_id=f"someone/{repo_id}")

    def create_commit(self, repo_id: str, operations: list[Any], **settings: Any) -> str:
        self.calls.append(("create_commit", {"repo_id": repo_id, **settings}))
        self.uploaded = {one.path_in_repo: Path(one.path_or_fileobj).read_bytes() for one in operations}
        return f"https://hub/{repo_id}"


def check_uploaded(hub: Hub, expected: Path, rank: int) -> None:
    """All files of one process and the card, by the first rank alone."""
    if rank != 0:
        assert not hub.calls, hub.calls
        return
    assert [name for name, _ in hub.calls] == ["create_repo", "create_commit"], hub.calls
    assert hub.calls[1][1]["commit_message"] == "Ours" and hub.calls[0][1]["token"] == "secret", hub.calls
    files = {one.name: one.read_bytes() for one in expected.iterdir()} | {"README.md": b"a card"}
    assert hub.uploaded.keys() == files.keys(), (hub.uploaded.keys(), files.keys())
    assert not [name for name, content in files.items() if hub.uploaded[name] != content]
    hub.calls.clear()


def check_adapter(folder: Path, hub: Hub, rank: int) -> None:
    """Of an adapter its own files alone, as one process writes them."""
    model = easytorch.AutoModelForCausalLM.from_pretrained(folder / "alone")
    model.apply_lora_to_layers(4, "q_proj|up_proj", rngs=0)
    if rank == 0:
        model.save_pretrained(folder / "adapter")
    model.shard_model(mesh=make_mesh("fsdp=2"))
    hub_given: dict[str, Any] = {"token": "secret", "commit_message": "Ours"}

    model.save_pretrained(folder / "pushed-adapter", push_to_hub=True, **hub_given)
    check_uploaded(hub, folder / "adapter", rank)
    model.push_to_hub("ours", **hub_given)
    check_uploaded(hub, folder / "adapter", rank)


def check_waiting(rank: int) -> None:
    """The others wait for longer than their group does, and get what the first has found, or its error."""
    group = dist.new_group(timeout=timedelta(seconds=4))

    def work() -> str:
        assert rank == 0
        time.sleep(6)
        return "uploaded"

    def fail() -> None:
        raise PermissionError("no right to write there")

    assert by_first(group, work) == "uploaded"
    try:
        by_first(group, fail)
    except RankFailedError as error:
        assert error.rank == 0 and "no right" in str(error), error
    else:
        raise AssertionError("the first rank's error went unnoticed")


def main(folder: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    rank, hub = dist.get_rank(), Hub()
    model = easytorch.AutoModelForCausalLM.from_pretrained(folder / "alone", mesh=make_mesh("fsdp=2"))
    hub_given: dict[str, Any] = {"max_shard_size": SIZE, "token": "secret", "commit_message": "Ours"}

    model.save_pretrained(folder / "pushed", push_to_hub=True, **hub_given)
    check_uploaded(hub, folder / "split", rank)

    found = model.push_to_hub("ours", **hub_given)
    assert found == "https://hub/someone/ours", found
    check_uploaded(hub, folder / "split", rank)

    found = model.push_to_hub("ours", float_dtype="bfloat16", **hub_given)
    check_uploaded(hub, folder / "half", rank)
    assert next(model.parameters()).dtype == torch.float32

    hub.refuses = rank == 0
    for number, push in enumerate(
        (lambda: model.save_pretrained(folder / "refused", push_to_hub=True), lambda: model.push_to_hub("ours"))
    ):
        try:
            push()
        except (PermissionError, RuntimeError) as error:
            assert isinstance(error, PermissionError) == (rank == 0), error
            assert "no right to write there" in str(error), error
        else:
            raise AssertionError(f"{number}: the refusal went unnoticed")
    assert (folder / "refused" / "model.safetensors").is_file()  # what was saved stays

    model.save_pretrained(folder / "variant")
    model.save_pretrained(folder / "variant", variant="fp16", max_shard_size=SIZE)
    model.save_pretrained(folder / "variant", variant="fp16", max_shard_size="30KB")
    hub.refuses = False
    check_adapter(folder, hub, rank)
    check_waiting(rank)
    dist.barrier()
    print(f"rank {rank} ok\n", end="", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    leave_group()
