"""The test case of a package of programs: each does the same with torch's fully_shard and with ours.

Each rank runs every program both ways and compares what it sees itself: values bit for bit on two ranks, and
within the rounding of sums in another order on four.
"""

import functools
import importlib
import unittest
from pathlib import Path

import rank_results

WORKER = Path(__file__).with_name("parity_worker.py")


@functools.cache
def chosen(package, ranks):
    return rank_results.names_on(ranks, importlib.import_module(package).PROGRAMS, again_one_in=9)


@functools.lru_cache
def results_of(package, ranks, timeout_s):
    """For each rank what differs, by program, and how the run ended."""
    imports = getattr(importlib.import_module(package), "IMPORTS", ())
    return rank_results.run_on(ranks, WORKER, "--programs", package, *chosen(package, ranks), timeout_s=timeout_s,
                               imports=imports)


class ParityCase(unittest.TestCase):
    maxDiff = None

    def expect_equal(self, package, name, ranks, timeout_s):
        missing = importlib.import_module(package).PROGRAMS[name].missing()
        if missing:
            self.skipTest(f"not installed: {', '.join(missing)}; tools/setup does it")
        results, ended = results_of(package, ranks, timeout_s)
        for rank, found in enumerate(results):
            self.assertIn(name, found, f"rank {rank} did not get here: {ended}")
            self.assertEqual(found[name], [], f"rank {rank} of {ranks}")


def add_tests(case, package, timeout_s=280):
    """A test for each program of the package and number of ranks."""
    programs = importlib.import_module(package).PROGRAMS
    for ranks in sorted({ranks for program in programs.values() for ranks in program.ranks}):
        for name in chosen(package, ranks):
            setattr(case, f"test_{name}_on_{ranks}_ranks".replace(".", "_"),
                    functools.partialmethod(ParityCase.expect_equal, package, name, ranks, timeout_s))
