"""tools/same_collectives.py: it says what differs between two records, and leaves out what hangs on time."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from closing_line import main

TOOL = Path(__file__).resolve().parents[2] / "tools" / "same_collectives.py"
BEFORE = {"a test #1 rank 0": (3, 0xA1, 0xB1), "a test #1 rank 1": (3, 0xA2, 0xB2), "late #1 rank 0": (5, 0xA3, 0xB3)}


class SameCollectives(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def record(self, name, lines):
        path = self.root / name
        path.write_text("".join(f"{call}: {count} {own:016x} {bare:016x}\n" for call, (count, own, bare) in lines.items()))
        return path

    def compare(self, after, *arguments, before=BEFORE):
        command = [sys.executable, str(TOOL), str(self.record("before", before)), str(self.record("after", after)), *arguments]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        return run.returncode, run.stdout.splitlines()

    def test_equal_records(self):
        self.assertEqual(self.compare(BEFORE), (0, ["3 calls before, 3 after, 0 differ"]))

    def test_another_sequence_is_named_by_test_call_and_rank(self):
        code, lines = self.compare(BEFORE | {"a test #1 rank 1": (4, 0xFF, 0xFE)})
        self.assertEqual(code, 1)
        self.assertEqual(lines[0], "a test #1 rank 1: 3 collectives before, 4 after")

    def test_calls_that_one_has(self):
        without = {call: line for call, line in BEFORE.items() if call != "late #1 rank 0"}
        self.assertEqual(self.compare(without)[1][0], "late #1 rank 0: only before")
        self.assertEqual(self.compare(BEFORE, before=without)[1][0], "late #1 rank 0: only after")

    def test_names_may_differ_where_that_is_said(self):
        renamed = BEFORE | {"a test #1 rank 1": (3, 0xFF, 0xB2)}
        self.assertEqual(self.compare(renamed)[0], 1)
        self.assertEqual(self.compare(renamed, "--without-subject")[0], 0)

    def test_what_two_records_of_one_build_differ_in_is_left_out(self):
        again = self.record("again", BEFORE | {"late #1 rank 0": (6, 0xA4, 0xB4)})
        self.assertEqual(self.compare(BEFORE | {"late #1 rank 0": (7, 0xA5, 0xB5)}, "--again", str(again))[0], 0)
        self.assertEqual(self.compare(BEFORE | {"a test #1 rank 0": (7, 0xA5, 0xB5)}, "--again", str(again))[0], 1)

    def test_another_file_is_refused_by_line(self):
        run = subprocess.run([sys.executable, str(TOOL), str(self.record("before", BEFORE)), __file__], capture_output=True,
                             text=True, check=False)
        self.assertNotEqual(run.returncode, 0)
        self.assertIn(":1: expected", run.stderr)


if __name__ == "__main__":
    main()
