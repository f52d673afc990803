"""The state of a call of fully_shard or replicate, and where modules keep it."""

import copy
import functools
import types
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _State

from . import _hooked
from ._meshes import post_forward_mesh

# FSDPStates that have a core; several have the same root.
live_states: weakref.WeakSet = weakref.WeakSet()


@dataclass(eq=False)
class Kind:
    """Of the two functions one, in what they differ."""

    name: str  # torch's registry has the module under it
    other: str  # and those that this function leaves alone, with all below them, under this one
    prefix: str  # of the class that a module gets
    front: type  # that it gets in front of its own
    of_other: type = AssertionError  # raised for a module that the other function has been applied to
    keys: tuple[Any, ...] = ()  # the state's: the function, and torch's function of this name
    classes: dict[type, type] = field(default_factory=dict)  # made so far, by the module's own

    def leaves_out(self, module) -> bool:
        return self.other in module.__dict__.get(REGISTRY_KEY, {})

    def state_of(self, module):
        # torch's own decorator `contract` for this would refuse a tie across groups, which shows one name less.
        return module.__dict__.get(STATE_KEY, {}).get(self.keys[0])


class FSDPState(_State):
    """What `fully_shard.state(module)` and `replicate.state(module)` return; modules of one call share it.

    The members that begin with an underscore are what torch.distributed.pipelining asks for: before torch 2.15 it
    ends a stage's backwards through them, and since then it looks whether stages share a communication context.
    """

    # None: the final callback does all of it, for all groups of the root.
    _fsdp_param_group = None
    _fsdp_param_groups = ()

    def __init__(self, kind, mesh, reshard_after_forward=None, policies=None):
        """policies: (mp_policy, offload_policy)."""
        super().__init__()
        self.kind, self.policies, self.reshard_after_forward = kind, policies, reshard_after_forward
        self.units = []  # weak references to the call's modules, when they are sharded
        self.core, self.mesh = None, mesh  # the C++ side, when it is there; torch's data-parallel mesh
        self.post_forward_mesh = post_forward_mesh(mesh, reshard_after_forward)
        self._state_ctx = types.SimpleNamespace(all_states=[self])
        self._comm_ctx = object()
        self.annotated = []  # (module, name, Annotation) of each parameter that spmd_types annotates
        self.buffer_dtypes = []  # (module, name, dtype) of each buffer that the policy keeps in another
        self.timeline = None  # the last that was recorded of the root

    def _root_post_backward_final_callback(self):
        self.core.set_manual_backward_finalization(True)
        self.core.finalize_backward()
        self.core.set_manual_backward_finalization(False)

    def take_core(self, core, modules):
        self.core = core
        self.units = [weakref.ref(each) for each in modules]
        live_states.add(self)
        core.set_post_forward_mesh(*self.post_forward_mesh)
        core.set_find_hooked(functools.partial(_find_hooked, weakref.ref(self)))

    def owner_of(self, table):
        """The module whose table of parameters it is."""
        modules = (below for unit in self.units if unit() is not None for below in unit().modules())
        return next(below for below in modules if below._parameters is table)

    def cast_buffers_back(self):
        """Buffers that the policy keeps in another dtype are in their own until `recast_buffers`."""
        for module, name, dtype in self.buffer_dtypes:
            if (buffer := module._buffers.get(name)) is not None:
                buffer.data = buffer.data.to(dtype)

    def recast_buffers(self):
        """Their own dtype is what they are in now. They may be other tensors, too."""
        found = [(module, name, buffer) for module, name, _ in self.buffer_dtypes
                 if (buffer := module._buffers.get(name)) is not None and buffer.is_floating_point()]
        self.buffer_dtypes = [(module, name, buffer.dtype) for module, name, buffer in found]
        if found:
            self.core.cast_buffers([buffer for _, _, buffer in found])

    def follow_reshard_after_forward(self, value):
        self.reshard_after_forward = value
        self.post_forward_mesh = post_forward_mesh(self.mesh, value)
        self.core.set_post_forward_mesh(*self.post_forward_mesh)

    def __deepcopy__(self, memo):
        new = FSDPState(self.kind, self.mesh, policies=self.policies)  # gets its core when its modules are there
        new.reshard_after_forward = self.reshard_after_forward
        new.post_forward_mesh = self.post_forward_mesh
        new.annotated = copy.deepcopy(self.annotated, memo)
        new.buffer_dtypes = copy.deepcopy(self.buffer_dtypes, memo)
        return new


def _find_hooked(state, parameter, table, name):
    """The HookedParameter of a sharded parameter that has got hooks since; None: it has none."""
    if not _hooked.has_late_hooks(parameter):
        return None
    state = state()
    _hooked.check_released(parameter._local_tensor, state.reshard_after_forward)
    return _hooked.HookedParameter.of_shard(parameter, (state.owner_of(table), name), state)


def state_of(module):
    """Whichever of the two functions the module was given to; None: neither."""
    return module.__dict__.get(STATE_KEY, {}).get(FSDPState)


def _core_of(module):
    return module.__dict__[STATE_KEY][FSDPState].core


def _remember_state(module, state, item):
    # torch's own function finds it, too: `torch.distributed.fsdp.fully_shard.state(module)`.
    _add_to(module, STATE_KEY, {key: state for key in (FSDPState, *state.kind.keys)})
    _add_to(module, REGISTRY_KEY, {state.kind.name: item})


def _add_to(module, key, entries):
    module.__dict__[key] = {**module.__dict__.get(key, {}), **entries}  # a new one: see _undone_by


def _mark_as_managed(module):
    # What Dynamo asks. Past a __setattr__ of the module's own.
    module.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)


def _undone_by(undo, managed):
    """What `_remember_state` and `_mark_as_managed` do to these modules, `undo` undoes."""
    before = [(module.__dict__, dict(module.__dict__)) for module in managed]

    def restore():
        for now, attributes in before:
            now.clear()
            now.update(attributes)

    undo.callback(restore)
