"""Runs a Python program that uses the package on ranks, and reads what each rank has written."""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "processes"))
import launch

PACKAGE = launch.BUILD / "bindings"
PATH = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []


def run_once_more(programs, ranks):
    """Of the parity suite's programs, by name, those that a suite that runs them once more, in another way, takes on so many
    ranks: each on the fewest that it can do with, unless the run is a thorough one.
    """
    return [name for name, program in programs.items()
            if ranks in (program.ranks if launch.is_thorough() else program.ranks[:1])]


def run_on(ranks, program, *arguments, timeout_s):
    """Each rank's results, {} of one that wrote none, and how the run ended.

    The program gets a folder behind its arguments, where rank r writes r.json after each result.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE), *PATH])
    with tempfile.TemporaryDirectory() as folder:
        ran = launch.run_ranks(ranks, sys.executable, program, *arguments, folder, timeout_s=timeout_s)
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        return ([json.loads(file.read_text()) if file.exists() else {} for file in files],
                f"exit code {ran.returncode}\n{ran.stderr[-3000:]}")
