"""Where in the program a thread is, for what ranks tell each other when a collective is late."""

import atexit
import os
import sys

import torch

from . import _C

_LIBRARIES = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__))


def of_thread(ident: int) -> str:
    """"in full_tensor, called at train.py:33": what the program called, and where; "" for a thread that runs no Python."""
    frame, called = sys._current_frames().get(ident), ""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        called = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return ""
    place = f"at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return f"in {called}, called {place}" if called else place


def install() -> None:
    _C.set_whereabouts(of_thread)
    atexit.register(_C.set_whereabouts, None)
