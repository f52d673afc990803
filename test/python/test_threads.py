"""The parity suite's programs once more with threads of one process as ranks (thread_worker.py): the process group
is a class derived in Python, so this is also the test of process groups of a user's own.
"""

import functools
import unittest
from pathlib import Path

import rank_results
from closing_line import main

import thread_worker

@functools.lru_cache
def results_of(ranks):
    chosen = rank_results.names_on(ranks, thread_worker.PROGRAMS)
    [found], ended = rank_results.run_on(1, Path(thread_worker.__file__), ranks, *chosen, timeout_s=280)
    return found, ended


class Threads(unittest.TestCase):
    maxDiff = None

    def expect_equal(self, name, ranks):
        found, ended = results_of(ranks)
        self.assertIn(name, found, f"{ranks} threads did not get here: {ended}")
        self.assertEqual(found[name], [])


for _ranks in (2, 4):
    for _name in rank_results.names_on(_ranks, thread_worker.PROGRAMS):
        setattr(Threads, f"test_{_name}_on_{_ranks}_threads".replace(".", "_"),
                functools.partialmethod(Threads.expect_equal, _name, _ranks))


if __name__ == "__main__":
    main()
