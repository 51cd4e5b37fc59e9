"""torchrun without its own failure report, which would bury the message of the process that failed.

    python -m easytorch.training.torchrun [torchrun's arguments]

Exits with the code of the process that failed first, 128 + the signal's number where a signal ended it.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

_LOGGERS = ("agent.server.api", "multiprocessing.api", "multiprocessing.errors")


def main(arguments: Sequence[str]) -> int:
    for name in _LOGGERS:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun(list(arguments))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        hint = ": out of memory?" if name == "SIGKILL" else ""
        print(f"error: training process {rank} was ended by {name}{hint}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
