"""Times of all-gathers and reduce-scatters over the ranks' network, beside the simulated networks' (bench/networks.py).

Usage: torchrun [--nnodes N --rdzv-endpoint HOST:PORT] --nproc-per-node G link_times.py [--device cpu] [--out FILE]
Each rank has a GPU. The first rank prints a line for each size: microseconds by events
on the device, of the slowest rank, the bus bandwidth, and what nvlink and infiniband are simulated to take.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import figure_lines
import networks

SIZES = [1 << power for power in range(12, 29, 2)]  # bytes of the whole buffer
REPEATS = 20


def join(device):
    rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


def timed_us(call, device):
    for _ in range(3):
        call()
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(REPEATS):
            call()
        end.record()
        torch.cuda.synchronize()
        taken = 1e3 * begin.elapsed_time(end) / REPEATS
    else:
        begin = time.perf_counter()
        for _ in range(REPEATS):
            call()
        taken = 1e6 * (time.perf_counter() - begin) / REPEATS
    slowest = torch.tensor([taken], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    join(options.device)
    ranks = dist.get_world_size()
    for size in SIZES if options.device == "cuda" else SIZES[:4]:
        whole = torch.zeros(size // 4, device=options.device)
        piece = torch.zeros(size // 4 // ranks, device=options.device)
        whole = whole[: piece.numel() * ranks]
        for name, call in (("all_gather", lambda: dist.all_gather_into_tensor(whole, piece)),
                           ("reduce_scatter", lambda: dist.reduce_scatter_tensor(piece, whole))):
            taken = timed_us(call, options.device)
            simulated = {f"{preset}_us": round(made(ranks).latency_of_us() + made(ranks).sending_us(size), 2)
                         for preset, made in networks.PRESETS.items()}
            line = {"figure": f"{name} over {ranks} ranks", "bytes": size, "us": round(taken, 2),
                    "bus_GB_per_s": round(1e-3 * size * (ranks - 1) / ranks / taken, 3), **simulated}
            if dist.get_rank() == 0:
                figure_lines.tell(line, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
