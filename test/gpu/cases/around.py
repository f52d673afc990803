"""What stands around training: initialization, state dicts, offload, activation checkpoints."""

import functools

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp

from .common import Model, adam, apart, batch, case, compare, make_model, part_of, shard, train, train_plain


def expected(place):
    model = make_model(place)
    return train_plain(place, model, adam(model))


@case(variants=[(True,), (False,)])
def cpu_offload(place, pin_memory):
    mesh = place.mesh()
    model = shard(place, make_model(place), mesh=mesh, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=pin_memory))
    locals_ = [parameter.to_local() for parameter in model.parameters()]
    assert all(local.is_cpu for local in locals_), "a shard is not in the host's memory"
    if place.is_gpu:
        pinned = [local.is_pinned() for local in locals_ if local.numel()]
        assert all(pinned) if pin_memory else not any(pinned), f"pinned: {sum(pinned)} of {len(pinned)}"
    found = train(place, model, adam(model))
    assert all(parameter.grad.to_local().is_cpu for parameter in model.parameters()), "a gradient is not there either"
    return compare(found, expected(place), mesh)


@case(variants=[(False,), (True,)])
def activation_checkpoint(place, use_reentrant):
    mesh = place.mesh()
    model = make_model(place)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    shard(place, model, mesh=mesh)
    return compare(train(place, model, adam(model)), expected(place), mesh)


@case
def meta_device(place):
    """Sharded without memory, then filled shard by shard."""
    mesh = place.mesh()
    with torch.device("meta"):
        model = Model()
    shard(place, model, mesh=mesh)
    model.to_empty(device=place.device)
    values = make_model(place).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(part_of(values[name], mesh))
    return compare(train(place, model, adam(model)), expected(place), mesh)


@case
def state_dict(place):
    """Whole values out, then into another sharded model, which goes on alike."""
    mesh = place.mesh()
    plain, model = make_model(place), shard(place, make_model(place), mesh=mesh)
    train(place, model, adam(model), steps=2)
    train_plain(place, plain, adam(plain), steps=2)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    worst = max(apart(whole[name].cpu(), value.cpu()) for name, value in plain.state_dict().items())
    assert worst < 1e-5, f"the state dict is {worst} apart from the plain model's"
    torch.manual_seed(4)
    with torch.device(place.device):
        other = shard(place, Model(), mesh=mesh)
    set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True))
    same = all(torch.equal(mine.to_local(), theirs.to_local())
               for mine, theirs in zip(other.parameters(), model.parameters()))
    assert same, "what was loaded is not what was saved"
    return {"state_dict": worst, **compare(train(place, other, adam(other)), train_plain(place, plain, adam(plain)),
                                           mesh)}


@case
def full_tensors(place):
    plain, model = make_model(place), shard(place, make_model(place))
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters()):
        assert isinstance(mine, DTensor), f"{name} is registered as {type(mine).__name__}"
        assert torch.equal(mine.full_tensor(), theirs), name
    return {}


@case
def moved_and_cast(place):
    """`to` acts on the shards, there and back."""
    plain, model = make_model(place), shard(place, make_model(place))
    model.to(torch.bfloat16)
    plain.to(torch.bfloat16)
    tokens = batch(place, place.rank, 0)
    mine, theirs = model(tokens).item(), plain(tokens).item()
    assert abs(mine - theirs) <= 1e-2 * abs(theirs), f"{mine}, the plain model {theirs}"
    return {"loss": abs(mine - theirs)}
