"""Checks: parameters read outside forward, by methods and functions that know nothing of sharding."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp
from beyond_fsdp2 import batches_of, check, train_both


class Methods(nn.Module):
    """Each method reads parameters of its own, of a module without its own fully_shard, and of one with it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.plain = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(5, 6))
        self.positions = nn.Parameter(torch.randn(1, 8, 6))
        self.table = nn.Embedding(7, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.plain(self.inner(x)) @ self.weight.t()

    def linear(self, x):
        return F.linear(x, self.weight)

    def of_a_sharded_module(self, x):
        return F.linear(x, self.inner[0].weight, self.inner[0].bias)

    def of_a_module_below(self, x):
        return self.plain(x)

    def part_of_a_sharded_module(self, x):
        return self.inner[2](x)

    def views(self, x):
        return (x + self.positions[0, :4]) @ self.weight.t()

    def parts(self, x):
        first, _, last = self.weight.split(2)
        return x @ torch.cat([first, last]).t()

    def arithmetic(self, x):
        return x @ (self.weight * 2 + 1).t()

    def scalar(self, x):
        return (x @ self.weight.t()).mean() * self.scale

    def embedding(self, x):
        return self.table(torch.tensor([1, 5, 1])) @ x.t()

    def indexed(self, x):
        return x @ self.weight[torch.tensor([3, 0])].t()

    def in_another_dtype(self, x):
        return x.double() @ self.weight.double().t()

    # DTensor has no such expand along a sharded dimension.
    def what_dtensor_cannot(self, x):
        return torch.cat([x, self.positions.expand(2, -1, -1)[1, :1]])

    def detached(self, x):
        return x @ self.weight.detach().t() + x @ self.weight.t()

    def made_without_autograd(self, x):
        with torch.no_grad():
            weight = self.weight.t()
        return x @ weight + x @ self.weight.t()

    def around_forward(self, x):
        return self(x) + x @ self.weight.t()


METHODS = [name for name, value in vars(Methods).items() if callable(value) and not name.startswith("_")]


def shard(model, mesh, **options):
    fsdp.fully_shard(model.inner, mesh=mesh, **options)
    fsdp.fully_shard(model, mesh=mesh, **options)


def plain_and_sharded(ranks, **options):
    torch.manual_seed(0)
    plain = Methods()
    sharded = copy.deepcopy(plain)
    shard(sharded, init_device_mesh("cpu", (ranks,)), **options)
    return plain, sharded


def compare_gradients(plain, sharded):
    for (name, expected), found in zip(plain.named_parameters(), sharded.parameters()):
        assert isinstance(found, DTensor), name
        if expected.grad is None:
            assert found.grad is None, name
            continue
        assert isinstance(found.grad, DTensor) and found.grad.placements == found.placements, name
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-6, msg=name)


def run(model, name, x, is_recomputed):
    method = getattr(model, name)
    y = checkpoint(method, x, use_reentrant=False) if is_recomputed else method(x)
    assert not isinstance(y, DTensor)
    return y.square().mean()


@check
def methods_other_than_forward(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    batches = [batches_of(each)[0] for each in range(ranks)]
    for name in METHODS:
        for is_recomputed in (False, False, True):
            plain.zero_grad()
            sharded.zero_grad()
            losses = [run(plain, name, x, is_recomputed) for x in batches]
            (sum(losses) / ranks).backward()
            loss = run(sharded, name, batches[rank], is_recomputed)
            loss.backward()
            torch.testing.assert_close(loss, losses[rank], msg=name)
            compare_gradients(plain, sharded)
        with torch.no_grad():
            torch.testing.assert_close(run(sharded, name, batches[rank], False), losses[rank], msg=name)
        # After an evaluation the root shows plain tensors, whose gradients zero_grad would look for, as in FSDP2.
        sharded.reshard()


@check
def training_by_methods(rank, ranks):
    for name in ("views", "of_a_sharded_module", "around_forward"):
        train_both(Methods, shard, rank, ranks, loss_of=lambda model, x, name=name: run(model, name, x, False))


@check
def gradients_of_methods_add_up(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    for step in range(2):
        x = [batches_of(each)[step] for each in range(ranks)]
        (sum(run(plain, "linear", each, False) + run(plain, "forward", each, False) for each in x) / ranks).backward()
        (run(sharded, "linear", x[rank], False) + run(sharded, "forward", x[rank], False)).backward()
        compare_gradients(plain, sharded)


@check
def a_function_that_is_given_parameters(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    x = batches_of(rank)[0]
    torch.testing.assert_close(F.linear(x, sharded.weight), F.linear(x, plain.weight))
    assert torch.equal(sharded.weight, plain.weight.detach())
    assert (sharded.weight - plain.weight.detach()).abs().max() == 0


@check
def operators_on_parameters_alone_stay_dtensors(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    for total in ((sharded.weight * 2).sum(), sharded.weight.norm(), sharded.weight @ sharded.inner[0].weight):
        assert isinstance(total, DTensor)
    penalty = sharded.weight.square().sum().full_tensor()
    torch.testing.assert_close(penalty, plain.weight.square().sum())
    assert torch.equal(sharded.weight.full_tensor(), plain.weight)
    # A copy, and what is made from it, are the user's own.
    with torch.no_grad():
        copied = sharded.weight.clone()
        copied.mul_(3)
    assert torch.equal(copied.full_tensor(), plain.weight * 3)
    try:
        copied + plain.weight
        raise AssertionError("a DTensor of the user's own took an ordinary tensor")
    except RuntimeError as error:
        assert "mixed" in str(error)


@check
def what_is_computed_from_old_values_is_not_mixed_with_new_ones(rank, ranks):
    _, sharded = plain_and_sharded(ranks)
    doubled = sharded.weight * 2
    view = sharded.weight.t()
    with torch.no_grad():
        sharded.weight.fill_(1.0)
    ones = torch.ones(4, 6)
    torch.testing.assert_close(ones @ view, torch.full((4, 5), 6.0))
    try:
        ones @ doubled.t()
        raise AssertionError("values of two moments were taken for one")
    except RuntimeError as error:
        assert "mixed" in str(error)


@check
def whole_values_written_through_a_parameter(rank, ranks):
    _, sharded = plain_and_sharded(ranks)
    values = torch.arange(30.0).view(5, 6)
    with torch.no_grad():
        assert sharded.weight.copy_(values) is sharded.weight
        sharded.weight *= torch.full((5, 6), 2.0)
        sharded.weight[torch.tensor([1])] = -1.0
    expected = values * 2
    expected[1] = -1
    assert isinstance(sharded.weight, DTensor)
    assert torch.equal(sharded.weight.full_tensor(), expected)
    x = batches_of(rank)[0]
    torch.testing.assert_close(sharded.linear(x), x @ expected.t())


@check
def a_plain_state_dict_is_loaded(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    values = {key: value + 1 for key, value in plain.state_dict().items()}
    sharded.load_state_dict(values)
    for name, parameter in sharded.named_parameters():
        assert torch.equal(parameter.full_tensor(), values[name]), name


@check
def mixed_precision_in_methods(rank, ranks):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, sharded = plain_and_sharded(ranks, mp_policy=policy)
    x = batches_of(rank)[0]
    y = sharded.linear(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, F.linear(x.bfloat16(), plain.weight.bfloat16()))
    y.float().square().mean().backward()
    assert sharded.weight.grad.dtype == torch.float32


@check
def requires_grad_toggled_before_a_method(rank, ranks):
    _, sharded = plain_and_sharded(ranks)
    sharded.weight.requires_grad_(False)
    assert not sharded.linear(batches_of(rank)[0]).requires_grad
    sharded.weight.requires_grad_(True)
    sharded.linear(batches_of(rank)[0]).square().mean().backward()
    assert sharded.weight.grad is not None


@check
def what_a_user_asks_for_is_shown_though_others_have_put_back_something_else(rank, ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in (*model, model):
        fsdp.fully_shard(layer, reshard_after_forward=True)
    x = torch.ones(2, 6)
    model[0].unshard()
    with torch.no_grad():
        torch.func.functional_call(model, {"0.weight": torch.ones(6, 6)}, (x,))  # puts back what was there before
    model[0].reshard()
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

    with torch.no_grad():
        torch.func.functional_call(model, {"1.weight": torch.ones(6, 6)}, (x,))
    model[1].unshard()
    assert not any(isinstance(parameter, DTensor) for parameter in model[1].parameters())
    model[1].reshard()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
