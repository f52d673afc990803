"""tools/gpu_check without a GPU: what it skips and says on each kind of bad machine, and that nothing found is lost."""

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

import command_line
import machine
import pack
import parts
import report
import stages
from closing_line import main
from record import Record

H200 = dict(gpu="NVIDIA H200", gpus=1, memory_gib=139.8, driver="580.1", torch="2.11.0", cuda="13.0", nccl="2.28.9",
            toolkit="13.0", sanitizer="/usr/local/cuda/bin/compute-sanitizer", python="3.12.3", cores=16)
LIMIT_OF_A_CALL_S = 600


class InFolder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.record = Record(self.folder / "out")

    def needs(self, **differences):
        return machine.Needs(machine.Machine(**{**H200, **differences}), self.record, self.folder / "build")


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
        self.assertIn("needs nccl/two_ranks, which has not run", self.needs().missing("two_ranks"))
        self.record.add("nccl", part="two_ranks", status="failed", why="exit code 1: invalid usage")
        self.assertIn("found it failed: exit code 1: invalid usage", self.needs().missing("two_ranks"))
        self.record.add("nccl", part="two_ranks", status="passed")
        self.assertEqual(self.needs().missing("two_ranks"), "")
        self.assertEqual(self.needs(gpus=2).missing("two_ranks"), "")

    def test_what_needs_more_machines_says_how_many(self):
        self.assertEqual(self.needs().missing("gpus:2"), "needs 2 GPUs, here is 1")
        self.assertIn("needs 2 nodes", self.needs().missing("nodes:2"))

    def test_what_is_not_built_is_skipped_by_name(self):
        self.assertIn("bench/x is not built", self.needs().missing("built:bench/x"))


class Parts(InFolder):
    def run_part(self, text, limit_s=30):
        part = parts.Part("one", (sys.executable, "-c", text, "{out}"), limit_s)
        return parts.run(part, "cases", self.record, {"PYTHONUNBUFFERED": "1"}, limit_s)

    def test_a_part_that_is_cut_short_loses_nothing_that_it_has_written(self):
        text = ("import sys, time; out = open(sys.argv[1], 'a')\n"
                "for at in range(3): out.write('{\"case\": %d}\\n' % at); out.flush(); print('said', at)\n"
                "out.write('{\"half'); out.flush(); time.sleep(60)")
        begin = time.monotonic()
        self.assertEqual(self.run_part(text, limit_s=3), "cut")
        self.assertLess(time.monotonic() - begin, 50)
        self.assertEqual([line["found"]["case"] for line in self.record.lines("cases") if "found" in line], [0, 1, 2])
        self.assertIn("said 2", (self.record.folder / "cases.log").read_text())
        self.assertEqual(self.record.last("cases", "one")["why"], "not done within 3 s")

    def test_a_command_is_told_when_to_end_by_itself(self):
        part = parts.Part("one", (sys.executable, "-c", "import sys; sys.exit(sys.argv[1] != '85')", "{limit}"), 100)
        self.assertEqual(parts.run(part, "cases", self.record, {}, 100), "passed")

    def test_counts_and_the_last_words_are_kept(self):
        self.assertEqual(self.run_part("print('3 passed, 0 failed, 1 skipped')"), "passed")
        self.assertEqual(self.record.last("cases", "one")["counts"], [3, 0, 1])
        self.assertEqual(self.run_part("import sys; sys.exit('it broke')"), "failed")
        self.assertEqual(self.record.last("cases", "one")["why"], "exit code 1: it broke")

    def test_a_copy_has_what_was_found_before_it_was_asked_for(self):
        self.run_part("print('first')")
        copied = Record(self.record.folder, self.folder / "copy")
        copied.add("cases", part="two", status="passed")
        lines = (self.folder / "copy" / "results.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line)["part"] for line in lines], ["one", "one", "two"])
        self.assertIn("first", (self.folder / "copy" / "log.txt").read_text())


class Calls(InFolder):
    """Of the whole command, with stages of its own."""

    def call(self, *some, **options):
        given = dict(device="cpu", seconds=60, out=self.record.folder, copy=None, build=self.folder, stage=None, again=False,
                     slower=1)
        options = Namespace(**{**given, **options})
        with mock.patch.object(stages, "all_stages", lambda _: {"cases": list(some)}), \
                mock.patch.object(machine, "look", lambda device: machine.Machine(device=device, torch="2.11.0")), \
                mock.patch("sys.stdout", new_callable=io.StringIO) as said:
            return command_line.Check(options).run(), said.getvalue()

    def part(self, name, text="", needs=()):
        return parts.Part(name, (sys.executable, "-c", f"open({str(self.folder / name)!r}, 'a').write('x')\n{text}"), 30, needs)

    def times(self, name):
        path = self.folder / name
        return len(path.read_text()) if path.exists() else 0

    def test_a_second_call_goes_on_with_what_has_not_passed(self):
        good, bad = self.part("good"), self.part("bad", "import sys; sys.exit(3)")
        self.assertEqual(self.call(good, bad)[0], command_line.SOME_FAILED)
        self.assertEqual(self.call(good, bad)[0], command_line.SOME_FAILED)
        self.assertEqual((self.times("good"), self.times("bad")), (1, 2))
        self.assertEqual(self.call(good, again=True)[0], command_line.ALL_PASSED)
        self.assertEqual(self.times("good"), 2)

    def test_what_is_skipped_is_one_line_and_the_rest_goes_on(self):
        code, said = self.call(self.part("first", needs=("gpu",)), self.part("second"))
        self.assertEqual(code, command_line.SOME_SKIPPED)
        self.assertIn("cases/first: skipped: needs a GPU", said)
        self.assertEqual((self.times("first"), self.times("second")), (0, 1))
        self.assertIn("needs a GPU", (self.record.folder / "report.md").read_text())

    def test_with_no_time_nothing_is_begun(self):
        code, said = self.call(self.part("first"), seconds=1)
        self.assertEqual((code, self.times("first")), (command_line.TIME_IS_UP, 0))
        self.assertIn("no time was left for 1 parts", said)


class Packages(InFolder):
    def ask(self, *arguments):
        return subprocess.run([sys.executable, self.folder / "packages" / "bin" / "pkg-config", *arguments],
                              capture_output=True, text=True)

    def test_the_packed_pkg_config_answers_for_what_is_packed(self):
        if not Path("/var/lib/dpkg/status").exists():
            self.skipTest("no Debian packages here")
        size, versions = pack.pack(self.folder / "packages", with_cuda=False)
        self.assertLess(size, 20 << 20)
        self.assertEqual(versions.keys(), pack.PACKAGES.keys())
        for name in pack.PACKAGES:
            self.assertRegex(self.ask("--modversion", name).stdout, r"^\d+\.\d+")
        flags = self.ask("--cflags", "spdlog").stdout.split()
        self.assertIn("-DSPDLOG_COMPILED_LIB", flags)
        self.assertTrue(Path(flags[0].removeprefix("-I"), "spdlog", "spdlog.h").exists())
        words = self.ask("--libs", "libisal").stdout.split()
        self.assertTrue(Path(words[0].removeprefix("-L"), "libisal.so").exists())
        self.assertIn("-lisal", words)
        self.assertEqual(self.ask("--modversion", "zlib").returncode, 1)


class Table(unittest.TestCase):
    def test_every_stage_has_parts_with_limits_that_a_call_can_hold(self):
        options = Namespace(device="cuda", build=Path("/b/build-gpu"), packages=Path("/p"), jobs=None)
        for device in ("cuda", "cpu"):
            options.device = device
            found = stages.all_stages(options)
            self.assertEqual(tuple(found), stages.NAMES)
            for name, some in found.items():
                self.assertTrue(some, name)
                self.assertEqual(len({part.name for part in some}), len(some), name)
                for part in some:
                    self.assertLessEqual(part.limit_s, LIMIT_OF_A_CALL_S, f"{name}/{part.name}")
                    self.assertTrue(part.shows, f"{name}/{part.name}")

    def test_the_report_has_a_table_of_steps_and_what_was_left_out(self):
        lines = [{"stage": "steps", "part": "x", "status": "begun", "shows": "step time"},
                 {"stage": "steps", "part": "x", "found": {"world": "one", "measured": "step", "impl": "python", "tokens": 128,
                                                            "step": {"median_ms": 12.5}, "issue": {}, "exposed": {}}},
                 {"stage": "steps", "part": "x", "found": {"world": "one", "left_out": "steps of 8192 tokens"}},
                 {"stage": "steps", "part": "x", "status": "passed", "seconds": 3.0, "cpu_seconds": 1.0}]
        text = report.text(lines)
        self.assertIn("| one | 128 | python | 12.5 |", text)
        self.assertIn("Left out for want of time: steps of 8192 tokens.", text)
        self.assertIn("| x | step time | passed |", text)


if __name__ == "__main__":
    main()
