"""Gradients that are tensor subclasses, as what modules are called with is: FSDP2 takes their values."""

import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed.fsdp
import torch.nn as nn
from torch.distributed.tensor import DTensor

from programs.common import error_of, full, mesh_of

from .subclasses import SavesItself, Wrapped
from .table import program


def batch():
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))


class Tagged(Wrapped):
    """Every operator gives the class."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda each: each.held, (args, kwargs or {}))
        made = function(*args, **kwargs)
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda each: each if isinstance(each, cls) else cls(each), made)


@program(ranks=(2,), variants=[("reduced",), ("accumulated",), ("reduced_in_float64",)])
def plain_parameters_with_subclasses_for_inputs(api, ranks, how):
    """So that their gradients are of the class; FSDP2 takes their values."""
    policy = api.MixedPrecisionPolicy(reduce_dtype=torch.float64 if how == "reduced_in_float64" else None,
                                      cast_forward_inputs=False)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    for block in net:
        api.fully_shard(block, mesh=mesh_of(ranks), mp_policy=policy)
    api.fully_shard(net, mesh=mesh_of(ranks), mp_policy=policy)
    for step in range(3):
        net.set_requires_gradient_sync(how != "accumulated" or step == 2)
        net(Tagged(batch())).square().sum().backward()
    return {name: [type(parameter.grad.to_local()).__name__, full(parameter.grad)]
            for name, parameter in net.named_parameters()}


class Summed(torch.autograd.Function):
    """Its backward gives what functional collectives do: a tensor subclass that waits when it is read."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return funcol.all_reduce(gradient.contiguous(), "sum", torch.distributed.group.WORLD)


class WithSummed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))

    def forward(self, x):
        return nn.functional.linear(x, Summed.apply(self.weight))


@program(ranks=(2,))
def gradients_that_collectives_are_still_making(api, ranks):
    net = WithSummed()
    api.fully_shard(net, mesh=mesh_of(ranks))
    for _ in range(2):
        net(batch()).square().sum().backward()
    return [type(net.weight.grad.to_local()).__name__, full(net.weight.grad)]


@program(ranks=(2,))
def asked_for_by_autograd(api, ranks):
    """This rank's own, as they are."""
    net = nn.Linear(6, 5)
    api.fully_shard(net, mesh=mesh_of(ranks))
    found = torch.autograd.grad(net(Tagged(batch())).square().sum(), list(net.parameters()))
    return [[type(gradient).__name__, gradient.held] for gradient in found]


class Closed(Tagged):
    """Cannot be copied to another tensor."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            raise NotImplementedError("what a Closed holds is its own")
        return super().__torch_dispatch__(function, types, args, kwargs)


@program(ranks=(2,))
def that_cannot_be_read_are_an_error_which_leaves_the_module_as_it_was(api, ranks):
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    for each in (net[0], net[1], net):
        api.fully_shard(each, mesh=mesh_of(ranks))
    error = "NotImplementedError"
    if api is not torch.distributed.fsdp:
        error = error_of(lambda: net(Closed(batch())).sum().backward())
        assert all(isinstance(parameter, DTensor) and parameter.grad is None for parameter in net.parameters())
    net(batch()).square().sum().backward()
    return [error, {name: full(parameter.grad) for name, parameter in net.named_parameters()}]


@program(ranks=(2,))
def put_on_parameters_by_hand_are_added_to(api, ranks):
    net = nn.Linear(6, 5)
    api.fully_shard(net, mesh=mesh_of(ranks))
    net(batch()).square().sum().backward()
    for parameter in net.parameters():
        given = DTensor.from_local(SavesItself(torch.ones_like(parameter.to_local())), parameter.device_mesh,
                                   parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
        parameter.grad = given
    net(batch()).square().sum().backward()
    return {name: getattr(parameter.grad.to_local(), "held", parameter.grad.to_local())
            for name, parameter in net.named_parameters()}
