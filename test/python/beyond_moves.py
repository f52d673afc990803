"""Checks of test_beyond_fsdp2.py: sharded modules with gradients that are moved and converted, whole or halfway."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp
from beyond_fsdp2 import check
from hook_programs.subclasses import Halved

FLOAT, LOW = torch.float32, torch.bfloat16
HAS_GRAD_DTYPE = hasattr(torch.nn.Parameter(torch.zeros(1)), "grad_dtype")


def made(ranks, grad_dtype="unset", dtype=LOW, blocks=False):
    """(sharded, plain): with a gradient each, of the same batch on all ranks."""
    nets = []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4, dtype=dtype), nn.Sequential(nn.Linear(4, 4, dtype=dtype)))
        net[1].register_buffer("sentinel", torch.ones(1))
        if grad_dtype != "unset":
            for parameter in net.parameters():
                parameter.grad_dtype = grad_dtype
        if is_sharded:
            mesh = init_device_mesh("cpu", (ranks,))
            if blocks:
                fsdp.fully_shard([net[0], net[1]], mesh=mesh)
            fsdp.fully_shard(net, mesh=mesh)
        backward(net)
        nets.append(net)
    return nets


def backward(net):
    net(torch.linspace(-1, 1, 8, dtype=next(net.parameters()).dtype).view(2, 4)).sum().backward()


def told(net):
    """Of each parameter: dtypes and whole values, its own and its gradient's."""
    def of(tensor):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return None if tensor is None else (whole.dtype, whole.detach().clone())

    return {name: (getattr(parameter, "grad_dtype", None), of(parameter), of(parameter.grad))
            for name, parameter in net.named_parameters()}


def expect_same(found, wanted, subject):
    for name, (grad_dtype, *tensors) in wanted.items():
        assert found[name][0] == grad_dtype, f"{subject}: {name} wants {found[name][0]}, not {grad_dtype}"
        for mine, other in zip(found[name][1:], tensors):
            assert (mine is None) == (other is None), f"{subject}: {name}: {mine} for {other}"
            if mine is not None:
                assert mine[0] == other[0] and torch.equal(mine[1], other[1]), f"{subject}: {name}: {mine} for {other}"


KEEP_DTYPES = {"cpu": lambda net: net.cpu(), "to": lambda net: net.to("cpu", non_blocking=True),
               "identity": lambda net: net._apply(lambda tensor: tensor), "clone": lambda net: net._apply(torch.clone),
               "doubled": lambda net: net._apply(lambda tensor: 2 * tensor), "below": lambda net: net[1].cpu()}


@check
def moves_that_keep_dtypes_keep_gradients_of_another_dtype(rank, ranks):
    for grad_dtype in ("unset", FLOAT, None) if HAS_GRAD_DTYPE else ("unset",):
        for blocks in (False, True):
            for name, move in KEEP_DTYPES.items():
                if name == "below" and grad_dtype != "unset" and not blocks:
                    continue  # not a sharded module's own _apply
                net, plain = made(ranks, grad_dtype, blocks=blocks)
                objects = [(parameter, parameter.grad) for parameter in net.parameters()]
                for each in (net, plain):
                    move(each)
                subject = f"{name}, grad_dtype {grad_dtype}, blocks {blocks}"
                expect_same(told(net), told(plain), subject)
                if name != "below":
                    for (parameter, gradient), now in zip(objects, net.parameters(), strict=True):
                        assert parameter is now and parameter.grad is gradient, subject
                for each in (net, plain):
                    backward(each)
                expect_same(told(net), told(plain), f"again after {subject}")


@check
def conversions_keep_the_gradients_dtype_that_was_asked_for(rank, ranks):
    for dtype in (FLOAT, torch.float16) if HAS_GRAD_DTYPE else ():
        net, _ = made(ranks, torch.float64)
        before = told(net)
        net.to(dtype)
        for name, (grad_dtype, values, gradient) in told(net).items():
            assert grad_dtype == gradient[0] == torch.float64 and values[0] == dtype, (name, grad_dtype, values, gradient)
            assert torch.equal(gradient[1], before[name][2][1])
        backward(net)


@check
def what_is_set_on_parameters_and_their_hooks_stay_with_them_when_they_are_moved(rank, ranks):
    for move in (lambda net: net.cpu(), lambda net: net.half(), lambda net: net._apply(failing_at(3, torch.clone))):
        calls = []
        net, _ = made(ranks, dtype=FLOAT)
        for index, parameter in enumerate(net.parameters()):
            parameter.of_mine = index
            parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.of_mine))
        try:
            move(net)
        except Halfway:
            pass
        assert [parameter.of_mine for parameter in net.parameters()] == [0, 1, 2, 3]
        backward(net)
        assert sorted(calls) == [0, 1, 2, 3], calls


class Halfway(Exception):
    pass


def failing_at(count, function):
    """function, but for the call of this number."""
    calls = []

    def fails(tensor):
        calls.append(tensor)
        if len(calls) == count:
            raise Halfway
        return function(tensor)

    return fails


@check
def an_apply_that_fails_halfway_changes_nothing(rank, ranks):
    for grad_dtype in ("unset", FLOAT) if HAS_GRAD_DTYPE else ("unset",):
        for blocks in (False, True):
            for function in (torch.clone, lambda tensor: tensor.half(), lambda tensor: 3 * tensor):
                net, plain = made(ranks, grad_dtype, blocks=blocks)
                objects = list(net.parameters())
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                reached = 0
                for count in range(1, 40):
                    try:
                        net._apply(failing_at(count, function))
                    except Halfway:
                        reached = count
                    else:
                        break
                    if blocks and any(p.dtype != LOW or not torch.equal(p.full_tensor(), q) for p, q in
                                      zip(net.parameters(), plain.parameters())):
                        break  # one of the two had been converted, as a plain one would be
                    expect_same(told(net), told(plain), f"failed at {count}, grad_dtype {grad_dtype}, blocks {blocks}")
                    assert all(one is other for one, other in zip(objects, net.parameters(), strict=True))
                assert reached >= 3, reached
                if blocks:
                    continue
                other, twin = made(ranks, grad_dtype)
                try:
                    other._apply(failing_at(6, function))
                except Halfway:
                    pass
                optimizer = torch.optim.SGD(other.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
                for each, its in zip((other, twin), optimizer):
                    backward(each)
                    its.step()
                    backward(each)
                expect_same(told(other), told(twin), "trained on")


@check
def tensor_subclasses_are_there_after_a_failed_apply_and_compute_after_a_whole_one(rank, ranks):
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    net.weight = nn.Parameter(Halved(net.weight.detach()))
    net.register_buffer("sentinel", torch.ones(1))
    twin = nn.Linear(4, 4)
    twin.load_state_dict({"weight": net.weight.held.bfloat16().float(), "bias": net.bias.detach()})
    fsdp.fully_shard(net, mesh=init_device_mesh("cpu", (ranks,)))
    net(torch.ones(2, 4)).sum().backward()
    before, gradient = net.weight.to_local().held.clone(), net.weight.grad.full_tensor()
    for count in range(1, 9):
        try:
            net._apply(failing_at(count, lambda tensor: tensor.double()))
        except Halfway:
            pass
        else:
            break
        local = net.weight.to_local()
        assert type(local) is Halved and local.dtype == net.weight.dtype == FLOAT and torch.equal(local.held, before), count
        assert torch.equal(net.weight.grad.full_tensor(), gradient)
        net.zero_grad()
        net(torch.ones(2, 4)).sum().backward()
        assert torch.equal(net.weight.grad.full_tensor(), gradient)
    assert count == 6 and net.weight.dtype == torch.float64 and type(net.weight.to_local()) is Halved, count
    for each in (net, twin.double()):
        each.zero_grad()
        each(torch.linspace(-1, 1, 8).view(2, 4).double()).square().sum().backward()
    assert net.weight.grad.dtype == torch.float64
    torch.testing.assert_close(net.weight.grad.full_tensor(), twin.weight.grad)
