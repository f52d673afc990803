"""What FSDP2 cannot do, or not on a CPU: compared with the plain model, which sees the ranks' batches one by one."""

import datetime
import functools
import importlib
import json
import sys
import traceback
import unittest
from pathlib import Path

import rank_results
from closing_line import main

RANKS = 2
ON_FOUR_RANKS = "materialized_values_are_the_same_on_one_and_more_ranks_and_unsharded"
WITHOUT_A_GROUP = "fully_shard_makes_a_process_group_where_there_is_none"
AFTER_A_SUBINTERPRETER = "what_a_custom_gather_returns_is_let_go"


def all_checks():
    """The module that has them, when all that add to them have been imported."""
    for path in sorted(Path(__file__).parent.glob("beyond_*.py")):
        importlib.import_module(path.stem)
    import local_shards  # noqa: F401 (more of them)

    return sys.modules["beyond_fsdp2"]


def after_a_subinterpreter():
    """From then on PyGILState_Check says yes everywhere."""
    try:
        import _interpreters as subinterpreters
    except ImportError:
        import _xxsubinterpreters as subinterpreters
    subinterpreters.destroy(subinterpreters.create())


def run_on_a_rank(folder, names=None):
    import torch.distributed as dist

    beyond_fsdp2 = all_checks()

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    results = {}
    checks = dict(beyond_fsdp2.CHECKS)
    checks[WITHOUT_A_GROUP] = checks.pop(WITHOUT_A_GROUP)  # the last one: it ends the group
    for name, check in checks.items():
        if dist.get_world_size() != RANKS and name != ON_FOUR_RANKS or names and name not in names:
            continue
        try:
            check(dist.get_rank(), dist.get_world_size())
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@functools.lru_cache
def results(ranks=RANKS, mode="--rank"):
    return rank_results.run_on(ranks, __file__, mode, timeout_s=400)


class BeyondFsdp2(unittest.TestCase):
    def expect(self, name, ranks=RANKS, mode="--rank"):
        found, ended = results(ranks, mode)
        for rank, of_rank in enumerate(found):
            self.assertIn(name, of_rank, f"rank {rank} did not get here: {ended}")
            self.assertTrue(of_rank[name] == "", f"rank {rank}: {of_rank[name]}")


if __name__ == "__main__" and sys.argv[1:2] == ["--rank"]:
    run_on_a_rank(sys.argv[2])
elif __name__ == "__main__" and sys.argv[1:2] == ["--after-a-subinterpreter"]:
    after_a_subinterpreter()
    run_on_a_rank(sys.argv[2], [AFTER_A_SUBINTERPRETER])
elif __name__ == "__main__":
    beyond_fsdp2 = all_checks()

    for _name in beyond_fsdp2.CHECKS:
        setattr(BeyondFsdp2, f"test_{_name}", functools.partialmethod(BeyondFsdp2.expect, _name))
    BeyondFsdp2.test_on_four_ranks = functools.partialmethod(BeyondFsdp2.expect, ON_FOUR_RANKS, 4)
    BeyondFsdp2.test_after_a_subinterpreter = functools.partialmethod(
        BeyondFsdp2.expect, AFTER_A_SUBINTERPRETER, mode="--after-a-subinterpreter")
    main()
