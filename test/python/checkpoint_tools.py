"""More checks of test_checkpoints.py: arguments, errors, and the tools that others read and write checkpoints with."""

import json

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import _C, _checkpoint_parts as checkpoint_parts
from fsdp._meshes import communicator_of
from checkpoints import (Net, adamw, blank, expect_same, optimizer_of, own_folder, plain, refuses, shard, sharded,
                         whole)

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def equal_to_plain(net, what, dtype=None):
    for name, value in plain()[0].state_dict().items():
        expected = value.to(dtype).to(value.dtype) if dtype and value.is_floating_point() else value
        assert torch.equal(whole(net.state_dict()[name]), expected), f"{what}: {name}"


@check
def safetensors_reads_it(rank, ranks, shared):
    path = own_folder(rank, shared, "safetensors") / "c"
    net, optimizer = sharded(ranks, "last")
    fsdp.save_checkpoint(path, net, optimizer, max_file_bytes=600)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    expected = plain()[0].state_dict()
    assert set(index) == set(expected) - {"third.weight"}, set(index)
    for name, file in index.items():
        assert torch.equal(load_file(path / file)[name], expected[name]), name
    source, its_optimizer = plain()
    state = its_optimizer.state[source.first.weight]
    files = json.loads((path / "optimizer.safetensors.index.json").read_text())["weight_map"]
    assert torch.equal(load_file(path / files["first.weight.exp_avg"])["first.weight.exp_avg"], state["exp_avg"])
    assert {name.rpartition(".")[2] for name in files} == {"exp_avg", "exp_avg_sq", "step"}


@check
def files_of_safetensors_are_loaded(rank, ranks, shared):
    folder = own_folder(rank, shared, "foreign")
    if rank == 0:
        save_file({name: value.clone() for name, value in plain()[0].state_dict().items() if name != "third.weight"},
                  folder / "one.safetensors")
    dist.barrier()
    for readers in ("all_ranks", "first_rank"):
        for kind in ("first", "last", "plain", "fsdp2"):
            net = shard(blank(), ranks, kind)
            loaded = fsdp.load_checkpoint(folder / "one.safetensors", net, readers=readers, max_extra_bytes=4 << 20)
            equal_to_plain(net, kind)
            assert (loaded.world_size, loaded.extra, loaded.restored_rng_state) == (0, None, False)


@check
def dtypes_are_converted_on_request(rank, ranks, shared):
    path = own_folder(rank, shared, "dtypes") / "c"
    net, optimizer = sharded(ranks, "first")
    fsdp.save_checkpoint(path, net, optimizer, dtype=torch.bfloat16)
    other = shard(blank(), ranks, "last")
    its_optimizer = adamw(other.parameters())
    refuses(lambda: fsdp.load_checkpoint(path, other, its_optimizer), ValueError,
            "'first.weight' is BF16, expected F32", "'scale'", "convert_dtypes")
    assert not any(whole(value).any() for value in other.state_dict().values()) and not its_optimizer.state
    fsdp.load_checkpoint(path, other, its_optimizer, convert_dtypes=True)
    equal_to_plain(other, "converted", torch.bfloat16)
    # The optimizer's state was not narrowed.
    first = whole(its_optimizer.state[other.first.weight]["exp_avg"])
    source, source_optimizer = plain()
    assert torch.equal(first, source_optimizer.state[source.first.weight]["exp_avg"])
    narrow = shard(blank().to(torch.bfloat16), ranks, "first")
    its_optimizer = adamw(narrow.parameters())
    fsdp.load_checkpoint(path, narrow, its_optimizer, convert_dtypes=True)
    assert its_optimizer.state[narrow.first.weight]["exp_avg"].dtype == torch.bfloat16


@check
def all_that_does_not_fit_is_told_at_once(rank, ranks, shared):
    path = own_folder(rank, shared, "misfits") / "c"
    net, optimizer = sharded(ranks, "first")
    fsdp.save_checkpoint(path, net, optimizer)

    class Other(Net):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.more = nn.Linear(2, 2)
            del self.scale

    other = Other()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    fsdp.fully_shard(other, mesh=init_device_mesh("cpu", (ranks,)))
    its_optimizer = adamw(other.parameters())
    refuses(lambda: fsdp.load_checkpoint(path, other, its_optimizer), ValueError, "Missing: 'more.weight', 'more.bias'",
            "Unexpected: 'scale'", "'first.weight' has sizes (7, 6), expected (8, 6)", "the optimizer's 'more.weight'",
            "nothing was changed")
    for name, value in other.state_dict().items():
        assert torch.equal(whole(value), before[name]), name
    loaded = fsdp.load_checkpoint(path, other, its_optimizer, strict=False)
    assert "'more.weight'" in loaded.missing and "'scale'" in loaded.unexpected, loaded
    assert any("first.bias" in text for text in loaded.wrong), loaded
    assert torch.equal(whole(other.second.weight.detach()), plain()[0].second.weight)
    assert torch.equal(whole(other.more.weight.detach()), before["more.weight"])
    state = its_optimizer.state
    assert "exp_avg" in state[other.second.weight] and not state.get(other.more.weight)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    refuses(lambda: fsdp.load_checkpoint(path, other, sgd), ValueError, "is AdamW's, expected SGD's", "'more.weight'")
    halves = torch.optim.AdamW([{"params": [other.first.weight]}, {"params": [other.first.bias]}])
    refuses(lambda: fsdp.load_checkpoint(path, other, halves), ValueError, "has 1 parameter groups, expected 2")
    without = path.parent / "without"
    fsdp.save_checkpoint(without, net)
    refuses(lambda: fsdp.load_checkpoint(without, *sharded(ranks, "first")), ValueError, "optimizer.json")


@check
def names_are_mapped(rank, ranks, shared):
    path = own_folder(rank, shared, "names") / "c"
    net, optimizer = sharded(ranks, "first")
    fsdp.save_checkpoint(path, net, optimizer)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = blank()

    def fresh():
        outer = Outer()
        shard(outer.inner, ranks, "last")
        return outer, adamw(outer.parameters())

    for rename in ({"": "inner."}, lambda name: f"inner.{name}"):
        outer, its_optimizer = fresh()
        fsdp.load_checkpoint(path, outer, its_optimizer, rename=rename)
        expect_same(outer.inner, its_optimizer, *plain(), "renamed")
    outer, its_optimizer = fresh()
    loaded = fsdp.load_checkpoint(path, outer, strict=False,
                                  rename=lambda name: "" if name.startswith("first") else f"inner.{name}")
    assert "'inner.first.weight'" in loaded.missing and not loaded.unexpected, loaded
    refuses(lambda: fsdp.load_checkpoint(path, outer, rename=lambda name: 3), ValueError, "rename", "expected a str")
    refuses(lambda: fsdp.load_checkpoint(path, outer, rename=lambda name: {}[name]), fsdp.CheckpointError, "KeyError")


@check
def a_mistake_of_one_rank_is_an_error_on_all(rank, ranks, shared):
    path = own_folder(rank, shared, "mistakes") / "c"
    net, optimizer = sharded(ranks, "first")
    extra = {"of": object()} if rank == ranks - 1 else {}
    refuses(lambda: fsdp.save_checkpoint(path, net, extra=extra), ValueError, "extra", "JSON")
    assert not path.exists()
    wrong = adamw(nn.Linear(2, 2).parameters()) if rank == 0 else optimizer
    refuses(lambda: fsdp.save_checkpoint(path, net, wrong), ValueError, "not the module's")
    refuses(lambda: fsdp.save_checkpoint(path, net, dtipe=torch.float16), TypeError, "dtipe")
    refuses(lambda: fsdp.save_checkpoint(path, net, dtype=torch.int8), ValueError, "floating-point")
    refuses(lambda: fsdp.save_checkpoint(path, net, keep_last=2), ValueError, "keep_last", "step-100")
    refuses(lambda: fsdp.load_checkpoint(path, net, verify="sometimes"), ValueError, "'while_loading'", "'sometimes'")
    refuses(lambda: fsdp.load_checkpoint(path, net, max_extra_bytes=1), ValueError, "max_extra_bytes")
    refuses(lambda: fsdp.load_checkpoint(path, net), fsdp.CheckpointError, "no such file")
    refuses(lambda: fsdp.CheckpointSaver(when_saving="never"), ValueError, "'refuse'")
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    refuses(lambda: fsdp.save_checkpoint(path, meta), ValueError, "meta device")


@check
def an_optimizer_that_cpp_has_saved_is_loaded(rank, ranks, shared):
    """LibTorch's optimizers count in int64 and have fewer options."""
    path = own_folder(rank, shared, "cpp") / "c"
    weight = torch.arange(6.0).view(3, 2)
    tensors = {"weight.exp_avg": weight + 1, "weight.exp_avg_sq": weight + 2, "weight.step": torch.tensor(7)}

    def parts():
        sections = {"model": [checkpoint_parts.entry("weight", weight)],
                    "optimizer": [checkpoint_parts.entry(*each) for each in tensors.items()]}
        group = {"params": ["weight"], "options": {"lr": 0.25, "betas": [0.5, 0.75], "eps": 1e-8, "weight_decay": 0.0,
                                                   "amsgrad": False}}
        return sections, {"optimizer.json": json.dumps({"optimizer": "AdamW", "groups": [group]})}

    _C.save_checkpoint(communicator_of(dist.group.WORLD), str(path), parts,
                       {"max_file_bytes": 1 << 20, "keep_last": 0, "rng_state": False})
    net = nn.Linear(2, 3, bias=False)
    fsdp.fully_shard(net, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    fsdp.load_checkpoint(path, net, optimizer)
    group, state = optimizer.param_groups[0], optimizer.state[net.weight]
    assert (group["lr"], group["betas"]) == (0.25, (0.5, 0.75)) and "fused" in group, group
    assert state["step"].dtype == torch.float32 and state["step"].item() == 7
    assert torch.equal(whole(state["exp_avg_sq"]), weight + 2)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@check
def damage_is_named(rank, ranks, shared):
    path = own_folder(rank, shared, "damage") / "c"
    net, _ = sharded(ranks, "first")
    fsdp.save_checkpoint(path, net)
    if rank == 0:
        data = bytearray((path / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (path / "model.safetensors").write_bytes(data)
    dist.barrier()
    for verify in ("while_loading", "before_loading"):
        other = shard(blank(), ranks, "first")
        refuses(lambda: fsdp.load_checkpoint(path, other, verify=verify), fsdp.CheckpointError, "model.safetensors",
                "damaged")
    assert not whole(other.second.weight.detach()).any()
    fsdp.load_checkpoint(path, shard(blank(), ranks, "first"), verify="never")


def small_llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=40, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
                                        **more))


def tokens_of(model):
    model.eval()
    with torch.no_grad():
        return model.generate(torch.arange(4).unsqueeze(0), max_new_tokens=8, min_new_tokens=8, do_sample=False)


@check
def transformers_loads_what_is_saved_and_the_reverse(rank, ranks, shared):
    for tied in (False, True):
        folder = own_folder(rank, shared, f"transformers-{tied}")
        model = small_llama(tie_word_embeddings=tied)
        expected, tokens = {name: value.clone() for name, value in model.state_dict().items()}, tokens_of(model)
        if rank == 0:
            model.save_pretrained(folder / "theirs", max_shard_size="10KB")
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in (*model.model.layers, model):
            fsdp.fully_shard(layer, mesh=mesh)
        fsdp.save_checkpoint(folder / "ours", model, max_file_bytes=10_000)
        if rank == 0:
            model.config.save_pretrained(folder / "ours")
            model.generation_config.save_pretrained(folder / "ours")
        dist.barrier()
        for each in ("theirs", "ours"):
            assert len(list((folder / each).glob("*.safetensors"))) > 1
            again = type(small_llama()).from_pretrained(folder / each)
            for name, value in again.state_dict().items():
                assert torch.equal(value, expected[name]), f"{each}: {name}"
            with torch.no_grad():
                other = small_llama(tie_word_embeddings=tied)
                for parameter in other.parameters():
                    parameter.zero_()
            for layer in (*other.model.layers, other):
                fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=False)
            fsdp.load_checkpoint(folder / each, other)
            for name, value in other.state_dict().items():
                assert torch.equal(whole(value), expected[name]), f"{each}: {name}"
            assert torch.equal(tokens_of(other), tokens), each


@check
def checkpoints_of_torch_go_through_the_model(rank, ranks, shared):
    """From torch.distributed.checkpoint of an FSDP2 model to ours, and back."""
    folder = own_folder(rank, shared, "dcp")

    def state_of(net, optimizer):
        model, its_optimizer = get_state_dict(net, optimizer)
        return {"model": model, "optimizer": its_optimizer}

    def load(path, net, optimizer):
        state = state_of(net, optimizer)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    dcp.save(state_of(*sharded(ranks, "fsdp2")), checkpoint_id=folder / "theirs")
    net = shard(blank(), ranks, "first")
    optimizer = optimizer_of(net, "first")
    load(folder / "theirs", net, optimizer)
    expect_same(net, optimizer, *plain(), "theirs in ours")
    fsdp.save_checkpoint(folder / "ours", net, optimizer)
    net = shard(blank(), ranks, "fsdp2")
    optimizer = optimizer_of(net, "fsdp2")
    fsdp.load_checkpoint(folder / "ours", net, optimizer)
    expect_same(net, optimizer, *plain(), "ours in FSDP2")
    dcp.save(state_of(*sharded(ranks, "last")), checkpoint_id=folder / "back")
    net = shard(blank(), ranks, "fsdp2")
    optimizer = optimizer_of(net, "fsdp2")
    load(folder / "back", net, optimizer)
    expect_same(net, optimizer, *plain(), "ours in theirs")


@check
def a_tensor_parallel_model_is_saved_whole(rank, ranks, shared):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if ranks < 4:
        return
    path = own_folder(rank, shared, "parallel") / "c"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make():
        torch.manual_seed(6)
        return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))

    def parallel(net):
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return fsdp.fully_shard(net, mesh=mesh["dp"])

    fsdp.save_checkpoint(path, parallel(make()))
    expected = make().state_dict()
    found = load_file(path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with torch.no_grad():
        other = make()
        for parameter in other.parameters():
            parameter.zero_()
    fsdp.load_checkpoint(path, parallel(other))
    for name, parameter in other.named_parameters():
        assert torch.equal(whole(parameter.detach()), expected[name]), name
