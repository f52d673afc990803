"""Optimizers, clipping and state dicts."""

import torch
import torch.nn as nn

from .common import EPS, Model, adam, batches, full, gradients, mesh_of, program, shard, shown, train


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=EPS, foreach=True),
    "loop": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=EPS, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=EPS, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=EPS),
}


@program(variants=[(name,) for name in OPTIMIZERS])
def optimizer(api, ranks, name):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    made = OPTIMIZERS[name](model.parameters())
    trained = train(model, made, batches(3))
    return {"trained": trained, "state": [dict(made.state[p]) for p in model.parameters()]}


@program(ranks=(2,), variants=[(float("inf"),)])  # torch has no such norm of an empty shard, as four ranks have
@program(variants=[(1.0,), (2.0,)])
def clipping(api, ranks, norm_type):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    model(batches(1)[0]).square().mean().backward()
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
    clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type)
    return {"total": full(total), "clipped": full(clipped), "gradients": gradients(model)}


@program
def state_dict_of_dtensors(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    train(model, adam(model), batches(1))
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, adam(model), batches(2))
    model.load_state_dict(saved)
    return {"saved": saved, "after": train(model, adam(model), batches(2))}


@program
def state_dict_assigned(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    saved = {key: value.detach().clone() * 2 for key, value in model.state_dict().items()}
    model.load_state_dict(saved, assign=True)
    return {"shown": shown(model), "after": train(model, adam(model), batches(2))}


@program
def state_dict_between_forward_and_backward(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    loss = model(batches(1)[0]).square().mean()
    saved = {key: value.detach().clone() for key, value in model.state_dict().items()}
    loss.backward()
    return {"saved": saved, "gradients": gradients(model)}


@program
def full_state_dicts(api, ranks):
    from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict,
                                                         get_optimizer_state_dict, set_model_state_dict,
                                                         set_optimizer_state_dict)

    model = shard(api, Model(), mesh=mesh_of(ranks))
    optimizer = adam(model)
    train(model, optimizer, batches(2))
    options = StateDictOptions(full_state_dict=True)
    saved = get_model_state_dict(model, options=options)
    saved_optimizer = get_optimizer_state_dict(model, optimizer, options=options)
    other = Model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    shard(api, other, mesh=mesh_of(ranks))
    other_optimizer = adam(other)
    set_model_state_dict(other, saved, options=options)
    set_optimizer_state_dict(other, other_optimizer, saved_optimizer, options=options)
    return {"saved": saved, "optimizer": saved_optimizer, "after": train(other, other_optimizer, batches(2))}
