"""Python's side of host_overhead: the plain model, FSDP2 and the extension over collectives that move nothing.

A request names impl (fsdp2, python), blocks, params_per_block, world, operator, sharded, warmup, steps and label; the
reply holds the CPU seconds of each step. Under callgrind the steps' instructions are dumped under `label`.
"""

import torch

import free_network
import worker

extension = worker.extension()


class Block(torch.nn.Module):
    """See Note [The block of host_overhead] in bench_host_overhead.cpp, whose twin this is."""

    def __init__(self, params, world, operator):
        super().__init__()
        sizes = (world,) if operator == "mul" else (world, 8)
        self.names = [f"weight{i}" for i in range(params)]
        for name in self.names:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(sizes)))
        self.forward = self.scale if operator == "mul" else self.project

    def scale(self, x):
        for name in self.names:
            x = x * getattr(self, name)
        return x

    def project(self, x):
        for name in self.names:
            x = x + torch.nn.functional.linear(x, getattr(self, name)).narrow(1, 0, 8)
        return x


class Model(torch.nn.Module):
    def __init__(self, blocks, params, world, operator):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(params, world, operator) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def make_model(request):
    blocks, params, world = request["blocks"], request["params_per_block"], request["world"]
    model = Model(blocks, params, world, request["operator"])
    if request["sharded"]:
        mesh = free_network.start_world(world)
        fully_shard = worker.fully_shard_of(request["impl"])
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def answer(request):
    model = make_model(request)
    parameters = list(model.parameters())
    world = request["world"]
    x = torch.ones((world,) if request["operator"] == "mul" else (1, 8))

    def step():
        model(x).sum().backward()
        for parameter in parameters:
            parameter.grad = None

    for _ in range(request["warmup"]):
        step()
    worker.quiet_collector()
    times = []
    extension.start_counting_instructions()
    for _ in range(request["steps"]):
        times.append(worker.cpu_seconds(step))
    extension.stop_counting_instructions(request["label"])
    return {"cpu_seconds": times}


if __name__ == "__main__":
    free_network.install()
    worker.serve(answer)
