"""Cases whose time is up, or that hang: what has ended is kept, what is left is said, and what hangs keeps no other waiting."""

import io
import json
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "processes")]

import run_cases
import run_native
import shared_gpu
from closing_line import main
from worlds import WORLDS

# As Catch2's programs are: a case that has `hangs` in its name does not end.
PROGRAM = """#!/usr/bin/env python3
import sys, time
names = {names!r}
if "--list-test-names-only" in sys.argv:
    print("\\n".join(names) if "[" not in sys.argv[2].replace("[.]", "") else "")
    sys.exit(0)
given = open(sys.argv[sys.argv.index("--input-file") + 1]).read().splitlines()
with open(sys.argv[sys.argv.index("--out") + 1], "w") as out:
    out.write("<Catch><Group name='x'>")
    for name in given:
        if "hangs" in name:
            out.flush()
            time.sleep(60)
        out.write(f"<TestCase name='{{name}}'><OverallResult success='true'/></TestCase>")
        out.flush()
"""


class Native(unittest.TestCase):
    def run_native(self, names, limit_s, case_limit_s=None):
        """(its exit code, {case: status}, what it said)"""
        with tempfile.TemporaryDirectory() as folder:
            program, out = Path(folder) / "program", Path(folder) / "out"
            program.write_text(PROGRAM.format(names=names))
            program.chmod(0o755)
            given = {"FSDP_BUILD_DIR": folder, "FSDP_TEST_DEVICE": "cpu"}
            given |= {"FSDP_TEST_CASE_LIMIT_S": str(case_limit_s)} if case_limit_s else {}
            arguments = ["run_native.py", "--program", "program", "--limit", str(limit_s), "--out", str(out)]
            shared_gpu.gpus.cache_clear()
            with mock.patch.dict(os.environ, given), mock.patch.object(sys, "argv", arguments), \
                    mock.patch("sys.stdout", new_callable=io.StringIO) as said:
                code = run_native.main()
            lines = [json.loads(line) for line in out.read_text().splitlines()]
            return code, {line["case"]: line["status"] for line in lines}, said.getvalue()

    def test_where_time_is_up_cases_are_left_and_have_not_failed(self):
        code, statuses, said = self.run_native(["one", "two hangs", "three"], limit_s=4)
        self.assertEqual(statuses, {"one": "passed", "two hangs": "left", "three": "left"})
        self.assertEqual(code, 1)
        self.assertIn("left: two hangs\ntime was up in the middle of it", said)

    def test_a_case_that_hangs_is_ended_and_the_others_go_on(self):
        begin = time.monotonic()
        statuses = self.run_native(["one", "two hangs", "three"], limit_s=60, case_limit_s=3)[1]
        self.assertEqual(statuses, {"one": "passed", "two hangs": "failed", "three": "passed"})
        self.assertLess(time.monotonic() - begin, 40)


class Python(unittest.TestCase):
    """The processes are given: what they had written when they were ended."""

    def run_cases(self, *runs, limit_s=30):
        """runs: (seconds that it takes, what each of the two ranks has written)"""
        clock, left = [0.0], list(runs)

        def run_once(world, names, limit_s, tell):
            seconds, ranks = left.pop(0)
            clock[0] += min(seconds, limit_s)
            return [{line["case"]: line for line in rank} for rank in ranks], "last words"

        told = []
        with mock.patch.object(run_cases, "run_once", run_once), \
                mock.patch.object(run_cases.time, "monotonic", lambda: clock[0]):
            found = run_cases.run_cases(WORLDS["nccl"], ["a", "b", "c"], limit_s, told.append)
        self.assertEqual([line["case"] for line in told], list(found), "each is told once")
        return {name: (line["status"], line["found"]) for name, line in found.items()}

    @staticmethod
    def ended(*names, status="passed"):
        return [{"case": name, "status": status, "found": name} for name in names]

    def test_where_time_is_up_cases_are_left_and_have_not_failed(self):
        found = self.run_cases((60, [self.ended("a"), self.ended("a")]))
        self.assertEqual(found, {"a": ("passed", "a"), "b": ("left", "time was up in the middle of it"),
                                 "c": ("left", "no time was left")})

    def test_one_that_failed_as_time_ended_has_failed(self):
        bad = self.ended("a") + self.ended("b", status="wrong")
        found = self.run_cases((60, [bad, self.ended("a")]))
        self.assertEqual(found["b"], ("failed", "a rank: b"))
        self.assertEqual(found["c"][0], "left")

    def test_one_that_ended_its_ranks_has_failed_and_the_others_go_on(self):
        found = self.run_cases((5, [self.ended("a"), self.ended("a")]), (5, [self.ended("c"), self.ended("c")]))
        self.assertEqual(found["b"], ("failed", "did not end; last words"))
        self.assertEqual(found["c"], ("passed", "c"))

    def test_the_last_seconds_begin_nothing_new(self):
        found = self.run_cases((25, [self.ended("a"), self.ended("a")]))
        self.assertEqual(found["c"], ("left", "no time was left"))


if __name__ == "__main__":
    main()
