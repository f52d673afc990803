"""Starts a program on the ranks of this machine, as torchrun does, and says in one line why the first rank failed.

Usage: start_ranks.py RANKS PROGRAM [ARGUMENTS...]

Each rank leaves its error in torchelastic's error file. What else torchrun says of a failure, its log and a report of all
ranks, is left out: the other ranks fail because the first one did, or are ended.
"""

import logging
import math
import signal
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

FAILED = 1
# A rank that a signal ends leaves no file, and is noticed after those that miss it have written theirs.
NOTICED_LATE_S = 2


def when(failure):
    """A time to compare, in seconds: torchelastic's are whole ones, in which a rank and those that miss it fail together."""
    if failure.exitcode == -signal.SIGTERM:
        return math.inf  # torchrun ended it
    file = Path(failure.error_file)
    return file.stat().st_mtime if file.is_file() else failure.timestamp - NOTICED_LATE_S


def described(failure):
    if failure.exitcode < 0:
        return f"was ended by signal {-failure.exitcode} ({failure.signal_name()})"
    said = f": {failure.message['message']}" if isinstance(failure.message, dict) else ""
    return f"failed with exit code {failure.exitcode}{said}"


def main():
    ranks, *command = sys.argv[1:]
    logging.disable(logging.ERROR)  # torchrun's; the ranks have their own
    with tempfile.TemporaryDirectory(prefix="fsdp-ranks-") as folder:
        try:
            run(parse_args(["--standalone", "--nproc-per-node", ranks, "--log-dir", folder, "--no-python", *command]))
        except ChildFailedError as error:
            rank, failure = min(error.failures.items(), key=lambda item: when(item[1]))
            print(f"tools/train: rank {rank} {described(failure)}", file=sys.stderr)
            return FAILED
        except SignalException as error:  # Ctrl-C, or kill
            return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
