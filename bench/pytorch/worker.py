"""How a worker process talks to the conductor: one JSON request a line in, one JSON reply a line out."""

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path

REPLY = "@reply "  # libraries print to the standard output too; the conductor looks for this


def serve(answer):
    """Answers requests with `answer(request)` until the input ends."""
    for line in sys.stdin:
        reply = answer(json.loads(line))
        sys.stdout.write(REPLY + json.dumps(reply) + "\n")
        sys.stdout.flush()


def serve_one(make, about, answer):
    """The first request makes the subject with `make(request)` and is answered with `about(subject)`, the others with
    `answer(subject, request)`."""
    subject = None

    def reply(request):
        nonlocal subject
        if request["do"] == "setup":
            subject = make(request)
            return about(subject)
        return answer(subject, request)

    serve(reply)


def extension():
    """The C++ helpers that run.py has built."""
    sys.path.insert(0, str(Path(os.environ["FSDP_BUILD_DIR"]) / "bench"))
    return importlib.import_module("fsdp_bench_extension")


def package():
    """The library's Python package, from the build folder."""
    sys.path.insert(0, str(Path(os.environ["FSDP_BUILD_DIR"]) / "bindings"))
    return importlib.import_module("fsdp")


def fully_shard_of(impl):
    """FSDP2's function, or the package's (`python`)."""
    if impl == "python":
        return package().fully_shard
    return importlib.import_module("torch.distributed.fsdp").fully_shard


def quiet_collector():
    """No garbage collection inside a measurement."""
    gc.collect()
    gc.disable()


def seconds(function):
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def cpu_seconds(function):
    """Of this process: what others do on the machine is left out, but so is waiting."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def init_gloo():
    """Joins the world that the conductor describes in the environment."""
    import torch

    torch.set_num_threads(1)
    return _join("gloo")


def init_nccl():
    """The same, with a GPU for each rank, or the first one for those that have none of their own."""
    import torch

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank if rank < torch.cuda.device_count() else 0)
    return _join("nccl")


def _join(backend):
    import torch.distributed as dist

    if dist.is_initialized():  # for the subject before
        return dist
    dist.init_process_group(
        backend,
        init_method="file://" + os.environ["FSDP_BENCH_STORE"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return dist
