"""tools/gpu_check while it runs: it cuts itself at the end of its budget, and nothing that was found is lost."""

import io
import json
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tools" / "gpu"), str(HERE.parent / "processes")]

import call
import machine
import parts
import plan
from closing_line import main
from in_folder import InFolder
from record import Record


class Parts(InFolder):
    def run_part(self, text, limit_s=30):
        part = parts.Part("one", (sys.executable, "-c", text, "{out}"), limit_s)
        return parts.run(part, "cases", self.record, {"PYTHONUNBUFFERED": "1"}, limit_s)

    def why(self):
        return self.record.last("cases", "one")["why"]

    def test_a_part_that_is_cut_short_loses_nothing_that_it_has_written(self):
        text = ("import sys, time; out = open(sys.argv[1], 'a')\n"
                "for at in range(3): out.write('{\"case\": %d}\\n' % at); out.flush(); print('said', at)\n"
                "out.write('{\"half'); out.flush(); time.sleep(60)")
        begin = time.monotonic()
        self.assertEqual(self.run_part(text, limit_s=3), "cut")
        self.assertLess(time.monotonic() - begin, 30)
        self.assertEqual([line["found"]["case"] for line in self.record.lines("cases") if "found" in line], [0, 1, 2])
        self.assertIn("said 2", (self.record.folder / "cases.log").read_text())
        self.assertEqual(self.why(), "not done within 3 s")

    def test_the_end_of_one_that_does_not_want_to_end_is_within_its_limit(self):
        text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        self.assertEqual(self.run_part(text, limit_s=6), "cut")
        self.assertLess(self.record.last("cases", "one")["seconds"], 6 + parts.TICK_S + 1)

    def test_a_command_is_told_when_to_end_by_itself(self):
        part = parts.Part("one", (sys.executable, "-c", "import sys; sys.exit(sys.argv[1] != '87')", "{limit}"), 100)
        self.assertEqual(parts.run(part, "cases", self.record, {}, 100), "passed")
        for limit_s in (20, 25, 60, 140):
            end_s, own_s = parts.margins(limit_s)
            self.assertLess(own_s, limit_s - end_s)
            self.assertGreater(own_s, 0.8 * limit_s)

    def test_counts_and_the_last_words_are_kept(self):
        self.assertEqual(self.run_part("print('3 passed, 0 failed, 1 skipped')"), "passed")
        self.assertEqual(self.record.last("cases", "one")["counts"], [3, 0, 1])
        self.assertEqual(self.run_part("import sys; sys.exit('it broke')"), "failed")
        self.assertEqual(self.why(), "exit code 1: it broke")

    def wrote(self, *lines, code=0, closing=""):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        return self.run_part(f"import sys; open(sys.argv[1], 'a').write({text!r})\nprint({closing!r}); sys.exit({code})")

    def test_cases_that_no_time_was_left_for_are_no_failure(self):
        left = [{"case": f"case {at}", "status": "left"} for at in range(5)]
        self.assertEqual(self.wrote({"case": "a", "status": "passed"}, *left, code=1), "cut")
        self.assertEqual(self.why(), "left: case 0, case 1, case 2 and 2 more")
        self.assertEqual(self.wrote({"case": "a", "status": "failed"}, *left, code=1), "failed")
        self.assertEqual(self.why(), "failed: a, and no time was left for all")

    def test_figures_that_are_left_out_make_it_cut_and_fewer_turns_do_not(self):
        self.assertEqual(self.wrote({"left_out": "more turns of 512 tokens"}), "passed")
        self.assertEqual(self.wrote({"left_out": "steps of 2048 tokens"}), "cut")
        self.assertEqual(self.why(), "left: steps of 2048 tokens")

    def test_where_all_is_skipped_nothing_has_passed(self):
        self.assertEqual(self.wrote({"case": "a", "status": "skipped", "found": "needs a GPU"},
                                    closing="0 passed, 0 failed, 1 skipped"), "skipped")
        self.assertEqual(self.why(), "needs a GPU")

    def test_a_copy_has_what_was_found_before_it_was_asked_for_and_another_machine_goes_on_from_it(self):
        self.run_part("print('first')")
        copied = Record(self.record.folder, self.folder / "copy")
        copied.add("cases", part="two", status="passed")
        lines = (self.folder / "copy" / "results.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line)["part"] for line in lines], ["one", "one", "two"])
        self.assertIn("first", (self.folder / "copy" / "log.txt").read_text())
        for _ in range(2):
            there = Record(self.folder / "there", earlier=self.folder / "copy")
            self.assertTrue(there.has_passed("cases", "two"))
            self.assertEqual(len(there.lines()), 3)


class Calls(InFolder):
    """Of a whole command, with parts of its own."""

    def call(self, *groups, **options):
        begin = time.monotonic()
        given = dict(device="cpu", seconds=60, out=self.record.folder, copy=None, earlier=None, build=self.folder, again=False,
                     slower=1, packed=self.folder, opened=self.folder)
        options = Namespace(**{**given, **options})
        with mock.patch.object(machine, "look", lambda device: machine.Machine(device=device, torch="2.11.0")), \
                mock.patch("sys.stdout", new_callable=io.StringIO) as said:
            code = call.Call(options, begin).run("first", [self.group(some) for some in groups])
            return code, said.getvalue()

    def group(self, some):
        some = some if isinstance(some, tuple) else (some,)
        return plan.Group("+".join(part.name for part in some), max(part.limit_s for part in some), some, "first")

    def part(self, name, text="", needs=(), limit_s=30):
        command = (sys.executable, "-c", f"open({str(self.folder / name)!r}, 'a').write('x')\n{text}")
        return parts.Part(name, command, limit_s, needs)

    def times(self, name):
        path = self.folder / name
        return len(path.read_text()) if path.exists() else 0

    def test_a_second_call_goes_on_with_what_has_not_passed(self):
        good, bad = self.part("good"), self.part("bad", "import sys; sys.exit(3)")
        self.assertEqual(self.call(good, bad)[0], call.SOME_FAILED)
        self.assertEqual(self.call(good, bad)[0], call.SOME_FAILED)
        self.assertEqual((self.times("good"), self.times("bad")), (1, 2))
        self.assertEqual(self.call(good, again=True)[0], call.ALL_PASSED)
        self.assertEqual(self.times("good"), 2)

    def test_what_is_skipped_is_one_line_and_the_rest_goes_on(self):
        code, said = self.call(self.part("a", needs=("gpu",)), self.part("b"))
        self.assertEqual(code, call.SOME_SKIPPED)
        self.assertIn("first/a: skipped: needs a GPU", said)
        self.assertEqual((self.times("a"), self.times("b")), (0, 1))
        self.assertIn("needs a GPU", (self.record.folder / "report.md").read_text())

    def test_without_what_was_packed_it_says_so_and_how_to_build(self):
        said = self.call(self.part("a"))[1]
        self.assertIn("libfsdp-gpu.tar.xz, which --pack makes; tools/gpu_check --more build compiles them here", said)

    def test_with_no_time_nothing_is_begun_and_what_is_left_is_said(self):
        code, said = self.call(self.part("a"), seconds=1)
        self.assertEqual((code, self.times("a")), (call.TIME_IS_UP, 0))
        self.assertIn("first/a: left: no time was left", said)

    def test_the_parts_of_a_group_run_side_by_side(self):
        both = tuple(self.part(name, f"import pathlib, time\nwhile not pathlib.Path({str(self.folder / other)!r}).exists(): "
                               "time.sleep(0.05)") for name, other in (("a", "b"), ("b", "a")))
        self.assertEqual(self.call(both)[0], call.ALL_PASSED)

    def test_a_command_cuts_itself_at_the_end_of_its_budget_and_keeps_what_it_has(self):
        begin = time.monotonic()
        code, said = self.call(self.part("a"), self.part("b", "import time; print('said', flush=True); time.sleep(90)"),
                               self.part("c"), seconds=22)
        self.assertLess(time.monotonic() - begin, 24)
        self.assertEqual(code, call.TIME_IS_UP)
        self.assertEqual({name: self.record.last("first", name)["status"] for name in "abc"},
                         {"a": "passed", "b": "cut", "c": "left"})
        self.assertIn("said", (self.record.folder / "first.log").read_text())
        self.assertIn("1 passed, 0 failed, 1 cut, 0 skipped, 1 left", said)

    def test_a_command_that_is_ended_from_outside_ends_its_parts_and_keeps_what_it_has(self):
        begin, child = time.monotonic(), self.folder / "child"
        killer = threading.Thread(target=lambda: (self.wait_for(child), os.kill(os.getpid(), signal.SIGTERM)))
        killer.start()
        text = f"import os, pathlib, time; pathlib.Path({str(child)!r}).write_text(str(os.getpid())); time.sleep(90)"
        code, said = self.call(self.part("a", text, limit_s=80), self.part("b"), seconds=80)
        killer.join()
        self.assertLess(time.monotonic() - begin, 40)
        self.assertEqual(code, call.TIME_IS_UP)
        self.assertIn("first/a: cut", said)
        self.assertIn("the command was ended", said)
        self.assertEqual(self.record.last("first", "b")["status"], "left")
        with self.assertRaises(ProcessLookupError):
            os.kill(int(child.read_text()), 0)

    @staticmethod
    def wait_for(path):
        while not (path.exists() and path.read_text()):
            time.sleep(0.05)


if __name__ == "__main__":
    main()
