"""Which modules of a tree become units of their own: FSDP1's wrap policies for `fully_shard`, with a dry run."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable

import torch.nn as nn

from . import _checks
from ._fully_shard import fully_shard
from ._logs import logger
from ._module import FSDPModule


@dataclass(frozen=True)
class WrapCandidate:
    """A module that a policy is asked about. numel: elements of its parameters, without those of units below it."""

    module: nn.Module
    name: str  # path from the root
    numel: int
    is_root: bool = False


@dataclass(frozen=True, kw_only=True)
class WrapPolicy:
    """wraps: (candidate, the default options) -> the keyword arguments of fully_shard for a module that is to be a unit, asked
    after everything below it; None: it stays with its parent. enters: (candidate, with all its elements) -> whether to look
    below it; None: always. The root is always a unit."""

    wraps: Callable[[WrapCandidate, dict[str, Any]], dict[str, Any] | None]
    enters: Callable[[WrapCandidate], bool] | None = None


def wrap_if(predicate: Callable[[WrapCandidate], bool]) -> WrapPolicy:
    """Modules for which `predicate` is true, with the default options."""
    return WrapPolicy(wraps=lambda candidate, defaults: defaults if predicate(candidate) else None)


def wrap_class(*classes: type[nn.Module]) -> WrapPolicy:
    """Modules of these classes, or of classes below them. TypeError for what is no class."""
    for each in classes:
        if not isinstance(each, type):
            raise TypeError(f"wrap_class: expected classes of modules, found {each!r}")
    return wrap_if(lambda candidate: isinstance(candidate.module, classes))


def wrap_by_size(
    *,
    min_numel: int = 100_000_000,
    is_leaf: Callable[[nn.Module], bool] = lambda module: isinstance(module, nn.MultiheadAttention),
    is_excluded: Callable[[nn.Module], bool] = lambda module: isinstance(module, (nn.ModuleList, nn.ModuleDict)),
) -> WrapPolicy:
    """FSDP1's size_based_auto_wrap_policy: a unit has at least `min_numel` elements that no unit below it has taken.
    is_leaf: not looked into. is_excluded: never a unit. ValueError for a min_numel that is not above 0."""
    if _checks.whole_number(min_numel, "wrap_by_size: min_numel", 2**63 - 1) <= 0:
        raise ValueError(f"wrap_by_size: expected a min_numel above 0, found {min_numel}")

    def wraps(candidate, defaults):
        return defaults if candidate.numel >= min_numel and not is_excluded(candidate.module) else None

    return WrapPolicy(wraps=wraps, enters=lambda candidate: candidate.numel >= min_numel and not is_leaf(candidate.module))


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


@dataclass
class WrapPlan:
    """What a policy makes of a tree, before anything is changed: inner units before outer ones, the root last. As text, the
    tree of units with the bytes of their own parameters, and a note for each that mixes frozen and trainable ones."""

    units: list[PlannedUnit]

    def __str__(self) -> str:
        lines: list[str] = []

        def add(unit, depth):
            indent = "  " * depth
            lines.append(f"{indent}{unit.name or '(root)'}: {len(unit.parameters)} parameters, {unit.bytes} bytes")
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


class _Planner:
    def __init__(self, policy, options):
        self.policy, self.options, self.units, self.seen = policy, options, [], set()
        self.claims = {}  # parameter -> unit
        self.ignored = set(_checks.parameter_set(options.get("ignored_params"), "plan_wrapping: ignored_params"))
        for module in _checks.module_set(options.get("ignored_modules"), "plan_wrapping: ignored_modules"):
            self.ignored.update(module.parameters())

    def visit(self, module, name):
        """Plans the units of a subtree; returns how many elements they took."""
        if module in self.seen:
            return 0
        self.seen.add(module)
        params = [param for param in module.parameters() if param not in self.ignored]
        numel, taken = sum(param.numel() for param in params), 0
        if self.policy.enters is None or self.policy.enters(WrapCandidate(module, name, numel, not name)):
            for key, child in module.named_children():
                taken += self.visit(child, f"{name}.{key}" if name else key)
        options = self.policy.wraps(WrapCandidate(module, name, numel - taken), self.options) if name else self.options
        if options is None:
            return taken
        _checks.modules(module, f"plan_wrapping: fully_shard of {name!r}")
        self.units.append(PlannedUnit(module, name, dict(options)))
        for param in params:
            self.claims.setdefault(param, self.units[-1])
        return numel

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


def plan_wrapping(root: nn.Module, policy: WrapPolicy, **options: Any) -> WrapPlan:
    """The dry run: changes nothing, communicates nothing. options: fully_shard's keyword arguments for the root, and the
    policy's defaults. A parameter that several units share is listed with the nearest one around them.

    Raises ValueError if the tree has a sharded module already, or if the policy chooses a container without a forward;
    TypeError for what is no module or policy.
    """
    _checks.modules(root, "plan_wrapping")
    if not isinstance(root, nn.Module) or not isinstance(policy, WrapPolicy):
        raise TypeError(f"plan_wrapping: expected a module and a WrapPolicy, found {type(root)} and {policy!r}")
    for name, module in root.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(f"plan_wrapping: {name or 'the root'} is sharded already; a policy needs a tree without sharded "
                             "modules")
    planner = _Planner(policy, options)
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
