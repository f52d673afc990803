"""Each row of the table in fsdp1.hpp against FSDP1: the same weights and data, in float64."""

import inspect
import unittest
from pathlib import Path

from torch.distributed.fsdp import FullyShardedDataParallel

from closing_line import main
from row_results import row_results

WORKER = Path(__file__).with_name("fsdp1_worker.py")
WIDTH, INNER, OUTPUTS, BLOCKS, BATCH = 6, 8, 2, 3, 4
STEPS = 4
PARAMETERS = (WIDTH * WIDTH + WIDTH + BLOCKS * (2 * WIDTH * INNER + INNER + WIDTH)
              + OUTPUTS * WIDTH + OUTPUTS)

FLAT = [
    {"name": "the defaults"},
    {"name": "SHARD_GRAD_OP", "sharding_strategy": "SHARD_GRAD_OP"},
    {"name": "NO_SHARD", "sharding_strategy": "NO_SHARD"},
    {"name": "HYBRID_SHARD on one node", "sharding_strategy": "HYBRID_SHARD", "one_node": True},
    {"name": "BACKWARD_POST", "backward_prefetch": "BACKWARD_POST"},
    {"name": "no backward prefetch", "backward_prefetch": "None"},
    {"name": "BACKWARD_POST of SHARD_GRAD_OP", "sharding_strategy": "SHARD_GRAD_OP",
     "backward_prefetch": "BACKWARD_POST"},
    {"name": "forward_prefetch", "forward_prefetch": True},
    {"name": "no limit_all_gathers", "limit_all_gathers": False},
    {"name": "sync_module_states", "sync_module_states": True},
    {"name": "param_init_fn", "param_init_fn": True},
    {"name": "device_id", "device_id": True},
    {"name": "cpu_offload", "cpu_offload": True},
    {"name": "use_orig_params", "use_orig_params": True},
    {"name": "modules exempt from mixed precision", "exempt": True},
    {"name": "auto_wrap_policy by size", "auto_wrap_policy": "by size"},
    {"name": "auto_wrap_policy by size, with smaller units", "auto_wrap_policy": "by a smaller size"},
    {"name": "auto_wrap_policy, a function", "auto_wrap_policy": "a function"},
    {"name": "auto_wrap_policy, a CustomPolicy", "auto_wrap_policy": "CustomPolicy"},
    {"name": "no auto_wrap_policy", "auto_wrap_policy": "None"},
    {"name": "process_group", "process_group": [[0, 1]]},
    {"name": "ignored_modules", "ignored_modules": ["head", "blocks.1"]},
    {"name": "ignored_modules, with use_orig_params", "ignored_modules": ["head"], "use_orig_params": True},
    {"name": "ignored_modules below a unit", "ignored_modules": ["blocks.0.down"]},
    {"name": "ignored_states, parameters", "ignored_states": ["in.bias", "blocks.2.up.weight"], "use_orig_params": True},
    {"name": "ignored_states, modules", "ignored_states": ["blocks.2", "head"]},
    {"name": "use_orig_params of NO_SHARD", "use_orig_params": True, "sharding_strategy": "NO_SHARD"},
]
HYBRID = [
    {"name": "HYBRID_SHARD", "sharding_strategy": "HYBRID_SHARD", "mesh_2d": True},
    {"name": "_HYBRID_SHARD_ZERO2", "sharding_strategy": "_HYBRID_SHARD_ZERO2", "mesh_2d": True},
    {"name": "process_group of each half", "process_group": [[0, 1], [2, 3]]},
    {"name": "process_group of ranks that are not neighbours", "process_group": [[0, 2], [1, 3]],
     "sharding_strategy": "SHARD_GRAD_OP"},
    {"name": "process_group, a pair", "process_group": [[0, 1], [2, 3]], "sharding_strategy": "HYBRID_SHARD", "is_pair": True},
]

# What FSDP1 keeps of its arguments, where a row names no other value.
DEFAULTS = {"sharding_strategy": "FULL_SHARD", "backward_prefetch": "BACKWARD_PRE", "forward_prefetch": False,
            "limit_all_gathers": True, "cpu_offload": False, "use_orig_params": False}


def results_of(ranks, rows):
    """(libfsdp's, FSDP1's): for each rank what each row gave."""
    return row_results(ranks, rows, "fsdp1_rows", WORKER, "fsdp1", weights=PARAMETERS, weights_scale=0.5,
                       inputs=ranks * STEPS * BATCH * WIDTH)


class Fsdp1(unittest.TestCase):
    def expect_close(self, found, expected, what, relative=1e-10):
        self.assertEqual(len(found), len(expected), what)
        largest = max(abs(value) for value in expected)
        for a, b in zip(found, expected):
            self.assertAlmostEqual(a, b, delta=relative * largest, msg=what)

    def expect_rows(self, ranks, rows):
        libfsdp, fsdp1 = results_of(ranks, rows)
        for row in rows:
            name = row["name"]
            with self.subTest(row=name):
                kept = fsdp1[0][name]["options"]
                self.assertEqual(kept, {**DEFAULTS, **{key: row[key] for key in DEFAULTS if key in row}})
            for rank in range(ranks):
                found, expected = libfsdp[rank][name], fsdp1[rank][name]
                with self.subTest(row=name, rank=rank):
                    self.assertNotIn("refused", found)
                    for figure in ("losses", "norms", "weights"):
                        self.expect_close(found[figure], expected[figure], figure, 1e-5 if "exempt" in row else 1e-10)

    def test_arguments_are_all_of_fsdp1s(self):
        """None of them is left out here."""
        rows = {key for row in FLAT + HYBRID for key in row}
        # By another name, or a part of one.
        named = {"device_mesh": "mesh_2d", "mixed_precision": "exempt"}
        given = inspect.signature(FullyShardedDataParallel.__init__).parameters
        left_out = {named.get(name, name) for name in given} - rows - {"self", "module"}
        self.assertEqual(left_out, set())

    def test_two_ranks_train_as_with_fsdp1(self):
        self.expect_rows(2, FLAT)

    def test_two_replicas_of_two_shards_train_as_with_fsdp1(self):
        self.expect_rows(4, HYBRID)


if __name__ == "__main__":
    main()
