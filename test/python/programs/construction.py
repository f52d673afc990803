"""Building models and moving them."""

import torch
import torch.nn as nn

from .common import WIDTH, Model, adam, batches, fill, fill_parameter, mesh_of, program, sgd, shard, shown, train


@program
def meta_device(api, ranks):
    with torch.device("meta"):
        model = Model()
    shard(api, model, mesh=mesh_of(ranks))
    before = shown(model)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.scale.fill_(0.5)
    after = shown(model)
    fill(model)
    return {"before": before, "after": after, "trained": train(model, sgd(model), batches(2))}


@program
def meta_device_with_modules_that_share_a_group(api, ranks):
    with torch.device("meta"):
        model = Model()
    api.fully_shard([model.enter, model.head], mesh=mesh_of(ranks))
    shard(api, model, mesh=mesh_of(ranks))
    model.to_empty(device="cpu")
    fill(model)
    model.scale.fill_(0.5)
    return {"after": shown(model), "trained": train(model, sgd(model), batches(2))}


@program
def given_memory_and_values_module_by_module(api, ranks):
    with torch.device("meta"):
        model = Model()
    api.fully_shard([model.enter, model.head], mesh=mesh_of(ranks))
    shard(api, model, mesh=mesh_of(ranks))
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):  # before the modules behind it have any memory
            fill_parameter(parameter)
    model.scale.fill_(0.5)
    return {"after": shown(model), "trained": train(model, sgd(model), batches(2))}


@program
def to_another_dtype(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    model.double()
    return {"shown": shown(model), "trained": train(model, adam(model), batches(2, dtype=torch.float64))}


@program
def class_and_indexing(api, ranks):
    model = api.fully_shard(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]), mesh=mesh_of(ranks))
    return [type(model).__name__, type(model[:2]).__name__, isinstance(model, nn.Sequential),
            isinstance(model, torch.distributed.fsdp.FSDPModule)]
