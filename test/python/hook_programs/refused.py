"""What is refused, before anything has changed."""

import torch
import torch.distributed.fsdp
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from programs.common import error_of, mesh_of

from . import subclasses
from .table import program
from .trained import Net, inputs


# An older FSDP2 asks for no release, and takes what it does not ask for; ours refuses it with every torch.
ASKS_FOR_RELEASE = "_release_all_gather_outputs_after_post_all_gather" in FSDPParam.__annotations__


@program(ranks=(2,), variants=[("OnlyPre",), ("OnlyPost",),
                               *([("OnlyRelease",), ("WrongRelease",)] if ASKS_FOR_RELEASE else [])])
def at_once(api, ranks, name):
    net = Net(getattr(subclasses, name))
    error = error_of(lambda: api.fully_shard(net.blocks[0], mesh=mesh_of(ranks)))
    if api is not torch.distributed.fsdp:  # FSDP2 leaves it half sharded
        assert type(net.blocks[0]) is torch.nn.Linear and not hasattr(net.blocks[0].weight, "placements")
        assert net.blocks[0].weight.__class__ is getattr(subclasses, name)
    return error


@program(ranks=(2,))
def a_signature_that_is_neither(api, ranks):
    net = Net(subclasses.WrongSignature)
    api.fully_shard(net, mesh=mesh_of(ranks))
    return error_of(lambda: net(inputs(1)[0]))


@program(ranks=(2,))
def a_class_without_the_hooks(api, ranks):
    """FSDP2 fails in the gather or trains on what it does not know, as its operators go; ours says so before the first gather,
    as the class may get hooks until then."""
    net = Net(subclasses.WithoutHooks)
    if api is torch.distributed.fsdp:
        return ["NotImplementedError"] * 3
    api.fully_shard(net.blocks[0], mesh=mesh_of(ranks))
    held = net.blocks[0].weight.to_local().held.clone()
    errors = [error_of(lambda: net(inputs(1)[0])), error_of(net.blocks[0].unshard), error_of(lambda: net(inputs(1)[0]))]
    assert torch.equal(net.blocks[0].weight.to_local().held, held)
    return errors


@program(ranks=(2,))
def a_class_that_is_lost_on_the_way(api, ranks):
    """FSDP2 goes on with a plain tensor, which is gathered in another form than the class asked for."""
    with torch.device("meta"):
        net = Net(subclasses.Forgetful)
    api.fully_shard(net, mesh=mesh_of(ranks)).to_empty(device="cpu")
    assert type(net.blocks[0].weight.to_local()) is torch.Tensor
    error = error_of(lambda: net(inputs(1)[0]))
    return [error] if api is not torch.distributed.fsdp else [{"no error": "RuntimeError"}[error]]


@program(ranks=(2,) if hasattr(torch.distributed.fsdp.FSDPModule, "set_symm_mem_for_comm") else ())
def memory_of_the_process_group_behind_a_custom_gather(api, ranks):
    class Comm:
        def allocate(self, size, *, dtype, device):
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            return torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    net = api.fully_shard(torch.nn.Linear(4, 4), mesh=mesh_of(ranks))
    net.set_custom_all_gather(Comm())
    return [error_of(lambda: net.set_allocate_memory_from_process_group_for_comm(True)),
            error_of(net.set_symm_mem_for_comm)]


@program(ranks=(2,))
def what_looks_past_the_subclass_at_its_memory(api, ranks):
    """Functions of ours: a checkpoint, local shards, first values."""
    if api is torch.distributed.fsdp:
        return ["ValueError", "ValueError", "ValueError", "NotImplementedError"]
    net = api.fully_shard(Net(subclasses.Halved), mesh=mesh_of(ranks))
    patched = api.fully_shard(torch.nn.Linear(4, 4), mesh=mesh_of(ranks))
    local = patched.weight._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: ((local,), None)
    local.fsdp_post_all_gather = lambda sent, *_, out=None: (sent[0], sent)
    patched(torch.ones(2, 4))
    with torch.device("meta"):
        on_meta = api.fully_shard(Net(subclasses.Halved), mesh=mesh_of(ranks))
    return [error_of(lambda: api.save_checkpoint("nowhere", net)), error_of(lambda: api.local_shards(net)),
            error_of(lambda: api.local_shards(patched)), error_of(lambda: api.materialize(on_meta))]
