"""Programs for FSDP2's interface do the same with torch's fully_shard and with ours (programs/).

Each rank runs every program both ways and compares what it sees itself: values bit for bit on two ranks, and
within the rounding of sums in another order on four.
"""

import functools
import sys
import unittest
from pathlib import Path

import rank_results
from closing_line import main

sys.path.insert(0, str(rank_results.PACKAGE))
from programs import PROGRAMS

WORKER = Path(__file__).with_name("parity_worker.py")


@functools.lru_cache
def results_of(ranks):
    """For each rank what differs, by program, and how the run ended."""
    return rank_results.run_on(ranks, WORKER, timeout_s=280)


class Parity(unittest.TestCase):
    maxDiff = None

    def expect_equal(self, name, ranks):
        results, ended = results_of(ranks)
        for rank, found in enumerate(results):
            self.assertIn(name, found, f"rank {rank} did not get here: {ended}")
            self.assertEqual(found[name], [], f"rank {rank} of {ranks}")


for _name, _program in PROGRAMS.items():
    for _ranks in _program.ranks:
        setattr(Parity, f"test_{_name}_on_{_ranks}_ranks".replace(".", "_"),
                functools.partialmethod(Parity.expect_equal, _name, _ranks))


if __name__ == "__main__":
    main()
