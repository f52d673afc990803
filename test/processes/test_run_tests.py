"""What tools/test counts."""

import os
import sys
import unittest

import launch
from closing_line import main

sys.path.insert(0, str(launch.ROOT / "tools"))
import run_tests  # noqa: E402

# One of its cases kills a program that this variable names, and is skipped without it.
PROGRAM = launch.BUILD / "test" / "checkpoint" / "fsdp_test_checkpoint"
VARIABLE = "FSDP_CHECKPOINT_SAVER"


class RunTests(unittest.TestCase):
    def counts(self, text):
        os.environ.pop(VARIABLE, None)
        outcome = run_tests.run_catch2({"name": "checkpoint", "cmd": [str(PROGRAM)], "env": {}, "timeout": 300}, text)
        return outcome.passed, outcome.failed, outcome.skipped

    def test_a_case_that_this_machine_cannot_run_is_skipped_and_not_passed(self):
        self.assertEqual(self.counts("[kills]"), (0, 0, 1))

    def test_a_case_that_runs_is_passed(self):
        self.assertEqual(self.counts("a path under a file is an error on every rank"), (1, 0, 0))


if __name__ == "__main__":
    main()
