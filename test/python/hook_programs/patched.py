"""Hooks that a class, or one shard of it or of a plain parameter, gets after fully_shard, over a subclass whose operators
give it again, gradients too (torch's own TwoTensor)."""

import torch
import torch.distributed.fsdp
import torch.nn as nn
from torch.testing._internal.two_tensor import TwoTensor

from programs.common import error_of, full, mesh_of

from . import subclasses
from .table import program

WIDTH = 8


def sends_both(shard, mesh):
    return (shard.a, shard.b), None


def sends_both_of_five(shard, mesh, outer_size, outer_stride, module, mp_policy):
    subclasses.seen.add(f"{mesh.ndim} {tuple(outer_size)} {type(module).__name__} {mp_policy.param_dtype}")
    return sends_both(shard, mesh)


def makes_both(shard, outputs, metadata, param_dtype, *, out=None):
    if out is None:
        return TwoTensor(*outputs).to(param_dtype), outputs
    for kept, gathered in zip((out.a, out.b), outputs):
        if kept.untyped_storage().data_ptr() != gathered.untyped_storage().data_ptr():
            kept.copy_(gathered)
    return None


class HooksOfTwoTensor:
    """While it lives the class has them."""

    def __init__(self, pre):
        self.pre = pre

    def __enter__(self):
        TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather = self.pre, makes_both

    def __exit__(self, *_):
        del TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather


class Mlp(nn.Module):
    def __init__(self, width=WIDTH, wrap=lambda weight: TwoTensor(weight, weight.clone()), factor=4):
        super().__init__()
        self.enter = nn.Linear(width, factor * width, bias=False)
        self.leave = nn.Linear(factor * width, width, bias=False)
        for linear in (self.enter, self.leave):
            if wrap is not None:
                linear.weight = nn.Parameter(wrap(linear.weight.detach()))

    def forward(self, x):
        return self.leave(torch.relu(self.enter(x)))


def stack(wrap=lambda weight: TwoTensor(weight, weight.clone())):
    return nn.Sequential(*[Mlp(wrap=wrap) for _ in range(3)])


def sharded(api, net, mesh, **options):
    for block in net:
        api.fully_shard(block, mesh=mesh, **options)
    return api.fully_shard(net, mesh=mesh, **options)


def batch(width=WIDTH):
    return torch.randn(2, width, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))


def plain(tensor):
    return [each.clone() for each in (tensor.a, tensor.b)] if isinstance(tensor, TwoTensor) else tensor.clone()


def seen_of(net):
    def gradient(parameter):
        return parameter.grad if parameter.grad is None else [type(parameter.grad.to_local()).__name__, full(parameter.grad)]

    return {name: [plain(parameter.to_local()), gradient(parameter)] for name, parameter in net.named_parameters()}


def train(net, steps=3, width=WIDTH, **options):
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, **options)
    found = []
    for step in range(steps):
        loss = net(batch(width)).sum()
        loss.backward()
        found.append([plain(loss.detach()), seen_of(net)])
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return found


def equals_plain(net, twin, steps=3):
    """Both train as the plain one does on all ranks' batches."""
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2, foreach=True) for each in (net, twin)]
    for step in range(steps):
        net(batch()).sum().backward()
        twin(batch()).sum().backward()
        for parameter, other in zip(net.parameters(), twin.parameters()):
            for inner in (other.grad.a, other.grad.b):
                torch.distributed.all_reduce(inner)
                inner /= torch.distributed.get_world_size()
            torch.testing.assert_close(parameter.grad.full_tensor(), other.grad.b)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


@program(ranks=(2,), variants=[(reshards, hooks) for reshards in (True, False) for hooks in ("of_one", "of_five")])
def two_tensors_train_as_the_plain_ones_do(api, ranks, reshards, hooks):
    with HooksOfTwoTensor(sends_both if hooks == "of_one" else sends_both_of_five):
        net, twin = stack(), stack()
        twin.load_state_dict(net.state_dict())
        equals_plain(sharded(api, net, mesh_of(ranks), reshard_after_forward=reshards), twin)
        return train(net, foreach=True)


@program(ranks=(2,), variants=[(True,), (False,)])
def two_tensors_made_on_meta_in_mixed_precision(api, ranks, reshards):
    with HooksOfTwoTensor(sends_both_of_five):
        with torch.device("meta"):
            net = stack()
        sharded(api, net, mesh_of(ranks), reshard_after_forward=reshards,
                mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        net.to_empty(device="cpu")
        for parameter in net.parameters():
            nn.init.constant_(parameter, 0.1)
        return train(net, foreach=True)


def halves(shard, mesh, outer_size, outer_stride, module, mp_policy):
    subclasses.seen.add(f"{mesh.ndim} {mesh.size()} {tuple(outer_size)} {type(module).__name__}")
    return (shard.to(torch.bfloat16),), None


@torch.no_grad()
def widens(shard, outputs, metadata, param_dtype, *, out=None):
    (gathered,) = outputs
    if out is None:
        values = gathered.to(param_dtype)
        return values, (gathered, values)
    with torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(gathered)
    return None


def patch(net, pre=halves, post=widens):
    for parameter in net.parameters():
        local = parameter._local_tensor
        local.fsdp_pre_all_gather = pre.__get__(local)
        local.fsdp_post_all_gather = post.__get__(local)


@program(ranks=(2,), variants=[("TwoTensor",), ("plain",)])
def hooks_put_on_shards_after_to_empty(api, ranks, kind):
    subclasses.seen.clear()
    with torch.device("meta"):
        net = stack(None) if kind == "plain" else stack()
    sharded(api, net, mesh_of(ranks)).to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.13)
    patch(net)
    trained = train(net, foreach=True)
    assert len(subclasses.seen) == 2, subclasses.seen
    return [trained, sorted(subclasses.seen)]


@program(ranks=(2,), variants=[(True,), (False,)])
def hooks_put_on_plain_shards_round_what_is_gathered(api, ranks, reshards):
    subclasses.seen.clear()
    net = sharded(api, stack(None), mesh_of(ranks), reshard_after_forward=reshards)
    patch(net)
    rounded = [full(parameter.detach()).to(torch.bfloat16).float() for parameter in net[0].parameters()]
    net[0].unshard()
    for parameter, values in zip(net[0].parameters(), rounded):
        assert torch.equal(parameter, values)
    net[0].reshard()
    return [train(net), sorted(subclasses.seen)]


@program(ranks=(2,))
def hooks_put_on_one_of_a_group(api, ranks):
    net = Mlp(wrap=None)
    api.fully_shard(net, mesh=mesh_of(ranks))
    patch(net.enter)
    return train(net)


def sends_itself(shard, mesh, outer_size, outer_stride, module, mp_policy):
    subclasses.seen.add(f"{mesh.ndim} {mesh.size()}")
    return (shard,), None


@torch.no_grad()
def takes_it(shard, outputs, metadata, param_dtype, *, out=None):
    return None if out is not None else (outputs[0], outputs)


@program(ranks=(2,), variants=[("TwoTensor",), ("plain",)])
def hooks_put_on_shards_are_told_of_the_mesh_that_shards(api, ranks, kind):
    subclasses.seen.clear()
    mesh = torch.distributed.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("replicate", "shard"))
    net = sharded(api, stack(None) if kind == "plain" else stack(), mesh)
    patch(net, sends_itself, takes_it)
    return [net(batch()).detach(), sorted(subclasses.seen)]


class PaddedHalves(subclasses.Wrapped):
    """Every operator gives the class. Padded by its hook, where rows are not even."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs):
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda each: each.held, (args, kwargs))
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, function(*args, **kwargs))

    fsdp_pre_all_gather = subclasses.Halved.fsdp_pre_all_gather
    fsdp_post_all_gather = widens


@program(ranks=(2,))
def rows_that_are_not_even_under_a_fused_optimizer(api, ranks):
    net = Mlp(width=3, factor=3, wrap=lambda weight: PaddedHalves(weight))
    api.fully_shard(net, mesh=mesh_of(ranks), reshard_after_forward=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    net(batch(3)).sum().backward()
    found = [full(parameter.grad) for parameter in net.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return [found, [parameter.to_local().held for parameter in net.parameters()]]


@program(ranks=(2,))
def a_subclass_that_gets_hooks_after_it_was_refused(api, ranks):
    """FSDP2 fails in an operator that knows no such tensor."""
    if api is torch.distributed.fsdp:
        with HooksOfTwoTensor(sends_both):
            net = sharded(api, stack(), mesh_of(ranks))
            return ["NotImplementedError", train(net)]
    net = sharded(api, stack(), mesh_of(ranks))
    error = error_of(lambda: net(batch()))
    with HooksOfTwoTensor(sends_both):
        return [error, train(net)]


@program(ranks=(2,))
def half_of_the_hooks_put_on_a_shard(api, ranks):
    net = nn.Linear(4, 4)
    api.fully_shard(net, mesh=mesh_of(ranks))
    net.weight._local_tensor.fsdp_pre_all_gather = lambda mesh: ((), None)
    return error_of(lambda: net(torch.ones(2, 4))) if api is not torch.distributed.fsdp else "AssertionError"
