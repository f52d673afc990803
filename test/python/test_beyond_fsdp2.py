"""What FSDP2 cannot do, or not on a CPU: compared with the plain model, which sees the ranks' batches one by one."""

import datetime
import functools
import importlib
import json
import os
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
BREAKS_GROUPS = "beyond_alone"  # these checks leave collectives behind that never end


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


def breaks_groups(check):
    return check.__module__ == BREAKS_GROUPS


def run_on_a_rank(folder, names=None):
    import torch.distributed as dist

    beyond_fsdp2 = all_checks()
    if names is None:
        names = [name for name, check in beyond_fsdp2.CHECKS.items() if not breaks_groups(check) and name != WITHOUT_A_GROUP]

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if names != [WITHOUT_A_GROUP]:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    results = {}
    checks = beyond_fsdp2.CHECKS
    for name, check in checks.items():
        if ranks != RANKS and name != ON_FOUR_RANKS or name not in names:
            continue
        try:
            check(rank, ranks)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
    if any(breaks_groups(checks[name]) for name in results):
        os._exit(0)  # nothing may wait for them
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
elif __name__ == "__main__" and sys.argv[1:2] == ["--breaks-groups"]:
    run_on_a_rank(sys.argv[2], [_name for _name, _check in all_checks().CHECKS.items() if breaks_groups(_check)])
elif __name__ == "__main__" and sys.argv[1:2] == ["--without-a-group"]:
    run_on_a_rank(sys.argv[2], [WITHOUT_A_GROUP])
elif __name__ == "__main__" and sys.argv[1:2] == ["--after-a-subinterpreter"]:
    after_a_subinterpreter()
    run_on_a_rank(sys.argv[2], [AFTER_A_SUBINTERPRETER])
elif __name__ == "__main__":
    beyond_fsdp2 = all_checks()

    for _name, _check in beyond_fsdp2.CHECKS.items():
        _mode = "--breaks-groups" if breaks_groups(_check) else "--without-a-group" if _name == WITHOUT_A_GROUP else "--rank"
        setattr(BeyondFsdp2, f"test_{_name}", functools.partialmethod(BeyondFsdp2.expect, _name, mode=_mode))
    BeyondFsdp2.test_on_four_ranks = functools.partialmethod(BeyondFsdp2.expect, ON_FOUR_RANKS, 4)
    BeyondFsdp2.test_after_a_subinterpreter = functools.partialmethod(
        BeyondFsdp2.expect, AFTER_A_SUBINTERPRETER, mode="--after-a-subinterpreter")
    main()
