"""FSDP2's and DDP's side of all_gather_overlap over processes: layers that keep the host, or a GPU, busy for a chosen time."""

import time

import torch

import timed_layers
import worker

try:
    extension = worker.extension()
except ModuleNotFoundError:  # it is built where valgrind is
    extension = None


class HostSpin:
    def __call__(self, microseconds, _name):
        end = time.perf_counter_ns() + int(1e3 * microseconds)
        while time.perf_counter_ns() < end:
            pass


class HostWait:
    """For more ranks than the machine has cores. Who sleeps wakes up late, so the last stretch is spun."""

    SPIN_NS = 50_000

    def __call__(self, microseconds, _name):
        end = time.perf_counter_ns() + int(1e3 * microseconds)
        time.sleep(max(0, end - self.SPIN_NS - time.perf_counter_ns()) * 1e-9)
        while time.perf_counter_ns() < end:
            pass


class DeviceSpin:
    """One kernel on the current stream. The twin of DeviceSpin in bench/bench_device.cpp."""

    CYCLES = 20_000_000  # long beside a launch

    def __init__(self):
        for _ in range(2):  # the first one also wakes the device up
            torch.cuda.synchronize()
            self.cycles_per_us = self.CYCLES / (1e6 * worker.seconds(self._calibrate))

    def _calibrate(self):
        torch.cuda._sleep(self.CYCLES)
        torch.cuda.synchronize()

    def __call__(self, microseconds, _name):
        torch.cuda._sleep(int(microseconds * self.cycles_per_us))


class Overlap:
    def __init__(self, request):
        is_gpu = request["backend"] == "nccl"
        self.dist = worker.init_nccl() if is_gpu else worker.init_gloo()
        from torch.distributed.device_mesh import init_device_mesh

        self.device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
        occupy = DeviceSpin() if is_gpu else HostWait() if request["clock"] == "waits" else HostSpin()
        self.model = timed_layers.stack_of(request["layers"], self.device, occupy)
        if request.get("impl") == "ddp":
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
            return
        mesh = init_device_mesh(self.device.type, (self.dist.get_world_size(),))
        fully_shard = worker.fully_shard_of("fsdp2")
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self):
        self.model.zero_grad(set_to_none=True)
        self.dist.barrier()
        self.synchronize()

        self.forget_peak()
        begin = time.perf_counter()
        self.model(torch.zeros(1, device=self.device)).sum().backward()
        issued = time.perf_counter()
        self.synchronize()
        return {"total_us": 1e6 * (time.perf_counter() - begin), "issued_us": 1e6 * (issued - begin),
                "peak_live_bytes": self.peak()}

    def time_alone(self, request):
        """Of one raw collective: the twin of bench/bench_overlap.cpp's, with all-reduces."""
        world = self.dist.get_world_size()
        times = {"gather_us": [], "reduce_us": [], "all_reduce_us": []}
        for size in request["bytes"]:
            whole, piece = (torch.zeros(size // 4 // parts, device=self.device) for parts in (1, world))
            collectives = {"gather_us": lambda: self.dist.all_gather_into_tensor(whole, piece),
                           "reduce_us": lambda: self.dist.reduce_scatter_tensor(piece, whole),
                           "all_reduce_us": lambda: self.dist.all_reduce(whole)}
            for name, collective in collectives.items():
                times[name].append([1e6 * self.seconds_alone(collective) for _ in range(request["repeats"])])
        return times

    def seconds_alone(self, collective):
        self.dist.barrier()
        self.synchronize()
        return worker.seconds(lambda: (collective(), self.synchronize()))

    def forget_peak(self):
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif extension:
            extension.start_recording()

    def peak(self):
        """None: nothing counts it."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return extension.peak_bytes() if extension else None


def answer(overlap, request):
    if request["do"] == "alone":
        return overlap.time_alone(request)
    steps = [overlap.step() for _ in range(request["warmup"] + request["steps"])]
    return {"steps": steps[request["warmup"]:]}


if __name__ == "__main__":
    if extension:
        extension.install_counting_allocator()
    worker.serve_one(Overlap, lambda overlap: {}, answer)
