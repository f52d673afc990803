"""Copies of sharded modules: deepcopy shards the copy like the original; pickle is refused."""

import copy
import functools
import pickle

import torch
import torch.nn as nn

from . import _C
from ._dtensors import copy_parameter
from ._spmd_types import without_annotation
from ._states import state_of

_UNDER_WAY = object()  # its id in deepcopy's memo: a sharded module around this one is being copied


def _without_class_in_front(module):
    """A new object of the module's own class, without attributes."""
    own = type(module).__bases__[1]
    return own.__new__(own)


def _copy_module(module, memo):
    new = memo[id(module)] = _without_class_in_front(module)
    get_state = getattr(module, "__getstate__", None)  # Python 3.11 gives one to every object
    new.__setstate__(copy.deepcopy(get_state() if get_state else module.__dict__, memo))
    new.__class__ = type(module)
    return new


def _copy_handle(handle, parameter, memo):
    """A plain parameter like the handle, without values; nothing touches its memory but this rank's part."""
    empty = torch.empty_strided(handle.shape, handle.stride(), dtype=parameter.dtype, device=handle.device)
    new = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    new.__dict__.update(copy.deepcopy(without_annotation(handle.__dict__), memo))
    return new


def _outside_inference_mode(function):
    """What is made in that mode could be used in it alone."""
    @functools.wraps(function)
    def outside(*args):
        with torch.inference_mode(False), torch.no_grad():
            return function(*args)

    return outside


@_outside_inference_mode
def deepcopy(module, memo):
    """`copy.deepcopy` of a sharded module: an independent one over the same mesh, with the same shards, options, hooks
    and attributes. Gradients are not copied. Every rank of the mesh makes it.

    Raises NotImplementedError where one of both, fully_shard and replicate, is below the other; ValueError where a module
    of the same call, or a parameter's owner, lies outside of `module`; RuntimeError on the meta device.
    """
    if id(_UNDER_WAY) in memo:
        return _copy_module(module, memo)
    states = list(dict.fromkeys(below._get_fsdp_state() for below in module.modules() if hasattr(below, "_core")))
    kind = states[0].kind
    if any(state.kind is not kind for state in states):
        raise NotImplementedError(f"deepcopy: a module that {kind.other} was applied to, below one of {kind.name}, cannot be "
                                  "copied with it; copy the module before these functions are applied")
    cores = [state.core for state in states]
    module._core().check_copyable()
    for core in cores:
        core.see_places()  # all of them before one is copied: parameters may have changed places among them
    for core in cores:
        core.reshard()  # tables hold DTensors
        for parameter, handle in core.forms():
            if id(parameter) not in memo:  # an optimizer's copy may have it already
                memo[id(parameter)] = copy_parameter(parameter, memo)
            memo[id(handle)] = _copy_handle(handle, parameter, memo)
    memo[id(_UNDER_WAY)] = _UNDER_WAY
    try:
        new = _copy_module(module, memo)
    finally:
        del memo[id(_UNDER_WAY)]
    for state, core in zip(states, _C.copy_sharded(module, new, cores, memo, kind.leaves_out)):
        new_state = memo[id(state)]
        new_state.take_core(core, [below for below in new.modules() if state_of(below) is new_state])
    return new


def shallow_copy(module):
    new = _without_class_in_front(module)
    new.__dict__.update(module.__dict__)
    new.__class__ = type(module)
    return new


def refuse_pickle(module, protocol):
    raise pickle.PicklingError(
        f"{type(module).__name__}: a sharded module cannot be pickled, as each rank has a part of it only, and process "
        "groups; save its state_dict(), by torch.distributed.checkpoint for instance"
    )
