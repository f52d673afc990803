"""all_gather_overlap on the simulated device: the library's package, FSDP2 or DDP, each with its own scheduler.

A request names impl (fsdp, fsdp2, ddp), world, network (as the extension's make_backend takes it), scale (of the tensors'
bytes, which stand in for more), layers as bench/stack.py has them, `separate` for reductions over a group of their own (FSDP2
of torch 2.11 has none, and goes without), and `mixed` for parameters that are gathered in bfloat16 and reduced in float32. It
may name `one_stream`, for a device with a single stream, where nothing overlaps.
"""

import gc

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import simulated_device
import timed_layers
import worker

IMPLS = {"fsdp": "python", "fsdp2": "fsdp2"}  # as worker.py names them


def sharded(layers, fully_shard, mesh, request):
    # Of one class: the package takes torch's, too. What goes from layer to layer is no activation of any size.
    policy = (MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if request["mixed"]
              else MixedPrecisionPolicy())
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(layers, mesh=mesh, mp_policy=policy)
    if request["separate"] and hasattr(layers, "set_separate_reduce_scatter_group"):
        layers.set_separate_reduce_scatter_group()
    return layers


def replicated(layers, scale):
    """With DDP's own sizes of buckets, the first of which is smaller, of bytes that stand in for more."""
    default_mb = getattr(ddp, "_DEFAULT_BUCKET_CAP_MB", 25)  # torch 2.11 has it in a constructor
    first_mb = dist._DEFAULT_FIRST_BUCKET_BYTES / 2**20
    return ddp.DistributedDataParallel(layers, bucket_cap_mb_list=[first_mb / scale, default_mb / scale])


class Overlap:
    network = {}  # what the process group's backend is made for

    def __init__(self, extension, request):
        self.extension = extension
        if dist.is_initialized():
            dist.destroy_process_group()
        self.network.clear()
        self.network.update(request["network"])
        simulated_device.join(request["world"])
        torch.simulated.Stream = simulated_device.only_stream if request.get("one_stream") else simulated_device.new_stream
        layers = timed_layers.stack_of(request["layers"], simulated_device.DEVICE, extension.compute)
        if request["impl"] == "ddp":
            self.model = replicated(layers, request["scale"])
        else:
            mesh = init_device_mesh(simulated_device.NAME, (request["world"],))
            self.model = sharded(layers, worker.fully_shard_of(IMPLS[request["impl"]]), mesh, request)

    def step(self):
        self.model.zero_grad(set_to_none=True)
        self.extension.synchronize()
        self.extension.take_slices()
        self.extension.reset_peak()
        begin = self.extension.now_us()
        self.model(torch.zeros(1, device=simulated_device.DEVICE)).sum().backward()
        self.extension.synchronize()
        slices = self.extension.take_slices()
        for slice_ in slices:
            for name in ("launched_us", "begin_us", "end_us"):
                slice_[name] -= begin
        return {"total_us": self.extension.now_us() - begin, "slices": slices,
                "peak_live_bytes": self.extension.peak_bytes()}


def main():
    torch.set_num_threads(1)
    extension = simulated_device.load()
    simulated_device.register_backend(extension, Overlap.network)
    subject = None

    def answer(request):
        nonlocal subject
        if request["do"] == "setup":
            subject = None
            gc.collect()  # FSDP2's states refer to each other
            subject = Overlap(extension, request)
            return {}
        steps = [subject.step() for _ in range(request["warmup"] + request["steps"])]
        return {"steps": steps[request["warmup"]:]}

    worker.serve(answer)


if __name__ == "__main__":
    main()
