"""Policies as `torch.distributed.fsdp.wrap` has them, for FSDP1, as a WrapPolicy."""

import functools
import inspect
from typing import Any, Callable

import torch.nn as nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import _Policy

from ._api import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ._wrap_policy import WrapPolicy, has_forward

# What may be given as a policy: WrapPolicy, ModuleWrapPolicy and CustomPolicy, or a function as size_based_auto_wrap_policy is.
AnyPolicy = WrapPolicy | _Policy | Callable[..., bool]


def policy_of(given: Any, root: nn.Module, ignored: set[nn.Module], options: dict[str, Any], subject: str) -> WrapPolicy:
    """options: fully_shard's keyword arguments for the root. TypeError for what is none of FSDP1's policies."""
    if isinstance(given, WrapPolicy):
        return given
    if isinstance(given, _Policy):
        return _of_object(given, root, ignored, options, subject)
    if callable(given) and not isinstance(given, (type, nn.Module)) and _is_asked_as_fsdp1s(given):
        return _of_function(given)
    raise TypeError(f"{subject}: expected a WrapPolicy, or one of FSDP1's: ModuleWrapPolicy, CustomPolicy, or a function "
                    f"(module, recurse, nonwrapped_numel) such as size_based_auto_wrap_policy; found {given!r}")


def _is_asked_as_fsdp1s(function):
    try:
        inspect.signature(function).bind(module=None, recurse=True, nonwrapped_numel=0)
    except (TypeError, ValueError):
        return False
    return True


def _of_object(policy, root, ignored, options, subject):
    units = policy._run_policy(root, ignored, dict(options))
    return WrapPolicy(wraps=lambda candidate, defaults: (
        _translated(units[candidate.module], subject) if candidate.module in units else None))


def _of_function(function):
    """FSDP1 asks whether to look below a module, and then, only where it did, whether to make it a unit."""
    entered = set()

    def enters(candidate):
        entered.discard(candidate.module)
        if function(module=candidate.module, recurse=True, nonwrapped_numel=candidate.numel):
            entered.add(candidate.module)
        return candidate.module in entered

    def wraps(candidate, defaults):
        # always_wrap_policy and the one by size take lists, too, which is of no use to FSDP1.
        is_unit = candidate.module in entered and has_forward(candidate.module) and function(
            module=candidate.module, recurse=False, nonwrapped_numel=candidate.numel)
        return defaults if is_unit else None

    return WrapPolicy(wraps=wraps, enters=enters)


def _translated(arguments, subject):
    """A unit's keyword arguments, of which a CustomPolicy's function may have given some in FSDP1's words."""
    result = {}
    for name, value in arguments.items():
        if name in _FSDP1S_ARGUMENTS:
            result.update(_FSDP1S_ARGUMENTS[name](value, f"{subject}: {name}", arguments))
        else:
            result[name] = value
    return result


def _reshard_of(strategy, subject, arguments):
    hybrid = {ShardingStrategy.HYBRID_SHARD: True, ShardingStrategy._HYBRID_SHARD_ZERO2: False}
    if strategy in hybrid:
        if getattr(arguments.get("mesh"), "ndim", 0) != 2:
            raise ValueError(f"{subject}: {strategy.name} needs a mesh of two dimensions (replicate, shard), found "
                             f"{arguments.get('mesh')}")
        return {"reshard_after_forward": hybrid[strategy]}
    if strategy is ShardingStrategy.NO_SHARD:
        raise ValueError(f"{subject}: NO_SHARD is not an option of a unit; name the module in replicated_modules")
    if not isinstance(strategy, ShardingStrategy):
        raise TypeError(f"{subject}: expected a ShardingStrategy, found {strategy!r}")
    return {"reshard_after_forward": strategy is ShardingStrategy.FULL_SHARD}


def _precision_of(policy, subject, arguments):
    if policy is None:
        return {"mp_policy": MixedPrecisionPolicy()}
    if not isinstance(policy, MixedPrecision):
        raise TypeError(f"{subject}: expected a MixedPrecision or None, found {policy!r}")
    if policy.keep_low_precision_grads:
        raise ValueError(f"{subject}: its keep_low_precision_grads has no equal in MixedPrecisionPolicy; leave it out")
    classes = tuple(policy._module_classes_to_ignore)
    return {"mp_policy": MixedPrecisionPolicy(
        param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype or policy.param_dtype,
        buffer_dtype=policy.buffer_dtype, cast_forward_inputs=policy.cast_forward_inputs,
        is_exempt=lambda module: isinstance(module, classes))}


def _offload_of(policy, subject, arguments):
    if policy is not None and not isinstance(policy, CPUOffload):
        raise TypeError(f"{subject}: expected a CPUOffload or None, found {policy!r}")
    return {"offload_policy": CPUOffloadPolicy() if policy is not None and policy.offload_params else OffloadPolicy()}


def _nothing(value, subject, arguments):
    return {}


_FSDP1S_ARGUMENTS = {"sharding_strategy": _reshard_of, "mixed_precision": _precision_of, "cpu_offload": _offload_of,
                     "use_orig_params": _nothing, "forward_prefetch": _nothing}
