"""fsdp.save_checkpoint and load_checkpoint: models and optimizers of 1, 2 and 4 ranks, each loaded by the others, beside the
plain model; and what other tools save and load.
"""

import datetime
import functools
import json
import sys
import tempfile
import traceback
import unittest
from pathlib import Path

import rank_results
import launch
from closing_line import main

# Each saves, and loads what all before it have saved.
RUNS = (1, 2, 4, 2, 1) if launch.is_thorough() else (1, 4, 2)
IMPORTS = ("transformers.models.llama.modeling_llama",)


def all_checks():
    import checkpoint_tools  # adds its own
    import checkpoints

    return {**checkpoints.CHECKS, **checkpoint_tools.CHECKS}


def run_on_a_rank(shared, folder):
    import torch.distributed as dist
    from shared_gloo import share_gloo_thread

    share_gloo_thread()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = {}
    for name, check in all_checks().items():
        try:
            check(rank, ranks, shared)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
        if results[name]:
            break  # the ranks are out of step
    dist.destroy_process_group()


@functools.lru_cache
def results():
    """(ranks, results of each rank, how the run ended) of each run."""
    with tempfile.TemporaryDirectory() as shared:
        return [(ranks, *rank_results.run_on(ranks, __file__, "--rank", shared, timeout_s=300, imports=IMPORTS))
                for ranks in RUNS]


class Checkpoints(unittest.TestCase):
    def expect(self, name):
        for ranks, found, ended in results():
            for rank, of_rank in enumerate(found):
                self.assertIn(name, of_rank, f"rank {rank} of {ranks} did not get here: {ended}")
                self.assertTrue(of_rank[name] == "", f"rank {rank} of {ranks}: {of_rank[name]}")


if __name__ == "__main__" and sys.argv[1:2] == ["--rank"]:
    run_on_a_rank(*sys.argv[2:4])
elif __name__ == "__main__":
    for _name in all_checks():
        setattr(Checkpoints, f"test_{_name}", functools.partialmethod(Checkpoints.expect, _name))
    main()
