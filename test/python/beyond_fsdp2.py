"""The checks of test_beyond_fsdp2.py: functions (rank, ranks) that run on every rank."""

import copy
import datetime
import gc
import threading
import time
import weakref

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def batches_of(rank, steps=3, width=6):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, width, generator=generator) for _ in range(steps)]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def raises(kind, what, call):
    try:
        call()
    except kind as error:
        assert what in str(error), error
        return error
    raise AssertionError(f"no {kind} with {what!r}")


def train_both(make, shard, rank, ranks, steps=3, loss_of=lambda model, x: model(x).square().mean()):
    """Trains the sharded model beside the plain one and compares weights after every step."""
    torch.manual_seed(0)
    plain = make()
    sharded = copy.deepcopy(plain)
    shard(sharded, init_device_mesh("cpu", (ranks,)))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, sharded)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # The plain model: the mean over the ranks' batches.
        sum(loss_of(plain, batches_of(each)[step]) for each in range(ranks)).div(ranks).backward()
        loss_of(sharded, batches_of(rank)[step]).backward()
        for optimizer in optimizers:
            optimizer.step()
        expected = dict(plain.named_parameters())
        for name, parameter in sharded.named_parameters():
            found = whole(parameter.detach())
            torch.testing.assert_close(found, expected[name].detach(), rtol=1e-5, atol=1e-6, msg=f"{name}, step {step}")
    return sharded


def beside(plain, ranks):
    """A sharded copy."""
    sharded = copy.deepcopy(plain)
    return fsdp.fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.linear(x) * self.scale


@check
def a_parameter_without_dimensions(rank, ranks):
    model = train_both(Scaled, lambda m, mesh: fsdp.fully_shard(m, mesh=mesh), rank, ranks)
    assert isinstance(model.scale, DTensor) and model.scale.shape == ()


@check
def several_dtypes_in_one_group(rank, ranks):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow = nn.Linear(6, 6)
            self.wide = nn.Linear(6, 6, dtype=torch.float64)

        def forward(self, x):
            return self.wide(self.narrow(x).double())

    train_both(Mixed, lambda m, mesh: fsdp.fully_shard(m, mesh=mesh), rank, ranks)


@check
def parameters_tied_across_groups(rank, ranks):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    def shard(model, mesh):
        fsdp.fully_shard(model.first, mesh=mesh)
        fsdp.fully_shard(model.second, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)

    model = train_both(Tied, shard, rank, ranks)
    assert model.first.weight is model.second.weight


@check
def an_uneven_dimension_behind_the_first(rank, ranks):
    from torch.distributed.tensor import Shard

    train_both(lambda: nn.Linear(6, 5), lambda m, mesh: fsdp.fully_shard(
        m, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1)), rank, ranks)


@check
def a_divide_factor_on_gloo(rank, ranks):
    torch.manual_seed(0)
    plain = nn.Linear(6, 3)
    model = beside(plain, ranks)
    model.set_gradient_divide_factor(5.0)
    sum(plain(batches_of(each)[0]).square().mean() for each in range(ranks)).div(5.0).backward()
    model(batches_of(rank)[0]).square().mean().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad, rtol=1e-5, atol=1e-6)


@check
def a_view_of_an_output_changed_in_place(rank, ranks):
    def loss_of(model, x):
        y = model(x)
        y[0].mul_(2)
        return y.square().mean()

    train_both(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)),
               lambda m, mesh: [fsdp.fully_shard(each, mesh=mesh) for each in (*m, m)], rank, ranks, loss_of=loss_of)


@check
def a_view_of_a_released_parameter_faults_in(rank, ranks):
    torch.manual_seed(0)
    plain = nn.Linear(6, 3)
    model = beside(plain, ranks)
    model.unshard()
    view = model.weight[1]
    model.reshard()
    torch.testing.assert_close(view.detach() + 0, plain.weight[1].detach())


@check
def a_group_of_another_kind_is_told_in_one_error(rank, ranks):
    raised = None
    try:
        fsdp.fully_shard(nn.Linear(6, 3), mesh=init_device_mesh("cpu", (ranks,)), reshard_after_forward=7)
    except ValueError as error:
        raised = str(error)
    assert raised is not None and "7" in raised, raised


@check
def other_python_threads_run_while_a_collective_waits(rank, ranks):
    model = nn.Linear(6, 3)
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    model(batches_of(rank)[0]).sum().backward()  # connections are made
    store, ticks, is_inside, stop = dist.distributed_c10d._get_default_store(), 0, threading.Event(), threading.Event()

    def tick():
        nonlocal ticks
        while not stop.is_set():
            time.sleep(0.01)
            ticks += is_inside.is_set()
            if ticks == 20:
                store.set(f"rank {rank} ticks", "")

    thread = threading.Thread(target=tick)
    thread.start()
    if rank == 0:  # the others wait for this rank inside their all-gather, until their threads have run
        store.wait([f"rank {other} ticks" for other in range(1, ranks)], datetime.timedelta(seconds=60))
    is_inside.set()
    model(batches_of(rank)[0]).sum().backward()
    stop.set()
    thread.join()


@check
def an_optimizer_in_backward(rank, ranks):
    model = nn.Linear(6, 3)
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    called = []
    model.weight.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter.grad is not None))
    model(batches_of(rank)[0]).sum().backward()
    assert called == [True], called


class Event:
    """Stands for a recorded torch.Event, which needs an accelerator."""

    def __init__(self):
        self.waits = 0

    def wait(self, stream=None):
        self.waits += 1


@check
def the_next_forward_waits_for_an_event_behind_the_optimizer(rank, ranks):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    for each in (*model, model):
        fsdp.fully_shard(each, mesh=init_device_mesh("cpu", (ranks,)))
    x = batches_of(rank)[0]
    model(x).sum().backward()
    event = Event()
    model.set_post_optim_event(event)
    assert event.waits == 0
    for _ in range(2):
        model(x).sum().backward()
        assert event.waits == 1, event.waits
    try:
        model.set_post_optim_event("an event")
    except TypeError as error:
        assert "expected an event" in str(error)
    else:
        raise AssertionError("a string was taken for an event")


@check
def without_an_event_behind_the_optimizer_the_next_forward_waits_for_nothing(rank, ranks):
    model = fsdp.fully_shard(nn.Linear(6, 3), mesh=init_device_mesh("cpu", (ranks,)))
    x = batches_of(rank)[0]
    model.set_post_optim_event(torch.cpu.current_stream().record_event())  # a CPU's: None
    model(x).sum().backward()
    event = Event()
    model.set_post_optim_event(event)
    model.set_post_optim_event(None)  # in its place
    model(x).sum().backward()
    assert event.waits == 0, event.waits


@check
def a_class_that_refuses_classes_below_it_is_left_alone(rank, ranks):
    class Refuses(nn.Linear):
        def __init_subclass__(cls, **kwargs):
            raise TypeError("no classes below this one")

    model = Refuses(6, 3)
    try:
        fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    except TypeError as error:
        assert "no classes below" in str(error)
    else:
        raise AssertionError("it has been sharded")
    assert not isinstance(model.weight, DTensor)
    model(batches_of(rank)[0]).sum().backward()


@check
def plain_tensors_in_the_place_of_parameters_are_refused(rank, ranks):
    model = beside(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), ranks)
    state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    try:
        model.load_state_dict(state, assign=True)
    except TypeError as error:
        assert "assign=False" in str(error), error
    else:
        raise AssertionError("plain tensors were taken")


@check
def a_copy_does_not_keep_its_original(rank, ranks):
    class Encodes(nn.Linear):
        def encode(self, x):
            return self(x) * 2

    model = beside(Encodes(6, 3), ranks)
    fsdp.register_fsdp_forward_method(model, "encode")
    copied, original = copy.deepcopy(model), weakref.ref(model)
    del model
    gc.collect()
    assert original() is None
    assert copied.encode(batches_of(rank)[0]).shape == (4, 3)


@check
def an_optimizer_and_its_module_are_copied_together(rank, ranks):
    model = beside(nn.Linear(6, 3), ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for pair in (copy.deepcopy([model, optimizer]), copy.deepcopy([optimizer, model])[::-1]):
        copied, its_optimizer = pair
        held = {id(parameter) for group in its_optimizer.param_groups for parameter in group["params"]}
        assert held == {id(parameter) for parameter in copied.parameters()}
        before = whole(copied.weight.detach()).clone()
        copied(batches_of(rank)[0]).sum().backward()
        its_optimizer.step()
        assert not torch.equal(whole(copied.weight.detach()), before)


@check
def gradients_go_with_parameters_to_another_dtype(rank, ranks):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model = beside(plain, ranks)
    for is_dropped in (False, True):
        for of_plain, each in ((True, plain), (False, model)):
            inputs = [x.to(each[1].bias.dtype) for x in (batches_of(one)[0] for one in range(ranks))]
            loss = sum(each(x).sum() for x in inputs) / ranks if of_plain else each(inputs[rank]).sum()
            loss.backward()
            each.to(torch.float64 if not is_dropped else torch.float32)
            if is_dropped:
                each.zero_grad()
        for (name, expected), found in zip(plain.named_parameters(), model.parameters()):
            assert (expected.grad is None) == (found.grad is None), name
            if expected.grad is not None:
                torch.testing.assert_close(whole(found.grad), expected.grad, rtol=1e-5, atol=1e-6, msg=name)


@check
def a_module_that_is_left_on_meta_is_named_and_may_follow(rank, ranks):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    fsdp.fully_shard(list(model), mesh=init_device_mesh("cpu", (ranks,)))
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    model[0].to_empty(device="cpu")
    nn.init.constant_(model[0].weight, 0.5)  # goes with it
    for _ in range(2):
        try:
            model(batches_of(rank)[0])
        except RuntimeError as error:
            assert "1.weight: is on the meta device" in str(error), error
        else:
            raise AssertionError("a parameter on meta was gathered")
    model[1].to_empty(device="cpu")
    for parameter in (model[0].bias, *model[1].parameters()):
        nn.init.ones_(parameter)
    y = model(torch.ones(2, 6))
    assert torch.equal(y, torch.full((2, 3), 25.0)), y
    y.sum().backward()


@check
def a_sparse_initialisation_of_a_parameter(rank, ranks):
    model = fsdp.fully_shard(nn.Linear(6, 8), mesh=init_device_mesh("cpu", (ranks,)))
    torch.manual_seed(0)
    nn.init.sparse_(model.weight, 0.5)
    weight = whole(model.weight.detach())
    assert (weight == 0).sum(0).tolist() == [4] * 6, weight
    torch.testing.assert_close(model(torch.eye(6)) - model(torch.zeros(1, 6)), weight.t())


@check
def fully_shard_makes_a_process_group_where_there_is_none(rank, ranks):
    assert not dist.is_initialized()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model = copy.deepcopy(plain)
    fsdp.fully_shard(model[0])
    assert dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (rank, ranks)
    fsdp.fully_shard(model)
    assert model[0].weight.device_mesh.shape == (ranks,)
    model(batches_of(rank)[0]).square().mean().backward()
    sum(plain(batches_of(each)[0]).square().mean() for each in range(ranks)).div(ranks).backward()
    for mine, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(whole(mine.grad), other.grad)
