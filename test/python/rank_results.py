"""Runs a Python program that uses the package on ranks, and reads what each rank has written."""

import importlib
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "processes"))
import forked_ranks
import launch

PACKAGE = launch.BUILD / "bindings"
sys.path.insert(0, str(PACKAGE))
PATH = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
SEES_PACKAGE = os.pathsep.join([str(PACKAGE), *PATH])  # PYTHONPATH of what starts anew


def names_on(ranks, programs, again_one_in=None):
    """Of the parity suite's programs, by name, those that a run takes on so many ranks: each on the fewest that it can do with;
    on more, too, one in so many of them, or none. A thorough run takes all, and those that are long.
    """
    if launch.is_thorough():
        return [name for name, program in programs.items() if ranks in program.ranks]
    programs = {name: program for name, program in programs.items() if not program.is_long}
    again = [name for name, program in programs.items() if ranks in program.ranks[1:]]
    again = again[::again_one_in] if again_one_in else []
    # A program has no ranks where torch lacks what it is about.
    return [name for name, program in programs.items() if ranks in program.ranks[:1] or name in again]


def run_on(ranks, program, *arguments, timeout_s, imports=()):
    """Each rank's results, {} of one that wrote none, and how the run ended.

    The program gets a folder behind its arguments, where rank r writes r.json after each result. imports: modules that the
    ranks use and that take long; they are imported once, as ranks are forks. One that is not installed is left out.
    """
    os.environ["PYTHONPATH"] = SEES_PACKAGE
    for name in ("fsdp", *imports):
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        ran = launch.run_ranks(ranks, Path(program), *arguments, folder, timeout_s=timeout_s, start=forked_ranks.start_rank)
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        return ([json.loads(file.read_text()) if file.exists() else {} for file in files],
                f"exit code {ran.returncode}\n{ran.stderr[-3000:]}")
