"""The key-value store under an Orbax checkpoint, through tensorstore: OCDBT where it has a manifest, else plain files.

Source: orbax-checkpoint 0.12, `serialization/tensorstore_utils.py`. OCDBT holds the files of every array as keys of one
B-tree; in plain files every array is a folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from easytorch.bridge.core.interruptions import interruption_of
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.storage.fsync import os_error_of

if TYPE_CHECKING:
    import tensorstore

# Nodes of the B-tree, which every read walks.
_NODE_CACHE_BYTES = 32 << 20


def load_tensorstore() -> Any:
    """The tensorstore module; `ImportError` that says what to install where it is missing."""
    try:
        import tensorstore
    except ImportError as error:
        if (interruption := interruption_of(error)) is not None:
            raise interruption from None
        raise ImportError("folders of Orbax, EasyDeL and T5X need tensorstore: pip install tensorstore") from error
    return tensorstore


def new_context() -> tensorstore.Context:
    """A tensorstore context whose memory is bounded: few files and few chunks at once.

    Files are not synced one by one: whoever writes a checkpoint syncs the finished folder.
    """
    limits = {"file_io_concurrency": {"limit": 8}, "data_copy_concurrency": {"limit": 4}, "file_io_sync": False}
    context: tensorstore.Context = load_tensorstore().Context(
        {**limits, "cache_pool#ocdbt": {"total_bytes_limit": _NODE_CACHE_BYTES}}
    )
    return context


def store_spec(folder: Path, *, ocdbt: bool) -> dict[str, Any]:
    """The kvstore spec of the store in `folder`."""
    files = {"driver": "file", "path": f"{folder.absolute()}/"}
    return {"driver": "ocdbt", "base": files, "cache_pool": "cache_pool#ocdbt"} if ocdbt else files


def array_spec(store: dict[str, Any], name: str, driver: str) -> dict[str, Any]:
    """The TensorStore spec of the array `name` in a store."""
    return {"driver": driver, "kvstore": {**store, "path": f"{store.get('path', '')}{name}/"}}


@contextmanager
def tensorstore_errors(file: Path, tensor: str | None = None, *, writing: bool = False) -> Iterator[None]:
    """Turns tensorstore's errors (`ValueError` and similar) into `CheckpointError`.

    writing: an error of the operating system is raised as such, for the caller, which knows the destination.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, KeyError, IndexError, OSError, RuntimeError, NotImplementedError, OverflowError) as error:
        reason = str(error).partition(" [")[0].partition("\n")[0][:300] or type(error).__name__
        if writing and (cause := os_error_of(error)) is not None:
            raise cause from error
        failed, advice = ("written", "look at the disk") if writing else ("read", "copy the checkpoint again")
        raise CheckpointError(f"cannot be {failed} ({reason}); {advice}", file=file, tensor=tensor) from error
