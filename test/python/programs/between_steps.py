"""What users do to gradients, parameters and modules between steps."""

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .common import Model, batches, fill, gradients, mesh_of, program, sgd, shard, shown, train


def backward(model, x):
    model(x).square().mean().backward()


def load(model):
    model.load_state_dict(model.state_dict())


def assign(model):
    model.load_state_dict(model.state_dict(), assign=True)


def move(model):
    model.to("cpu")


WAYS = {"load": load, "assign": assign, "move": move}


@program(variants=[(name, is_first) for name in WAYS for is_first in (True, False)])
def gradients_dropped_around(api, ranks, name, is_first):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    first, second = batches(2)
    backward(model, first)
    if is_first:
        model.zero_grad()
    WAYS[name](model)
    if not is_first:
        model.zero_grad()
    backward(model, second)
    return gradients(model)


@program(variants=[(name,) for name in WAYS])
def gradients_kept_through(api, ranks, name):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    first, second = batches(2)
    backward(model, first)
    WAYS[name](model)
    before = gradients(model)
    backward(model, second)
    return {"before": before, "after": gradients(model)}


def drop_one_by_one(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = None


DROPS = {"optimizer": lambda _, optimizer: optimizer.zero_grad(), "module": lambda model, _: model.zero_grad(),
         "parameters": drop_one_by_one}


def storages_of_gradients(model):
    """(weak reference, bytes) of each."""
    storages = [parameter.grad.to_local().untyped_storage() for parameter in model.parameters()]
    once = {storage.data_ptr(): storage for storage in storages}
    return [(StorageWeakRef(storage), storage.nbytes()) for storage in once.values()]


@program(variants=[(name,) for name in DROPS])
def dropped_gradients_leave_no_bytes_between_steps(api, ranks, name):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left = []
    for x in batches(3):
        backward(model, x)
        optimizer.step()
        storages = storages_of_gradients(model)
        DROPS[name](model, optimizer)
        left.append(sum(size for storage, size in storages if not storage.expired()))
    return {"bytes": left, "weights": dict(model.named_parameters())}


@program
def a_gradient_that_is_kept_is_the_users(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    kept = []
    for x in batches(3):
        backward(model, x)
        kept.append(model.head.weight.grad)
        model.zero_grad()
    model.head.weight.grad = kept[0]
    backward(model, x)
    return {"kept": kept, "added up": gradients(model)}


def whole(parameter):
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@program(tolerance=1e-6)
def a_loss_on_the_parameters_too(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks), reshard_after_forward=True)
    seen = []
    for x in batches(2):
        penalty = sum(whole(parameter).pow(2).sum() for parameter in model.parameters())
        (model(x).square().sum() + penalty).backward()
        seen.append(gradients(model))
    return seen


@program
def filled_module_by_module(api, ranks):
    with torch.device("meta"):
        model = Model()
    api.fully_shard(model, mesh=mesh_of(ranks))
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
    fill(model)
    model.scale.fill_(0.5)
    return train(model, sgd(model), batches(2))


@program
def training_around_a_functional_call(api, ranks):
    model = api.fully_shard(nn.Sequential(nn.Linear(7, 4), nn.ReLU(), nn.Linear(4, 3)), mesh=mesh_of(ranks))
    x = batches(1)[0]
    backward(model, x)
    model.zero_grad()
    own = [torch.randn(7, 4, requires_grad=True)]
    # Its backward needs no parameter.
    (model(x).detach() + (x @ own[0]).sum()).sum().backward()
    kinds = shown(model)
    model.zero_grad()
    backward(model, x)
    return {"kinds": kinds, "gradients": gradients(model)}


@program(variants=[("thawed",), ("frozen",)])
def toggled_behind_a_forward_without_backward(api, ranks, how):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    first, second = batches(2)
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(how == "frozen")
    backward(model, first)
    model.zero_grad()
    model(second)  # evaluated, with autograd on
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(how == "thawed")
    backward(model, first)
    toggled = gradients(model)
    model.zero_grad()
    backward(model, second)
    return {"toggled": toggled, "later": gradients(model)}
