"""Each row of the table in fsdp1.hpp against FSDP1: the same weights and data, in float64."""

import array
import json
import random
import tempfile
import unittest
from pathlib import Path

import forked_ranks
import launch
from closing_line import main

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
    {"name": "use_orig_params of NO_SHARD", "use_orig_params": True, "sharding_strategy": "NO_SHARD"},
]
HYBRID = [
    {"name": "HYBRID_SHARD", "sharding_strategy": "HYBRID_SHARD", "mesh_2d": True},
    {"name": "_HYBRID_SHARD_ZERO2", "sharding_strategy": "_HYBRID_SHARD_ZERO2", "mesh_2d": True},
]

# What FSDP1 keeps of its arguments, where a row names no other value.
DEFAULTS = {"sharding_strategy": "FULL_SHARD", "backward_prefetch": "BACKWARD_PRE", "forward_prefetch": False,
            "limit_all_gathers": True, "cpu_offload": False, "use_orig_params": False}


def write_doubles(path, count, seed, scale):
    draw = random.Random(seed)
    values = array.array("d", (draw.uniform(-scale, scale) for _ in range(count)))
    path.write_bytes(values.tobytes())


def results_of(ranks, rows):
    """(libfsdp's, FSDP1's): for each rank what each row gave."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.json").write_text(json.dumps(rows))
        write_doubles(folder / "weights.bin", PARAMETERS, seed=1, scale=0.5)
        write_doubles(folder / "inputs.bin", ranks * STEPS * BATCH * WIDTH, seed=2, scale=2)
        for start, command in ((launch.start_rank, [launch.RANK_PROGRAMS, "fsdp1_rows"]), (forked_ranks.start_rank, [WORKER])):
            result = launch.run_ranks(ranks, *command, folder, start=start)
            if result.returncode != 0:
                raise AssertionError(f"{result.args}: exit code {result.returncode}\n{result.stderr}")
        return tuple([json.loads((folder / f"{side}_{rank}.json").read_text())
                      for rank in range(ranks)] for side in ("libfsdp", "fsdp1"))


class Fsdp1(unittest.TestCase):
    def expect_close(self, found, expected, what):
        self.assertEqual(len(found), len(expected), what)
        largest = max(abs(value) for value in expected)
        for a, b in zip(found, expected):
            self.assertAlmostEqual(a, b, delta=1e-10 * largest, msg=what)

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
                        self.expect_close(found[figure], expected[figure], figure)

    def test_two_ranks_train_as_with_fsdp1(self):
        self.expect_rows(2, FLAT)

    def test_two_replicas_of_two_shards_train_as_with_fsdp1(self):
        self.expect_rows(4, HYBRID)


if __name__ == "__main__":
    main()
