"""The quick start's program trains as it stands in the documentation, and the examples in Python run."""

import importlib.util
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path

import rank_results  # puts the folders of these on the path
import forked_ranks
import launch
import quickstarts
from closing_line import main

EXAMPLES = launch.ROOT / "examples"
ON_CPUS = """
import sys
sys.path[:0] = {folders}
import accelerate_cpu
accelerate_cpu.shard_on_cpus()
import train_accelerate
train_accelerate.main()
"""


def needs(*modules):
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return unittest.skipIf(missing, f"not installed: {', '.join(missing)}")


class Quickstarts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        os.environ["PYTHONPATH"] = rank_results.SEES_PACKAGE

    def run_ranks(self, ranks, *program, **more):
        ran = launch.run_ranks(ranks, *program, timeout_s=120, **more)
        self.assertEqual(ran.returncode, 0, ran.stderr[-3000:])
        return ran.stdout

    def expect_falling(self, output):
        (first, last), = re.findall(r"rank 0: loss ([\d.]+) -> ([\d.]+)", output)
        self.assertLess(float(last), 0.75 * float(first))

    def test_the_program_of_the_page_trains(self):
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "quickstart.py")
            program.write_text(quickstarts.python_program())
            command = [part for part in launch.torchrun(2, program) if part != "--no-python"]
            ran = launch.run(command, timeout_s=200)
        self.assertEqual(ran.returncode, 0, ran.stderr[-3000:])
        found = quickstarts.losses(ran.stdout)
        self.assertEqual(sorted(found), [0, 1])
        for rank, losses in found.items():
            self.assertEqual(len(losses), 20, f"rank {rank}")
            self.assertLess(sum(losses[-5:]) / 5, 0.75 * losses[0], f"rank {rank} learns: {losses}")

    def test_the_code_of_the_guides_runs(self):
        self.assertIn("rank 0: all guides ran", self.run_ranks(2, EXAMPLES / "guides.py", start=forked_ranks.start_rank))

    @needs("transformers")
    def test_a_model_of_transformers_trains(self):
        output = self.run_ranks(2, EXAMPLES / "train_hf.py", start=forked_ranks.start_rank)
        losses = quickstarts.losses(output)[0]
        self.assertLess(sum(losses[-5:]) / 5, 0.75 * losses[0], losses)
        self.assertIn("model.layers.2", output)

    @needs("accelerate", "transformers")
    def test_accelerate_trains_with_this_package_in_the_place_of_torchs(self):
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "on_cpus.py")
            program.write_text(ON_CPUS.format(folders=[str(launch.ROOT / "test" / "trainers"), str(EXAMPLES)]))
            output = self.run_ranks(2, sys.executable, "-m", "fsdp", program)
        self.expect_falling(output)
        self.assertIn("sharded by ['fsdp._module']", output)

    @needs("accelerate", "transformers")
    def test_the_program_for_accelerate_says_that_nothing_is_sharded_on_cpus_and_fails(self):
        ran = launch.run_ranks(2, EXAMPLES / "train_accelerate.py", timeout_s=120, start=forked_ranks.start_rank)
        self.assertEqual(ran.returncode, 1, ran.stdout + ran.stderr[-3000:])
        self.assertRegex(ran.stderr, r"has not sharded the model. It made a \w+ on cpu")
        self.assertIn("train_hf.py", ran.stderr)


if __name__ == "__main__":
    main()
