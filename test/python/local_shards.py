"""Checks of local shards, beside the per-parameter optimizer and the plain model."""

import copy
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp
from beyond_fsdp2 import batches_of, check, whole


class Net(nn.Module):
    """Weights decay, biases and norms do not; one parameter is frozen, one may go unused."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7)
        self.late = nn.Linear(7, 3)
        self.frozen.weight.requires_grad_(False)
        self.uses_late = True

    def forward(self, x):
        hidden = self.norm(torch.tanh(self.first(x)))
        hidden = hidden + self.frozen(hidden)
        return self.late(hidden) if self.uses_late else hidden


def decays(name, parameter):
    return "decay" if name.endswith("weight") else "none"


def plain_net():
    torch.manual_seed(0)
    return Net()


def sharded_net(ranks, mesh=None, api=fsdp, **options):
    mesh = mesh or init_device_mesh("cpu", (ranks,))
    net = plain_net()
    api.fully_shard(net.first, mesh=mesh, **options)
    return api.fully_shard(net, mesh=mesh, **options)


def adamw(named, **options):
    """named: (label, tensor)."""
    groups = [{"params": [tensor for of, tensor in named if of == label and tensor.requires_grad],
               "weight_decay": decay} for label, decay in (("decay", 0.1), ("none", 0.0))]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def over_shards(net, **options):
    return adamw([(shard.label, shard) for shard in fsdp.local_shards(net, decays)], **options)


def over_parameters(net, **options):
    return adamw([(decays(name, parameter), parameter) for name, parameter in net.named_parameters()], **options)


def loss_of(net, rank, step):
    return net(batches_of(rank, steps=step + 1)[step]).square().mean()


def expect_same(ours, others, what, tolerance=0.0):
    others = dict(others)
    for name, tensor in dict(ours).items():
        other = others[name]
        assert (tensor is None) == (other is None), f"{what}: {name} is {tensor} and {other}"
        if tensor is not None:
            torch.testing.assert_close(whole(tensor.detach()), whole(other.detach()), rtol=tolerance, atol=tolerance,
                                       msg=lambda text: f"{what}: {name}: {text}")


def gradients(net):
    return {name: parameter.grad for name, parameter in net.named_parameters()}


EXACT = {"foreach": False}  # other kernels round differently at other places of a tensor


def train_beside(ranks, rank, steps=4, mesh=None, kind=EXACT, **options):
    """Local shards beside parameters, and beside the plain model."""
    tolerance = 0.0 if kind is EXACT else 1e-6
    ours, theirs, plain = sharded_net(ranks, mesh, **options), sharded_net(ranks, mesh, **options), plain_net()
    optimizers = over_shards(ours, **kind), over_parameters(theirs, **kind), over_parameters(plain, **kind)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for net in (ours, theirs):
            loss_of(net, rank, step).backward()
        sum(loss_of(plain, each, step) for each in range(ranks)).div(ranks).backward()
        expect_same(gradients(ours), gradients(theirs), f"gradients of step {step}", tolerance)
        norm = fsdp.clip_grad_norm_(fsdp.local_shards(ours, decays), 0.05)
        expected = fsdp.clip_grad_norm_(theirs.parameters(), 0.05, foreach=True)
        left = fsdp.clip_grad_norm_(theirs.parameters(), 1e6, 2.0, True, False)  # as torch takes them; clips nothing
        torch.testing.assert_close(left, expected.clamp(max=0.05), rtol=1e-2, atol=0.0)
        # Each by its own norm, which may differ in the last place.
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05), rtol=1e-4, atol=0.0)
        with torch.no_grad():
            for one, other in zip(ours.parameters(), theirs.parameters()):
                if other.grad is not None:
                    one.grad.copy_(other.grad)
        for optimizer in optimizers:
            optimizer.step()
        expect_same(ours.named_parameters(), theirs.named_parameters(), f"weights after step {step}", tolerance)
        expect_same(ours.named_parameters(), plain.named_parameters(), f"plain weights after step {step}", 1e-5)
    return ours, optimizers[0]


@check
def local_shards_train_as_parameters_do(rank, ranks):
    for kind in (EXACT, {"foreach": True}, {"fused": True}):
        train_beside(ranks, rank, kind=kind)
    train_beside(ranks, rank, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    train_beside(ranks, rank, offload_policy=fsdp.CPUOffloadPolicy())
    train_beside(ranks, rank, reshard_after_forward=False)
    train_beside(ranks, rank, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard")))


@check
def local_shards_are_plain_parameters_in_their_parameters_memory(rank, ranks):
    net = sharded_net(ranks)
    before = {name: whole(parameter.detach()).clone() for name, parameter in net.named_parameters()}
    shards = fsdp.local_shards(net, decays)
    assert all(type(shard) is nn.Parameter and shard.dim() == 1 and shard.is_leaf for shard in shards)
    # first: weight, bias; the root's group: frozen weight, trainable weights, trainable biases.
    assert sorted((shard.module_name, shard.label, shard.requires_grad) for shard in shards) == [
        ("", "decay", False), ("", "decay", True), ("", "none", True), ("first", "decay", True),
        ("first", "none", True)]
    expect_same(net.named_parameters(), before.items(), "values")
    named = dict(net.named_parameters())
    for shard in shards:
        rest = shard.detach().clone()
        for part in shard.parts:
            assert part.parameter is named[part.name], part.name
            local = part.parameter.to_local()
            found = shard.detach()[part.offset:part.offset + part.numel]
            assert torch.equal(found, local.detach().reshape(-1)), part.name
            assert part.numel == 0 or found.data_ptr() == local.data_ptr(), part.name
            rest[part.offset:part.offset + part.numel] = 0
        assert not rest.any(), "padding"
    assert all(one is other for one, other in zip(fsdp.local_shards(net, decays), shards))
    with torch.no_grad():
        for shard in shards:
            shard.fill_(0.25)
    assert all((whole(parameter.detach()) == 0.25).all() for parameter in net.parameters())
    out = net(torch.ones(2, 6))
    assert torch.allclose(out, torch.full_like(out, out[0, 0].item())), "forward sees what was written"


@check
def gradients_of_local_shards_follow_whoever_resets_them(rank, ranks):
    ours, theirs = sharded_net(ranks), sharded_net(ranks)
    optimizer, other = over_shards(ours), over_parameters(theirs)
    shards = fsdp.local_shards(ours, decays)

    def backward(step, what):
        for net in (ours, theirs):
            loss_of(net, rank, step).backward()
        expect_same(gradients(ours), gradients(theirs), what)
        for shard in shards:
            for part in shard.parts:
                if part.parameter.grad is not None and part.numel:
                    found = shard.grad[part.offset:part.offset + part.numel]
                    assert found.data_ptr() == part.parameter.grad.to_local().data_ptr(), f"{what}: {part.name}"

    backward(0, "first")
    backward(1, "added up")
    optimizer.zero_grad()
    other.zero_grad()
    backward(2, "after the optimizer's zero_grad")
    ours.zero_grad()
    theirs.zero_grad()
    backward(3, "after the module's")
    ours.zero_grad()
    theirs.zero_grad()
    ours.uses_late = theirs.uses_late = False
    backward(4, "some unused")
    optimizer.zero_grad(set_to_none=False)
    other.zero_grad()
    ours.uses_late = theirs.uses_late = True
    backward(5, "after zeros were written")


@check
def state_of_local_shards_has_the_parameters_names(rank, ranks):
    ours, optimizer = train_beside(ranks, rank, steps=2)
    for api in (fsdp, torch.distributed.fsdp):
        # What a per-parameter optimizer of ours or FSDP2's takes over goes on as the local shards do.
        theirs = sharded_net(ranks, api=api)
        theirs.load_state_dict(ours.state_dict())
        other = over_parameters(theirs, fused=True)
        state = fsdp.optimizer_state_dict(ours, optimizer)
        assert set(state["state"]) == {name for name, parameter in theirs.named_parameters() if parameter.requires_grad}
        assert all(isinstance(fields["exp_avg"], DTensor) for fields in state["state"].values())
        set_optimizer_state_dict(theirs, other, copy.deepcopy(state))
        expect_equal_states(state, get_optimizer_state_dict(theirs, other))
        # And back, into an optimizer that has no state.
        again = copy_of(ours, ranks)
        fresh = over_shards(again, fused=True)
        fsdp.load_optimizer_state_dict(again, fresh, get_optimizer_state_dict(theirs, other))
        for net, each in ((theirs, other), (again, fresh)):
            each.zero_grad()
            loss_of(net, rank, 5).backward()
            each.step()
        expect_same(again.named_parameters(), theirs.named_parameters(), "after a step more", 1e-6)


def copy_of(net, ranks):
    other = sharded_net(ranks)
    other.load_state_dict(net.state_dict())
    return other


def expect_equal_states(one, other):
    for name, fields in one["state"].items():
        for key, value in fields.items():
            assert torch.equal(whole(value), whole(other["state"][name][key])), f"{name}: {key}"
            if isinstance(value, DTensor):
                assert value.placements == other["state"][name][key].placements, f"{name}: {key}"
    options = [{key: value for key, value in group.items() if key != "params"} for group in one["param_groups"]]
    assert options == [{key: group[key] for key in options[0]} for group in other["param_groups"]]
    names = [[set(group["params"]) for group in state["param_groups"]] for state in (one, other)]
    assert names[0] == names[1], names


@check
def state_of_local_shards_goes_through_files(rank, ranks):
    ours, optimizer = train_beside(ranks, rank, steps=2)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"optimizer": fsdp.optimizer_state_dict(ours, optimizer)}, checkpoint_id=folder[0])
    again = copy_of(ours, ranks)
    fresh = over_shards(again, fused=True)
    state = fsdp.optimizer_state_dict(again, fresh)
    dcp.load({"optimizer": state}, checkpoint_id=folder[0])
    fsdp.load_optimizer_state_dict(again, fresh, state)
    expect_equal_states(fsdp.optimizer_state_dict(ours, optimizer), fsdp.optimizer_state_dict(again, fresh))
    # Whole tensors, as rank 0 may have read them.
    full = {"state": {name: {key: whole(value) for key, value in fields.items()}
                      for name, fields in state["state"].items()}, "param_groups": state["param_groups"]}
    other = over_shards(again, fused=True)
    fsdp.load_optimizer_state_dict(again, other, full)
    expect_equal_states(state, fsdp.optimizer_state_dict(again, other))


def refuses(function, kind, *words):
    try:
        function()
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def plain_state(step_count=2, named=False):
    """A plain optimizer's state_dict() after steps, and its model's parameters."""
    net = plain_net()
    trained = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained if named else [parameter for _, parameter in trained], lr=0.02)
    for _ in range(step_count):
        net(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    return dict(trained), optimizer


@check
def a_plain_optimizers_state_by_positions_is_loaded(rank, ranks):
    for named in (False, True):
        plain, optimizer = plain_state(named=named)
        state = optimizer.state_dict()
        for over in ("parameters", "shards"):
            net = sharded_net(ranks)
            held = [p for p in net.parameters() if p.requires_grad] if over == "parameters" else [
                shard for shard in fsdp.local_shards(net, decays) if shard.requires_grad]
            loaded = torch.optim.AdamW(held, lr=1.0)
            fsdp.load_optimizer_state_dict(net, loaded, state)
            assert all(group["lr"] == 0.02 and "param_names" not in group for group in loaded.param_groups)
            found = fsdp.optimizer_state_dict(net, loaded)["state"]
            for name, parameter in plain.items():
                for key, value in optimizer.state[parameter].items():
                    assert torch.equal(whole(found[name][key]), value), (name, key)
        net = sharded_net(ranks)
        some = torch.optim.AdamW(net.first.parameters())
        refuses(lambda: fsdp.load_optimizer_state_dict(net, some, state), ValueError, "7 parameters by their positions", "2")


@check
def gradients_are_clipped_by_every_norm_that_torch_takes(rank, ranks):
    for norm_type in (0, 0.0, -1, -2.5, 0.5, 1, 3, float("inf"), float("-inf"), "inf"):
        for has_zeros in (False, True):
            plain, nets = plain_net(), [sharded_net(ranks), sharded_net(ranks)]
            for net in (plain, *nets):
                net(torch.linspace(-1, 1, 12).view(2, 6)).sum().backward()
                if has_zeros:
                    net.late.weight.grad.zero_()
            wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
            torch.testing.assert_close(fsdp.clip_grad_norm_(fsdp.local_shards(nets[1], decays), 0.01, norm_type), wanted)
            torch.testing.assert_close(fsdp.clip_grad_norm_(nets[0].parameters(), 0.01, norm_type), wanted)
            for net in nets:
                expect_same(gradients(net), gradients(plain), f"norm {norm_type}", 1e-6)
    refuses(lambda: fsdp.clip_grad_norm_(nets[0].parameters(), 1.0, float("nan")), ValueError, "norm_type")
    assert fsdp.clip_grad_norm_(sharded_net(ranks).parameters(), 1.0, -1) == 0


@check
def wrong_uses_of_local_shards_are_refused(rank, ranks):
    net = sharded_net(ranks)
    refuses(lambda: fsdp.local_shards(nn.Linear(2, 2)), ValueError, "fully_shard")
    optimizer = over_shards(net)
    refuses(lambda: fsdp.local_shards(net), ValueError, "other labels")
    net.late.weight.requires_grad_(False)
    refuses(lambda: loss_of(net, rank, 0).backward(), RuntimeError, "late.weight", "requires_grad")
    net.late.weight.requires_grad_(True)
    loss_of(net, rank, 0).backward()
    optimizer.step()
    fresh = sharded_net(ranks)
    pending = loss_of(fresh, rank, 0)
    refuses(lambda: fsdp.local_shards(fresh), RuntimeError, "in the middle of a step")
    pending.backward()

    def fails(name, parameter):
        raise KeyError("the label's own")

    refuses(lambda: fsdp.local_shards(fresh, fails), KeyError, "the label's own")
    refuses(lambda: fsdp.local_shards(fresh, lambda name, parameter: 3), TypeError, "label", "str", "3")
    fsdp.local_shards(fresh)

    state = fsdp.optimizer_state_dict(net, optimizer)
    refuses(lambda: fsdp.optimizer_state_dict(nn.Linear(2, 2), optimizer), ValueError, "not the module's")
    fewer = {**state, "param_groups": state["param_groups"][:1]}
    refuses(lambda: fsdp.load_optimizer_state_dict(net, optimizer, fewer), ValueError, "missing", "late.bias")
    other_steps = copy.deepcopy(state)
    other_steps["state"]["late.weight"]["step"] += 1
    refuses(lambda: fsdp.load_optimizer_state_dict(net, optimizer, other_steps), ValueError, "step", "one local shard")
    elsewhere = torch.distributed.tensor.distribute_tensor(torch.ones(4), init_device_mesh("cpu", (ranks,)))
    refuses(lambda: fsdp.clip_grad_norm_([elsewhere], 1.0), TypeError, "torch.nn.utils.clip_grad_norm_")
    refuses(lambda: fsdp.clip_grad_norm_(fsdp.local_shards(net, decays), -1.0), ValueError, "max_norm")


@check
def local_shards_of_a_model_from_the_meta_device(rank, ranks):
    with torch.device("meta"):
        net = Net()
    fsdp.fully_shard(net, mesh=init_device_mesh("cpu", (ranks,)))
    shards = fsdp.local_shards(net)
    assert all(shard.is_meta for shard in shards)
    net.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)
    for shard in fsdp.local_shards(net):
        assert not shard.is_meta
        for part in shard.parts:
            assert (shard.detach()[part.offset:part.offset + part.numel] == 0.5).all(), part.name
    loss_of(net, rank, 0).backward()
    assert all(shard.grad is not None for shard in shards if shard.requires_grad)
