"""Every benchmark builds and runs through, on few cases; what it says of speed is not looked at. Of two test_overlap.py reads
the lines."""

import functools
import subprocess
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(Path(__file__).resolve().parents[1] / "processes")]

import callgrind
import conductor
import harness
import launch
from closing_line import main
from run import BENCHMARKS

NEEDS_A_GPU = ("cuda_step",)
# By test_overlap.py, with --quick.
RUN_BY_TEST_OVERLAP = ("all_gather_overlap", "scale")


class Benchmarks(unittest.TestCase):
    def expect_to_run(self, name, *arguments):
        if name in NEEDS_A_GPU and not Path("/dev/nvidiactl").exists():
            self.skipTest("no GPU")
        ran = subprocess.run([sys.executable, str(BENCH / "run.py"), name, "--quick", *arguments], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(ran.returncode, 0, ran.stdout)
        self.assertRegex(ran.stdout, r"\d", "no figure was printed")

    def test_memory_at_each_operator(self):
        harness.build(SimpleNamespace(no_build=False), [harness.EXTENSION])
        ran = subprocess.run([sys.executable, str(Path(__file__).with_name("test_operator_memory.py"))], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(ran.returncode, 0, ran.stdout)

    def test_instructions_of_python_are_counted(self):
        if launch.is_thorough():
            self.expect_to_run("compare_fsdp2", "--callgrind", "--parts", "start")
            return
        # Under callgrind a Python with torch takes a minute of a processor to start: one of the two is enough.
        harness.build(SimpleNamespace(no_build=False), harness.targets_for(("python",)))
        request = {"impls": ["python"], "world": 8, "repeats": 1, "device": "cpu"}
        counts = callgrind.count("start", conductor.pytorch_command("many_modules.py"),
                                 [{**request, "modules": 2}, {**request, "modules": 4, "label": "4-cpu"}])
        self.assertEqual(set(counts), {"4-cpu-python-fully_shard", "4-cpu-python-first_step"})
        for label, count in counts.items():
            self.assertGreater(count, 10_000, label)


for _name in BENCHMARKS:
    if _name in RUN_BY_TEST_OVERLAP and not launch.is_thorough():
        continue
    setattr(Benchmarks, f"test_{_name}_runs", functools.partialmethod(Benchmarks.expect_to_run, _name))

if __name__ == "__main__":
    main()
