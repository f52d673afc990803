"""What a wrap policy makes of a tree: a dry run of calls of `fully_shard`, and the calls."""

import dataclasses
import inspect
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn

from . import _checks
from ._fsdp1_policies import AnyPolicy, policy_of
from ._fully_shard import fully_shard
from ._logs import logger
from ._module import FSDPModule
from ._wrap_policy import WrapCandidate, has_forward


# Of fully_shard's keyword arguments, with the default that means none.
_OPTIONS = {name for name, each in inspect.signature(fully_shard).parameters.items() if each.kind is each.KEYWORD_ONLY}
_SETS = {"ignored_params": _checks.parameter_set, "ignored_modules": _checks.module_set,
         "replicated_params": _checks.parameter_set, "replicated_modules": _checks.module_set}


@dataclass
class PlannedUnit:
    """One unit that `apply_wrapping` will make. Names are from the root; bytes are of the unsharded parameters."""

    module: nn.Module
    name: str  # "" for the root
    options: dict[str, Any]  # fully_shard's keyword arguments
    parameters: list[str] = field(default_factory=list)
    bytes: int = 0
    frozen_bytes: int = 0  # of those that need no gradient
    frozen_parameters: list[str] = field(default_factory=list)
    is_exempt: bool = False  # MixedPrecisionPolicy.is_exempt holds for it, or for a module around it


@dataclass
class WrapPlan:
    """What a policy makes of a tree, before anything is changed: inner units before outer ones, the root last. As text, the
    tree of units with the bytes of their own parameters, and notes of those that mix frozen and trainable ones or are exempt
    from mixed precision."""

    units: list[PlannedUnit]

    def __str__(self) -> str:
        lines: list[str] = []

        def add(unit, depth):
            indent = "  " * depth
            lines.append(f"{indent}{unit.name or '(root)'}: {len(unit.parameters)} parameters, {unit.bytes} bytes")
            if unit.is_exempt:
                lines.append(f"{indent}  note: exempt from mixed precision")
            if 0 < unit.frozen_bytes < unit.bytes:
                lines.append(f"{indent}  note: {unit.frozen_bytes} of these bytes are frozen: "
                             f"{', '.join(unit.frozen_parameters)}; they are gathered with the others and not reduced")
            for below in self.units:
                if _around(self.units, below) is unit:
                    add(below, depth + 1)

        add(self.units[-1], 0)
        return "\n".join(lines)


def _around(units, unit):
    """The innermost unit around `unit`; None for the root."""
    behind = units[next(index for index, each in enumerate(units) if each is unit) + 1:]
    return next((each for each in behind if not each.name or unit.name.startswith(each.name + ".")), None)


def _registrations(module):
    return Counter(param for below in module.modules() for param in below._parameters.values() if param is not None)


def _checked_options(options, subject):
    """A copy, in which what may be read only once is a list."""
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"{subject}: fully_shard has no argument {name!r}; expected some of {', '.join(sorted(_OPTIONS))}")
    return {name: list(_SETS[name](value, f"{subject}: {name}")) if name in _SETS and value is not None else value
            for name, value in options.items()}


def _ignored_by(options):
    return {*(options.get("ignored_params") or ()),
            *(param for module in options.get("ignored_modules") or () for param in module.parameters())}


class _Planner:
    def __init__(self, root, policy, options):
        self.options, self.units, self.seen = _checked_options(options, "plan_wrapping"), [], set()
        self.claims = {}  # parameter -> unit
        self.ignored = _ignored_by(self.options)
        self.left_alone = set()  # ignored modules, with all below them
        inside = set(root.modules())
        for module in self.options.get("ignored_modules") or ():
            if module is root or module not in inside:
                where = "the root, of which nothing would be left" if module is root else "not in the tree of the root"
                raise ValueError(f"plan_wrapping: ignored_modules: {type(module).__name__} is {where}")
            self.left_alone.update(module.modules())
        self.is_exempt = _checks.exemption(self.options.get("mp_policy"))
        self.policy = policy_of(policy, root, self.left_alone, self.options, "plan_wrapping")

    def visit(self, module, name, is_asked=True, in_exempt=False):
        """Plans the units of a subtree; returns how many elements they took. is_asked: the policy looks below all modules
        around it. in_exempt: one around it is exempt from mixed precision."""
        if module in self.seen or module in self.left_alone:
            return 0
        self.seen.add(module)
        params = [param for param in module.parameters() if param not in self.ignored]
        numel, taken = sum(param.numel() for param in params), 0
        is_exempt = self.is_exempt is not None and has_forward(module) and self.is_exempt(module)
        enters = is_asked and (self.policy.enters is None or self.policy.enters(WrapCandidate(module, name, numel, not name)))
        for key, child in module.named_children() if enters or self.is_exempt is not None else ():
            taken += self.visit(child, f"{name}.{key}" if name else key, enters, in_exempt or is_exempt)
        options = self.options_of(WrapCandidate(module, name, numel - taken, not name), is_asked, is_exempt, in_exempt)
        if options is None:
            return taken
        self.units.append(PlannedUnit(module, name, options, is_exempt=in_exempt or is_exempt))
        self.ignored.update(_ignored_by(options))  # as the units around it will do
        for param in params:
            if param not in self.ignored:
                self.claims.setdefault(param, self.units[-1])
        return numel

    def options_of(self, candidate, is_asked, is_exempt, in_exempt):
        """Of a module that is to be a unit; None: it is none."""
        if candidate.is_root:
            return self.options
        options = self.policy.wraps(candidate, self.options) if is_asked else None
        if options is None and is_exempt and candidate.numel > 0:
            options = self.options
        if options is None:
            return None
        subject = f"plan_wrapping: fully_shard of {candidate.name!r}"
        _checks.modules(candidate.module, subject)
        options = self.within(candidate.module, _checked_options(options, subject))
        policy = self.options.get("mp_policy")
        if in_exempt and options.get("mp_policy") is policy:  # as a call for it alone could not tell
            options["mp_policy"] = dataclasses.replace(policy, is_exempt=lambda module: True)
        return options

    def within(self, module, options):
        """Of what the root's call ignores, a unit's call may name what is in the unit alone. A parameter of it that the unit
        has, too, is ignored there by itself."""
        if not options.get("ignored_modules"):
            return dict(options)
        elsewhere = self.left_alone.difference(module.modules())
        return {**options,
                "ignored_modules": [each for each in options["ignored_modules"] if each not in elsewhere],
                "ignored_params": [param for param in module.parameters() if param in self.ignored.union(_ignored_by(options))]}

    def assign(self, root):
        """Each parameter to its unit, or to the nearest one around all places where it is registered."""
        names = {param: name for name, param in root.named_parameters()}
        inside = {id(unit): _registrations(unit.module) for unit in self.units}
        everywhere = inside[id(self.units[-1])]
        for param, unit in self.claims.items():
            while inside[id(unit)][param] != everywhere[param]:
                unit = _around(self.units, unit)
            size = param.numel() * param.element_size()
            unit.parameters.append(names[param])
            unit.bytes += size
            if not param.requires_grad:
                unit.frozen_bytes += size
                unit.frozen_parameters.append(names[param])


def plan_wrapping(root: nn.Module, policy: AnyPolicy, **options: Any) -> WrapPlan:
    """The dry run: changes nothing, communicates nothing. options: fully_shard's keyword arguments for the root, and the
    policy's defaults. ignored_modules: no units are made of them, or below them. A parameter that several units share is listed
    with the nearest one around them.

    policy: a WrapPolicy, or one of torch.distributed.fsdp.wrap: ModuleWrapPolicy; CustomPolicy, whose function may give
    arguments of fully_shard or FSDP1's sharding_strategy, mixed_precision and cpu_offload; or a function (module, recurse,
    nonwrapped_numel), such as functools.partial(size_based_auto_wrap_policy, min_num_params=...), which is not asked about
    modules without a forward of their own.

    Raises ValueError if the tree has a sharded module already, if the policy chooses a container without a forward, or if an
    ignored module is the root or not in the tree; TypeError for what is no module, policy or argument of fully_shard.
    """
    _checks.modules(root, "plan_wrapping")
    if not isinstance(root, nn.Module):
        raise TypeError(f"plan_wrapping: expected a module, found {type(root)}")
    for name, module in root.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(f"plan_wrapping: {name or 'the root'} is sharded already; a policy needs a tree without sharded "
                             "modules")
    planner = _Planner(root, policy, options)
    planner.visit(root, "")
    planner.assign(root)
    return WrapPlan(planner.units)


def apply_wrapping(plan: WrapPlan) -> FSDPModule:
    """Calls fully_shard for each unit of the plan, inner ones first, and returns the root. Raises what that raises: units
    that come before the wrong one are sharded then. Logs a warning for a plan of the root alone."""
    if len(plan.units) == 1:
        logger.warning("apply_wrapping: the policy chose no module below the root, so all parameters are one group, which is "
                       "gathered whole; print(plan_wrapping(root, policy)) shows the plan")
    for unit in plan.units:
        fully_shard(unit.module, **unit.options)
    return plan.units[-1].module  # type: ignore[return-value]
