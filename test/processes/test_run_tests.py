"""What tools/test counts."""

import os
import sys
import tempfile
import time
import unittest
from pathlib import Path

import launch
from closing_line import main

sys.path.insert(0, str(launch.ROOT / "tools"))
import test_forks  # noqa: E402
import test_programs  # noqa: E402
import test_selection  # noqa: E402

# One of its cases kills a program that this variable names, and is skipped without it.
PROGRAM = launch.BUILD / "test" / "checkpoint" / "fsdp_test_checkpoint"
VARIABLE = "FSDP_CHECKPOINT_SAVER"
CHECKPOINT = {"name": "checkpoint", "suite": ["libfsdp:checkpoint"], "cmd": [str(PROGRAM)], "env": {}, "timeout": 300}


def test_of(name, suite, *command):
    return {"name": name, "suite": [f"libfsdp:{suite}"], "cmd": list(command) or [f"/build/fsdp_test_{name}"]}


TESTS = [test_of("comm", "comm"), test_of("tensor", "tensor"), test_of("group", "group"), test_of("runtime", "runtime"),
         test_of("checkpoint", "checkpoint"), test_of("parity", "python", "python", "/test/python/test_parity.py"),
         test_of("threads", "python", "python", "/test/python/test_threads.py")]


class RunTests(unittest.TestCase):
    def counts(self, text):
        os.environ.pop(VARIABLE, None)
        outcome = test_programs.run_catch2(CHECKPOINT, test_programs.Cases(text=text))
        return outcome.passed, outcome.failed, outcome.skipped

    def test_a_case_that_this_machine_cannot_run_is_skipped_and_not_passed(self):
        self.assertEqual(self.counts("[kills]"), (0, 0, 1))

    def test_cases_are_found_by_name_and_by_file(self):
        name = "a path under a file is an error on every rank"
        for cases in (test_programs.Cases(names=(name,)), test_programs.Cases(files=("test_block_sums",))):
            outcome = test_programs.run_catch2(CHECKPOINT, cases)
            self.assertGreater(outcome.passed, 0, cases)
            self.assertLess(outcome.passed, 20, cases)

    def test_what_has_no_cases_to_choose_from_is_left_out(self):
        tests = [*TESTS, test_of("fuzz_readers", "checkpoint", "/test/fuzz/../../tools/fuzz", "--seconds", "5")]
        programs = {"comm", "tensor", "group", "runtime", "checkpoint"}
        for text, expected in ("gather", programs | {"parity", "threads"}), ("[unsharder]", programs):
            chosen = test_selection.with_text(tests, text)
            self.assertEqual({test["name"] for test, _ in chosen}, expected, text)
            self.assertEqual({cases.text for _, cases in chosen}, {text})

    def reached(self, *files):
        return {test["name"]: cases.files for test, cases in test_selection.reached_by(TESTS, files)}

    def test_a_file_of_the_library_reaches_the_tests_of_its_layer_and_of_those_behind_it(self):
        self.assertEqual(set(self.reached("lib/comm/debug/fake_collectives.cpp")), {test["name"] for test in TESTS})
        self.assertEqual(set(self.reached("lib/api/inspect/report.cpp")), {"runtime", "checkpoint", "parity", "threads"})
        self.assertEqual(set(self.reached("lib/checkpoint/plan/pieces.cpp")), {"checkpoint", "parity", "threads"})
        self.assertEqual(set(self.reached("bindings/src/options.cpp")), {"parity", "threads"})

    def test_a_file_of_tests_reaches_itself(self):
        self.assertEqual(self.reached("test/trace/test_cut_off.cpp", "test/schedule/test_exec_order.cpp"),
                         {"group": ("test_cut_off", "test_exec_order")})
        self.assertEqual(self.reached("test/python/test_threads.py"), {"threads": ()})

    def test_what_stands_beside_tests_reaches_all_that_may_use_it(self):
        self.assertEqual(set(self.reached("test/comm/nccl_substitute.cpp")), {test["name"] for test in TESTS})
        self.assertEqual(set(self.reached("test/python/programs/states.py")), {"parity", "threads"})

    def test_documents_reach_nothing_and_an_unknown_file_everything(self):
        self.assertEqual(self.reached("README.md", "bench/results/a.jsonl"), {})
        self.assertEqual(set(self.reached("meson.build")), {test["name"] for test in TESTS})

    def test_every_layer_is_known(self):
        layers = {folder.name for folder in (launch.ROOT / "lib").iterdir() if (folder / "meson.build").exists()}
        known = set().union(*(layers for layers, _ in test_selection.LAYERS))
        self.assertEqual(layers - {"torch"}, known)

    def test_a_case_that_runs_is_passed(self):
        self.assertEqual(self.counts("a path under a file is an error on every rank"), (1, 0, 0))


# What a fork is asked to run: (program, exit code, what it prints).
PROGRAMS = [
    ("import sys; sys.exit(3)", 3, ""),
    ("import sys; sys.exit('no such thing')", 1, "no such thing"),
    ("raise ValueError('a fault')", 1, "ValueError: a fault"),
    ("import os, sys; print(__name__, os.environ['PYTHONPATH'], sys.argv[1:], os.getpgid(0) == os.getpid())", 0,
     "__main__ so ['--and', 'more'] True"),
    ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ("import subprocess; subprocess.run(['echo', 'of a child'], check=True)", 0, "of a child"),
]
SLEEPS_WITH_A_CHILD = """
import subprocess, sys
from pathlib import Path
Path(sys.argv[1]).write_text(str(subprocess.Popen(["sleep", "100"]).pid))
print("asleep", flush=True)
subprocess.run(["sleep", "100"])
"""


class Forks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.forks = test_forks.Forks(sys.executable)
        cls.addClassCleanup(cls.forks.close)

    def run_program(self, text, *arguments, timeout_s=60):
        program = self.folder / f"{self.id()}_{time.monotonic_ns()}.py"
        program.write_text(text)
        return self.forks.run([sys.executable, str(program), *arguments], {"PYTHONPATH": "so"}, timeout_s)

    def test_a_fork_ends_and_prints_as_the_program_would(self):
        for text, code, printed in PROGRAMS:
            with self.subTest(text):
                ran = self.run_program(text, "--and", "more")
                self.assertEqual(ran.exit_code, code, ran.output)
                self.assertIn(printed, ran.output)
                self.assertLess(ran.cpu_s, 30)

    def test_what_takes_too_long_is_ended_with_its_children(self):
        ran = self.run_program(SLEEPS_WITH_A_CHILD, str(self.folder / "child"), timeout_s=2)
        self.assertIsNone(ran.exit_code)
        self.assertEqual(ran.output, "asleep\n")
        status = Path("/proc", (self.folder / "child").read_text(), "status")
        self.assertTrue(not status.exists() or "State:\tZ" in status.read_text())


if __name__ == "__main__":
    main()
