"""Programs for FSDP2's interface do the same with torch's fully_shard and with ours (programs/).

Each rank runs every program both ways and compares what it sees itself: values bit for bit on two ranks, and
within the rounding of sums in another order on four.
"""

import functools
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "processes"))
import launch
from closing_line import main

PACKAGE = launch.BUILD / "bindings"
sys.path.insert(0, str(PACKAGE))
from programs import PROGRAMS

WORKER = Path(__file__).with_name("parity_worker.py")


@functools.lru_cache
def results_of(ranks):
    """For each rank what differs, by program; and what was running when a rank ended."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["PYTHONPATH"] = str(PACKAGE)
        command = launch.torchrun(ranks, sys.executable, WORKER, folder)
        result = launch.run(command, timeout_s=280)
        found = []
        for rank in range(ranks):
            results = folder / f"results_{rank}.json"
            found.append(json.loads(results.read_text()) if results.exists() else {})
        last = [(folder / f"now_{rank}").read_text() for rank in range(ranks) if (folder / f"now_{rank}").exists()]
        ended = f"exit code {result.returncode}, last programs {last}\n{result.stderr[-3000:]}"
        return found, ended if result.returncode != 0 else ""


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
