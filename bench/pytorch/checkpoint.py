"""PyTorch's side of checkpoint: torch.distributed.checkpoint saves and loads the same model, sharded by FSDP2."""

import ctypes
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import models
import worker

DIM = 1024


class Matrices(torch.nn.Module):
    """`matrices` modules with a parameter of [1024, 1024] each."""

    def __init__(self, matrices):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(DIM, DIM, bias=False) for _ in range(matrices))


def memory(name):
    """A line of /proc/self/status that is in kB, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    return 0


def measure_together(function):
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before does not count as held
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = memory("VmHWM")
    dist.all_reduce(torch.zeros(1))
    taken = worker.seconds(function)
    return {"seconds": taken, "extra_bytes": memory("VmHWM") - before}


class Bench:
    def __init__(self, request):
        self.path = Path(request["folder"]) / "dcp"
        self.model = Matrices(request["matrices"])
        self.bytes = models.parameter_bytes(self.model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in [*self.model.layers, self.model]:
            fully_shard(module, mesh=mesh)
        self.fill(1)

    @torch.no_grad()
    def fill(self, value):
        for parameter in self.model.parameters():
            parameter.to_local().fill_(value)

    def save(self):
        if dist.get_rank() == 0:
            shutil.rmtree(self.path, ignore_errors=True)
        dist.all_reduce(torch.zeros(1))
        return measure_together(lambda: dcp.save(self.model.state_dict(), checkpoint_id=self.path))

    def load_cold(self):
        if dist.get_rank() == 0:
            for file in filter(Path.is_file, self.path.rglob("*")):
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.all_reduce(torch.zeros(1))
        return self.load()

    def load(self):
        self.fill(0)
        measured = measure_together(lambda: dcp.load(self.model.state_dict(), checkpoint_id=self.path))
        for parameter in self.model.parameters():
            if parameter.to_local().flatten()[-1] != 1:
                raise RuntimeError("a parameter was not loaded")
        return measured


if __name__ == "__main__":
    worker.init_gloo()
    worker.serve_one(Bench, lambda bench: {"bytes": bench.bytes}, lambda bench, request: getattr(bench, request["do"])())
