"""Where such parameters lie, and what their values come from."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_model_state_dict, set_state_dict)

from programs.saved import shared_folder

from .subclasses import Halved, Quantized
from .table import program
from .trained import Net, held, maker, sgd, sharded, train


@program(ranks=(2,), variants=[("Halved",), ("WithScales",), ("SavesItself",), ("Quantized",)])
def offloaded(api, ranks, name):
    net = sharded(api, Net(maker(name)), ranks, offload_policy=api.CPUOffloadPolicy(pin_memory=False))
    return train(net, sgd(net))


def on_meta(api, name, ranks):
    with torch.device("meta"):
        net = Net(maker(name))
    return sharded(api, net, ranks)


def another_state(api, name, ranks):
    return sharded(api, Net(maker(name)), ranks).state_dict()


@program(ranks=(2,), variants=[("Halved",), ("WithScales",), ("Quantized",)])
def made_on_meta_and_loaded(api, ranks, name):
    net = on_meta(api, name, ranks)
    net.to_empty(device="cpu")
    net.load_state_dict(another_state(api, name, ranks))
    return train(net, sgd(net))


@program(ranks=(2,), variants=[("Halved",), ("Quantized",)])
def made_on_meta_and_assigned(api, ranks, name):
    net = on_meta(api, name, ranks)
    net.load_state_dict(another_state(api, name, ranks), assign=True)
    return train(net, sgd(net))


@program(ranks=(2,), variants=[("Halved",), ("Quantized",)])
def assigned_between_steps(api, ranks, name):
    net = sharded(api, Net(maker(name)), ranks)
    losses = train(net, sgd(net))["losses"]
    net.load_state_dict(another_state(api, name, ranks), assign=True)
    return [losses, train(net, sgd(net))]


@program(ranks=(2,), variants=[("Halved",), ("Quantized",)])
def moved_to_another_dtype(api, ranks, name):
    return held(sharded(api, Net(maker(name)), ranks).to(torch.float64))


@program(ranks=(2,), variants=[("Halved",), ("Quantized",)])
def with_the_state_dicts_of_checkpoints(api, ranks, name):
    net, other = (sharded(api, Net(maker(name)), ranks) for _ in range(2))
    optimizer, other_optimizer = sgd(net), sgd(other)
    trained = train(net, optimizer)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    set_state_dict(other, other_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return [trained, train(other, other_optimizer)]


@program(ranks=(2,))
def with_a_full_state_dict(api, ranks):
    whole = StateDictOptions(full_state_dict=True)
    net, other = (sharded(api, Net(Halved), ranks) for _ in range(2))
    trained = train(net, sgd(net))
    set_model_state_dict(other, get_model_state_dict(net, options=whole), options=whole)
    return [trained, train(other, sgd(other))]


@program(ranks=(2,), variants=[("Halved",), ("Quantized",)])
def with_a_checkpoint(api, ranks, name):
    net, other = (sharded(api, Net(maker(name)), ranks) for _ in range(2))
    trained = train(net, sgd(net))
    state = get_model_state_dict(other)
    with shared_folder() as folder, torch.serialization.safe_globals(
            [Halved, Quantized, torch._utils._rebuild_wrapper_subclass]):
        dcp.save(get_model_state_dict(net), storage_writer=FileSystemWriter(folder))
        dcp.load(state, storage_reader=FileSystemReader(folder))
    return [trained, held(other), train(other, sgd(other))]
