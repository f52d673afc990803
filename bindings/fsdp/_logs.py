"""The library's log lines, in the logger "fsdp" of Python's logging. Their records have `fsdp_rank`."""

import atexit
import logging
import sys

import torch.distributed as dist

from . import _C

logger = logging.getLogger("fsdp")
# By the level of a line in C++.
_LEVELS = [5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR]
_NAMES = {"trace": 5, "debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "warning": logging.WARNING,
          "err": logging.ERROR, "error": logging.ERROR, "critical": logging.CRITICAL}


def _log(level, text):
    if _ASKED and not logger.hasHandlers():
        # Python shows warnings and errors then, and this program asks for more, or for less.
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(name)s] [%(levelname)s] %(message)s"))
        logger.addHandler(handler)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    logger.log(_LEVELS[level], "%s%s", f"rank {rank}: " if ranks > 1 else "", text, extra={"fsdp_rank": rank})


_ASKED = _C.asked_log_level()  # FSDP_LOG_LEVEL; "": it is not set


def install() -> None:
    """FSDP_LOG_LEVEL is the logger's level, where it is set; else the program's own settings decide."""
    if _ASKED in _NAMES:
        logger.setLevel(_NAMES[_ASKED])
    _C.set_log_function(_log, not _ASKED)
    atexit.register(_C.set_log_function, None, False)
