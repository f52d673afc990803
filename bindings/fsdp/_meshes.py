"""torch's device meshes as the core's."""

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import _C

# By process group, which may be made anew under the same name.
_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_meshes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# (the core's, its process groups) by the id of torch's mesh: two that are equal may have groups of their own.
_last_of_mesh: dict[int, tuple[Any, list[dist.ProcessGroup]]] = {}
_made: dict[tuple[int, ...], dist.ProcessGroup] = {}
_post_forward_meshes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def default_mesh(names=None):
    """A mesh of one dimension over the default process group, which is made if there is none."""
    if not dist.is_initialized():
        dist.init_process_group()
    device_type = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=names)


def hybrid_mesh() -> DeviceMesh:
    """A ("replicate", "shard") mesh over all ranks that shards within a node and replicates across nodes, as FSDP1's
    HYBRID_SHARD does, where the launcher says which ranks a node has (LOCAL_WORLD_SIZE, LOCAL_RANK). A collective call; makes
    the default process group if there is none.

    Raises ValueError on every rank if nodes have different numbers of ranks, or ranks that are not consecutive.
    """
    device_type = default_mesh().device_type
    per_node = _C.ranks_per_node(communicator_of(dist.group.WORLD))
    return init_device_mesh(device_type, (dist.get_world_size() // per_node, per_node), mesh_dim_names=("replicate", "shard"))


def _timeout_s(group, device_type):
    try:
        return group._get_backend(torch.device(device_type)).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return 600.0


def _new_group(backend, ranks, name):
    """Called by its members alone."""
    return dist.new_group(ranks, backend=backend, group_desc=name, use_local_synchronization=True)


def _communicator(group, device_type):
    by_type = _groups.setdefault(group, {})
    if device_type not in by_type:
        by_type[device_type] = _C.borrowed_group(group, dist.get_process_group_ranks(group), device_type,
                                                 _timeout_s(group, device_type),
                                                 functools.partial(_new_group, dist.get_backend(group)))
    return by_type[device_type]


def communicator_of(group):
    """The core's communicator over a process group, of the CPU if the group has that: a collective call the first time."""
    try:
        return _communicator(group, "cpu")
    except ValueError:
        if not torch.accelerator.is_available():
            raise
        return _communicator(group, torch.accelerator.current_accelerator().type)


def process_group_over(ranks):
    """The process group of these world ranks in their order, made by its members if there is none."""
    for group in list(_groups):
        if group in dist.distributed_c10d._world.pg_map and dist.get_process_group_ranks(group) == list(ranks):
            return group
    if _made.get(tuple(ranks)) not in dist.distributed_c10d._world.pg_map:
        _made[tuple(ranks)] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _made[tuple(ranks)]


def _made_core_mesh(mesh, beside):
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)] + list(beside.values())
    names = [*(mesh.mesh_dim_names or (("dp",) if beside else ())), *beside]
    key = (mesh.device_type, tuple(names), tuple(id(group) for group in groups))
    known = _meshes.setdefault(groups[0], {})
    if key not in known:
        known[key] = _C.mesh_of_groups([_communicator(group, mesh.device_type) for group in groups], names)
    return known[key], groups


def core_mesh(mesh: DeviceMesh, beside: dict = {}):
    """The core's mesh of a torch mesh of one or two dimensions, followed by `beside`: name -> process group."""
    if beside:
        return _made_core_mesh(mesh, beside)[0]
    # What a mesh of torch's answers takes long, and every call of fully_shard asks.
    known = _last_of_mesh.get(id(mesh))
    if known is not None and all(group in dist.distributed_c10d._world.pg_map for group in known[1]):
        return known[0]
    made = _made_core_mesh(mesh, beside)
    if known is None:
        weakref.finalize(mesh, _last_of_mesh.pop, id(mesh), None).atexit = False
    _last_of_mesh[id(mesh)] = made
    return made[0]


def post_forward_mesh(mesh: DeviceMesh, reshard_after_forward):
    """(mesh, rank, ranks): groups of as many ranks as an int `reshard_after_forward` asks for; (None, 0, 0) where it
    asks for none. A collective call the first time."""
    if not isinstance(reshard_after_forward, int) or isinstance(reshard_after_forward, bool):
        return None, 0, 0
    shards = mesh.size(mesh.ndim - 1)
    # torch makes such a mesh together with all ranks of the world. One that does not divide is the core's to refuse.
    if (not 1 < reshard_after_forward < shards or shards % reshard_after_forward
            or mesh.size() < dist.get_world_size()):
        return None, 0, 0
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    known = _post_forward_meshes.setdefault(groups[0], {})
    key = (mesh.device_type, tuple(id(group) for group in groups), reshard_after_forward)
    if key not in known:
        known[key] = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, reshard_after_forward))
    found = known[key]
    return found, found.get_local_rank(1), reshard_after_forward
