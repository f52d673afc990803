"""A rank that dies, throws or falls silent: the others fail soon, and say in what."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import launch
from closing_line import main

# What a rank may be in the middle of.
OPERATION = r"all_gather|reduce_scatter|all_reduce"


class Failures(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        launch.write_text(folder.name)
        cls.endless = [*launch.TINY, "--data", folder.name, "--steps", "1000000", "--timeout", launch.patience(8)]

    def start_training(self):
        processes = launch.start_by_hand(2, launch.TRAIN, *self.endless)
        for process in processes:
            self.addCleanup(self.end, process)
        launch.wait_for_line(processes[0], "step ")
        return processes

    @staticmethod
    def end(process):
        if process.poll() is None:
            process.kill()
        process.communicate()

    def expect_failure(self, process, within_s):
        within_s = launch.patience(within_s)
        try:
            _, errors = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.fail(f"the rank still runs {within_s} s after the other one failed")
        self.assertGreater(process.returncode, 0, errors)
        self.assertRegex(errors, OPERATION)
        self.assertIn("world", errors)  # the name of the group

    def test_a_killed_rank_makes_the_other_fail_at_once(self):
        processes = self.start_training()
        processes[1].kill()
        self.expect_failure(processes[0], within_s=20)

    def test_a_rank_that_falls_silent_makes_the_other_fail_after_the_timeout(self):
        processes = self.start_training()
        processes[1].send_signal(signal.SIGSTOP)
        self.expect_failure(processes[0], within_s=30)

    def test_a_rank_that_throws_makes_the_other_fail(self):
        first, second = launch.start_by_hand(2, launch.RANK_PROGRAMS, "rank_failure",
                                             FSDP_TEST_TIMEOUT_MS=launch.patience(20_000))
        self.addCleanup(self.end, first)
        self.addCleanup(self.end, second)
        _, errors = second.communicate(timeout=launch.patience(60))
        self.assertEqual(second.returncode, 1, errors)
        self.assertIn("rank 1 gives up on purpose", errors)
        self.expect_failure(first, within_s=30)

    def start_ranks(self, *command, **more):
        """The run of tools/train, of two ranks."""
        run = subprocess.Popen([sys.executable, str(launch.ROOT / "tools" / "start_ranks.py"), "2", *map(str, command)],
                               env=launch.environment(**more), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(self.end, run)
        return run

    def test_of_a_rank_that_is_killed_under_torchrun_one_line_says_so(self):
        run = self.start_ranks(launch.TRAIN, *self.endless)
        launch.wait_for_line(run, "step ")
        killed = launch.children(run.pid)[-1]
        rank = re.search(rb"\0RANK=(\d)\0", Path(f"/proc/{killed}/environ").read_bytes())[1].decode()
        os.kill(killed, signal.SIGKILL)
        _, errors = run.communicate(timeout=launch.patience(60))
        self.assertEqual((errors, run.returncode), (f"tools/train: rank {rank} was ended by signal 9 (SIGKILL)\n", 1))

    def test_of_ranks_that_fail_under_torchrun_one_line_says_why_the_first_one_did(self):
        run = self.start_ranks(launch.RANK_PROGRAMS, "rank_failure", FSDP_TEST_TIMEOUT_MS=launch.patience(20_000),
                               FSDP_LOG_LEVEL="off")  # it has values of its own on each rank
        _, errors = run.communicate(timeout=launch.patience(60))
        self.assertEqual((errors, run.returncode),
                         ("tools/train: rank 1 failed with exit code 1: rank 1 gives up on purpose\n", 1))

    def test_a_rank_that_leaves_no_error_file_is_named_with_its_exit_code(self):
        run = self.start_ranks("/bin/sh", "-c", "[ $RANK = 0 ] || exit 3; exec sleep 60")
        _, errors = run.communicate(timeout=launch.patience(60))
        self.assertEqual((errors, run.returncode), ("tools/train: rank 1 failed with exit code 3\n", 1))


if __name__ == "__main__":
    main()
