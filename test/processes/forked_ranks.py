"""Ranks of a Python program as forks of this process, which has imported torch: each import takes two seconds of a processor,
and there are dozens of ranks.
"""

import os
import signal
import sys

import launch

sys.path.append(str(launch.ROOT / "tools"))
import test_forks  # noqa: E402


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
    test_forks.import_torch()
    import torch

    def prepare():
        os.environ.update(launch.rank_environment(rank, ranks, **more))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has read it long ago

    # An interpreter's end takes a second. One rank's shows what is wrong with it.
    end = test_forks.end_interpreter if rank == 0 or launch.is_thorough() else test_forks.end_at_once
    return ForkedRank(test_forks.fork_program([program, *arguments], stdout.fileno(), stderr.fileno(), prepare, end))
