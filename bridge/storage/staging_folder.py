"""`.NAME.XXXXXXXX.partial`: the hidden folder beside a destination in which it is written.

lock        held (flock) by the writing process, which distinguishes a killed writer from a running one
journal     what is finished, see `journal.py`
new/NAME    the destination to be
old/NAME    the previous destination, where the file system cannot exchange two names
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

from easytorch.bridge.core.interruptions import uninterrupted
from easytorch.bridge.storage.exchange import rename_new

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


class StagingFolder:
    """One such folder, owned by this process until `release` or `remove`."""

    def __init__(self, root: Path, destination: Path, lock: int) -> None:
        self.root = root
        self.folder = root / "new" / destination.name
        self.old = root / "old" / destination.name
        self.journal = root / "journal"
        self._lock = lock

    def release(self) -> None:
        """Leaves the folder for another run."""
        os.close(self._lock)

    def remove(self) -> None:
        """Removes the folder; files that cannot be removed are left for the next sweep."""
        try:
            uninterrupted(lambda: shutil.rmtree(self.root, ignore_errors=True))
        finally:
            self.release()

    def finish_exchange(self, destination: Path) -> bool:
        """Moves the complete new one into place where a run was killed after moving the old one aside."""
        if not os.path.lexists(self.old) or not os.path.lexists(self.folder) or os.path.lexists(destination):
            return False
        rename_new(self.folder, destination)
        return True


def make(destination: Path) -> StagingFolder:
    """A new, empty staging folder beside `destination`, whose parent exists; `OSError` where none can be made."""
    while True:
        root = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.partial")
        lock = None
        try:
            root.mkdir()
            lock = _locked(root, without_locks=True)
            if lock is None:
                # Before it was locked, another run's sweep took the folder for a dead run's.
                continue
            made = StagingFolder(root, destination, lock)
            made.folder.mkdir(parents=True)
            return made
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            if lock is not None:
                os.close(lock)
            raise


def left_behind(destination: Path) -> tuple[list[StagingFolder], list[Path]]:
    """The staging folders of `destination` of dead writers, now owned by this process, and those of running ones.

    Without file locks no writer can be known to be dead.
    """
    pattern = re.compile(rf"\.{re.escape(destination.name)}\.[0-9a-f]{{8}}\.partial")
    try:
        roots = [path for path in sorted(destination.parent.iterdir()) if pattern.fullmatch(path.name)]
    except OSError:
        return [], []
    dead, living = [], []
    for root in roots:
        if root.is_symlink() or not root.is_dir():
            continue
        try:
            lock = _locked(root, without_locks=False)
        except OSError:
            lock = None
        if lock is None:
            living.append(root)
        else:
            dead.append(StagingFolder(root, destination, lock))
    return dead, living


def _locked(root: Path, *, without_locks: bool) -> int | None:
    """The lock file of `root`, open and held; None when another process holds it or has removed the folder.

    without_locks: whether an unheld one will do where the file system has no locks.
    """
    file = root / "lock"
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if file.stat().st_ino == os.fstat(lock).st_ino:
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        if without_locks and error.errno in _NO_LOCKS:
            return lock
        if error.errno not in _NO_LOCKS:
            os.close(lock)
            raise
    os.close(lock)
    return None
