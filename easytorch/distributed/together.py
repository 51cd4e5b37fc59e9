"""Work that the ranks of a group do together: an error in one of them is an error in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

# How often the ranks that wait for the first one hear from it, which has to be within their group's timeout.
BEAT_SECONDS = 1.0


class RankFailedError(RuntimeError):
    """Another rank could not do its part. rank: which one; cause: its error."""

    def __init__(self, rank: int, cause: Exception) -> None:
        self.rank, self.cause = rank, cause
        super().__init__(f"rank {rank}: {cause}")


class RankLostError(RuntimeError):
    """Another rank does not answer any more: its process has ended, or the connection to it."""


def together(group: Any, work: Callable[[], Any]) -> list[Any]:
    """What `work` returns in each rank of `group`, in order. Each rank calls this; results and errors are pickled.

    The error of the first rank that failed is raised as `RankFailedError` in all of them, in that rank with the error
    as its cause; `RankLostError` where a rank has ended. group: of a CPU backend, None for a process alone.
    """
    result, failed = None, None
    try:
        result = work()
    except RankLostError:
        raise  # the others cannot be asked
    except Exception as error:  # a boundary between processes: the others wait for this one
        failed = error
    outcomes = exchanged(group, (result, None if failed is None else _picklable(failed)))
    for rank, (_, cause) in enumerate(outcomes):
        if cause is not None:
            raise RankFailedError(rank, cause) from (failed if rank == rank_in(group) else None)
    return [result for result, _ in outcomes]


def by_first(group: Any, work: Callable[[], Any]) -> Any:
    """What `work` returns in the first rank of `group`, in each of them, which call this and wait as long as it takes.

    A collective that they waited in would end with the group's timeout, which an upload may exceed: the first rank
    works in a thread, and tells the others every `BEAT_SECONDS` that it is still there. `work` must not communicate
    with them. Errors as in `together`.
    """
    if group is None:
        return together(None, work)[0]
    outcome: Future[Any] = Future()
    if rank_in(group) == 0:
        Thread(target=_fulfil, args=(outcome, work), daemon=True).start()
    else:
        outcome.set_result(None)
    done = torch.zeros((), dtype=torch.int32)
    while not done:
        wait([outcome], timeout=BEAT_SECONDS)
        done.fill_(outcome.done())
        with talking():
            dist.all_reduce(done, dist.ReduceOp.MIN, group=group)
    return together(group, outcome.result)[0]


def _fulfil(outcome: Future[Any], work: Callable[[], Any]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # a boundary between threads, and the others wait for this one
        outcome.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


@contextmanager
def own_errors(what: str) -> Iterator[None]:
    """Turns `RankFailedError` into that error itself in the rank that failed, and in the others into a `RuntimeError`
    that says `what` and why."""
    try:
        yield
    except RankFailedError as error:
        if isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise RuntimeError(f"{what}: {error.cause}") from error


def exchanged(group: Any, own: Any) -> list[Any]:
    """What each rank of `group` passes, in order; pickled."""
    if group is None:
        return [own]
    found: list[Any] = [None] * dist.get_world_size(group)
    with talking():
        dist.all_gather_object(found, own, group=group)
    return found


def rank_in(group: Any) -> int:
    """The place of this process in `group`; 0 for None, a process alone."""
    return 0 if group is None else dist.get_rank(group)


def size_of(group: Any) -> int:
    """The number of ranks; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


@contextmanager
def talking() -> Iterator[None]:
    """Turns an error of torch.distributed's backend into `RankLostError`."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"another rank does not answer: {str(error).strip().partition(chr(10))[0]}") from error


@contextmanager
def cpu_group(mesh: Any) -> Iterator[Any]:
    """A group of a CPU backend of the ranks of `mesh` and of the mesh that it was cut from; None without a mesh.

    Each of these ranks calls this.
    """
    if mesh is None:
        yield None
        return
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    ranks = sorted(int(rank) for rank in root.mesh.flatten())
    if len(ranks) == dist.get_world_size() and dist.get_backend() == "gloo":
        yield dist.group.WORLD
        return
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _picklable(error: Exception) -> Exception:
    """Its type where that is built in, and its text: others may not be made of one argument."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror)
    return error if type(error) in (ValueError, TypeError, RuntimeError) else RuntimeError(str(error) or repr(error))
