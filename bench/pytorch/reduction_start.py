"""Which start of reductions is fastest here: a Llama's steps with each of them, and what choose_reduce_scatter_start takes.

Usage: torchrun --nproc-per-node G reduction_start.py [--device cpu] [--tokens N] [--out FILE]
Reductions have a communicator of their own. Each rank has a GPU.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import figure_lines
import link_times
import models
import worker

STARTS = ("by_size", "first_after_all_gather", "first_after_next_backward")
LARGE = {"blocks": 16, "dim": 2048, "hidden": 8192, "vocabulary": 32768, "heads": 16}
SMALL = {"blocks": 3, "dim": 64, "hidden": 128, "vocabulary": 128, "heads": 2}
ROUNDS = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    link_times.join(options.device)
    shape = LARGE if options.device == "cuda" else SMALL
    torch.manual_seed(0)
    with torch.device(options.device):
        model = models.LlamaModel(**shape).bfloat16()
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    root = models.shard(model, mesh, worker.package().fully_shard)
    root.set_separate_reduce_scatter_group()
    root.set_reduce_scatter_max_input_buffers(2)
    tokens = torch.randint(shape["vocabulary"], (1, options.tokens if options.device == "cuda" else 16)).to(options.device)

    def time_step():
        begin = time.perf_counter()
        model(tokens).backward()
        if options.device == "cuda":
            torch.cuda.synchronize()
        model.zero_grad(set_to_none=True)
        return 1e3 * (time.perf_counter() - begin)

    medians = {}
    for start in STARTS:
        root.set_reduce_scatter_start(start)
        time_step()
        medians[start] = round(statistics.median(time_step() for _ in range(ROUNDS)), 3)
    line = {"figure": f"starts of reductions over {dist.get_world_size()} ranks, ms a step", **medians,
            "chosen": root.choose_reduce_scatter_start(time_step)}
    if dist.get_rank() == 0:
        figure_lines.tell(line, options.out)
    assert line["chosen"] in STARTS
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
