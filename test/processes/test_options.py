"""What the trainer says to a wrong command line: one line, and exit code 2."""

import functools
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path

import launch
from closing_line import main


class Options(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.data = folder.name
        launch.write_text(cls.data)

    def expect_refusal(self, arguments, message, program=launch.TRAIN):
        result = launch.run([program, *arguments])
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertEqual(result.stdout, "")
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertIn(message, result.stderr)

    def check(self, *arguments):
        return ["--data", self.data, "--check", *arguments]

    def test_an_unknown_option_is_named(self):
        self.expect_refusal(self.check("--stepps", "3"), "unknown option --stepps")

    def test_a_value_of_the_wrong_kind_is_named(self):
        self.expect_refusal(self.check("--steps", "many"), "--steps: is a whole number, 1 or more, not many")
        self.expect_refusal(self.check("--layers", "0"), "--layers: is a whole number, 1 or more, not 0")
        self.expect_refusal(self.check("--clip", "nan"), "--clip: is a number, 0 or more, not nan")
        self.expect_refusal(self.check("--device", "gpu"), "--device is auto, cpu or cuda, not gpu")

    def test_a_missing_value_is_named(self):
        self.expect_refusal(self.check("--seed"), "--seed")

    def test_a_path_that_is_not_there_is_named(self):
        self.expect_refusal(["--data", "/no/such/path", "--check"], "cannot read /no/such/path")

    def test_text_shorter_than_a_row_is_refused(self):
        short = Path(self.data) / "short"
        short.write_text("few bytes")
        self.addCleanup(short.unlink)
        self.expect_refusal(["--data", short, "--check"], "fewer than the 257 of one row")

    def test_a_global_batch_that_the_ranks_do_not_divide_is_refused(self):
        self.expect_refusal(self.check("--ranks", "3", "--global-batch", "8"),
                            "--global-batch 8 cannot be divided among 3 ranks")

    def test_a_reshard_group_that_does_not_divide_the_ranks_is_refused(self):
        self.expect_refusal(self.check("--ranks", "4", "--reshard-after-forward", "3"),
                            "--reshard-after-forward 3 does not divide 4 ranks")

    def test_what_shows_a_sharded_model_needs_one(self):
        self.expect_refusal(self.check("--ranks", "1", "--no-shard", "--report"), "--report and --timeline show a sharded")
        self.expect_refusal(self.check("--timeline", "/no/such/folder/t.json"), "--timeline: there is no folder")
        self.expect_refusal(self.check("--timeline", "t.json", "--steps", "2"), "--timeline records from the third step")

    def test_several_ranks_cannot_leave_sharding_out(self):
        self.expect_refusal(self.check("--ranks", "2", "--no-shard"), "--no-shard runs in one process")

    def test_a_record_that_cannot_be_written_is_refused(self):
        self.expect_refusal(self.check("--json", "/no/such/folder/run.json"), "there is no folder")

    def test_checkpoints_need_a_folder_that_can_be_written(self):
        self.expect_refusal(self.check("--save-every", "5"), "--save-every says when to save; add --save PATH")
        self.expect_refusal(self.check("--keep", "2"), "--keep says how many checkpoints stay; add --save PATH")
        self.expect_refusal(self.check("--save", "run", "--save-every", "0"), "--save-every: is a whole number, 1 or more")
        self.expect_refusal(self.check("--save", "run", "--keep", "-1"), "--keep: is a whole number, 0 or more")
        self.expect_refusal(self.check("--save", f"{self.data}/part0.txt/run"), "part0.txt is no folder")

    def test_another_number_of_processes_than_ranks_is_refused(self):
        self.expect_refusal(["--data", self.data, "--ranks", "2"], "--ranks 2, but 1 process")

    def test_the_right_options_give_the_number_of_ranks(self):
        result = launch.run([launch.TRAIN, *self.check("--ranks", "4", "--reshard-after-forward", "2")])
        self.assertEqual((result.returncode, result.stdout), (0, "4\n"), result.stderr)

    def test_the_wheel_for_cpus_has_no_cuda(self):
        self.expect_refusal(["--cpu", "--cuda", "enabled"], "--cuda enabled needs torch with CUDA",
                            program=launch.ROOT / "tools" / "setup")

    def test_the_scripts_refuse_an_unknown_option_before_any_set_up(self):
        for script in ("setup", "train", "test", "bench"):
            self.expect_refusal(["--no-such-option"], "unknown option --no-such-option",
                                program=launch.ROOT / "tools" / script)
            self.expect_refusal(["--torch", "1.0"], "torch is a version", program=launch.ROOT / "tools" / script)

    def test_a_suite_refuses_options_that_it_would_leave_unheard(self):
        for suite in ("trainers", "benchmarks", "documentation"):
            for option in (["--failed"], ["--changed"], ["--sanitize", "thread"], ["--cuda", "disabled"], ["--draws", "3"]):
                self.expect_refusal(["--suite", suite, *option], "--suite goes with --torch, --filter and --thorough",
                                    program=launch.ROOT / "tools" / "test")

    @functools.cached_property
    def version(self):
        return launch.run([launch.TRAIN, "--version"]).stdout

    def expect_help_and_version(self, *command):
        for option in ("-h", "--help"):
            result = launch.run([*command, option])
            self.assertEqual((result.returncode, result.stderr), (0, ""), command)
            self.assertIn("--version", result.stdout, command)
        result = launch.run([*command, "--version"])
        self.assertEqual((result.returncode, result.stderr), (0, ""), command)
        self.assertEqual(result.stdout, self.version, command)

    def test_each_script_and_program_tells_its_options_and_the_version_before_any_set_up(self):
        scripts = [path for path in (launch.ROOT / "tools").iterdir() if path.is_file() and os.access(path, os.X_OK)]
        self.assertGreater(len(scripts), 8)
        for command in [*scripts, launch.TRAIN]:
            with self.subTest(command=command.name):
                self.expect_help_and_version(command)

    def test_a_benchmark_tells_its_options_before_any_set_up(self):
        result = launch.run([launch.ROOT / "tools" / "bench", "memory", "--help"])
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("--blocks", result.stdout)
        # Whoever has set nothing up has Python's own modules alone, as this has with -S.
        bench = [sys.executable, "-S", launch.ROOT / "bench" / "run.py"]
        names = re.findall(r"^  (\w+) ", launch.run(bench).stdout, re.MULTILINE)
        self.assertGreater(len(names), 8)
        for name in names:
            with self.subTest(benchmark=name):
                result = launch.run([*bench, name, "--help"])
                self.assertEqual((result.returncode, result.stderr), (0, ""))
                self.assertIn("--quick", result.stdout)

    def test_the_help_that_the_script_shows_is_the_programs(self):
        shown = (launch.ROOT / "tools" / "llama" / "help.txt").read_text()
        self.assertEqual(shown, launch.run([launch.TRAIN, "--help"]).stdout)


if __name__ == "__main__":
    main()
