"""Checks of test_beyond_fsdp2.py: wrap policies and their dry run."""

import logging

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from beyond_fsdp2 import batches_of, check, raises, train_both


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def stack():
    return nn.Sequential(nn.Linear(6, 6), Block(), nn.Sequential(Block(), nn.Linear(6, 6)))


def units(plan):
    return [(unit.name, len(unit.parameters), unit.bytes) for unit in plan.units]


BLOCK = 4 * (6 * 8 + 8 + 8 * 6 + 6)
LAYER = 4 * (6 * 6 + 6)


@check
def a_plan_names_units_and_bytes_and_changes_nothing(rank, ranks):
    model = stack()
    before = dict(model.named_parameters())
    plan = fsdp.plan_wrapping(model, fsdp.wrap_class(Block))
    assert units(plan) == [("1", 4, BLOCK), ("2.0", 4, BLOCK), ("", 4, 2 * LAYER)], units(plan)
    assert plan.units[-1].parameters == ["0.weight", "0.bias", "2.1.weight", "2.1.bias"]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert str(plan).splitlines() == [f"(root): 4 parameters, {2 * LAYER} bytes", f"  1: 4 parameters, {BLOCK} bytes",
                                      f"  2.0: 4 parameters, {BLOCK} bytes"]


@check
def a_plan_by_size_takes_what_no_unit_below_has(rank, ranks):
    plan = fsdp.plan_wrapping(stack(), fsdp.wrap_by_size(min_numel=60))
    assert [unit.name for unit in plan.units] == ["1", "2.0", ""], units(plan)
    plan = fsdp.plan_wrapping(stack(), fsdp.wrap_by_size(min_numel=60, is_leaf=lambda module: isinstance(module, Block),
                                                         is_excluded=lambda module: isinstance(module, Block)))
    assert [unit.name for unit in plan.units] == ["2", ""], units(plan)


@check
def a_plan_lists_ties_around_all_their_places_and_frozen_parameters(rank, ranks):
    model = stack()
    model[2][0].up.weight = model[1].up.weight
    model[0].bias.requires_grad_(False)
    plan = fsdp.plan_wrapping(model, fsdp.wrap_if(lambda candidate: isinstance(candidate.module, Block)))
    assert "1.up.weight" in plan.units[-1].parameters and plan.units[-1].frozen_parameters == ["0.bias"], units(plan)
    assert "24 of these bytes are frozen: 0.bias" in str(plan), str(plan)
    assert sum(len(unit.parameters) for unit in plan.units) == len(list(model.parameters()))


@check
def what_was_planned_trains_as_the_plain_model(rank, ranks):
    def shard(model, mesh):
        plan = fsdp.plan_wrapping(model, fsdp.wrap_class(Block), mesh=mesh)
        assert fsdp.apply_wrapping(plan) is model
        found = [name for name, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)]
        assert found == ["", "1", "2.0"], found

    train_both(stack, shard, rank, ranks)


@check
def options_of_a_policy_are_those_of_its_units(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    half = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    policy = fsdp.WrapPolicy(wraps=lambda candidate, defaults: (
        {**defaults, "mp_policy": half} if isinstance(candidate.module, Block) else None))
    model, seen = stack(), []
    fsdp.apply_wrapping(fsdp.plan_wrapping(model, policy, mesh=mesh))
    model[1].register_forward_pre_hook(lambda module, args: seen.append(module.up.weight.dtype))
    model(batches_of(rank)[0]).sum().backward()
    assert seen == [torch.bfloat16], seen


@check
def a_policy_that_chooses_nothing_is_told(rank, ranks):
    mesh, lines, logger = init_device_mesh("cpu", (ranks,)), [], logging.getLogger("fsdp")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        fsdp.apply_wrapping(fsdp.plan_wrapping(stack(), fsdp.wrap_class(Block), mesh=mesh))
        assert not any("chose no module" in line for line in lines), lines
        fsdp.apply_wrapping(fsdp.plan_wrapping(stack(), fsdp.wrap_class(nn.Conv2d), mesh=mesh))
        assert any("chose no module" in line for line in lines), lines
    finally:
        logger.removeHandler(handler)


@check
def wrong_plans_are_refused(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    raises(TypeError, "WrapPolicy", lambda: fsdp.plan_wrapping(stack(), Block))
    raises(TypeError, "wrap_class", lambda: fsdp.wrap_class("Block"))
    raises(ValueError, "min_numel", lambda: fsdp.wrap_by_size(min_numel=0))
    raises(ValueError, "forward", lambda: fsdp.plan_wrapping(nn.Sequential(nn.ModuleList([Block()])),
                                                             fsdp.wrap_class(nn.ModuleList)))
    sharded = stack()
    fsdp.fully_shard(sharded[1], mesh=mesh)
    raises(ValueError, "1 is sharded already", lambda: fsdp.plan_wrapping(sharded, fsdp.wrap_class(Block)))
