"""Models over a mesh uploaded to the Hub: the ranks write one folder together, and the first of them uploads it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers.utils.hub import create_and_tag_model_card, hf_api

from easytorch.distributed.together import by_first, cpu_group, own_errors, rank_in

Save = Callable[[str | os.PathLike[str]], object]


def save_and_upload(model: Any, folder: str | os.PathLike[str], mesh: Any, save: Save, hub: dict[str, Any]) -> None:
    """`save(folder)` by each rank of `mesh`, and then what is new in the folder uploaded by the first one.

    hub: repo_id (the folder's name by default), commit_message, create_pr, token, and what makes the repository, as
    `save_pretrained(push_to_hub=True)` of transformers takes them. The first rank's error is raised there, and the
    others raise `RuntimeError`; what was saved stays.
    """
    with cpu_group(mesh) as group:
        before: dict[str, float] = _first(group, lambda: _timestamps(Path(folder)))
        save(folder)
        made = dict(hub)
        commit = {name: made.pop(name) for name in ("commit_message", "create_pr") if name in made}
        repo_id, token = made.pop("repo_id", os.path.basename(os.fspath(folder))), made.get("token")

        def upload() -> None:
            repository = hf_api().create_repo(repo_id, exist_ok=True, **made).repo_id
            card = create_and_tag_model_card(repository, model.model_tags, token=token)
            card.save(Path(folder) / "README.md")
            model._upload_modified_files(os.fspath(folder), repository, before, token=token, **commit)

        _first(group, upload)


def push_sharded(
    model: Any,
    mesh: Any,
    repo_id: str,
    save: Save,
    *,
    private: bool | None = None,
    token: Any = None,
    tags: list[str] | None = None,
    **commit: Any,
) -> Any:
    """transformers' `push_to_hub` of a model over `mesh`, by each rank: returns its result, of which the ranks behind
    the first have the text. Errors as in `save_and_upload`.

    save: writes the model into a folder, by each rank. commit: of the upload.
    """
    with cpu_group(mesh) as group, ExitStack() as stack:

        def temporary() -> str:  # below it: a folder whose place another can take
            return str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model")

        folder: str = _first(group, temporary)
        save(folder)
        result: Any = None

        def upload() -> str:
            nonlocal result
            repository = hf_api().create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
            card = create_and_tag_model_card(repository, tags, token=token)
            card.save(Path(folder) / "README.md")
            result = model._upload_modified_files(folder, repository, files_timestamps={}, token=token, **commit)
            return str(result)

        text = _first(group, upload)
        return result if rank_in(group) == 0 else text


def _timestamps(folder: Path) -> dict[str, float]:
    return {entry.name: entry.stat().st_mtime for entry in folder.iterdir()} if folder.is_dir() else {}


def _first(group: Any, work: Callable[[], Any]) -> Any:
    """What `work` returns in the first rank, in each of them."""
    with own_errors("the first rank could not upload the model"):
        return by_first(group, work)
