"""How much of an offloaded model's copies between host and device runs beside kernels, by torch.profiler.

Usage: offload_timeline.py [--device cpu] [--out FILE]. Ours pinned and not, FSDP2's pinned, in one process each after the
other. A copy is hidden for as long as a kernel runs. On a CPU nothing is copied: the steps run, and that is said.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh

import figure_lines
import kernel_timeline
import models
import worker

LARGE = {"blocks": 12, "dim": 2048, "hidden": 8192, "vocabulary": 8192, "heads": 16}
SMALL = {"blocks": 2, "dim": 64, "hidden": 128, "vocabulary": 128, "heads": 2}
TOKENS = {"cuda": 8192, "cpu": 64}
STEPS = 2
VARIANTS = (("ours", "python", True), ("ours, not pinned", "python", False), ("FSDP2", "fsdp2", True))


def united(intervals):
    """Disjoint ones, in order."""
    found = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def common_us(ones, others):
    """How long both go on, of two lists of disjoint intervals in order."""
    total, at = 0.0, 0
    for begin, end in ones:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        look = at
        while look < len(others) and others[look][0] < end:
            total += min(end, others[look][1]) - max(begin, others[look][0])
            look += 1
    return total


def summary(events):
    """Of events of a trace: copies to and from the device, and how much of them is beside kernels."""
    kernels = united([span(event) for event in events if event["cat"] == "kernel"])
    found = {}
    for name, part in (("to_device", "HtoD"), ("to_host", "DtoH")):
        copies = united([span(event) for event in events if event["cat"] == "gpu_memcpy" and part in event["name"]])
        whole = sum(end - begin for begin, end in copies)
        hidden = common_us(copies, kernels)
        found |= {f"{name}_ms": round(whole / 1e3 / STEPS, 3),
                  f"{name}_hidden": round(hidden / whole, 4) if whole else None}
    spans = [span(event) for event in events]
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0
    return {**found, "step_ms": round(whole / 1e3 / STEPS, 3),
            "kernels_ms": round(sum(end - begin for begin, end in kernels) / 1e3 / STEPS, 3)}


def span(event):
    return event["ts"], event["ts"] + event["dur"]


def make(impl, pinned, device, mesh):
    torch.manual_seed(0)
    model = models.LlamaModel(**(LARGE if device == "cuda" else SMALL)).bfloat16()
    api = worker.package() if impl == "python" else torch.distributed.fsdp
    options = {"mesh": mesh, "offload_policy": api.CPUOffloadPolicy(pin_memory=pinned)}
    for block in model.blocks:
        api.fully_shard(block, **options)
    return api.fully_shard(model, **options)


def measure(impl, pinned, device, mesh):
    model = make(impl, pinned and device == "cuda", device, mesh)
    vocabulary = model.embedding.num_embeddings
    tokens = torch.randint(vocabulary, (4, TOKENS[device] // 4), device=device)

    def step():
        model(tokens).backward()
        model.zero_grad(set_to_none=True)

    for _ in range(2):
        step()
    return summary(kernel_timeline.events_of(step, STEPS, device == "cuda", kernel_timeline.ON_DEVICE))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", init_method=f"file://{folder}/store", rank=0,
                                world_size=1)
        mesh = init_device_mesh(options.device, (1,))
        for name, impl, pinned in VARIANTS:
            found = {"figure": f"offload, {name}", **measure(impl, pinned, options.device, mesh)}
            figure_lines.tell(found, options.out)
            if on_gpu:
                torch.cuda.empty_cache()
        dist.destroy_process_group()
    if not on_gpu:
        print("on a CPU nothing is copied between host and device")
    return 0


if __name__ == "__main__":
    sys.exit(main())
