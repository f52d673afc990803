"""A rank that dies, throws or falls silent: the others fail soon, and say in what."""

import os
import signal
import subprocess
import tempfile
import unittest

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

    def test_under_torchrun_a_killed_rank_ends_the_run(self):
        run = subprocess.Popen([str(part) for part in launch.torchrun(2, launch.TRAIN, *self.endless)],
                               env=launch.environment(), text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
        self.addCleanup(self.end, run)
        launch.wait_for_line(run, "step ")
        os.kill(launch.children(run.pid)[-1], signal.SIGKILL)
        run.communicate(timeout=launch.patience(40))
        self.assertNotEqual(run.returncode, 0)

    def test_of_torchruns_report_one_line_a_rank_is_left(self):
        result = launch.run(launch.torchrun(2, launch.RANK_PROGRAMS, "rank_failure"),
                            FSDP_TEST_TIMEOUT_MS=launch.patience(20_000))
        self.assertIn("Traceback", result.stderr)
        shown = subprocess.run(["awk", "-f", str(launch.ROOT / "tools" / "torchrun_errors.awk")],
                               input=result.stderr, text=True, capture_output=True, check=True).stdout
        self.assertIn("failed: rank 1 gives up on purpose\n", shown)
        self.assertIn("tools/train: rank 1 failed with exit code 1\n", shown)
        self.assertLessEqual(shown.count("\n"), 4, shown)


if __name__ == "__main__":
    main()
