"""Checks: deepcopy of sharded modules, parameters tied after sharding, functional calls with parameters of the caller's
own."""

import copy
import io
import pickle
from collections import OrderedDict

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, vmap

import fsdp
from beyond_fsdp2 import batches_of, check


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.out.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.tags = {"kept": [1, 2]}
        self.favourite = self.out.weight

    def forward(self, x):
        return self.out(self.norm(self.second(torch.relu(self.first(x)))))

    def encode(self, x):
        return self.first(x)


def plain_and_sharded(ranks, **options):
    torch.manual_seed(0)
    plain = Net()
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (ranks,))
    fsdp.fully_shard(sharded.first, mesh=mesh, **options)
    fsdp.fully_shard(sharded, mesh=mesh, **options)
    return plain, sharded


def step(plain, sharded, rank, ranks, index):
    """One of SGD; the plain model's BatchNorm sees one batch after the other, so it is compared in eval mode."""
    for model in (plain, sharded):
        model.eval()
        model.zero_grad()
    sum(plain(batches_of(each)[index]).square().mean() for each in range(ranks)).div(ranks).backward()
    sharded(batches_of(rank)[index]).square().mean().backward()
    for model in (plain, sharded):
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()


def expect_equal(plain, sharded):
    expected = plain.state_dict()
    for name, value in sharded.state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@check
def a_deep_copy_of_a_replicated_module_trains_on_its_own(rank, ranks):
    torch.manual_seed(0)
    plain, mesh = Net(), init_device_mesh("cpu", (ranks,))
    replicated = copy.deepcopy(plain)
    fsdp.replicate(replicated.first, mesh=mesh)
    fsdp.replicate(replicated, mesh=mesh)
    step(plain, replicated, rank, ranks, 0)
    plain_copy, copied = copy.deepcopy(plain), copy.deepcopy(replicated)
    assert isinstance(copied, fsdp.ReplicateModule) and isinstance(copied.first, fsdp.ReplicateModule)
    assert fsdp.replicate.state(copied) not in (None, fsdp.replicate.state(replicated))
    for index in range(1, 3):
        step(plain_copy, copied, rank, ranks, index)
    expect_equal(plain_copy, copied)
    expect_equal(plain, replicated)


@check
def a_deep_copy_of_both_kinds_in_one_tree_is_refused(rank, ranks):
    mesh, model = init_device_mesh("cpu", (ranks,)), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    fsdp.replicate(model[0], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    try:
        copy.deepcopy(model)
        raise AssertionError("it was copied")
    except NotImplementedError as error:
        assert "replicate" in str(error)
    model(batches_of(rank)[0]).sum().backward()


@check
def a_deep_copy_trains_on_its_own(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    calls = []
    sharded.first.register_forward_hook(lambda module, *_: calls.append(module))
    fsdp.register_fsdp_forward_method(sharded, "encode")
    for index in range(2):
        step(plain, sharded, rank, ranks, index)
    plain_copy, copied = copy.deepcopy(plain), copy.deepcopy(sharded)

    assert type(copied) is type(sharded) and isinstance(copied, fsdp.FSDPModule)
    assert copied.first is not sharded.first and isinstance(copied.first, fsdp.FSDPModule)
    assert copied.second.weight is copied.first.weight
    assert copied.favourite is copied.out.weight and copied.tags == sharded.tags and copied.tags is not sharded.tags
    assert fsdp.fully_shard.state(copied) is not fsdp.fully_shard.state(sharded)
    for (name, one), (other_name, other) in zip(copied.named_parameters(), sharded.named_parameters(), strict=True):
        assert name == other_name and one is not other and isinstance(one, DTensor)
        assert one.placements == other.placements and one.device_mesh == other.device_mesh
        assert one.requires_grad == other.requires_grad and one.grad is None
        assert torch.equal(one.to_local(), other.to_local())
        assert one.to_local().numel() == 0 or one.to_local().data_ptr() != other.to_local().data_ptr()

    expect_equal(plain, sharded)
    for index in range(3):
        step(plain_copy, copied, rank, ranks, index)
    expect_equal(plain_copy, copied)
    expect_equal(plain, sharded)
    step(plain, sharded, rank, ranks, 2)
    expect_equal(plain, sharded)
    expect_equal(plain_copy, copied)

    calls.clear()
    copied(batches_of(rank)[0])
    assert calls == [copied.first]
    x = batches_of(rank)[1]
    torch.testing.assert_close(copied.encode(x), plain_copy.encode(x), rtol=1e-5, atol=1e-6)


@check
def parameters_of_two_groups_that_are_tied_after_sharding_train_as_one(rank, ranks):
    """As libraries do it that shard an empty model, read its weights and tie them then."""
    for layers in (["first", "second"], ["first"], ["second"]):  # what is left is the root's
        torch.manual_seed(0)
        plain = nn.Sequential(OrderedDict(first=nn.Linear(6, 6), middle=nn.Tanh(), second=nn.Linear(6, 6)))
        sharded = copy.deepcopy(plain)
        for layer in layers:
            fsdp.fully_shard(sharded.get_submodule(layer), mesh=init_device_mesh("cpu", (ranks,)))
        fsdp.fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))
        optimizers = []
        for model in (plain, sharded):
            model.second.weight = model.first.weight
            optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.1))
            assert len(optimizers[-1].param_groups[0]["params"]) == 3
        for index in range(3):
            for _ in range(2):  # the second adds to the gradients of the first
                sum(plain(batches_of(each)[index]).square().mean() for each in range(ranks)).div(ranks).backward()
                sharded(batches_of(rank)[index]).square().mean().backward()
                torch.testing.assert_close(sharded.first.weight.grad.full_tensor(), plain.first.weight.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert sharded.second.weight is sharded.first.weight
            expect_equal(plain, sharded)


@check
def a_copy_averages_as_ema(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    averages = [
        torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        for model in (plain, sharded)
    ]
    for index in range(3):
        step(plain, sharded, rank, ranks, index)
        for average, model in zip(averages, (plain, sharded)):
            average.update_parameters(model)
    expect_equal(averages[0].module, averages[1].module)
    x = batches_of(rank)[0]
    with torch.no_grad():
        torch.testing.assert_close(averages[1](x), averages[0](x), rtol=1e-5, atol=1e-6)


@check
def copies_of_modules_around_and_inside(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    holder = copy.deepcopy(nn.Sequential(nn.ReLU(), sharded))
    expect_equal(plain, holder[1])
    x = batches_of(rank)[0].abs()
    torch.testing.assert_close(holder(x), plain(x), rtol=1e-5, atol=1e-6)
    other = plain_and_sharded(ranks)[1]
    other(x).sum().backward()
    again = copy.deepcopy(copy.deepcopy(other))
    assert again.first.weight.grad is None and other.first.weight.grad is not None
    expect_equal(plain, again)


@check
def a_copy_has_the_policies(rank, ranks):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharded = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    fsdp.fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=policy, reshard_after_forward=False)
    copied = copy.deepcopy(sharded)
    seen = []
    copied[2].register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    x = batches_of(rank)[0]
    torch.testing.assert_close(copied(x), sharded(x), rtol=0, atol=0)
    assert seen == [torch.bfloat16] and copied(x).dtype == torch.bfloat16
    assert not isinstance(copied[2].weight, DTensor)  # kept after forward


@check
def a_part_whose_parameters_belong_elsewhere_is_not_copied(rank, ranks):
    _, sharded = plain_and_sharded(ranks)
    # Its weight went to the module around both, as second has it, too.
    try:
        copy.deepcopy(sharded.first)
        raise AssertionError("copied without its owner")
    except ValueError as error:
        assert "clone that one" in str(error), error
    expect_equal(plain_and_sharded(ranks)[0], sharded)


@check
def pickle_is_refused(rank, ranks):
    _, sharded = plain_and_sharded(ranks)
    for dump in (lambda: pickle.dumps(sharded), lambda: torch.save(nn.Sequential(sharded), "/dev/null")):
        try:
            dump()
            raise AssertionError("pickled")
        except pickle.PicklingError as error:
            assert "state_dict" in str(error)
    assert copy.copy(sharded).first is sharded.first


@check
def functional_calls_use_what_they_are_given(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    plain.eval(), sharded.eval()
    x = batches_of(rank)[0]
    given = {"first.weight": torch.ones(6, 6), "out.weight": torch.ones(3, 6)}
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(functional_call(sharded, given, (x,)), functional_call(plain, given, (x,)))
            torch.testing.assert_close(sharded(x), plain(x))
    sharded.reshard()
    same = dict(sharded.named_parameters())
    functional_call(sharded, same, (x,)).square().mean().backward()
    expected = Net()
    expected.load_state_dict(plain.state_dict())
    sum(expected.eval()(batches_of(each)[0]).square().mean() for each in range(ranks)).div(ranks).backward()
    torch.testing.assert_close(sharded.out.weight.grad.full_tensor(), expected.out.weight.grad)


@check
def gradients_by_torch_func(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    plain.eval(), sharded.eval()
    x = batches_of(rank)[0]

    def loss(model):
        return lambda params, x: functional_call(model, params, (x.view(-1, 6),)).square().mean()

    def detached(model):
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def per_sample(model):
        return vmap(grad(loss(model)), in_dims=(None, 0))(detached(model), x)

    for of in (lambda model: grad(loss(model))(detached(model), x), per_sample):
        found = of(sharded)
        for name, expected in of(plain).items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=name)
    assert isinstance(sharded.out.weight, DTensor)


@check
def gradients_of_another_dtype_are_copied_and_saved(rank, ranks):
    """They lie behind one another in one buffer, and look as if each had memory of its own."""
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float64
    model(batches_of(rank)[0].view(-1, 6)).sum().backward()
    for parameter in model.parameters():
        copied = copy.deepcopy(parameter.grad)
        assert copied.dtype == torch.float64
        torch.testing.assert_close(copied.to_local(), parameter.grad.to_local())
        torch.save(parameter.grad, io.BytesIO())


@check
def a_parameter_whose_name_has_a_nul(rank, ranks):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("a", nn.Parameter(torch.ones(4)))
            self.register_parameter("a\0b", nn.Parameter(torch.ones(4)))

        def forward(self, x):
            return x * self.a + getattr(self, "a\0b")

    model = Odd()
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    model(torch.ones(4)).sum().backward()
    assert list(model._parameters) == ["a", "a\0b"]
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
