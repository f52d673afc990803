"""Checks: what is put in the place of a sharded model's parameters and modules, and cannot stand there, is refused by name;
ties that are loaded; copies and conversions in inference mode."""

import copy
import logging

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import fsdp
from beyond_exchanges import LAYERS, UNITS, WIDTH, Chain, Pair, close, make, scaled
from beyond_fsdp2 import batches_of, check, raises, whole


def lines_of(call):
    """What is logged meanwhile."""
    lines, logger, handler = [], logging.getLogger("fsdp"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        call()
    finally:
        logger.removeHandler(handler)
    return lines


def whole_parameter(model, ranks):
    model.a.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def larger_parameter(model, ranks):
    model.a.weight = nn.Parameter(torch.ones(WIDTH + 2, WIDTH))


def parameter_of_another_dtype(model, ranks):
    model.a.weight = nn.Parameter(model.a.weight.detach().to(torch.bfloat16))


def replicated_parameter(model, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    model.a.weight = nn.Parameter(DTensor.from_local(torch.ones(WIDTH, WIDTH), mesh, [Replicate()]))


def whole_tied(model, ranks):
    model.a.weight = model.b.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


REFUSED = {whole_parameter: TypeError, larger_parameter: TypeError, parameter_of_another_dtype: RuntimeError,
           replicated_parameter: ValueError, whole_tied: TypeError}


@check
def what_cannot_stand_for_a_sharded_parameter_is_refused_by_name_at_every_forward(rank, ranks):
    for units in UNITS.values():
        for put, kind in REFUSED.items():
            for steps in (0, 1):
                pair = Pair(units, rank, ranks)
                for _ in range(steps):
                    pair.backward()
                own = {name: getattr(pair.sharded, name).weight for name in LAYERS}
                put(pair.sharded, ranks)
                for _ in range(2):
                    with torch.no_grad():
                        raises(kind, "a.weight", lambda: pair.sharded(batches_of(rank)[0]))
                    raises(kind, "a.weight", lambda: pair.sharded(batches_of(rank)[0]))
                for name in LAYERS:
                    getattr(pair.sharded, name).weight = own[name]
                pair.backward()
                pair.expect_equal(put.__name__)


def another_layer(model):
    model.b = nn.Linear(WIDTH, WIDTH)


def a_layer_with_more(model):
    model.b = nn.Sequential(model.b, nn.Linear(WIDTH, WIDTH))


@check
def an_unsharded_module_in_the_place_of_a_sharded_one_is_refused_by_name(rank, ranks):
    for put, name in ((another_layer, "b.weight"), (a_layer_with_more, "b.1.weight")):
        for units in UNITS.values():
            for steps in (0, 1):
                pair = Pair(units, rank, ranks)
                for _ in range(steps):
                    pair.backward()
                own = pair.sharded.b
                put(pair.sharded)
                for _ in range(2):
                    raises(fsdp.Error, f"'{name}'", lambda: pair.sharded(batches_of(rank)[0]))
                pair.sharded.b.requires_grad_(False)
                own.requires_grad_(True)
                pair.sharded(batches_of(rank)[0])  # what needs no gradient is nobody's business
                pair.sharded.reset_iter_state()
                pair.sharded.b = own
                pair.drop_gradients()
                pair.backward()
                pair.expect_equal("put back")


@check
def a_module_in_the_place_of_a_sharded_one_trains_once_it_is_sharded(rank, ranks):
    for units in UNITS.values():
        for steps in (0, 1):
            pair = Pair(units, rank, ranks)
            for _ in range(steps):
                pair.backward()
            for model in pair.both():
                torch.manual_seed(1)
                another_layer(model)
            fsdp.fully_shard(pair.sharded.b, mesh=init_device_mesh("cpu", (ranks,)))
            pair.take_optimizers()
            pair.drop_gradients()
            for step in range(2):
                pair.backward()
                pair.expect_equal(f"step {step}")
                pair.step()
                pair.drop_gradients()


@check
def an_added_unsharded_parameter_is_warned_of_by_name(rank, ranks):
    pair = Pair(LAYERS, rank, ranks)
    pair.backward()
    pair.sharded.added = nn.Linear(WIDTH, WIDTH, bias=False)
    lines = lines_of(lambda: [pair.sharded(batches_of(rank)[0]).sum().backward() for _ in range(2)])
    assert len([line for line in lines if "'added.weight'" in line]) == 1, lines


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, indices):
        return self.head(self.embed(indices))


def tied_pair(ranks, shares_a_call):
    torch.manual_seed(0)
    plain = Tied()
    sharded, mesh = copy.deepcopy(plain), init_device_mesh("cpu", (ranks,))
    if shares_a_call:
        fsdp.fully_shard([sharded.embed, sharded.head], mesh=mesh)
    return plain, fsdp.fully_shard(sharded, mesh=mesh)


def train_tied(plain, sharded, rank, ranks):
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, sharded)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        indices = [(torch.arange(4) * (1 + each) + step) % 8 for each in range(ranks)]
        sum(plain(each).square().mean() for each in indices).div(ranks).backward()
        sharded(indices[rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        close(sharded.embed.weight.detach(), plain.embed.weight.detach(), f"step {step}")


@check
def a_tied_parameter_stays_tied_when_its_own_state_is_assigned(rank, ranks):
    for shares_a_call in (True, False):
        plain, sharded = tied_pair(ranks, shares_a_call)
        sharded.load_state_dict({name: value for name, value in sharded.state_dict().items()}, assign=True)
        train_tied(plain, sharded, rank, ranks)
        assert sharded.head.weight is sharded.embed.weight


@check
def a_tie_whose_modules_hold_different_parameters_is_tied_anew_or_refused(rank, ranks):
    for shares_a_call in (True, False):
        for is_tied_anew in (True, False):
            plain, sharded = tied_pair(ranks, shares_a_call)
            sharded.load_state_dict({name: value * 2 for name, value in sharded.state_dict().items()}, assign=True)
            if is_tied_anew:
                with torch.no_grad():
                    plain.embed.weight.mul_(2)
                sharded.head.weight = sharded.embed.weight
                train_tied(plain, sharded, rank, ranks)
            else:
                for _ in range(2):
                    raises(fsdp.Error, "embed.weight", lambda: sharded(torch.arange(4)))


@check
def an_optimizer_from_before_fully_shard_is_warned_of_once_and_named_when_it_is_saved(rank, ranks):
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for name in LAYERS:
        fsdp.fully_shard(model.get_submodule(name), mesh=init_device_mesh("cpu", (ranks,)))
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))

    def train():
        for _ in range(20):
            optimizer.zero_grad()
            model.zero_grad()
            model(batches_of(rank)[0]).square().mean().backward()
            optimizer.step()

    lines = [line for line in lines_of(train) if "no optimizer has written" in line]
    assert len(lines) == 1, lines
    raises(ValueError, "'a.weight' as it was before fully_shard",
           lambda: fsdp.save_checkpoint("/nowhere", model, optimizer))


@check
def an_optimizer_of_replaced_parameters_is_told_so_when_it_is_saved(rank, ranks):
    model = make(True, (), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.a.weight = scaled(model.a.weight)
    raises(ValueError, "if the parameter was replaced", lambda: fsdp.optimizer_state_dict(model, optimizer))


@check
def an_inner_module_behind_its_outer_one_is_told_the_order(rank, ranks):
    model, mesh = Chain(), init_device_mesh("cpu", (ranks,))
    fsdp.fully_shard(model, mesh=mesh)
    error = raises((TypeError, RuntimeError, ValueError), "inner modules before outer ones",
                   lambda: fsdp.fully_shard(model.a, mesh=mesh))
    assert "Invariant" not in str(error) and "None" not in str(error), error


@check
def a_copy_that_is_made_in_inference_mode_runs_there_and_trains_outside(rank, ranks):
    for steps in (0, 1):
        pair = Pair(LAYERS[:1], rank, ranks)
        for _ in range(steps):
            pair.backward()
            pair.step()
            pair.drop_gradients()
        with torch.inference_mode():
            copied = copy.deepcopy(pair.sharded)
            for _ in range(2):
                close(copied(batches_of(rank)[0]), pair.plain(batches_of(rank)[0]), "in inference mode")
        pair.sharded = copied
        pair.backward()
        pair.expect_equal("the copy")


@check
def what_is_converted_in_inference_mode_trains_outside(rank, ranks):
    pair = Pair(LAYERS[:1], rank, ranks)
    with torch.inference_mode():
        pair.sharded.to(torch.float64).to(torch.float32)
        close(pair.sharded(batches_of(rank)[0]), pair.plain(batches_of(rank)[0]), "in inference mode")
    pair.sharded.reshard()
    pair.backward()
    pair.expect_equal("behind it")


@check
def a_module_that_goes_to_meta_untied_is_told_so_where_rank_0_is_tied(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(rank)
    model = Tied() if rank == 0 else Tied().to("meta")
    error = raises(ValueError, "tie them differently", lambda: fsdp.fully_shard(model, mesh=mesh, sync_from_rank0=True))
    assert 'Module.to("meta")' in str(error), error
    if rank > 0:
        model.head.weight = model.embed.weight
    fsdp.fully_shard(model, mesh=mesh, sync_from_rank0=True)
    model(torch.arange(4)).sum().backward()
