"""Ranks of a Python program as forks of this process, which has imported torch: each import takes two seconds of a processor,
and there are dozens of ranks.
"""

import ctypes
import os
import runpy
import signal
import sys
import traceback
import weakref

import launch


class ForkedRank:
    """What launch.run_ranks asks of a subprocess.Popen."""

    def __init__(self, pid):
        self.pid = pid
        self.returncode = None

    def poll(self, options=os.WNOHANG):
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self):
        return self.poll(0)

    def kill(self):
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def start_rank(rank, ranks, program, *arguments, stdout, stderr, **more):
    """One rank's process, as launch.start_rank starts it. more: of its environment."""
    import torch.distributed.fsdp
    import torch.distributed.tensor  # none of them starts a thread, which would not be there in a fork

    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return ForkedRank(pid)
    code = 1
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # of temporary folders, which stay the parent's
    try:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        os.environ.update(launch.rank_environment(rank, ranks, **more))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has read it long ago
        sys.argv = [str(part) for part in (program, *arguments)]
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # The interpreter's own end, with all that destructors do, and not that of the test around this.
        ctypes.pythonapi.Py_Exit(code)
