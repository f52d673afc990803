"""FSDP2's side of all_gather_overlap over gloo and NCCL: layers that keep the host, or a GPU, busy for a chosen time."""

import time

import torch

import worker

try:
    extension = worker.extension()
except ModuleNotFoundError:  # it is built where valgrind is
    extension = None


class HostSpin:
    def __call__(self, microseconds):
        end = time.perf_counter_ns() + int(1e3 * microseconds)
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

    def __call__(self, microseconds):
        torch.cuda._sleep(int(microseconds * self.cycles_per_us))


class Occupy(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, spin, forward_us, backward_us):
        context.save_for_backward(weight)
        context.spin, context.backward_us = spin, backward_us
        spin(forward_us)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        (weight,) = context.saved_tensors
        context.spin(context.backward_us)
        return gradient, torch.zeros_like(weight), None, None, None


class Layer(torch.nn.Module):
    def __init__(self, about, device, spin):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(*about["params"][0], device=device))
        self.spin, self.times = spin, (about["forward_us"], about["backward_us"])

    def forward(self, x):
        return Occupy.apply(x, self.weight, self.spin, *self.times)


class Overlap:
    def __init__(self, request):
        is_gpu = request["backend"] == "nccl"
        self.dist = worker.init_nccl() if is_gpu else worker.init_gloo()
        from torch.distributed.device_mesh import init_device_mesh

        self.device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
        spin = DeviceSpin() if is_gpu else HostSpin()
        mesh = init_device_mesh(self.device.type, (self.dist.get_world_size(),))
        fully_shard = worker.fully_shard_of("fsdp2")
        self.layers = torch.nn.Sequential(*(Layer(about, self.device, spin) for about in request["layers"]))
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self):
        self.layers.zero_grad(set_to_none=True)
        self.dist.barrier()
        self.synchronize()

        self.forget_peak()
        begin = time.perf_counter()
        self.layers(torch.zeros(1, device=self.device)).sum().backward()
        issued = time.perf_counter()
        self.synchronize()
        return {"total_us": 1e6 * (time.perf_counter() - begin), "issued_us": 1e6 * (issued - begin),
                "peak_live_bytes": self.peak()}

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
    steps = [overlap.step() for _ in range(request["warmup"] + request["steps"])]
    return {"steps": steps[request["warmup"]:]}


if __name__ == "__main__":
    if extension:
        extension.install_counting_allocator()
    worker.serve_one(Overlap, lambda overlap: {}, answer)
