"""Checks of test_beyond_fsdp2.py: wrap policies and their dry run."""

import functools
import logging

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy, wrap
from torch.distributed.fsdp._wrap_utils import _auto_wrap

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


def chosen_by_fsdp1(model, policy, ignored=()):
    """The names of the modules that FSDP1 wraps, inner ones first, and the arguments that it wraps each with."""
    names, found = {module: name for name, module in model.named_modules()}, []

    def wrapped(module, **arguments):
        found.append((names[module], arguments))
        return module

    ignored = {below for module in ignored for below in module.modules()}
    params = {param for module in ignored for param in module.parameters()}
    _auto_wrap(model, policy, ignored, params, {"mixed_precision": None}, wrapped)
    return found


class Attending(nn.Module):
    """An attention, which FSDP1 never makes a unit by size, and what it makes of containers."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.named = nn.ModuleDict({"last": nn.Linear(6, 6)})

    def forward(self, x):
        x = x + self.attention(x, x, x)[0]
        for block in self.blocks:
            x = block(x)
        return self.named["last"](x)


class HoldsParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.ParameterList([torch.full((6, 6), 0.1), torch.full((6, 6), 0.2)])
        self.named = nn.ParameterDict({"a": torch.full((6, 6), 0.3)})
        self.block = Block()

    def forward(self, x):
        return self.block(x @ self.rows[0] @ self.rows[1] @ self.named["a"])


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
def a_plan_by_size_is_fsdp1s_for_leaf_classes_containers_and_what_is_ignored(rank, ranks):
    for make in (stack, Attending, lambda: nn.Sequential(Attending(), Block()), lambda: nn.Transformer(6, 2, 1, 1, 8)):
        total = sum(param.numel() for param in make().parameters())
        for min_numel in (1, 20, 60, 100, 168, 200, total - 1, total):
            for ignored in ((), (Block,), (nn.MultiheadAttention,)):
                model = make()
                leave = [module for module in model.modules() if isinstance(module, ignored)]
                own = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=min_numel)
                expected = [name for name, _ in chosen_by_fsdp1(model, own, leave)]
                for policy in (fsdp.wrap_by_size(min_numel=min_numel), own):
                    plan = fsdp.plan_wrapping(model, policy, ignored_modules=leave)
                    assert [unit.name for unit in plan.units] == [*expected, ""], (make, min_numel, ignored, str(plan))


@check
def a_plan_by_size_takes_no_module_without_a_forward_of_its_own(rank, ranks):
    def shard(model, mesh):
        by_size = fsdp.wrap_by_size(min_numel=20, is_excluded=lambda module: isinstance(module, nn.Linear))
        plan = fsdp.plan_wrapping(model, by_size, mesh=mesh)
        assert [unit.name for unit in plan.units] == ["block", ""], str(plan)
        fsdp.apply_wrapping(plan)

    train_both(HoldsParameters, shard, rank, ranks)


@check
def fsdp1s_policies_choose_what_they_choose_for_fsdp1(rank, ranks):
    policies = [
        wrap.ModuleWrapPolicy({Block, nn.MultiheadAttention}),
        wrap.CustomPolicy(lambda module: isinstance(module, Block)),
        wrap.CustomPolicy(lambda module: {"forward_prefetch": True} if isinstance(module, nn.Linear) else False),
        wrap.size_based_auto_wrap_policy,
        functools.partial(functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=50),
                          force_leaf_modules={Block}, exclude_wrap_modules={nn.MultiheadAttention, nn.ModuleList}),
        functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)),
        functools.partial(wrap._or_policy, policies=[
            functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear))]),
        lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel == 6 * 8 + 8,
    ]
    for policy in policies:
        for ignored in ((), (nn.Linear,)):
            model = nn.Sequential(Attending(), Block())
            leave = [module for module in model.modules() if isinstance(module, ignored)]
            expected = [name for name, _ in chosen_by_fsdp1(model, policy, leave)]
            plan = fsdp.plan_wrapping(model, policy, ignored_modules=leave)
            assert [unit.name for unit in plan.units] == [*expected, ""], (policy, ignored, str(plan))
    plan = fsdp.plan_wrapping(Attending(), wrap.always_wrap_policy)
    assert "blocks.0.up" in [unit.name for unit in plan.units] and "blocks" not in [unit.name for unit in plan.units], str(plan)


@check
def a_custom_policys_arguments_are_those_of_its_units(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))

    def plan_of(arguments, **options):
        policy = wrap.CustomPolicy(lambda module: arguments if isinstance(module, Block) else False)
        return fsdp.plan_wrapping(stack(), policy, mesh=mesh, **options)

    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    plan = plan_of({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "mixed_precision": policy,
                    "cpu_offload": CPUOffload(offload_params=True), "use_orig_params": True})
    options = plan.units[0].options
    assert options["reshard_after_forward"] is False and options["mesh"] is mesh, options
    assert options["mp_policy"].param_dtype == torch.bfloat16 and options["mp_policy"].reduce_dtype == torch.float32, options
    assert isinstance(options["offload_policy"], fsdp.CPUOffloadPolicy), options
    assert plan.units[-1].options == {"mesh": mesh}, plan.units[-1].options
    assert plan_of({"reshard_after_forward": 1}).units[0].options["reshard_after_forward"] == 1
    full = plan_of({"sharding_strategy": ShardingStrategy.FULL_SHARD, "mixed_precision": None, "cpu_offload": None},
                   reshard_after_forward=False).units[0].options
    assert full["reshard_after_forward"] is True and full["mp_policy"].param_dtype is None, full
    for wrong, what in (({"sharding_strategy": ShardingStrategy.NO_SHARD}, "replicated_modules"),
                        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, "mesh of two dimensions"),
                        ({"device_id": 0}, "device_id"), ({"mixed_precison": policy}, "mixed_precison")):
        raises(TypeError if "mixed_precison" in wrong or "device_id" in wrong else ValueError, what, lambda: plan_of(wrong))
    raises(ValueError, "CustomPolicy", lambda: plan_of(3))


@check
def what_a_policys_call_ignores_is_no_unit_and_each_unit_leaves_its_own_part(rank, ranks):
    """As FSDP1 does: the first of these raised "not in the tree" at the first unit."""
    for policy in (fsdp.wrap_class(Block, nn.Linear), wrap.ModuleWrapPolicy({Block, nn.Linear}),
                   fsdp.wrap_by_size(min_numel=20)):
        for leave in (["0"], ["1"], ["1.up"], ["1", "2.1"], ["2"]):
            torch.manual_seed(0)
            model = stack()
            mesh, ignored = init_device_mesh("cpu", (ranks,)), [model.get_submodule(name) for name in leave]
            expected = [name for name, _ in chosen_by_fsdp1(model, policy, ignored)] if not isinstance(
                policy, fsdp.WrapPolicy) else None
            plan = fsdp.plan_wrapping(model, policy, mesh=mesh, ignored_modules=(each for each in ignored))
            found = [unit.name for unit in plan.units]
            assert expected is None or found == [*expected, ""], (found, expected)
            listed = {name for unit in plan.units for name in unit.parameters}
            left = {name for name, _ in model.named_parameters() if any(name.startswith(each + ".") for each in leave)}
            assert listed == {name for name, _ in model.named_parameters()} - left, (leave, listed)
            fsdp.apply_wrapping(plan)
            sharded = {name for name, param in model.named_parameters() if isinstance(param, torch.distributed.tensor.DTensor)}
            assert sharded == listed, (leave, sharded, listed)
            model(batches_of(rank)[0]).square().mean().backward()


@check
def a_weight_that_an_ignored_module_shares_with_a_unit_is_ignored_there_too(rank, ranks):
    model = stack()
    model[2][1].weight = model[0].weight
    mesh = init_device_mesh("cpu", (ranks,))
    plan = fsdp.plan_wrapping(model, fsdp.wrap_class(nn.Linear), mesh=mesh, ignored_modules=[model[2][1]])
    assert "0.weight" not in [name for unit in plan.units for name in unit.parameters], str(plan)
    fsdp.apply_wrapping(plan)
    assert type(model[0].weight) is nn.Parameter and model[2][1].weight is model[0].weight
    model(batches_of(rank)[0]).sum().backward()


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
    raises(TypeError, "nonwrapped_numel", lambda: fsdp.plan_wrapping(stack(), lambda module: True))
    raises(TypeError, "reshard", lambda: fsdp.plan_wrapping(stack(), fsdp.wrap_class(Block), reshard=True))
    raises(TypeError, "'reshard'", lambda: fsdp.plan_wrapping(stack(), fsdp.WrapPolicy(
        wraps=lambda candidate, defaults: {"reshard": True} if candidate.name == "1" else None)))
    raises(ValueError, "not in the tree", lambda: fsdp.plan_wrapping(stack(), fsdp.wrap_class(Block),
                                                                     ignored_modules=[Block()]))
    whole = stack()
    raises(ValueError, "the root", lambda: fsdp.plan_wrapping(whole, fsdp.wrap_class(Block), ignored_modules=[whole]))
    sharded = stack()
    fsdp.fully_shard(sharded[1], mesh=mesh)
    raises(ValueError, "1 is sharded already", lambda: fsdp.plan_wrapping(sharded, fsdp.wrap_class(Block)))
