"""Checks of test_beyond_fsdp2.py: materialize."""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp
from beyond_fsdp2 import batches_of, check, raises, whole
from beyond_options import Net


class Odd(nn.Module):
    """Sizes that ranks do not divide, and an initialiser that uses much of torch.nn.init."""

    def __init__(self):
        super().__init__()
        self.cut, self.turned = nn.Parameter(torch.empty(7, 5)), nn.Parameter(torch.empty(7, 7))
        self.thin, self.known = nn.Parameter(torch.empty(5, 6, dtype=torch.bfloat16)), nn.Parameter(torch.empty(3))
        self.spread, self.diagonal = nn.Parameter(torch.empty(3, 3, 3)), nn.Parameter(torch.empty(6, 4))
        self.register_buffer("steps", torch.empty(4, dtype=torch.float64))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.trunc_normal_(self.cut, std=0.5, a=-0.6, b=0.7)
        nn.init.orthogonal_(self.turned)
        nn.init.xavier_normal_(self.thin)
        self.thin.data[-1].zero_()
        self.thin.data[1, 2:4] = 3
        self.known.data.copy_(torch.arange(3))
        nn.init.kaiming_uniform_(self.spread, a=math.sqrt(5))
        nn.init.eye_(self.diagonal)
        self.steps.fill_(2)


class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.odd, self.net = Odd(), nn.Linear(6, 6)
        self.embed, self.norm = nn.Embedding(11, 6, padding_idx=2), nn.BatchNorm1d(5)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16)
        self.conv, self.lstm, self.bare = nn.Conv2d(3, 5, 3), nn.LSTM(3, 5), nn.Linear(4, 3, bias=False)
        self.words, self.tied = nn.Embedding(9, 4, padding_idx=2), nn.Linear(6, 11)
        self.tied.weight = self.embed.weight


def built(ranks, kind=Zoo, shard=(), mesh=None):
    with torch.device("meta"):
        model = kind()
    if ranks:
        mesh = mesh or init_device_mesh("cpu", (ranks,))
        for name in shard:
            fsdp.fully_shard(model.get_submodule(name), mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
    return model


def values_of(model):
    return {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}


def expect_same(found, expected, what):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8) if found[name].dim() else found[name],
                           value.view(-1).view(torch.uint8) if value.dim() else value), (name, what)


@check
def materialized_values_are_the_same_on_one_and_more_ranks_and_unsharded(rank, ranks):
    plain = built(0)
    fsdp.materialize(plain, seed=7)
    expected = values_of(plain)
    assert not any(value.is_meta for value in expected.values())
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    one = fsdp._meshes.DeviceMesh.from_group(alone, "cpu")
    replicas = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
    for what, mesh, shard in (("all ranks", None, ()), ("units", None, ("odd", "attention")), ("one rank", one, ("odd",)),
                              ("replicas", replicas, ("odd",))):
        model = built(ranks, shard=shard, mesh=mesh)
        before = dict(model.named_parameters())
        fsdp.materialize(model, seed=7)
        after = dict(model.named_parameters())
        assert all(after[name] is before[name] and isinstance(before[name], DTensor) for name in before), what
        assert not any(each.is_meta or each.device.type != "cpu" for each in (*model.parameters(), *model.buffers()))
        if what == "all ranks":
            assert model.net.weight._local_tensor.numel() <= -(-6 // ranks) * 6
        expect_same(values_of(model), expected, what)
    other = built(0)
    fsdp.materialize(other, seed=8)
    assert not torch.equal(other.net.weight, plain.net.weight) and torch.equal(other.norm.weight, plain.norm.weight)


@check
def materialized_values_follow_what_torchs_modules_do(rank, ranks):
    model = built(0)
    fsdp.materialize(model, seed=3)
    odd = model.odd
    assert odd.cut.min() >= -0.6 and odd.cut.max() <= 0.7 and odd.cut.std() > 0.2
    torch.testing.assert_close(odd.turned @ odd.turned.T, torch.eye(7), rtol=1e-5, atol=1e-5)
    assert (odd.thin[-1] == 0).all() and (odd.thin[1, 2:4] == 3).all() and odd.thin[0].abs().min() > 0
    assert odd.known.tolist() == [0, 1, 2] and (odd.steps == 2).all() and odd.spread.abs().max() <= 1 / 3
    assert torch.equal(odd.diagonal, torch.eye(6, 4))
    assert (model.words.weight[2] == 0).all() and model.words.weight.std() > 0.7
    assert model.tied.weight is model.embed.weight and model.tied.weight.abs().max() <= 1 / math.sqrt(6)
    assert (model.norm.running_var == 1).all() and model.norm.num_batches_tracked == 0
    assert (model.attention.self_attn.in_proj_bias == 0).all()
    assert model.conv.weight.abs().max() <= 1 / math.sqrt(27) and model.lstm.weight_hh_l0.abs().max() <= 1 / math.sqrt(5)
    assert model.bare.weight.abs().max() <= 0.5 and not torch.equal(model.net.weight[0], model.net.weight[1])


@check
def an_optimizer_made_before_materialize_trains_the_model(rank, ranks):
    plain = built(0, Net)
    model = built(ranks, Net, ("first",))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    scale = {"initializers": [fsdp.initializer(Net, lambda net, init: net.scale.fill_(2))]}
    fsdp.materialize(plain, **scale)
    optimizers[0] = torch.optim.SGD(plain.parameters(), lr=0.1)
    fsdp.materialize(model, **scale)
    for at in range(2):
        sum(plain(batches_of(each)[at]).square().mean() for each in range(ranks)).div(ranks).backward()
        model(batches_of(rank)[at]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(whole(one.detach()), other.detach(), rtol=1e-5, atol=1e-6)


class Ranked(nn.Module):
    """Initialises itself by what needs all values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 3))

    def reset_parameters(self):
        nn.init.normal_(self.weight)
        self.weight.data /= self.weight.norm(dim=1, keepdim=True)


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.empty(2))


@check
def what_an_initialiser_raises_names_its_module(rank, ranks):
    class Own(Exception):
        pass

    class Mute(Exception):
        def __str__(self):
            return "nothing of what it was given"

    class Breaks(nn.Linear):
        def reset_parameters(self):
            if self.raises:
                raise RuntimeError("cannot")

        raises = False

    def fails(error):
        def function(module, init):
            raise error
        return [fsdp.initializer(nn.Linear, function)]

    for error, text in ((Own("no"), ": no"), (KeyError("k"), ": k"), (ValueError(), ""), (OSError(2, "gone"), "gone"),
                        (Mute("x"), "")):
        model = built(ranks, lambda: nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(3, 3))), ("1",))
        found = raises(type(error), text, lambda: fsdp.materialize(model, initializers=fails(error)))
        said = "\n".join([str(found), *getattr(found, "__notes__", ())])
        assert found is error and "the initializer of '1.0' (Linear)" in said, said
        assert all(parameter.is_meta for parameter in model.parameters())
    with torch.device("meta"):
        model = nn.Sequential(Breaks(3, 3))
    model[0].raises = True
    raises(RuntimeError, "reset_parameters() of '0' (Breaks): cannot", lambda: fsdp.materialize(model))


@check
def what_cannot_be_initialised_is_named_with_the_way_out_and_nothing_changes(rank, ranks):
    def expect_untouched(model):
        assert all(isinstance(each, DTensor) and each.is_meta for each in model.parameters())
        assert all(type(each) is torch.Tensor and each.is_meta for each in model.buffers())

    model = built(ranks, lambda: nn.Sequential(nn.Linear(3, 3), Ranked(), Silent()), ("1",))
    rank_by = fsdp.initializer(Ranked, lambda module, init: init.whole_(module.weight, lambda values, generator: (
        values.normal_(generator=generator), values.div_(values.norm(dim=1, keepdim=True)))))
    raises(ValueError, "'1.weight' (Ranked)", lambda: fsdp.materialize(model))
    raises(ValueError, "fsdp.initializer", lambda: fsdp.materialize(model))
    expect_untouched(model)
    raises(ValueError, "'2' (Silent): scale, buffer table", lambda: fsdp.materialize(model, initializers=[rank_by]))
    expect_untouched(model)
    for arguments in ({"seed": -1}, {"seed": 2**64}):
        raises(ValueError, "seed", lambda: fsdp.materialize(model, **arguments))
    for arguments in ({"seed": "1"}, {"initializers": [nn.Linear]}):
        raises(TypeError, "materialize", lambda: fsdp.materialize(model, **arguments))
    raises(TypeError, "nn.Module", lambda: fsdp.materialize([model]))
    raises(TypeError, "class of modules", lambda: fsdp.initializer(3, print))
    expect_untouched(model)

    def silent(module, init):
        nn.init.uniform_(module.scale, 1, 2)
        module.table.copy_(torch.tensor([3.0, 4.0]))

    before = torch.random.get_rng_state()
    initializers = [rank_by, fsdp.initializer(Silent, silent)]
    fsdp.materialize(model, initializers=initializers)
    assert torch.equal(torch.random.get_rng_state(), before)
    plain = built(0, lambda: nn.Sequential(nn.Linear(3, 3), Ranked(), Silent()))
    fsdp.materialize(plain, initializers=initializers)
    expect_same(values_of(model), values_of(plain), "whole_")
    torch.testing.assert_close(plain[1].weight.norm(dim=1), torch.ones(6))
    assert plain[2].table.tolist() == [3, 4] and plain[2].scale.min() >= 1
    values = values_of(model)
    fsdp.materialize(model, seed=5, initializers=initializers)  # what has values keeps them
    expect_same(values_of(model), values, "again")
