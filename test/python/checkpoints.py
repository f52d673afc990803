"""The checks of test_checkpoints.py: functions (rank, ranks, shared folder) that run on every rank.

All compare with the plain model, which each rank trains alike: what is saved and loaded is equal to the bit.
"""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

import fsdp
from shared_mesh import shared_mesh

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


class Net(nn.Module):
    """Sizes that no number of ranks divides, a tied and a frozen parameter, buffers, one without dimensions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 7, bias=False)
        self.third.weight = self.second.weight
        self.frozen = nn.Linear(7, 5)
        self.frozen.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        hidden = self.norm(torch.tanh(self.first(x)))
        return self.frozen(self.third(torch.relu(self.second(hidden)))) * self.scale


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adamw(tensors, **options):
    return torch.optim.AdamW([tensor for tensor in tensors if tensor.requires_grad], lr=1e-2, foreach=False, **options)


def step(net, optimizer, seed):
    """The same data on all ranks."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def plain(steps=2, make_optimizer=adamw):
    torch.manual_seed(0)
    net = Net()
    optimizer = make_optimizer(net.parameters())
    for seed in range(steps):
        step(net, optimizer, seed)
    return net, optimizer


def blank():
    net = Net()
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.zero_()
    return net


def shard(net, ranks, kind):
    """kind: how."""
    if kind == "plain":
        return net
    api = torch.distributed.fsdp if kind == "fsdp2" else fsdp
    options = {"mesh": shared_mesh(ranks)}
    if kind == "hybrid" and ranks > 1:
        options["mesh"] = shared_mesh(2, ranks // 2, names=("replicate", "shard"))
    if kind == "last":
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.dim() - 1) if parameter.dim() else None
    # FSDP2 has no parameters without dimensions, and meshes of two dimensions have none yet.
    ignored = {net.scale} if kind in ("fsdp2", "hybrid") else set()
    api.fully_shard([net.second, net.third], **options)
    api.fully_shard(net, ignored_params=ignored, **options)
    return net


def optimizer_of(net, kind, make_optimizer=adamw):
    return make_optimizer(fsdp.local_shards(net) if kind == "local" else net.parameters())


KINDS = ["plain", "first", "last", "hybrid", "local", "fsdp2"]


def sharded(ranks, kind, source=None, make_optimizer=adamw):
    """The plain model, sharded, with the plain optimizer's state."""
    net, optimizer = source or plain(make_optimizer=make_optimizer)
    twin = Net()
    twin.load_state_dict(net.state_dict())
    shard(twin, ranks, kind)
    its_optimizer = optimizer_of(twin, kind, make_optimizer)
    if kind == "plain":
        its_optimizer.load_state_dict(optimizer.state_dict())
    else:
        fsdp.load_optimizer_state_dict(twin, its_optimizer, by_name(net, optimizer))
    return twin, its_optimizer


def by_name(net, optimizer):
    """As optimizer_state_dict, with whole tensors; without the step that it makes for an optimizer without state."""
    if not optimizer.state:
        return {"state": {}, "param_groups": []}
    found = fsdp.optimizer_state_dict(net, optimizer)
    return {"state": {name: {key: whole(value) for key, value in fields.items()}
                      for name, fields in found["state"].items()}, "param_groups": found["param_groups"]}


def expect_same(net, optimizer, other, other_optimizer, what):
    expected = other.state_dict()
    for name, value in net.state_dict().items():
        assert torch.equal(whole(value), whole(expected[name])), f"{what}: {name}: {whole(value)} {expected[name]}"
    ours, theirs = by_name(net, optimizer), by_name(other, other_optimizer)
    assert set(ours["state"]) == set(theirs["state"]), f"{what}: {set(ours['state']) ^ set(theirs['state'])}"
    for name, fields in theirs["state"].items():
        assert set(ours["state"][name]) == set(fields), f"{what}: {name}"
        for key, value in fields.items():
            found = ours["state"][name][key]
            same = torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
            assert same, f"{what}: {key} of {name}: {found} {value}"


def expect_goes_on(net, optimizer, what):
    """Loaded from the plain ones, it takes the step that they take."""
    step(net, optimizer, 7)
    other, its_optimizer = plain()
    step(other, its_optimizer, 7)
    expected = dict(other.named_parameters())
    for name, value in net.named_parameters():
        torch.testing.assert_close(whole(value.detach()), expected[name].detach(), rtol=1e-5, atol=1e-6,
                                   msg=f"{what}, a step later: {name}")


def refuses(function, kind, *words):
    try:
        function()
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def own_folder(rank, shared, name):
    """An empty one that all ranks see."""
    folder = Path(shared, f"{name}-{dist.get_world_size()}")
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    return folder


@check
def every_kind_is_saved(rank, ranks, shared):
    for kind in KINDS:
        net, optimizer = sharded(ranks, kind)
        path = Path(shared, f"{kind}-of-{ranks}")
        fsdp.save_checkpoint(path, net, optimizer, {"kind": kind, "epoch": [1, 2.5, None]})


@check
def every_kind_is_loaded_from_every_world(rank, ranks, shared):
    expected = plain()
    saved = sorted(Path(shared).glob("[a-z]*-of-*"))
    # Each kind loads from each world, a different kind each time.
    for index, path in enumerate(saved):
        for kind in (KINDS[index % len(KINDS)], KINDS[(index + 1 + index // len(KINDS)) % len(KINDS)]):
            net = shard(blank(), ranks, kind)
            optimizer = optimizer_of(net, kind)
            loaded = fsdp.load_checkpoint(path, net, optimizer)
            expect_same(net, optimizer, *expected, f"{path.name} as {kind}")
            assert loaded.extra == {"kind": path.name.split("-")[0], "epoch": [1, 2.5, None]}, loaded
            assert f"-of-{loaded.world_size}" in path.name
            assert loaded.restored_rng_state == (loaded.world_size == ranks)
            expect_goes_on(net, optimizer, f"{path.name} as {kind}")


@check
def a_state_that_is_there_is_loaded_in_its_memory(rank, ranks, shared):
    path = own_folder(rank, shared, "memory") / "c"
    for kind in ("first", "local"):
        net, optimizer = sharded(ranks, kind)
        fsdp.save_checkpoint(path, net, optimizer)
        first = next(iter(optimizer.state.values()))["exp_avg"]
        step(net, optimizer, 3)
        fsdp.load_checkpoint(path, net, optimizer)
        assert next(iter(optimizer.state.values()))["exp_avg"] is first, kind
        expect_same(net, optimizer, *plain(), kind)
        expect_goes_on(net, optimizer, kind)  # what was gathered before is gathered again


OPTIMIZERS = {
    "momentum": lambda tensors: torch.optim.SGD([t for t in tensors if t.requires_grad], lr=0.1, momentum=0.9),
    "no_state": lambda tensors: torch.optim.SGD([t for t in tensors if t.requires_grad], lr=0.1),
    "amsgrad": lambda tensors: adamw(tensors, amsgrad=True),
    "tensor_lr": lambda tensors: torch.optim.Adam([t for t in tensors if t.requires_grad], lr=torch.tensor(0.125)),
    "adagrad": lambda tensors: torch.optim.Adagrad([t for t in tensors if t.requires_grad], lr=0.1),
    "rmsprop": lambda tensors: torch.optim.RMSprop([t for t in tensors if t.requires_grad], centered=True),
    "frozen_too": lambda tensors: torch.optim.AdamW(list(tensors), lr=1e-2, foreach=False),
}


@check
def optimizers_of_torch(rank, ranks, shared):
    path = own_folder(rank, shared, "optimizers") / "c"
    for name, make in OPTIMIZERS.items():
        expected = plain(make_optimizer=make)
        net = Net()
        net.load_state_dict(expected[0].state_dict())
        shard(net, ranks, "first")
        optimizer = make(net.parameters())
        if expected[1].state:
            fsdp.load_optimizer_state_dict(net, optimizer, by_name(*expected))
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.param_groups[0]["limit"] = float("inf")
        fsdp.save_checkpoint(path, net, optimizer)
        other = shard(blank(), ranks, "last")
        its_optimizer = make(other.parameters())
        its_optimizer.param_groups[0]["limit"] = 0.0
        fsdp.load_checkpoint(path, other, its_optimizer)
        expect_same(other, its_optimizer, *expected, name)
        group = its_optimizer.param_groups[0]
        assert float(group["lr"]) == 0.25 and group["limit"] == float("inf"), f"{name}: {group}"
        assert {key: type(value) for key, value in group.items() if key != "lr"} == {
            key: type(value) for key, value in optimizer.param_groups[0].items() if key != "lr"}, name


class Odd(torch.optim.Optimizer):
    """State of every kind: wider than its parameter, of other sizes, no tensors."""

    def __init__(self, tensors):
        super().__init__(list(tensors), {"lr": 0.5, "named": "odd"})

    def step(self, closure=None):
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    state = self.state[tensor]
                    if not state:
                        rows = tensor.grad.sum(-1) if tensor.dim() > 1 else tensor.grad.clone()
                        state.update(wide=torch.zeros_like(tensor, dtype=torch.float64), rows=rows, seen=0, history=[])
                    state["wide"].add_(tensor.grad.double() / 3)
                    state["seen"] += 1
                    state["history"].append(state["seen"] / 2)


@check
def an_optimizer_of_the_users_own(rank, ranks, shared):
    path = own_folder(rank, shared, "odd") / "c"

    def make(kind="first"):
        torch.manual_seed(3)
        net = nn.Linear(6, 7)
        if kind == "first":
            fsdp.fully_shard(net, mesh=shared_mesh(ranks))
        return net, Odd(net.parameters())

    def train(net, optimizer):
        net(torch.randn(8, 6, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        optimizer.step()

    expected, sources = make("plain"), make()
    for each in (expected, sources):
        train(*each)
    fsdp.save_checkpoint(path, *sources)
    net, optimizer = make()
    train(net, optimizer)  # so that it knows how `rows` is spread
    optimizer.state[net.weight]["wide"].zero_()
    fsdp.load_checkpoint(path, net, optimizer)
    for name, tensor in net.named_parameters():
        state, saved = optimizer.state[tensor], sources[1].state[dict(sources[0].named_parameters())[name]]
        theirs = expected[1].state[dict(expected[0].named_parameters())[name]]
        assert state["seen"] == 1 and state["history"] == [0.5], state
        assert state["wide"].dtype == torch.float64 and torch.equal(whole(state["wide"]), whole(saved["wide"])), name
        assert torch.equal(whole(state["rows"]), whole(saved["rows"])), name
        torch.testing.assert_close(whole(state["wide"]), theirs["wide"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(whole(state["rows"]), theirs["rows"], rtol=1e-6, atol=1e-7)
    # A fresh one cannot know it.
    fresh, its_optimizer = make()
    refuses(lambda: fsdp.load_checkpoint(path, fresh, its_optimizer), ValueError, "weight.rows", "take a step")
    optimizer.state[net.weight]["function"] = print
    refuses(lambda: fsdp.save_checkpoint(path, net, optimizer), ValueError, "function", "weight")


@check
def random_generators_go_on(rank, ranks, shared):
    path = own_folder(rank, shared, "rng") / "c"
    net, _ = plain()
    torch.manual_seed(100 + rank)
    fsdp.save_checkpoint(path, net)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert fsdp.load_checkpoint(path, net, rng_state=False).restored_rng_state is False
    assert not torch.equal(torch.rand(3), expected)
    assert fsdp.load_checkpoint(path, net).restored_rng_state is True
    assert torch.equal(torch.rand(3), expected)


@check
def a_saver_works_while_training_goes_on(rank, ranks, shared):
    path = own_folder(rank, shared, "saver")
    saver = fsdp.CheckpointSaver()
    for kind, max_copy_bytes in (("first", None), ("local", None), ("last", 0)):
        if max_copy_bytes is not None:
            saver = fsdp.CheckpointSaver(max_copy_bytes=max_copy_bytes)
        net, optimizer = sharded(ranks, kind)
        assert saver.start_save(path / f"{kind}-1", net, optimizer, "first")
        for seed in range(4):
            step(net, optimizer, seed)
        after = {name: whole(value.detach()).clone() for name, value in net.named_parameters()}
        assert saver.start_save(path / f"{kind}-2", net, optimizer)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        saver.wait()
        assert not saver.is_saving()
        other = shard(blank(), ranks, "first")
        its_optimizer = adamw(other.parameters())
        assert fsdp.load_checkpoint(path / f"{kind}-1", other, its_optimizer).extra == "first"
        expect_same(other, its_optimizer, *plain(), kind)
        fsdp.load_checkpoint(path / f"{kind}-2", other)
        for name, value in other.named_parameters():
            assert torch.equal(whole(value.detach()), after[name]), name
    # What failed is told by the next call, once.
    Path(path, f"file{rank}").write_text("")
    dist.barrier()
    saver = fsdp.CheckpointSaver(when_saving="refuse")
    saver.start_save(path / "file0" / "c", net, optimizer)
    refuses(saver.wait, fsdp.CheckpointError, "file0")
    saver.wait()
    refuses(lambda: saver.start_save(path / "c", net, process_group=dist.group.WORLD), ValueError, "process_group")


@check
def the_last_ones_are_kept(rank, ranks, shared):
    path = own_folder(rank, shared, "series")
    net, _ = plain()
    for number in (1, 2, 3):
        fsdp.save_checkpoint(path / f"step-{number}", net, extra=number, keep_last=2)
    dist.barrier()
    assert {each.name for each in path.iterdir() if not each.name.startswith(".")} == {"step-2", "step-3"}
    latest = fsdp.latest_checkpoint(path)
    assert latest == str(path / "step-3") and fsdp.load_checkpoint(latest, net).extra == 3
    assert fsdp.latest_checkpoint(path / "nothing") is None
