"""First values that do not depend on the number of ranks, for models that are built on the meta device."""

from dataclasses import dataclass
from typing import Any, Callable, Iterable

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from . import _C, _checks
from ._hooked import is_gathered_by_hooks
from ._init_stand_in import StandIn, core_draws, stand_ins_in
from ._states import state_of


class Initializer:
    """What a function of `fsdp.initializer` is given beside the module: for what has to be made as a whole. Every rank makes
    all of it, one parameter at a time, and keeps its part."""

    def whole_(self, tensor: torch.Tensor, function: Callable[[torch.Tensor, torch.Generator], None]) -> None:
        """function(whole, generator) changes `whole`, zeros on the CPU of the parameter's sizes (float32 for bfloat16 and
        float16). It must draw from `generator` alone, which is seeded for this parameter. tensor: the module's.

        Raises ValueError for a tensor that is not the module's.
        """
        if not isinstance(tensor, StandIn) or tensor._rows is not None:
            raise ValueError("initializer: whole_ needs a parameter or buffer as the module holds it, such as module.weight, "
                             f"found {type(tensor)}")
        tensor._run.whole_(*tensor._place, function)


@dataclass(frozen=True)
class ModuleInitializer:
    """How the modules of one class get their first values; `fsdp.initializer` makes it."""

    kind: type[nn.Module]
    function: Callable[[Any, Initializer], None]


def initializer(kind: type[nn.Module], function: Callable[[Any, Initializer], None]) -> ModuleInitializer:
    """For `materialize`: function(module, init) gives values to the parameters and buffers of a `kind` (or a class derived
    from it), and to those of modules in it if theirs are not to stay as their own classes have made them. With nn.Module it is
    called for every module. It is called twice, first to learn what it covers.

        fsdp.initializer(RMSNorm, lambda norm, init: torch.nn.init.ones_(norm.weight))

    torch.nn.init's functions, and fill_, zero_, copy_, uniform_, normal_ and rows like weight[0] work on what the module holds;
    `init.whole_` is for the rest. TypeError for what is no class of modules, or no function.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"initializer: expected a class of modules, found {kind!r}")
    if not callable(function):
        raise TypeError(f"initializer: expected a function (module, init), found {function!r}")
    return ModuleInitializer(kind, function)


def _own_initializer(module):
    """What torch's modules, and most of others, initialise themselves by."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(function := getattr(module, name, None)):
            return function
    return None


def _class_name(module):
    own = type(module) if state_of(module) is None else type(module).__bases__[1]  # behind FSDPModule
    return own.__name__


def _name_module(error, subject, path):
    """In what the exception says, unless it has the path already, in a message or else in a note."""
    if path and f"'{path}" in str(error):
        return
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{subject}: {error.args[0]}", *error.args[1:])
    if subject not in str(error) and hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(subject)


class _Run:
    def __init__(self, module, seed, initializers):
        self.initializers = initializers
        self.names = {below: name for name, below in module.named_modules()}
        self.on_meta = {below for below in module.modules() if any(each.is_meta for each in _tensors_below(below))}
        for name, parameter in module.named_parameters():
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            if local.is_meta and is_gathered_by_hooks(local):
                raise NotImplementedError(f"materialize: '{name}' is a {type(local).__name__}, a tensor subclass, which knows "
                                          "alone what its values are; give the module memory by to_empty and initialize it")
        kinds = {state.kind for below in module.modules() if (state := state_of(below)) is not None}
        if len(kinds) > 1:
            raise NotImplementedError("materialize: fully_shard and replicate have both been applied in this module; call it "
                                      "on the modules of one of them")
        self.core = _C.init_run(module, lambda below: any(kind.leaves_out(below) for kind in kinds), seed, self.initialize)

    def describe(self, module, entry):
        path = self.names.get(module, "")
        return f"'{path}.{entry}' ({_class_name(module)})" if path else f"'{entry}' ({_class_name(module)})"

    def initialize(self, module, run):
        function = next((each.function for each in self.initializers if isinstance(module, each.kind)), None)
        if module not in self.on_meta:
            return
        own = _own_initializer(module) if function is None else None
        if function is None and own is None:
            return
        try:
            with stand_ins_in(module, run, self.describe), torch.no_grad(), core_draws():
                own() if own is not None else function(module, Initializer())
        except Exception as error:
            path = self.names.get(module)
            what = "the initializer" if own is None else f"{own.__name__}()"
            _name_module(error, f"materialize: {what} of {f'{path!r}' if path else 'the module'} ({_class_name(module)})", path)
            raise


def _tensors_below(module):
    return (*module.parameters(), *module.buffers())


def _allocate_sharded(module):
    """As `to_empty` does, but for what has values: those of a group are all on meta, or none is."""
    done = set()
    for below in module.modules():
        state = state_of(below)
        if state is None or state.core in done:
            continue
        done.add(state.core)
        pairs = [sharded for sharded, _ in state.core.forms() if sharded.is_meta]
        if not pairs:
            continue
        state.core.before_apply()
        for sharded in pairs:
            local = torch.zeros_like(sharded._local_tensor, device=state.mesh.device_type)
            new = nn.Parameter(DTensor(local, sharded._spec, requires_grad=False), requires_grad=sharded.requires_grad)
            torch.utils.swap_tensors(sharded, new)
        state.core.applied()


def materialize(module: nn.Module, *, seed: int = 0, initializers: Iterable[ModuleInitializer] = ()) -> None:
    """Gives a module on the meta device memory and first values: of what is sharded, this rank's part only, on the mesh's
    device; the rest as a whole. The values are the same, bit for bit, on any number of ranks.

        with torch.device("meta"):
            model = Llama(config)
        for block in model.blocks:
            fsdp.fully_shard(block)
        fsdp.fully_shard(model)
        fsdp.materialize(model, seed=1)

    Each module's own `reset_parameters()` (or `_reset_parameters()`, as MultiheadAttention's) runs, innermost first, so that
    an outer one may overrule, with random numbers that depend on the seed, the parameter's name and the element's position in
    the whole parameter alone, not on torch's generators. initializers: `fsdp.initializer(Class, function)`; the first that fits
    a module is taken instead. Of a tied parameter the last of its modules decides. What is not on meta keeps its values.
    Parameters of sharded modules stay the same objects, so an optimizer that was built before is as good as one built
    afterwards.

    Nothing is communicated; all ranks make the same call. Extra memory: one parameter, this rank's part or, for orthogonal_,
    sparse_ and whole_, the whole. ValueError, with nothing changed, that lists every module with a parameter or buffer that no
    initialiser covers, or names one whose initialiser does what cannot be done element by element, and the way out. What an
    initialiser raises itself arrives with its module's name in front.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"materialize: expected an nn.Module, found {module!r} ({type(module).__name__})")
    if not 0 <= _checks.whole_number(seed, "materialize: seed", 2**64) < 2**64:
        raise ValueError(f"materialize: expected a seed of 0 to 2**64 - 1, found {seed}")
    initializers = list(initializers)
    for each in initializers:
        _checks.instance(each, ModuleInitializer, "materialize: initializers")
        if each is None:
            raise TypeError("materialize: initializers: found None among them")
    run = _Run(module, seed, initializers)
    try:
        run.core.rehearse()
        _allocate_sharded(module)
        run.core.allocate_plain()
        run.core.run()
    finally:
        del run.core  # which has run.initialize, and so would keep the module
