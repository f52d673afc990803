"""What looks on or steps in while a model trains: profilers, dispatch modes, hooks of saved tensors."""

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from .common import Model, adam, batches, gradients, mesh_of, program, shard, shown, train, weights


class Products(TorchDispatchMode):
    """Counts those that are seen."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.append(tuple(args[-1].shape))
        return function(*args, **(kwargs or {}))


AROUND = {
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "anomaly": torch.autograd.detect_anomaly,
    "saved_on_cpu": torch.autograd.graph.save_on_cpu,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
}


@program(variants=[(name,) for name in AROUND])
def trained_under(api, ranks, name):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    optimizer = adam(model)
    with AROUND[name]():
        return train(model, optimizer, batches(3))


@program
def seen_by_dispatch_modes(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    with Products() as products:
        model(batches(1)[0]).square().mean().backward()
    with FlopCounterMode(display=False) as flops:
        model(batches(1)[0]).square().mean().backward()
    return {"products": products.seen, "flops": flops.get_total_flops(), "gradients": gradients(model)}


@program
def gradients_of_inputs(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    x = batches(1)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
    return {"gradient": gradient, "parameters": gradients(model), "after": train(model, adam(model), batches(2))}


@program
def frozen_and_thawed_between_steps(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    optimizer, seen = adam(model), []
    for index, x in enumerate(batches(4)):
        model.blocks[1].requires_grad_(index % 2 == 1)
        model.head.weight.requires_grad_(index < 2)
        seen.append(train(model, optimizer, [x])["losses"])
        seen.append([parameter.grad is None for parameter in model.parameters()])
        optimizer.zero_grad()
    return {"seen": seen, "shown": shown(model), "weights": weights(model)}


@program
def parametrized(api, ranks):
    model = Model()
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.up)
    nn.utils.parametrizations.spectral_norm(model.head)
    shard(api, model, mesh=mesh_of(ranks))
    return {"before": shown(model), "trained": train(model, adam(model), batches(3)), "state": model.state_dict()}


@program
def used_by_some_ranks_alone(api, ranks):
    """As experts are: each rank's tokens go to other ones."""
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        return "not in this torch"

    class Routed(Model):
        def forward(self, x):
            return self.head(self.blocks[torch.distributed.get_rank() % len(self.blocks)](self.enter(x)))

    model = Routed()
    api.fully_shard(model, mesh=mesh_of(ranks))
    model.set_reduce_scatter_unused_params(True)
    return train(model, adam(model), batches(3))


@program
def nested_no_grad_and_detached_parts(api, ranks):
    class Partly(Model):
        def forward(self, x):
            with torch.no_grad():
                x = self.blocks[0](self.enter(x))
            x = self.blocks[1](x)
            return self.head(self.blocks[2](x.detach()) + x)

    model = shard(api, Partly(), mesh=mesh_of(ranks))
    model(batches(1)[0]).square().mean().backward()
    return gradients(model)
