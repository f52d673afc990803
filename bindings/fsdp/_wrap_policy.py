"""FSDP1's wrap policies: which modules of a tree become units of their own."""

from dataclasses import dataclass
from typing import Any, Callable

import torch.nn as nn

from . import _checks


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
    below it; None: always. The root is always a unit. Neither is asked about ignored modules."""

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
    is_leaf: neither a unit nor looked into: it stays with its parent. is_excluded: never a unit, but looked into, as is each
    module without a forward of its own, such as ParameterList. ValueError for a min_numel that is not above 0."""
    if _checks.whole_number(min_numel, "wrap_by_size: min_numel", 2**63 - 1) <= 0:
        raise ValueError(f"wrap_by_size: expected a min_numel above 0, found {min_numel}")

    def enters(candidate):
        return candidate.numel >= min_numel and not is_leaf(candidate.module)

    def wraps(candidate, defaults):
        return defaults if enters(candidate) and has_forward(candidate.module) and not is_excluded(candidate.module) else None

    return WrapPolicy(wraps=wraps, enters=enters)


def has_forward(module):
    """Without one, nothing says when a unit's parameters are used."""
    return type(module).forward is not nn.Module.forward
