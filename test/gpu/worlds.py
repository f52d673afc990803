"""The worlds that cases run in, and how a process joins one.

one: world size 1, NCCL. fake: eight ranks, of which only the first is there. gloo: two processes on one device over
gloo. nccl: two processes over NCCL, on two GPUs, or on the only one (shared_gpu.py). On a CPU all of them are gloo,
but for fake.
"""

import datetime
import os
from dataclasses import dataclass

TIMEOUT = datetime.timedelta(seconds=40)


@dataclass(frozen=True)
class World:
    name: str
    processes: int
    ranks: int
    backend: str  # on a GPU


WORLDS = {world.name: world for world in (
    World("one", 1, 1, "nccl"),
    World("fake", 1, 8, "fake"),
    World("gloo", 2, 2, "gloo"),
    World("nccl", 2, 2, "cpu:gloo,cuda:nccl"),
)}


def device_type():
    """FSDP_TEST_DEVICE: cpu runs the cases that need no GPU without one."""
    return os.environ.get("FSDP_TEST_DEVICE", "cuda")


def missing(world):
    """What this machine lacks for the world; empty where it lacks nothing."""
    import torch

    if device_type() == "cpu":
        return "on a CPU, gloo is there already" if world.name == "nccl" else ""
    if not torch.cuda.is_available():
        return "no GPU"
    return ""


def join(world, rank, store_path):
    """Joins the world; returns this process's device."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if device_type() == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if world.backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world.ranks)
        return device
    backend = world.backend if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store_path}", rank=rank, world_size=world.ranks,
                            timeout=TIMEOUT)
    return device
