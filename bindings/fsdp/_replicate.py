"""replicate: data parallelism without shards, by the same scheduler."""

import functools
from typing import Any, overload

import torch.nn as nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.device_mesh import DeviceMesh

from . import _checks
from ._api import AnyMixedPrecisionPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from ._checks import flag
from ._fully_shard import _apply, _Call, _check_mesh
from ._meshes import default_mesh
from ._module import FSDPModule
from ._placer import DataParallel, data_parallel
from ._states import Kind
from ._torch_names import TorchReplicateModule, replicate_keys


class ReplicateModule(FSDPModule, TorchReplicateModule):
    """The class that `replicate` puts in front of a module's own: FSDPModule's controls, but for those of shards.

    `isinstance(module, torch.distributed._composable.replicate_with_fsdp.ReplicateModule)` holds for it, too.
    """

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Raises AssertionError, as nothing is cut: parameters stay as they are until the end of backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"set_reshard_after_forward: expected a bool, found {reshard_after_forward!r}")
        raise AssertionError("set_reshard_after_forward: the module is replicated, and so has no shards to go back to; "
                             "use fully_shard for that")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Raises AssertionError, as gradients are all-reduced."""
        raise AssertionError("set_separate_reduce_scatter_group: the module is replicated, and so its gradients are "
                             "all-reduced; use fully_shard for reduce-scatters")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Raises AssertionError for True, as there are neither all-gathers nor reduce-scatters to have such buffers."""
        if flag(enable, "set_allocate_memory_from_process_group_for_comm"):
            raise AssertionError("set_allocate_memory_from_process_group_for_comm: the module is replicated, and so has no "
                                 "all-gathers and reduce-scatters whose buffers could come from there")


_REPLICATES = Kind("replicate", other="fully_shard", prefix="Replicate", front=ReplicateModule, of_other=RuntimeError)


def _over(call):
    mesh, dims = call.mesh, call.dp_mesh_dims
    if mesh is None:
        mesh = default_mesh(("replicate",))
    _checks.mesh(mesh, "replicate")
    if dims is not None:
        _check_mesh(mesh, dims)
        if dims.shard_names:
            raise ValueError(f"replicate: dp_mesh_dims names {dims.shard_names} as dimensions that shard; name them as "
                             "replicate, or use fully_shard")
        return functools.partial(data_parallel, mesh, dims)
    if mesh.ndim != 1:
        raise ValueError(f"replicate expects a 1D DeviceMesh but got {mesh}")
    return lambda: DataParallel(mesh, replicates_only=True)


# What is returned is what was given, with another class.
@overload
def replicate(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: AnyMixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    sync_from_rank0: bool = ...,
) -> ReplicateModule: ...


@overload
def replicate(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: AnyMixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    sync_from_rank0: bool = ...,
) -> list[ReplicateModule]: ...


def replicate(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: AnyMixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    sync_from_rank0: bool = False,
) -> Any:
    """Keeps the parameters of `module` that no replicated module below it has taken yet whole on every rank, as one group
    whose gradients are averaged by one all-reduce: torch's `replicate` of torch.distributed._composable.replicate_with_fsdp.
    The module keeps its class, with ReplicateModule in front, and its parameters become DTensors with Replicate(). Modules
    that fully_shard has been applied to are left alone, with all below them; so is one of these below fully_shard.

    module: or a list of modules that share a group. mesh: of one dimension; None: all ranks. mp_policy, offload_policy: as
    for fully_shard. ignored_params: left alone. dp_mesh_dims: names of dimensions of a larger mesh that parameters are
    DTensors on, to replicate over; none that shard. sync_from_rank0, which torch's has not: parameters and buffers take the
    first rank's values, as DDP's do; then the call is collective.

    Returns the module, or the list, that it was given.

    Wrong arguments raise what fully_shard raises for them, and ValueError for a mesh of several dimensions or one that
    shards; AssertionError for a module that is replicated already; RuntimeError for one that fully_shard has been applied
    to. Whatever raises, the module is what it was before.
    """
    return _apply(_REPLICATES, module, _Call(mesh=mesh, dp_mesh_dims=dp_mesh_dims, mp_policy=mp_policy,
                                             offload_policy=offload_policy, ignored_params=ignored_params,
                                             sync_from_rank0=sync_from_rank0), _over)


def _state_of(module):
    # Also of torch's own, which looks for it by the name that may be this function's: see replace_torch.
    states = module.__dict__.get(STATE_KEY, {})
    return next((states[key] for key in _REPLICATES.keys if key in states), None)


_REPLICATES.keys = (replicate, *replicate_keys)
replicate.state = _state_of  # type: ignore[attr-defined]
