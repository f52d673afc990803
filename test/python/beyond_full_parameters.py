"""Checks of test_beyond_fsdp2.py: FullParameters."""

import copy

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp
from beyond_fsdp2 import batches_of, check, raises, whole
from beyond_options import Net
from programs.common import INPUTS
from programs.gradients import Branches


class Around(nn.Module):
    """An inner sharded module, one that is not, a parameter of its own, and a tie."""

    def __init__(self):
        super().__init__()
        self.inner, self.beside = Net(), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.beside.weight

    def forward(self, x):
        return self.tied(torch.relu(self.beside(self.inner(x)))) * self.scale


def twins(ranks, kind=Around, shard_inner=lambda model: (model.inner,), **options):
    torch.manual_seed(0)
    plain = kind()
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (ranks,))
    for module in (*shard_inner(sharded), sharded):
        fsdp.fully_shard(module, mesh=mesh, **options)
    return plain, sharded


def step(model, rank, at=0):
    loss = model(batches_of(rank)[at]).square().mean()
    loss.backward()
    return loss.detach()


def expect_sharded(model, before):
    found = dict(model.named_parameters())
    assert list(found) == list(before) and all(found[name] is before[name] for name in before), list(found)
    assert all(isinstance(parameter, DTensor) for parameter in found.values())


def expect_equal(found, expected):
    found, expected = dict(found), dict(expected)
    assert list(found) == list(expected), (list(found), list(expected))
    for name, value in expected.items():
        assert torch.equal(whole(found[name].detach()), value.detach()), name


@check
def a_backward_in_full_parameters_that_needs_none_leaves_what_is_to_be_reduced_for_the_next_one(rank, ranks):
    model, x = Branches(), torch.full((2, INPUTS), 1.0 + rank)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), ignored_params={model.kept}, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(x, True).sum().backward()
    loss = model(x, False).sum()
    loss.backward(retain_graph=True)
    model.set_requires_gradient_sync(True)
    with fsdp.FullParameters(model):
        loss.backward()
    assert model.drawn.grad is None
    model(x, False).sum().backward()
    assert torch.equal(whole(model.drawn.grad), torch.full((INPUTS,), sum(2.0 + 2 * each for each in range(ranks)) / ranks))


@check
def in_full_parameters_the_module_is_the_plain_one_and_afterwards_the_sharded_one(rank, ranks):
    plain, sharded = twins(ranks)
    for round_ in range(2):
        before = dict(sharded.named_parameters())
        with fsdp.FullParameters(sharded) as scope:
            assert scope is not None
            expect_equal(sharded.named_parameters(), plain.named_parameters())
            assert all(type(parameter) is nn.Parameter for parameter in sharded.parameters())
            assert sharded.tied.weight is sharded.beside.weight
            expect_equal(sharded.state_dict(), plain.state_dict())
            assert not any(isinstance(value, DTensor) for value in sharded.state_dict().values())
            assert all(parameter.grad is None for parameter in sharded.parameters())
            with torch.no_grad():
                assert torch.equal(sharded(batches_of(rank)[0]), plain(batches_of(rank)[0]))
                for model in (plain, sharded):
                    model.inner.first.weight[1] += 3
                    model.scale.mul_(2)
                    model.tied.weight[0, 0] = 7
            for model in (plain, sharded):
                model.inner.last.weight = nn.Parameter(model.inner.last.weight.detach() * 2)
        expect_sharded(sharded, before)
        expect_equal(sharded.named_parameters(), plain.named_parameters())
        expected = sum(plain(batches_of(each)[round_]).square().mean() for each in range(ranks)) / ranks
        plain.zero_grad()
        expected.backward()
        sharded.zero_grad()
        step(sharded, rank, round_)
        for (name, parameter), other in zip(sharded.named_parameters(), plain.parameters()):
            torch.testing.assert_close(whole(parameter.grad), other.grad, rtol=1e-5, atol=1e-6, msg=name)


@check
def full_parameters_are_in_their_own_dtype_under_mixed_precision(rank, ranks):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    plain, sharded = twins(ranks, mp_policy=policy)
    for after in (lambda: None, lambda: step(sharded, rank)):
        after()
        with fsdp.FullParameters(sharded), torch.no_grad():
            expect_equal(sharded.named_parameters(), plain.named_parameters())
            found = sharded(batches_of(rank)[0])
            assert found.dtype == torch.float32 and torch.equal(found, plain(batches_of(rank)[0]))
    assert sharded(batches_of(rank)[0]).dtype == torch.bfloat16


@check
def an_exception_in_full_parameters_keeps_what_was_written(rank, ranks):
    _, sharded = twins(ranks)
    before = dict(sharded.named_parameters())
    try:
        with fsdp.FullParameters(sharded), torch.no_grad():
            sharded.inner.last.bias.fill_(3)
            if rank == 1:
                raise KeyError("on one rank")
    except KeyError:
        pass
    expect_sharded(sharded, before)
    assert torch.equal(whole(sharded.inner.last.bias.detach()), torch.full((3,), 3.0))
    step(sharded, rank)


@check
def full_parameters_are_refused_inside_a_step_and_each_other(rank, ranks):
    _, sharded = twins(ranks)
    refused = 0

    def open_it(what):
        nonlocal refused
        raises(RuntimeError, what, lambda: fsdp.FullParameters(sharded).__enter__())
        refused += 1

    hook = sharded.beside.register_forward_hook(lambda *_: open_it("inside a forward"))
    loss = sharded(batches_of(rank)[0]).sum()
    hook.remove()
    loss.register_hook(lambda _: open_it("a backward"))
    open_it("backward")  # which has not run
    loss.backward()
    assert refused == 3
    before = dict(sharded.named_parameters())
    block = fsdp.FullParameters(sharded.inner)
    with block:
        open_it("another scope")
        raises(RuntimeError, "open already", block.__enter__)
        assert isinstance(sharded.scale, DTensor) and not isinstance(sharded.inner.first.weight, DTensor)
        raises(RuntimeError, "full parameters", lambda: sharded(batches_of(rank)[0]))
        raises(RuntimeError, "full parameters", lambda: sharded.inner(batches_of(rank)[0]))
        raises(RuntimeError, "FullParameters", lambda: sharded.to(torch.float64))
        sharded.reshard()
        sharded.inner.reshard()
        assert not isinstance(sharded.inner.first.weight, DTensor)
        with fsdp.FullParameters(sharded.beside):  # a part of another group
            assert not isinstance(sharded.tied.weight, DTensor) and isinstance(sharded.scale, DTensor)
    expect_sharded(sharded, before)
    step(sharded, rank)


@check
def full_parameters_without_recursion_writeback_or_on_the_first_rank_alone(rank, ranks):
    plain, sharded = twins(ranks)
    before = dict(sharded.named_parameters())
    with fsdp.FullParameters(sharded, recurse=False):
        assert isinstance(sharded.inner.first.weight, DTensor) and not isinstance(sharded.beside.weight, DTensor)
    with fsdp.FullParameters(sharded, writeback=False, offload_to_cpu=True), torch.no_grad():
        sharded.beside.weight.zero_()
        sharded.scale = nn.Parameter(torch.zeros(4))
    expect_sharded(sharded, before)
    expect_equal(sharded.named_parameters(), plain.named_parameters())
    with fsdp.FullParameters(sharded, writeback=False, rank0_only=True):
        if rank == 0:
            expect_equal(sharded.state_dict(), plain.state_dict())
        else:
            expect_sharded(sharded, before)
    with fsdp.FullParameters(nn.ModuleList([sharded, nn.Linear(2, 2)])):  # around it
        expect_equal(sharded.named_parameters(), plain.named_parameters())
    with fsdp.FullParameters(sharded):
        sharded.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    expect_equal(sharded.state_dict(), {name: value + 1 for name, value in plain.state_dict().items()})
    with fsdp.FullParameters(nn.Linear(2, 2)):
        pass


@check
def full_parameters_with_gradients(rank, ranks):
    plain, sharded = twins(ranks)
    step(sharded, rank)
    sum(plain(batches_of(each)[0]).square().mean() for each in range(ranks)).div(ranks).backward()
    with fsdp.FullParameters(sharded, with_grads=True), torch.no_grad():
        for (name, found), expected in zip(sharded.named_parameters(), plain.parameters()):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-6, msg=name)
        sharded.beside.weight.grad.fill_(2)
        sharded.scale.grad = None
    assert torch.equal(whole(sharded.beside.weight.grad), torch.full((3, 3), 2.0)) and sharded.scale.grad is None
    assert isinstance(sharded.inner.first.weight.grad, DTensor)
    step(sharded, rank, 1)


@check
def full_parameters_of_a_tensor_parallel_module_are_the_dtensors_there_were(rank, ranks):
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=None)})
    values = model[0].weight.full_tensor().detach().clone()
    fsdp.fully_shard(model, mesh=mesh["dp"])
    before = dict(model.named_parameters())
    with fsdp.FullParameters(model), torch.no_grad():
        assert model[0].weight.device_mesh.mesh_dim_names == ("tp",)
        assert torch.equal(model[0].weight.full_tensor(), values)
        model[0].weight.mul_(2)
    expect_sharded(model, before)
    assert torch.equal(whole(model[0].weight.detach()), values * 2)


@check
def wrong_arguments_of_full_parameters_change_nothing(rank, ranks):
    _, sharded = twins(ranks)
    before = dict(sharded.named_parameters())
    raises(TypeError, "nn.Module", lambda: fsdp.FullParameters([sharded]))
    raises(TypeError, "recurse", lambda: fsdp.FullParameters(sharded, recurse="no"))
    raises(ValueError, "writeback", lambda: fsdp.FullParameters(sharded, rank0_only=True).__enter__())
    with torch.device("meta"):
        on_meta = nn.Linear(4, 4)
    fsdp.fully_shard(on_meta, mesh=init_device_mesh("cpu", (ranks,)))
    raises(RuntimeError, "meta", lambda: fsdp.FullParameters(on_meta).__enter__())

    def wrong_sizes():
        with fsdp.FullParameters(sharded):
            sharded.beside.bias = nn.Parameter(torch.zeros(5))

    raises(ValueError, "sizes 3, found a replacement of sizes 5", wrong_sizes)
    expect_sharded(sharded, before)
    step(sharded, rank)
