"""What a program of C++ and one of FSDP's own give for the same rows, weights and data (rows.hpp, rows.py)."""

import array
import json
import random
import tempfile
from pathlib import Path

import forked_ranks
import launch


def write_doubles(path, count, seed, scale):
    draw = random.Random(seed)
    values = array.array("d", (draw.uniform(-scale, scale) for _ in range(count)))
    path.write_bytes(values.tobytes())


def row_results(ranks, rows, program, worker, side, *, weights, weights_scale, inputs):
    """(libfsdp's, those of `side`): for each rank what each row gave. weights, inputs: how many numbers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.json").write_text(json.dumps(rows))
        write_doubles(folder / "weights.bin", weights, seed=1, scale=weights_scale)
        write_doubles(folder / "inputs.bin", inputs, seed=2, scale=2)
        for start, command in ((launch.start_rank, [launch.RANK_PROGRAMS, program]), (forked_ranks.start_rank, [worker])):
            result = launch.run_ranks(ranks, *command, folder, start=start)
            if result.returncode != 0:
                raise AssertionError(f"{result.args}: exit code {result.returncode}\n{result.stderr}")
        return tuple([json.loads((folder / f"{each}_{rank}.json").read_text())
                      for rank in range(ranks)] for each in ("libfsdp", side))
