"""fully_shard and the functions beside it."""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, Callable, Iterable, overload

import torch
import torch.nn as nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors

from . import _C, _checks, _constructors, _copying, _dtensors, _hooked
from ._all_gather_extension import AllGatherExtension, extensions_of
from ._api import AnyMixedPrecisionPolicy, CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from ._buffer_dtypes import save_in_own_dtypes
from ._debugging import SanitizerOptions
from ._exempt_modules import register_casts
from ._forward_hooks import register_hooks
from ._hooked_values import first_ranks, own
from ._meshes import default_mesh
from ._module import FSDPModule, _cores_of
from ._placer import Placer, data_parallel
from ._states import FSDPState, Kind, _mark_as_managed, _remember_state, _undone_by, state_of
from ._torch_names import fully_shard_key

_dtensors.install()
_constructors.install()
_SHARDS = Kind("fully_shard", other="replicate", prefix="FSDP", front=FSDPModule)


def _check_not_sharded(kind, module):
    if not isinstance(module, FSDPModule):
        _checks.not_sharded_by_torch(module, [module], kind.name)
    if kind.name in module.__dict__.get(REGISTRY_KEY, {}):
        raise AssertionError(f"{kind.name} can only be applied to a module once; it has already been applied to "
                             f"the following module:\n{module}")
    if state_of(module) is not None:
        raise kind.of_other(f"{kind.name} cannot be applied to a module that {kind.other} has been applied to:\n{module}")


def _outermost(modules):
    """Without those inside another of them, and each once."""
    if len(modules) == 1:
        return modules
    inside = {below for module in modules for below in module.modules() if below is not module}
    return [module for module in dict.fromkeys(modules) if module not in inside]


def _check_mesh(mesh, dp_mesh_dims):
    _checks.mesh(mesh, "fully_shard")
    if dp_mesh_dims is not None:
        _check_dims(mesh, dp_mesh_dims)
        return
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("fully_shard: a mesh of two dimensions (replicate, shard) needs mesh_dim_names")


def _check_dims(mesh, dp_mesh_dims):
    names = (*dp_mesh_dims.shard_names, *dp_mesh_dims.replicate_names)
    if not names:
        raise ValueError("fully_shard: dp_mesh_dims has to name a dimension that shards, one that replicates, or both")
    if mesh.mesh_dim_names is None:
        raise ValueError("fully_shard: with dp_mesh_dims the mesh needs mesh_dim_names")
    for name in names:
        if name not in mesh.mesh_dim_names:
            raise ValueError(f"fully_shard: dp_mesh_dims names '{name}', but the mesh has {mesh.mesh_dim_names}")
    if len(set(names)) < len(names):
        raise ValueError(f"fully_shard: dp_mesh_dims names a dimension twice: {names}")


def _managed_modules(kind, modules):
    """Depth-first, without what is sharded already or belongs to another composable API."""
    managed, seen = [], set()

    def visit(module, is_given):
        if module in seen or (not is_given and (isinstance(module, FSDPModule) or kind.leaves_out(module))):
            return
        _checks.not_sharded_by_torch(module, modules, kind.name)
        seen.add(module)
        for child in module.children():
            visit(child, child in given)
        managed.append(module)

    given = set(modules)
    for module in modules:
        visit(module, True)
    return managed


def _own_params(managed, ignored):
    """(name, parameter) of every entry, in the order of the modules, which is the same on all ranks."""
    return [(name, param) for module in managed for name, param in module._parameters.items()
            if param is not None and not (ignored and param in ignored)]


def _check_params(kind, named, modules):
    _checks.params(named, kind.name)
    with _checks.ParameterNames(modules) as names:
        for param in names.each(param for _, param in named):
            _check_gatherable(kind, param)


def _check_gatherable(kind, param):
    if isinstance(param, DTensor):
        if isinstance(param._local_tensor, AsyncCollectiveTensor):
            param._local_tensor = param._local_tensor.wait()
        if _hooked.is_gathered_by_hooks(param._local_tensor):
            raise NotImplementedError(f"{kind.name}: a parameter is a DTensor over a {type(param._local_tensor).__name__}, "
                                      "a tensor subclass; expected the DTensor to be over a plain tensor, or the subclass, "
                                      "with fsdp_pre_all_gather, to be the parameter itself")
    elif type(param) is not nn.Parameter:
        _hooked.check(param)
        if param.is_nested:
            raise NotImplementedError(f"{kind.name}: a parameter is nested; ignore it with ignored_params")


def _check_device_type(kind, param, mesh):
    if param.device_mesh.device_type != mesh.device_type:
        raise ValueError(f"{kind.name}: a parameter is a DTensor on the device type {param.device_mesh.device_type}, but the "
                         f"mesh is on {mesh.device_type}; make both of one device type")


# What reduce_dtype=None means: the parameters' own dtype, or, before torch 2.15, the one that they are computed in.
_REDUCES_IN_OWN_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)


def _make_sharded_class(kind, own):
    if own not in kind.classes:
        kind.classes[own] = type(f"{kind.prefix}{own.__name__}", (kind.front, own), {
            "__deepcopy__": _copying.deepcopy,
            "__copy__": _copying.shallow_copy,
            "__reduce_ex__": _copying.refuse_pickle,
        })
    return kind.classes[own]


def _check_class(kind, module):
    """Raises where the module cannot get the class in front, as Python sees it."""
    own = type(module)
    _set_class(module, _make_sharded_class(kind, own))  # a class may refuse classes below it
    _set_class(module, own)  # and an object another class, by its layout in memory


def _set_class(module, its_class):
    object.__setattr__(module, "__class__", its_class)  # past a __setattr__ of its own


def _replicated(call, params):
    """Of the parameters of a call those that are whole on every rank: as asked for, and what has no dimensions."""
    asked = set(_checks.parameter_set(call.replicated_params, "fully_shard: replicated_params"))
    for module in _checks.module_set(call.replicated_modules, "fully_shard: replicated_modules"):
        asked.update(module.parameters())
    return [param for param in params if param.dim() == 0 or asked and param in asked]


@dataclass
class _Call:
    """What one of the functions was called with."""

    mesh: Any
    dp_mesh_dims: Any
    mp_policy: Any
    offload_policy: Any
    ignored_params: Any
    reshard_after_forward: Any = None
    shard_placement_fn: Any = None
    ignored_modules: Any = None
    replicated_params: Any = None
    replicated_modules: Any = None
    sync_from_rank0: Any = False
    sanitizer: Any = None
    all_gather_extension_fn: Any = None


def _over(call):
    """The ranks that fully_shard's parameters are sharded and replicated over."""
    mesh = call.mesh if call.mesh is not None else default_mesh()
    _check_mesh(mesh, call.dp_mesh_dims)
    return functools.partial(data_parallel, mesh, call.dp_mesh_dims)


def _apply(kind, module, call, over=_over):
    """What the functions do. over: (call) -> the function that makes its DataParallel, of a mesh that is right."""
    modules = _checks.modules(module, kind.name)
    for each in modules:
        _check_not_sharded(kind, each)
    modules = _outermost(modules)
    make_over = over(call)
    if call.reshard_after_forward is not None:
        _checks.reshard_after_forward(call.reshard_after_forward, "reshard_after_forward")
    mp_policy, offload_policy = call.mp_policy, call.offload_policy
    _checks.policies(mp_policy, offload_policy, kind.name)
    ignored = _checks.parameter_set(call.ignored_params, f"{kind.name}: ignored_params")
    ignored_modules = _checks.module_set(call.ignored_modules, f"{kind.name}: ignored_modules")
    left_alone = {below for module in ignored_modules for below in module.modules()}
    managed = _managed_modules(kind, modules)
    if left_alone:
        managed = [module for module in managed if module not in left_alone]
    named = _own_params(managed, ignored)
    _check_params(kind, named, modules)
    params = list(dict.fromkeys(param for _, param in named))
    _checks.function(call.shard_placement_fn, "shard_placement_fn")
    _checks.instance(call.sanitizer, SanitizerOptions, f"{kind.name}: sanitizer")
    over = make_over()
    with _checks.ParameterNames(modules) as names:
        for param in names.each(param for param in params if isinstance(param, DTensor)):
            _check_device_type(kind, param, over.mesh)
        for param in names.each(filter(_hooked.is_gathered_by_hooks, params)):
            _hooked.check_released(param, call.reshard_after_forward)
    users = {id(param): (module, name) for module in reversed(managed) for name, param in module._parameters.items()}
    policies = (mp_policy, offload_policy)
    values = first_ranks if _checks.flag(call.sync_from_rank0, "sync_from_rank0") else own
    placer = Placer(over, call.shard_placement_fn, params, kind.leaves_out, lambda param, form: _hooked.HookedParameter.of(
        param, form, users[id(param)], policies, values), names=_checks.ParameterNames(modules))
    annotated = [(module, name, annotation) for module in managed for name, param in module._parameters.items()
                 if (annotation := placer.annotation(param)) is not None]
    for each in modules:
        _check_class(kind, each)
    reshard_after_forward = False if over.replicates_only else call.reshard_after_forward
    state, item = FSDPState(kind, over.mesh, reshard_after_forward, policies), RegistryItem()
    with contextlib.ExitStack() as undo:
        _undone_by(undo, managed)
        for each in modules:
            _remember_state(each, state, item)
        for each in managed:
            _mark_as_managed(each)
        register_hooks(modules, undo)
        is_exempt = _checks.exemption(mp_policy)
        register_casts(managed, is_exempt, undo)
        save_in_own_dtypes(state, modules, managed, mp_policy, is_exempt, undo)
        core = _C.fully_shard(modules, placer, {
            "reshard_after_forward": reshard_after_forward,
            "ignored_params": list(ignored),
            "ignored_modules": list(ignored_modules),
            "replicated_params": _replicated(call, params),
            "sync_from_rank0": call.sync_from_rank0,
            "sanitizer": call.sanitizer,
            "all_gather_extension_fn": extensions_of(call.all_gather_extension_fn, kind.name),
            "param_dtype": mp_policy.param_dtype,
            "reduce_dtype": mp_policy.reduce_dtype,
            "reduce_in_own_dtype": _REDUCES_IN_OWN_DTYPE,
            "output_dtype": mp_policy.output_dtype,
            "buffer_dtype": getattr(mp_policy, "buffer_dtype", None),
            "full_precision_in_eval": _checks.flag(getattr(mp_policy, "full_precision_in_eval", False),
                                                   "mp_policy.full_precision_in_eval"),
            "is_exempt": is_exempt,
            "cast_forward_inputs": _checks.flag(mp_policy.cast_forward_inputs, "mp_policy.cast_forward_inputs"),
            "param_dtype_override_fn": _checks.dtype_override(mp_policy),
            "apply_to_tensors": _apply_to_tensors,
            "offloads": isinstance(offload_policy, CPUOffloadPolicy),
            "pin_memory": _checks.flag(getattr(offload_policy, "pin_memory", False), "offload_policy.pin_memory"),
        })
        undo.pop_all()
    # The parameters are sharded: nothing fails from here on.
    state.annotated = annotated
    placer.forget()
    state.take_core(core, modules)
    for each in modules:
        _set_class(each, kind.classes[type(each)])
    return module


# What is returned is what was given, with another class.
@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: AnyMixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    ignored_modules: Iterable[nn.Module] | None = ...,
    replicated_params: Iterable[nn.Parameter] | None = ...,
    replicated_modules: Iterable[nn.Module] | None = ...,
    sync_from_rank0: bool = ...,
    sanitizer: SanitizerOptions | None = ...,
    all_gather_extension_fn: Callable[[str, nn.Parameter], AllGatherExtension | None] | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: AnyMixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    ignored_modules: Iterable[nn.Module] | None = ...,
    replicated_params: Iterable[nn.Parameter] | None = ...,
    replicated_modules: Iterable[nn.Module] | None = ...,
    sync_from_rank0: bool = ...,
    sanitizer: SanitizerOptions | None = ...,
    all_gather_extension_fn: Callable[[str, nn.Parameter], AllGatherExtension | None] | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: AnyMixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    replicated_params: Iterable[nn.Parameter] | None = None,
    replicated_modules: Iterable[nn.Module] | None = None,
    sync_from_rank0: bool = False,
    sanitizer: SanitizerOptions | None = None,
    all_gather_extension_fn: Callable[[str, nn.Parameter], AllGatherExtension | None] | None = None,
) -> Any:
    """Shards the parameters of `module` that no sharded module below it has taken yet, as one group that is
    gathered and reduced together. The module keeps its class, with FSDPModule in front. Shard inner modules first.

    module: or a list of modules that share a group. mesh: of one dimension (FSDP), or two named ones (HSDP:
    replicate, shard); None: all ranks. reshard_after_forward: whether parameters are released between forward and
    backward (None: yes, but for the root); an int: kept as shards of so many ranks, which divide the shard size.
    shard_placement_fn: (parameter) -> Shard(dim), or None for Shard(0). mp_policy, offload_policy: torch's own
    classes. ignored_params: left alone.

    Beyond FSDP2, and the same on all ranks: ignored_modules: left alone with all below them, but for units in them that are
    sharded already. replicated_params, and replicated_modules with all below them: whole on every rank, never gathered;
    their gradients are averaged over all ranks. sync_from_rank0: parameters and buffers take the first rank's values, which
    makes this a collective call; the other ranks' modules may be on the meta device. sanitizer: see SanitizerOptions.
    all_gather_extension_fn: (name, parameter) -> AllGatherExtension, in whose form it is gathered, or None: as its values.

    Returns the module, or the list, that it was given.

    Wrong arguments raise what torch's fully_shard raises: TypeError for what is no module, mesh or policy, ValueError
    for a value that is not possible, AssertionError for a module that is sharded already, NotImplementedError for what
    is not in this version. What shard_placement_fn and param_dtype_override_fn raise arrives as it is. Whatever raises,
    the module is what it was before.
    """
    return _apply(_SHARDS, module, _Call(
        mesh=mesh, dp_mesh_dims=dp_mesh_dims, reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn, mp_policy=mp_policy, offload_policy=offload_policy,
        ignored_params=ignored_params, ignored_modules=ignored_modules, replicated_params=replicated_params,
        replicated_modules=replicated_modules, sync_from_rank0=sync_from_rank0, sanitizer=sanitizer,
        all_gather_extension_fn=all_gather_extension_fn))


_SHARDS.keys = (fully_shard, fully_shard_key)
fully_shard.state = _SHARDS.state_of  # type: ignore[attr-defined]


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Several roots (the stages of a pipeline on one rank) count packed gradients together."""
    _C.share_comm_ctx(_cores_of(modules))
    states = [state_of(module) for module in modules]
    for state in states:
        state._comm_ctx = states[0]._comm_ctx
