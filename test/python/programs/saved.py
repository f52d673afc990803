"""Checkpoints: torch.distributed.checkpoint, and the state dicts it is given."""

import contextlib
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     get_state_dict, set_model_state_dict, set_optimizer_state_dict,
                                                     set_state_dict)
from torch.distributed.checkpoint.stateful import Stateful

import fsdp
from shared_mesh import shared_mesh

from .common import EPS, Model, adam, batches, mesh_of, program, shard, train

SAVERS = {"fsdp2": torch.distributed.fsdp, "ours": fsdp}


@contextlib.contextmanager
def shared_folder():
    """One folder that all ranks see."""
    name = [tempfile.mkdtemp(prefix="fsdp-saved-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    try:
        yield name[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(name[0])


class Everything(Stateful):
    """As torch's own guides save an application."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, saved):
        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"],
                       optim_state_dict=saved["optimizer"])


def trained(api, seed=0, **options):
    torch.manual_seed(seed)
    model = shard(api, Model(), **options)
    optimizer = adam(model)
    train(model, optimizer, batches(2))
    return model, optimizer


def zeroed(api, **options):
    """One that has nothing of what is to be loaded."""
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    shard(api, model, **options)
    return model, adam(model)


@program(variants=[(saver,) for saver in SAVERS])
def saved_and_loaded(api, ranks, saver):
    source = Everything(*trained(SAVERS[saver], mesh=mesh_of(ranks)))
    target = Everything(*zeroed(api, mesh=mesh_of(ranks)))
    with shared_folder() as folder:
        dcp.save({"app": source}, checkpoint_id=folder)
        dcp.load({"app": target}, checkpoint_id=folder)
    return {"loaded": target.state_dict(), "after": train(target.model, target.optimizer, batches(2))}


@program(variants=[(saver,) for saver in SAVERS])
def saved_as_they_are(api, ranks, saver):
    model, optimizer = trained(SAVERS[saver], mesh=mesh_of(ranks))
    other, other_optimizer = trained(api, seed=1, mesh=mesh_of(ranks))  # with a state to load into
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
        loaded = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
        dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    return train(other, other_optimizer, batches(2))


@program
def saved_in_the_background(api, ranks):
    source = Everything(*trained(api, mesh=mesh_of(ranks)))
    target = Everything(*zeroed(api, mesh=mesh_of(ranks)))
    with shared_folder() as folder:
        saved = dcp.async_save({"app": source}, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        train(source.model, source.optimizer, batches(1))  # what is saved stays as it was
        saved.result()
        dcp.load({"app": target}, checkpoint_id=folder)
    return target.state_dict()


@program(ranks=(4,), variants=[(saver, way) for saver in SAVERS for way in ("to_hybrid", "from_hybrid", "to_fewer")])
def loaded_by_other_ranks(api, ranks, saver, way):
    flat = mesh_of(ranks)
    hybrid = shared_mesh(2, 2, names=("replicate", "shard"))
    meshes = {"to_hybrid": (flat, hybrid), "from_hybrid": (hybrid, flat), "to_fewer": (flat, hybrid["shard"])}
    before, after = meshes[way]
    source = Everything(*trained(SAVERS[saver], mesh=before))
    target = Everything(*zeroed(api, mesh=after))
    with shared_folder() as folder:
        dcp.save({"app": source}, checkpoint_id=folder)
        dcp.load({"app": target}, checkpoint_id=folder)
    return {"loaded": target.state_dict(), "after": train(target.model, target.optimizer, batches(1))}


@program
def saved_for_one_process(api, ranks):
    """The plain model reads what ranks have written."""
    model, _ = trained(api, mesh=mesh_of(ranks))
    plain = Model()
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        if dist.get_rank() == 0:
            dcp_to_torch_save(folder, f"{folder}/plain.pt")
        dist.barrier()
        plain.load_state_dict(torch.load(f"{folder}/plain.pt")["model"])
    return dict(plain.named_parameters())


@program(variants=[(saver, cpu_offload) for saver in SAVERS for cpu_offload in (False, True)])
def whole_state_dicts_from_rank0(api, ranks, saver, cpu_offload):
    model, optimizer = trained(SAVERS[saver], mesh=mesh_of(ranks))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    saved = get_model_state_dict(model, options=whole)
    saved_optimizer = get_optimizer_state_dict(model, optimizer, options=whole)
    if dist.get_rank() != 0:
        assert cpu_offload == (not saved), "only rank 0 keeps what goes to the CPU"
        saved, saved_optimizer = {}, {}
    other, other_optimizer = zeroed(api, mesh=mesh_of(ranks))
    from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(saved), options=from_rank0)
    set_optimizer_state_dict(other, other_optimizer, saved_optimizer, options=from_rank0)
    return {"saved": saved, "after": train(other, other_optimizer, batches(2))}


OPTIONS = {
    "plain": StateDictOptions(),
    "offloaded": StateDictOptions(cpu_offload=True),
    "trainable": StateDictOptions(ignore_frozen_params=True),
    "trainable_whole": StateDictOptions(ignore_frozen_params=True, full_state_dict=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


@program(variants=[(name,) for name in OPTIONS])
def state_dict_options(api, ranks, name):
    options = OPTIONS[name]

    def make():
        model = Model()
        model.blocks[0].requires_grad_(False)
        shard(api, model, mesh=mesh_of(ranks))
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=EPS)

    model, optimizer = make()
    train(model, optimizer, batches(2))
    saved = get_model_state_dict(model, options=options)
    saved_optimizer = get_optimizer_state_dict(model, optimizer, options=options)
    torch.manual_seed(2)
    other, other_optimizer = make()
    loading = StateDictOptions(strict=not options.ignore_frozen_params, full_state_dict=options.full_state_dict,
                               flatten_optimizer_state_dict=options.flatten_optimizer_state_dict)
    said = set_model_state_dict(other, dict(saved), options=loading)
    set_optimizer_state_dict(other, other_optimizer, saved_optimizer, options=loading)
    return {"saved": saved, "optimizer": saved_optimizer, "missing": said.missing_keys,
            "after": train(other, other_optimizer, batches(2))}


@program
def state_dict_of_a_part(api, ranks):
    model, optimizer = trained(api, mesh=mesh_of(ranks))
    part = get_model_state_dict(model.blocks[1])
    torch.manual_seed(3)
    other, _ = trained(api, seed=3, mesh=mesh_of(ranks))
    set_model_state_dict(other.blocks[1], part)
    return {"part": part, "other": dict(other.named_parameters())}
