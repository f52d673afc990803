"""FSDP2's side of all_gather_overlap over gloo: layers that keep the host busy for a chosen time."""

import time

import torch

import worker


def spin(microseconds):
    end = time.perf_counter_ns() + int(1e3 * microseconds)
    while time.perf_counter_ns() < end:
        pass


class Occupy(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, forward_us, backward_us):
        context.save_for_backward(weight)
        context.backward_us = backward_us
        spin(forward_us)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        (weight,) = context.saved_tensors
        spin(context.backward_us)
        return gradient, torch.zeros_like(weight), None, None


class Layer(torch.nn.Module):
    def __init__(self, about):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(*about["params"][0]))
        self.times = about["forward_us"], about["backward_us"]

    def forward(self, x):
        return Occupy.apply(x, self.weight, *self.times)


class Overlap:
    def __init__(self, request):
        self.dist = worker.init_gloo()
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (self.dist.get_world_size(),))
        fully_shard = worker.fully_shard_of("fsdp2")
        self.layers = torch.nn.Sequential(*(Layer(about) for about in request["layers"]))
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)

    def step(self):
        self.layers.zero_grad(set_to_none=True)
        self.dist.barrier()
        return 1e6 * worker.seconds(lambda: self.layers(torch.zeros(1)).sum().backward())


def answer(overlap, request):
    times = [overlap.step() for _ in range(request["warmup"] + request["steps"])]
    return {"steps": [{"total_us": us} for us in times[request["warmup"]:]]}


if __name__ == "__main__":
    worker.serve_one(Overlap, lambda overlap: {}, answer)
