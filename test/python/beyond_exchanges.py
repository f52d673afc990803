"""Checks: whatever a program puts in the place of parameters of a sharded model, the model then is the plain one that had the
same done to it, or says on all ranks what was put there."""

import copy

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrize

import fsdp
from beyond_fsdp2 import batches_of, check, whole

WIDTH = 6
LAYERS = ("a", "b", "c")


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        for name in LAYERS:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def make(is_sharded, units, ranks):
    torch.manual_seed(0)
    model = Chain()
    if is_sharded:
        for name in units:
            fsdp.fully_shard(model.get_submodule(name), mesh=init_device_mesh("cpu", (ranks,)))
        fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model


class Pair:
    """A plain model and a sharded one, and for each an optimizer from before and one from after a change."""

    def __init__(self, units, rank, ranks):
        self.rank, self.ranks, self.units = rank, ranks, units
        self.plain, self.sharded = make(False, units, ranks), make(True, units, ranks)
        self.losses = 0
        self.take_optimizers()

    def both(self):
        return (self.plain, self.sharded)

    def take_optimizers(self):
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in self.both()]

    def backward(self):
        index, self.losses = self.losses % 3, self.losses + 1
        sum(self.plain(batches_of(each)[index]).square().mean() for each in range(self.ranks)).div(self.ranks).backward()
        self.sharded(batches_of(self.rank)[index]).square().mean().backward()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def drop_gradients(self):
        for optimizer, model in zip(self.optimizers, self.both()):
            optimizer.zero_grad()
            model.zero_grad()

    def change(self, way):
        for model, is_sharded in zip(self.both(), (False, True)):
            way(model, lambda: make(is_sharded, self.units, self.ranks))

    def expect_equal(self, what):
        expected, found = dict(self.plain.named_parameters()), dict(self.sharded.named_parameters())
        assert list(found) == list(expected), f"{what}: {list(found)}, expected {list(expected)}"
        for name, parameter in found.items():
            close(parameter.detach(), expected[name].detach(), f"{what}, {name}")
            assert (parameter.grad is None) == (expected[name].grad is None), f"{what}, gradient of {name}: {parameter.grad}"
            if parameter.grad is not None:
                close(parameter.grad, expected[name].grad, f"{what}, gradient of {name}")
        for name, value in self.sharded.state_dict().items():
            close(value, self.plain.state_dict()[name], f"{what}, {name} in the state dict")


def close(found, expected, what):
    torch.testing.assert_close(whole(found), expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")


def evaluate(model):
    with torch.no_grad():
        model(batches_of(0)[0])
    if isinstance(model, fsdp.FSDPModule):
        model.reshard()  # it shows plain tensors until then


def scaled(parameter, by=0.5):
    return nn.Parameter(parameter.detach() * by)


WAYS = {}


def way(function):
    WAYS[function.__name__] = function
    return function


@way
def tied(model, another):
    model.b.weight = model.a.weight


@way
def tied_with_an_earlier_one(model, another):
    model.a.weight = model.c.weight


@way
def all_tied(model, another):
    model.b.weight = model.c.weight = model.a.weight
    model.b.bias = model.c.bias = model.a.bias


@way
def swapped(model, another):
    model.a.weight, model.b.weight = model.b.weight, model.a.weight


@way
def rotated(model, another):
    model.a.weight, model.b.weight, model.c.weight = model.c.weight, model.a.weight, model.b.weight


@way
def swapped_and_back(model, another):
    swapped(model, another)
    evaluate(model)
    swapped(model, another)


@way
def swapped_while_gathered(model, another):
    with torch.no_grad():
        model(batches_of(0)[0])
    swapped(model, another)
    evaluate(model)


@way
def another_parameter(model, another):
    model.a.weight = scaled(model.a.weight)


@way
def a_frozen_parameter(model, another):
    model.a.weight = nn.Parameter(model.a.weight.detach() * 2, requires_grad=False)


@way
def another_for_the_time_of_an_evaluation(model, another):
    own = model.a.weight
    model.a.weight = scaled(own)
    evaluate(model)
    model.a.weight = own


@way
def written_once_it_is_nobodys(model, another):
    own = model.a.weight
    model.a.weight = scaled(own)
    evaluate(model)
    with torch.no_grad():
        own.fill_(7)
    assert torch.equal(whole(own.detach()), torch.full((WIDTH, WIDTH), 7.0))


@way
def another_models_parameter(model, another):
    model.a.weight = another().b.weight


@way
def deleted_and_registered(model, another):
    own = model.a.weight
    del model.a.weight
    model.a.register_parameter("weight", scaled(own))


@way
def written_to_the_table(model, another):
    model.a._parameters["weight"] = scaled(model.a.weight)


@way
def no_bias(model, another):
    model.b.bias = None


@way
def tied_then_untied(model, another):
    own = model.b.weight
    model.b.weight = model.a.weight
    evaluate(model)
    model.b.weight = own


@way
def own_state_assigned(model, another):
    model.load_state_dict(model.state_dict(), assign=True)


@way
def own_state_assigned_swapped(model, another):
    state = model.state_dict()
    state["a.weight"], state["b.weight"] = state["b.weight"], state["a.weight"]
    state["b.bias"], state["c.bias"] = state["c.bias"], state["b.bias"]
    model.load_state_dict(state, assign=True)


@way
def own_parameters_assigned_swapped(model, another):
    state = model.state_dict(keep_vars=True)
    state["a.weight"], state["b.weight"] = state["b.weight"], state["a.weight"]
    model.load_state_dict(state, assign=True)


@way
def one_value_assigned_to_two(model, another):
    state = model.state_dict()
    state["a.weight"], state["b.weight"] = state["c.weight"].clone(), state["c.weight"].clone()
    model.load_state_dict(state, assign=True)


@way
def another_models_state_assigned(model, another):
    model.load_state_dict({name: value * 0.5 for name, value in another().state_dict().items()}, assign=True)


@way
def another_models_own_state_assigned(model, another):
    model.load_state_dict(another().state_dict(), assign=True)


@way
def a_part_of_a_state_assigned(model, another):
    model.load_state_dict({"b.weight": model.state_dict()["c.weight"] * 2}, assign=True, strict=False)


@way
def a_state_put_back(model, another):
    kept = model.state_dict()
    model.load_state_dict({name: value * 0.5 for name, value in kept.items()}, assign=True)
    evaluate(model)
    model.load_state_dict(kept, assign=True)


@way
def loaded_by_swapping_tensors(model, another):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        model.to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@way
def swapped_and_converted(model, another):
    swapped(model, another)
    model.to(torch.float64).to(torch.float32)


@way
def tied_and_converted(model, another):
    tied(model, another)
    model.to(torch.float64).to(torch.float32)


@way
def modules_swapped(model, another):
    model.a, model.b = model.b, model.a


@way
def a_module_in_two_places(model, another):
    model.c = model.a


UNITS = {"one group": (), "a group each": LAYERS, "one in the root's": LAYERS[:2]}


def before_the_first_forward(pair, way):
    pair.change(way)
    pair.take_optimizers()


def between_steps(pair, way):
    pair.backward()
    pair.step()
    pair.drop_gradients()
    pair.change(way)
    pair.take_optimizers()


def with_the_optimizer_from_before(pair, way):
    pair.backward()
    pair.step()
    pair.drop_gradients()
    pair.change(way)


def between_backward_and_step(pair, way):
    pair.backward()
    pair.change(way)
    pair.expect_equal("after the change")
    if "assigned" in way.__name__ or "state" in way.__name__:
        # The plain model's new parameters have the memory of the old ones, which its optimizer from before still steps.
        pair.take_optimizers()


@check
def whatever_is_put_in_the_place_of_parameters_a_sharded_model_goes_on_as_the_plain_one(rank, ranks):
    wrong = []
    times = (before_the_first_forward, between_steps, with_the_optimizer_from_before, between_backward_and_step)
    for index, way in enumerate(WAYS.values()):
        for at, units in enumerate(UNITS):
            for when in times[(index + at) % 2::2]:
                pair, what = Pair(UNITS[units], rank, ranks), f"{way.__name__}, {units}, {when.__name__}"
                try:
                    when(pair, way)
                    for step in range(3):
                        pair.backward()
                        pair.expect_equal(f"step {step}")
                        pair.step()
                        pair.expect_equal(f"behind step {step}")
                        if step != 1:  # once the gradients of two backwards add up
                            pair.drop_gradients()
                except Exception as error:
                    wrong.append(f"{what}: {type(error).__name__}: {str(error)[:400]}")
    assert not wrong, "\n".join(wrong)


def copied(pair):
    for model in pair.both():
        yield copy.deepcopy(model)


def expect_same_values(found, expected, what):
    found, expected = dict(found), dict(expected)
    assert list(found) == list(expected), f"{what}: {list(found)}, expected {list(expected)}"
    for name, value in found.items():
        close(value.detach(), expected[name].detach(), f"{what}, {name}")


def copy_it(pair):
    plain, sharded = copied(pair)
    expect_same_values(sharded.named_parameters(), plain.named_parameters(), "the copy")
    with torch.no_grad():
        close(sharded(batches_of(0)[0]), plain(batches_of(0)[0]), "the copy's forward")
        for parameter in sharded.parameters():
            parameter.fill_(7)


def show_it_whole(pair):
    with fsdp.FullParameters(pair.sharded):
        expect_same_values(pair.sharded.named_parameters(), pair.plain.named_parameters(), "shown whole")
        with torch.no_grad():
            for model in pair.both():
                for parameter in model.parameters():
                    parameter.mul_(2)


def show_a_part_whole(pair):
    with fsdp.FullParameters(pair.sharded.b):
        expect_same_values(pair.sharded.b.named_parameters(), pair.plain.b.named_parameters(), "a part, shown whole")


def put_it_in_order(pair):
    shards = fsdp.local_shards(pair.sharded)
    with torch.no_grad():
        for shard in shards:
            shard.mul_(3)
        for parameter in pair.plain.parameters():
            parameter.mul_(3)


LOOKS = (copy_it, show_it_whole, show_a_part_whole, put_it_in_order)


@check
def copies_full_parameters_and_local_shards_directly_behind_an_exchange_see_it(rank, ranks):
    wrong = []
    ways = [swapped, rotated, another_parameter, another_models_parameter, own_state_assigned, own_state_assigned_swapped,
            own_parameters_assigned_swapped, another_models_state_assigned, tied]
    for way in ways:
        for look in LOOKS:
            for units in UNITS:
                for has_stepped in (False, True):
                    if way is tied and look is show_it_whole:
                        continue  # each place has a tensor of its own then
                    pair, what = Pair(UNITS[units], rank, ranks), f"{way.__name__}, {look.__name__}, {units}, {has_stepped}"
                    try:
                        if has_stepped:
                            pair.backward()
                            pair.step()
                            pair.drop_gradients()
                        pair.change(way)
                        look(pair)
                        pair.expect_equal("behind the look")
                        pair.backward()
                        pair.expect_equal("behind a step")
                    except Exception as error:
                        wrong.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)


@check
def functional_calls_with_another_models_parameters_leave_those_of_the_model(rank, ranks):
    for given in (lambda model, another: dict(another.named_parameters()),
                  lambda model, another: {name: nn.Parameter(whole(value.detach()))
                                          for name, value in another.named_parameters()},
                  lambda model, another: {"a.weight": model.b.weight, "b.weight": model.a.weight}):
        for units in UNITS.values():
            pair = Pair(units, rank, ranks)
            another = [make(False, units, ranks), make(True, units, ranks)]
            for each in another:
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter.mul_(0.5)
            for _ in range(2):
                with torch.no_grad():
                    expected, found = (torch.func.functional_call(model, given(model, other), (batches_of(rank)[0],))
                                       for model, other in zip(pair.both(), another))
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
                pair.backward()
                pair.expect_equal("after a functional call")
                pair.step()
                pair.drop_gradients()


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


@check
def a_parametrization_of_a_sharded_parameter_is_the_plain_models_or_refused(rank, ranks):
    for units in UNITS.values():
        pair = Pair(units, rank, ranks)
        for model in pair.both():
            parametrize.register_parametrization(model.a, "weight", Symmetric(), unsafe=True)
        pair.take_optimizers()
        pair.backward()
        pair.expect_equal("parametrized")
