"""Checks of test_beyond_fsdp2.py: what MixedPrecisionPolicy has beyond torch's, as FSDP1 has it."""

import copy
import os
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, wrap

import fsdp
from beyond_fsdp2 import batches_of, check, raises, whole

HALF = torch.bfloat16


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Normed(nn.Module):
    names_inputs = True

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), RmsNorm()
        self.attention, self.last = nn.MultiheadAttention(6, 2), nn.Linear(6, 6)
        self.register_buffer("shift", torch.full((6,), 1.5))

    def forward(self, x):
        x = self.norm(self.first(x))
        attended = self.attention(query=x, key=x, value=x) if self.names_inputs else self.attention(x, x, x)
        return self.last(x + attended[0]) + self.shift


def in_half(layer, x):
    return F.linear(x, layer.weight.to(HALF), layer.bias.to(HALF))


def by_hand(model, x):
    """Linear layers in bfloat16; the norm and the attention, with its out_proj, in float32."""
    x = model.norm(in_half(model.first, x.to(HALF)).float()).to(HALF)
    wide = x.float()
    return in_half(model.last, x + model.attention(wide, wide, wide)[0].to(HALF)) + model.shift


def made():
    torch.manual_seed(0)
    return Normed()


def is_exempt(module):
    return isinstance(module, (RmsNorm, nn.MultiheadAttention))


def expect_step_by_hand(model, rank, ranks, what):
    plain = made()
    expected = [by_hand(plain, batches_of(each)[0]) for each in range(ranks)]
    sum(output.float().square().mean() for output in expected).div(ranks).backward()
    for _ in range(2):
        model.zero_grad()
        output = model(batches_of(rank)[0])
        assert output.dtype == expected[rank].dtype and torch.equal(output, expected[rank]), (what, output, expected[rank])
        output.float().square().mean().backward()
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters()):
            found = whole(parameter.grad)
            assert found.dtype == torch.float32, name
            torch.testing.assert_close(found, other.grad, rtol=2e-2, atol=1e-3, msg=lambda text: f"{what}: {name}: {text}")


@check
def exempt_modules_with_all_below_them_compute_in_full_precision(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32, is_exempt=is_exempt)

    def shard_whole(model):
        fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)

    def shard_each(model):
        for each in (model.norm, model.attention, model.first, model):
            fsdp.fully_shard(each, mesh=mesh, mp_policy=policy)

    def shard_lists(model):
        fsdp.fully_shard([model.first, model.norm], mesh=mesh, mp_policy=policy)
        fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)

    def shard_by_policy(model):
        fsdp.apply_wrapping(fsdp.plan_wrapping(model, fsdp.wrap_class(nn.Linear), mesh=mesh, mp_policy=policy))

    for shard in (shard_whole, shard_each, shard_lists, shard_by_policy):
        model = made()
        shard(model)
        expect_step_by_hand(model, rank, ranks, shard.__name__)
        exempt = {name for group in fsdp.report(model).groups for name in group.exempt_parameters}
        assert exempt == {name for name, _ in model.named_parameters() if name.startswith(("norm.", "attention."))}, exempt
        assert "exempt from mixed precision: " in str(fsdp.report(model))
        expect_step_by_hand(copy.deepcopy(model), rank, ranks, f"a copy of {shard.__name__}")


@check
def exempt_modules_train_as_with_fsdp1(rank, ranks):
    mesh, exempt = init_device_mesh("cpu", (ranks,)), (RmsNorm, nn.MultiheadAttention)
    chosen = wrap.ModuleWrapPolicy({nn.Conv2d})  # none
    theirs = FullyShardedDataParallel(
        made(), auto_wrap_policy=chosen, use_orig_params=True, device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(param_dtype=HALF, reduce_dtype=torch.float32, _module_classes_to_ignore=exempt))
    theirs.module.names_inputs = False  # which FSDP1 does not cast
    ours = made()
    policy = fsdp.MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32, is_exempt=is_exempt)
    plan = fsdp.plan_wrapping(ours, chosen, mesh=mesh, mp_policy=policy)
    fsdp.apply_wrapping(plan)
    found = sorted(name.replace("_fsdp_wrapped_module.", "") for name, module in theirs.named_modules()
                   if isinstance(module, FullyShardedDataParallel))
    assert [name.rstrip(".") for name in found] == sorted(unit.name for unit in plan.units), (found, str(plan))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for batch in batches_of(rank):
        outputs = [model(batch) for model in (ours, theirs)]
        assert outputs[0].dtype == outputs[1].dtype and torch.equal(*outputs), outputs
        for output, optimizer in zip(outputs, optimizers):
            optimizer.zero_grad()
            output.float().square().mean().backward()
            optimizer.step()


@check
def a_policy_makes_units_of_what_is_exempt_as_fsdp1_does(rank, ranks):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=HALF, is_exempt=is_exempt)
    for chosen, names in ((fsdp.wrap_class(nn.Conv2d), ["norm", "attention", ""]),
                          (fsdp.wrap_class(nn.Linear), ["first", "norm", "attention.out_proj", "attention", "last", ""]),
                          (fsdp.wrap_by_size(min_numel=10_000), ["norm", "attention", ""])):
        plan = fsdp.plan_wrapping(made(), chosen, mp_policy=policy)
        assert [unit.name for unit in plan.units] == names, str(plan)
        exempt = {unit.name for unit in plan.units if unit.is_exempt}
        assert exempt == {name for name in names if name.startswith(("norm", "att"))}, exempt
        assert str(plan).count("note: exempt from mixed precision") == len(exempt), str(plan)
    plan = fsdp.plan_wrapping(made(), fsdp.wrap_class(nn.Conv2d), mp_policy=fsdp.MixedPrecisionPolicy(is_exempt=is_exempt))
    assert [unit.name for unit in plan.units] == [""], str(plan)  # there is nothing to be exempt from


@check
def in_eval_mode_all_is_in_its_own_dtype_where_the_policy_or_fsdp1s_variable_asks_for_it(rank, ranks):
    mesh, x = init_device_mesh("cpu", (ranks,)), batches_of(rank)[0]
    for by_variable in (False, True):
        policy = fsdp.MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32, buffer_dtype=HALF, is_exempt=is_exempt,
                                           full_precision_in_eval=not by_variable)
        model, plain = made(), made()
        with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"} if by_variable else {}):
            for each in (model.attention, model.first, model):
                fsdp.fully_shard(each, mesh=mesh, mp_policy=policy)
        for grad_mode in (torch.no_grad, torch.enable_grad):
            model.eval()
            with grad_mode():
                output = model(x)
            assert output.dtype == torch.float32 and model.shift.dtype == torch.float32, (output.dtype, model.shift.dtype)
            torch.testing.assert_close(output, plain.eval()(x))
            if output.requires_grad:
                output.sum().backward()
                model.zero_grad()
            model.train()
            output = model(x)
            assert output.dtype == HALF and model.shift.dtype == HALF, (output.dtype, model.shift.dtype)
            output.sum().backward()
            model.zero_grad()
        raised = model(x)  # a step begins in training mode
        model.first.training = False
        raises(RuntimeError, "full_precision_in_eval", lambda: model(x))
        model.first.training = True
        raised.sum().backward()
        model.reset_iter_state()


@check
def buffers_take_buffer_dtype_and_are_saved_in_their_own(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    model, plain = nn.Sequential(made(), nn.BatchNorm1d(6)), nn.Sequential(made(), nn.BatchNorm1d(6))
    fsdp.fully_shard(model, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(buffer_dtype=torch.float64))
    dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
    expected = {"0.shift": torch.float64, "1.running_mean": torch.float64, "1.running_var": torch.float64,
                "1.num_batches_tracked": torch.int64}
    assert dtypes == expected, dtypes
    for each in (model, copy.deepcopy(model)):
        saved = each.state_dict()
        for name, buffer in plain.named_buffers():
            assert saved[name].dtype == buffer.dtype and torch.equal(saved[name], buffer), name
    model.load_state_dict(saved)
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == expected
    for convert, own in ((model.bfloat16, torch.bfloat16), (model.float, torch.float32)):
        convert()
        assert {name: buffer.dtype for name, buffer in model.named_buffers()} == expected
        found = {name: model.state_dict()[name].dtype for name in expected}
        assert found == {name: own if "num" not in name else torch.int64 for name in expected}, found


@check
def buffers_of_exempt_modules_keep_their_dtype(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    fsdp.fully_shard(model, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(
        param_dtype=HALF, buffer_dtype=HALF, is_exempt=lambda module: isinstance(module, nn.BatchNorm1d)))
    for _ in range(2):
        assert model(batches_of(rank)[0]).dtype == HALF and model[1].running_mean.dtype == torch.float32
        model.to(torch.float32)


@check
def wrong_policies_of_fsdp1s_kind_are_refused(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    for wrong, kind, what in ((dict(buffer_dtype="float32"), TypeError, "mp_policy.buffer_dtype"),
                              (dict(is_exempt=lambda module: "yes", param_dtype=HALF), TypeError, "is_exempt"),
                              (dict(is_exempt=3), TypeError, "mp_policy.is_exempt"),
                              (dict(full_precision_in_eval="yes"), TypeError, "full_precision_in_eval")):
        model = made()
        raises(kind, what, lambda: fsdp.fully_shard(model, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**wrong)))
        assert type(model) is Normed and not model._forward_pre_hooks and model.shift.dtype == torch.float32, wrong
