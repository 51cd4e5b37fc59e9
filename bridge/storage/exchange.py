"""Two renames that Python's `os` lacks: one that never overwrites, one that exchanges.

renameat2(2) of Linux. Where the kernel, the C library or the file system lacks it (NFS, macOS), `rename_new` checks and
then renames, and `exchange` returns False.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_HERE = -100  # AT_FDCWD: relative paths start at the working directory.
_NO_REPLACE, _EXCHANGE = 1, 2
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def rename_new(source: Path, target: Path) -> None:
    """Renames `source` to `target`; `FileExistsError` when that exists, even as a broken link."""
    if _renameat2(source, target, _NO_REPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def exchange(one: Path, other: Path) -> bool:
    """Swaps two paths atomically; False, and nothing done, where that is not possible."""
    return _renameat2(one, other, _EXCHANGE)


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    paths = os.fsencode(source), os.fsencode(target)
    if renameat2(_HERE, paths[0], _HERE, paths[1], ctypes.c_uint(flag)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNKNOWN:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(target))
