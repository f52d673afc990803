"""The README's program trains a model of `transformers` on two ranks, as it stands there."""

import importlib.util
import os
import tempfile
import unittest
from pathlib import Path

import rank_results  # puts the folders of these on the path
import launch
import readme
from closing_line import main


@unittest.skipIf(importlib.util.find_spec("transformers") is None, "not installed: transformers; tools/setup does it")
class Readme(unittest.TestCase):
    def test_the_program_in_python_trains(self):
        os.environ["PYTHONPATH"] = os.pathsep.join([str(rank_results.PACKAGE), *rank_results.PATH])
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "train.py")
            program.write_text(readme.python_program())
            command = [part for part in launch.torchrun(2, program) if part != "--no-python"]
            ran = launch.run(command, timeout_s=200)
        self.assertEqual(ran.returncode, 0, ran.stderr[-3000:])
        for rank, losses in readme.losses(ran.stdout).items():
            self.assertEqual(len(losses), 30, f"rank {rank}")
            self.assertLess(sum(losses[-5:]) / 5, 0.75 * losses[0], f"rank {rank} learns: {losses}")


if __name__ == "__main__":
    main()
