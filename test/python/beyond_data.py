"""Checks: values that are written by way of `.data`, or put in its place."""

import copy

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp
from beyond_fsdp2 import batches_of, check, raises, whole


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(3)])


def plain_and_sharded(ranks, **options):
    plain = layers()
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (ranks,))
    for module in [sharded[0], sharded[1], sharded]:
        fsdp.fully_shard(module, mesh=mesh, **options)
    return plain, sharded


def halve_all(parameters):
    torch._foreach_mul_([parameter.data for parameter in parameters], 0.5)


# As programs write to the parameters that they hold. Each halves them.
WRITES = {
    "data.mul_": lambda parameters: [parameter.data.mul_(0.5) for parameter in parameters],
    "data.copy_": lambda parameters: [parameter.data.copy_(parameter.detach().clone() * 0.5) for parameter in parameters],
    "data.copy_ of a whole": lambda parameters: [parameter.data.copy_(whole(parameter.detach()) * 0.5) for parameter in parameters],
    "foreach over data": halve_all,
    "data[...]": lambda parameters: [parameter.data.__setitem__(slice(None), parameter.data * 0.5) for parameter in parameters],
    "a view of data": lambda parameters: [parameter.data.view(-1).mul_(0.5) for parameter in parameters],
    "detach().data": lambda parameters: [parameter.detach().data.mul_(0.5) for parameter in parameters],
    "detach()": lambda parameters: [parameter.detach().mul_(0.5) for parameter in parameters],
    "the local tensor": lambda parameters: [local(parameter).detach().mul_(0.5) for parameter in parameters],
    "the local tensor's data": lambda parameters: [local(parameter).data.mul_(0.5) for parameter in parameters],
    "data =": lambda parameters: [setattr(parameter, "data", parameter.data * 0.5) for parameter in parameters],
    "data = of a whole": lambda parameters: [setattr(parameter, "data", whole(parameter.detach()) * 0.5)
                                             for parameter in parameters],
    "an operator": lambda parameters: [parameter.mul_(0.5) for parameter in parameters],
}


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def evaluate(model, x):
    with torch.no_grad():
        model(x)


# What comes before the write, and leaves parameters gathered.
BEFORE = {
    "nothing": lambda model, x: None,
    "an evaluation": evaluate,
    "two evaluations": lambda model, x: [evaluate(model, x) for _ in range(2)],
    "a step": lambda model, x: model(x).sum().backward(),
    "a forward without backward": lambda model, x: model(x),
    "a step, and an evaluation": lambda model, x: [model(x).sum().backward(), evaluate(model, x)],
    "a step, and a forward without backward": lambda model, x: [model(x).sum().backward(), model(x)],
}


@check
def writes_by_way_of_data_are_seen(rank, ranks):
    x = batches_of(rank)[0]
    for options in ({}, {"reshard_after_forward": False}):
        for before, run_before in BEFORE.items():
            plain, sharded = plain_and_sharded(ranks, **options)
            held = [list(model.parameters()) for model in (plain, sharded)]
            for write, run_write in WRITES.items():
                run_before(sharded, x)
                for parameters in held:
                    with torch.no_grad():
                        run_write(parameters)
                with torch.no_grad():
                    torch.testing.assert_close(sharded(x), plain(x), msg=f"{options}, {before}, {write}")
                torch.testing.assert_close(sharded(x), plain(x), msg=f"{options}, {before}, {write}, recorded")
                sharded.zero_grad()
                for parameters in held:  # so that values stay of one size
                    with torch.no_grad():
                        for parameter in parameters:
                            parameter.mul_(2)


@check
def writes_by_way_of_data_between_forward_and_backward_are_allowed(rank, ranks):
    for options in ({}, {"reshard_after_forward": False}):
        plain, sharded = plain_and_sharded(ranks, **options)
        for step in range(3):
            batches = [batches_of(each)[step] for each in range(ranks)]
            plain.zero_grad()
            sharded.zero_grad()
            losses = [plain(x).square().mean() for x in batches]
            loss = sharded(batches[rank]).square().mean()
            for model in (plain, sharded):
                for parameter in model.parameters():
                    parameter.data.mul_(0.5)
            (sum(losses) / ranks).backward()
            loss.backward()
            for expected, found in zip(plain.parameters(), sharded.parameters()):
                torch.testing.assert_close(found.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-6, msg=f"{options} {step}")


@check
def averages_are_swapped_in_and_out_by_data(rank, ranks):
    """The moving average that many trainers have: the averages' values in, an evaluation, the parameters' own back."""
    x = batches_of(rank)[0]
    outputs = []
    for model in plain_and_sharded(ranks):
        held = dict(model.named_parameters())
        optimizer = torch.optim.SGD(held.values(), lr=0.1)
        shadow = {name: parameter.data.clone() for name, parameter in held.items()}
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
            for name, parameter in held.items():
                shadow[name] = (shadow[name] * 0.5 + parameter.data * 0.5).clone()
            backup = {}
            for name, parameter in held.items():
                backup[name] = parameter.data
                parameter.data = shadow[name]
            with torch.no_grad():
                outputs.append(model(x).clone())
            for name, parameter in held.items():
                parameter.data = backup[name]
            with torch.no_grad():
                outputs.append(model(x).clone())
    half = len(outputs) // 2
    for i, (expected, found) in enumerate(zip(outputs[:half], outputs[half:])):
        torch.testing.assert_close(found, expected, msg=f"output {i}")


@check
def the_data_of_a_gradient_is_replaced(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 6)).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad.data * 3
            optimizer.step()
    for expected, found in zip(plain.parameters(), sharded.parameters()):
        torch.testing.assert_close(whole(found.detach()), expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(whole(found.grad), expected.grad, rtol=1e-5, atol=1e-6)


@check
def data_of_another_kind_is_refused_and_nothing_is_lost(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    parameter = sharded[0].weight
    values = parameter.full_tensor().clone()
    for data, kind in ((torch.zeros(2, 2), TypeError), (torch.zeros(6, 6, dtype=torch.float64), Exception)):
        raises(kind, "weight", lambda: setattr(parameter, "data", data))
        assert torch.equal(parameter.full_tensor(), values)
    sharded(torch.ones(4, 6)).sum().backward()
    raises(TypeError, "weight", lambda: setattr(parameter.grad, "data", torch.zeros(6, 6)))
