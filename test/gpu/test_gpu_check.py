"""tools/gpu_check without a GPU: its plans, what it skips and says on each kind of bad machine, where it cuts, and that nothing
found is lost."""

import io
import json
import subprocess
import sys
import tempfile
import time
import unittest
from argparse import Namespace
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tools" / "gpu"), str(HERE.parent / "processes")]

import call
import claims
import machine
import more
import packed
import parts
import plan
import report
from closing_line import main
from record import Record

H200 = dict(gpu="NVIDIA H200", gpus=1, memory_gib=139.8, driver="580.1", torch="2.11.0", cuda="13.0", nccl="2.28.9",
            toolkit="13.0", sanitizer="/usr/local/cuda/bin/compute-sanitizer", python="3.12.3", cores=16,
            glibc="2.39", compiler="/usr/bin/g++", torch_root="/opt/torch")
PACKED = {"torch": "2.11.0", "cuda": "13.0", "python": "3.12", "glibc": "2.34"}
LIMIT_OF_A_CALL_S = 600


class InFolder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.record = Record(self.folder / "out")

    def needs(self, unfit="", **differences):
        return machine.Needs(machine.Machine(**{**H200, **differences}), self.record, self.folder / "build", unfit)


class BadMachines(InFolder):
    def test_nothing_is_missing_on_the_machine_that_it_is_for(self):
        needs = self.needs()
        self.assertEqual([needs.missing(need) for need in ("gpu", "torch", "sanitizer", "memory:70")], [""] * 4)

    def test_without_a_driver_all_that_needs_a_gpu_says_so(self):
        self.assertEqual(self.needs(driver="", gpus=0, gpu="", memory_gib=0.0).missing("gpu"),
                         "no driver: nvidia-smi does not answer")

    def test_a_driver_without_a_gpu_that_torch_can_use_is_named(self):
        self.assertIn("torch 2.11.0 (CUDA 13.0)", self.needs(gpus=0, gpu="").missing("gpu"))

    def test_without_a_toolkit_the_sanitizer_alone_is_skipped(self):
        needs = self.needs(toolkit="", sanitizer="")
        self.assertIn("compute-sanitizer is not on the PATH", needs.missing("sanitizer"))
        self.assertEqual(needs.missing("gpu"), "")

    def test_a_torch_for_cuda_12_is_a_note(self):
        needs = self.needs(cuda="12.8")
        self.assertEqual(needs.missing("gpu"), "")
        self.assertTrue(any("12.8" in note for note in machine.notes(needs.machine)))

    def test_another_gpu_is_a_note_and_no_reason_to_skip(self):
        needs = self.needs(gpu="NVIDIA A10G", memory_gib=22.1)
        self.assertTrue(any("A10G" in note for note in machine.notes(needs.machine)))
        self.assertEqual(needs.missing("gpu"), "")
        self.assertEqual(needs.missing("memory:70"), "needs 70 GiB of GPU memory, here are 22.1")

    def test_two_ranks_need_a_probe_that_has_passed(self):
        self.assertIn("needs first/two_ranks, which has not run", self.needs().missing("two_ranks"))
        self.record.add("first", part="two_ranks", status="failed", why="exit code 1: invalid usage")
        self.assertIn("found it failed: exit code 1: invalid usage", self.needs().missing("two_ranks"))
        self.record.add("first", part="two_ranks", status="passed")
        self.assertEqual(self.needs().missing("two_ranks"), "")
        self.assertEqual(self.needs(gpus=2).missing("two_ranks"), "")

    def test_what_needs_more_machines_says_how_many(self):
        self.assertEqual(self.needs().missing("gpus:2"), "needs 2 GPUs, here is 1")
        self.assertIn("needs 2 nodes", self.needs().missing("nodes:2"))

    def test_what_is_not_built_is_skipped_by_name(self):
        self.assertEqual(self.needs().missing("built:bench/x"), "bench/x is not there: it was not packed")


    def test_binaries_that_do_not_fit_are_named_with_the_reason_and_can_be_built_then(self):
        def why(**differences):
            return packed.why_not(PACKED, machine.Machine(**{**H200, **differences}))

        self.assertEqual(why(), "")
        self.assertEqual(why(torch="2.12.0+cu130"), "they are for torch 2.11.0, here is 2.12.0")
        self.assertEqual(why(torch=""), "they are for torch 2.11.0, here is none")
        self.assertIn("with CUDA 13.0, here is one with CUDA 12.8", why(cuda="12.8"))
        self.assertEqual(why(glibc="2.31"), "they need glibc 2.34, here is 2.31")
        self.assertIn("for Python 3.12, here is 3.11.7", why(python="3.11.7"))
        self.assertIn("they need glibc 2.34", self.needs("they need glibc 2.34").missing("built:x"))
        self.assertEqual(self.needs("they need glibc 2.34").missing("unfit"), "")
        self.assertIn("nothing has to be built", self.needs().missing("unfit"))
        self.assertIn("no C++ compiler", self.needs(compiler="").missing("compiler"))


class Plans(InFolder):
    def options(self, device="cuda"):
        return Namespace(device=device, build=Path("/b"), headers=Path("/h"), jobs=None)

    def test_the_two_commands_hold_in_their_budgets(self):
        self.assertEqual(plan.BUDGETS_S, {"first": 300, "second": 330})
        for device in ("cuda", "cpu"):
            for name, budget_s in plan.BUDGETS_S.items():
                self.assertLessEqual(plan.most_s(self.options(device), name), budget_s, f"{name} on {device}")

    def test_a_part_has_its_groups_seconds_and_says_what_it_shows(self):
        for name in plan.NAMES:
            some = plan.parts_of(self.options(), name)
            every = [part.name for group in some for part in group.parts]
            self.assertEqual(len(set(every)), len(every))
            for group in some:
                self.assertEqual([part.limit_s for part in group.parts], [group.limit_s] * len(group.parts), group.name)
                self.assertTrue(all(part.shows for part in group.parts), group.name)

    def test_a_plan_says_the_seconds_of_each_group_and_their_sum(self):
        lines = list(plan.lines("first", plan.groups(self.options(), "first", self.record), 1))
        self.assertEqual(lines[0], "plan of first: at most 300 s")
        self.assertIn("    60 s  torch's groups, two ranks: nccl", lines)
        self.assertEqual(lines[-1], "   300 s  in all, 5 s of it to begin")
        self.assertEqual(sum(int(line.split()[0]) for line in lines[1:-1]), 295)
        slower = list(plan.lines("first", plan.groups(self.options("cpu"), "first", self.record), 8))
        self.assertEqual(slower[0], "plan of first: at most 2400 s, 8 times as long as on 16 cores")

    def test_the_second_command_begins_with_what_failed_and_ends_with_what_was_not_reached(self):
        for group in plan.first(self.options()):
            for part in group.parts:
                if part.name not in ("nccl", "graphs_one", "peak_one"):
                    self.record.add("first", part=part.name, status="passed")
        self.record.add("first", part="nccl", status="failed")
        self.record.add("first", part="graphs_one", status="cut")
        groups = plan.groups(self.options(), "second", self.record)
        self.assertEqual([[part.name for part in group.parts] for group in groups],
                         [["nccl"], ["steps"], ["compiled"], ["offload"], ["memcheck"], ["graphs_one"], ["peak_one"]])
        self.assertEqual([group.is_spare for group in groups], [False] * 5 + [True] * 2)
        self.assertEqual([group.stage for group in groups], ["first", *["second"] * 4, "first", "first"])
        self.assertIn("   330 s  in all", "\n".join(plan.lines("second", groups, 1)))

    def test_what_does_not_fit_into_them_has_limits_that_a_call_can_hold(self):
        found = more.stages(self.options())
        self.assertEqual(tuple(found), more.NAMES)
        every = [part for some in found.values() for part in some]
        self.assertEqual(len({part.name for part in every}), len(every))
        for part in every:
            self.assertLessEqual(part.limit_s, LIMIT_OF_A_CALL_S, part.name)
            self.assertTrue(part.shows, part.name)

    def test_every_part_of_the_plan_shows_a_claim_and_every_claim_names_parts_that_there_are(self):
        planned = {f"{name}/{part.name}" for name in plan.NAMES for group in plan.parts_of(self.options(), name)
                   for part in group.parts}
        others = {f"more/{part.name}" for some in more.stages(self.options()).values() for part in some}
        named = {part for claim in claims.CLAIMS for part in claim.parts}
        self.assertEqual(planned - named, set())
        self.assertEqual(named - planned - others, set())


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
        return self.run_part(f"import sys; open(sys.argv[1], 'a').write({''.join(json.dumps(line) + chr(10) for line in lines)!r})\n"
                             f"print({closing!r}); sys.exit({code})")

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


class Reports(InFolder):
    CLAIM = claims.of("it works", "first/a", "first/b")

    def state(self):
        return claims.state(self.CLAIM, self.record)

    def test_a_claim_is_shown_failed_or_not_reached(self):
        self.assertEqual(self.state(), ("not reached", "first/a has not begun; first/b has not begun"))
        self.record.add("first", part="a", status="passed")
        self.record.add("first", part="b", status="cut", why="left: case 3")
        self.assertEqual(self.state(), ("not reached", "first/b cut: left: case 3"))
        self.record.add("first", part="b", status="failed", why="failed: case 3")
        self.assertEqual(self.state(), ("failed", "first/b failed: failed: case 3"))
        self.record.add("first", part="b", status="left", why="no time was left")
        self.assertEqual(self.state()[0], "failed", "that it was not tried again is no better result")
        self.record.add("first", part="b", status="passed")
        self.assertEqual(self.state(), ("shown", ""))

    def test_the_report_has_each_claim_with_its_word(self):
        self.record.add("first", part="libraries", status="passed", seconds=1.0)
        self.record.add("first", part="train", status="failed", why="exit code 1: apart", seconds=1.0)
        text = report.text(self.record)
        self.assertRegex(text, r"run with this torch \| shown \| first/libraries \|  \|")
        self.assertRegex(text, r"\| failed \| first/train \| first/train failed: exit code 1: apart \|")
        self.assertRegex(text, r"under torch.compile \| not reached \| second/compiled \| second/compiled has not begun \|")
        self.assertEqual(sum(f"| {word} |" in line for line in text.splitlines()
                             for word in (claims.SHOWN, claims.FAILED, claims.NOT_REACHED)), len(claims.CLAIMS))

    def test_the_page_for_whoever_has_a_gpu_has_each_claim_and_both_commands(self):
        page = (HERE.parents[1] / "docs" / "gpu.md").read_text()
        for claim in claims.CLAIMS:
            self.assertIn(f"| {claim.text} | {', '.join(claim.parts)} |", page)
        for name, budget_s in plan.BUDGETS_S.items():
            self.assertRegex(page, rf"tools/gpu_check {name} .*# at most {budget_s} s")

    def test_on_a_cpu_it_says_that_nothing_is_shown_of_a_gpu(self):
        self.record.add("machine", date="2026-01-01", notes=[], **machine.Machine(device="cpu").facts())
        self.assertIn("A rehearsal on a CPU", report.text(self.record))

    def test_it_has_a_table_of_steps_and_what_was_left_out(self):
        self.record.add("second", part="x", status="begun", shows="step time")
        self.record.add("second", part="x", found={"world": "one", "measured": "step", "impl": "python", "tokens": 128,
                                                   "step": {"median_ms": 12.5}, "issue": {}, "exposed": {}})
        self.record.add("second", part="x", found={"world": "one", "left_out": "steps of 8192 tokens"})
        self.record.add("second", part="x", status="passed", seconds=3.0)
        text = report.text(self.record)
        self.assertIn("| one | 128 | python | 12.5 |", text)
        self.assertIn("Left out for want of time: steps of 8192 tokens.", text)
        self.assertIn("| x | step time | passed |", text)


if __name__ == "__main__":
    main()
