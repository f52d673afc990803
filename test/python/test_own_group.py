"""The parity suite's programs over process groups of a user's own, derived in Python: the same values as FSDP2 over
the same groups, and the same number of collectives for each group of parameters (own_group_worker.py).
"""

import functools
import unittest
from pathlib import Path

import rank_results
from closing_line import main

import own_group_worker


@functools.lru_cache
def results_of(ranks):
    """For each rank what differs, by program, and how the run ended."""
    chosen = rank_results.names_on(ranks, own_group_worker.PROGRAMS)
    return rank_results.run_on(ranks, Path(own_group_worker.__file__), *chosen, timeout_s=280)


class OwnGroups(unittest.TestCase):
    maxDiff = None

    def expect_equal(self, name, ranks):
        results, ended = results_of(ranks)
        for rank, found in enumerate(results):
            self.assertIn(name, found, f"rank {rank} did not get here: {ended}")
            self.assertEqual(found[name], [], f"rank {rank} of {ranks}")


for _ranks in (2, 4):
    for _name in rank_results.names_on(_ranks, own_group_worker.PROGRAMS):
        setattr(OwnGroups, f"test_{_name}_on_{_ranks}_ranks".replace(".", "_"),
                functools.partialmethod(OwnGroups.expect_equal, _name, _ranks))


if __name__ == "__main__":
    main()
