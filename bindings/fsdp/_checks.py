"""What arguments are checked for when they enter, before anything changes. What only the core knows is the core's to
refuse.

The types are those of FSDP2's exceptions where it checks itself. Where it fails by accident later (AttributeError,
IndexError), or takes no notice, a wrong type is a TypeError here and a wrong value a ValueError.
"""

import torch
import torch.nn as nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ._api import AnyMixedPrecisionPolicy, OffloadPolicy
from ._torch_names import FSDPModule as TorchFSDPModule

_LARGEST_INT = 2**31 - 1  # no world and no number of buffers is larger
_LARGEST_SIZE = 2**63 - 1


def _kind(value):
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def flag(value, subject):
    """What has a truth value of its own is taken; a string or a list, which is true by its length, is a mistake."""
    if value is None or hasattr(type(value), "__bool__"):
        return bool(value)
    raise TypeError(f"{subject}: expected a bool, found {value!r} ({_kind(value)})")


def number(value, subject):
    if isinstance(value, (str, bytes)) or not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):
        raise TypeError(f"{subject}: expected a number, found {value!r} ({_kind(value)})")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{subject}: expected a number, found one that is too large: {value!r}") from None


def whole_number(value, subject, largest=_LARGEST_INT):
    """An int; True is none, and what is larger than there can be anything of is as good as the largest."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{subject}: expected an int, found {value!r} ({_kind(value)})")
    return max(-largest, min(value, largest))


def byte_count(value, subject):
    return whole_number(value, subject, _LARGEST_SIZE)


def dtype(value, subject):
    if value is not None and not isinstance(value, torch.dtype):
        raise TypeError(f"{subject}: expected a torch.dtype or None, found {value!r} ({_kind(value)})")
    return value


def text(value, subject):
    if not isinstance(value, str):
        raise TypeError(f"{subject}: expected a str, found {value!r} ({_kind(value)})")
    return value


def reshard_after_forward(value, subject):
    """An int that does not divide the shard size is the core's to refuse."""
    if not isinstance(value, (bool, int)):
        raise ValueError(f"{subject}: expected a bool, or an int that divides the shard size, found {value!r}")
    if abs(value) > _LARGEST_INT:
        raise ValueError(f"{subject}: expected a divisor of the shard size, found {value}")


def modules(given, subject):
    """The list of modules that a function was given one or several of."""
    if isinstance(given, nn.Module):
        if isinstance(given, (nn.ModuleList, nn.ModuleDict)) and type(given).forward is nn.Module.forward:
            raise ValueError(f"{subject} does not support containers that do not implement forward: {given}\n"
                             "Call it on the container's modules, or on the list of them")
        return [given]
    if isinstance(given, type) or not hasattr(given, "__iter__"):
        raise TypeError(f"{subject}: expected an nn.Module or a list of them, found {given!r} ({_kind(given)})")
    found = list(given)
    for index, module in enumerate(found):
        if not isinstance(module, nn.Module):
            raise TypeError(f"{subject}: expected a list of modules, found {module!r} ({_kind(module)}) at position "
                            f"{index}")
    if not found:
        raise ValueError(f"{subject}: expected at least one module, found an empty list")
    if len(set(found)) != len(found):
        twice = next(module for module in found if found.count(module) > 1)
        raise AssertionError(f"{subject} can only be applied to a module once; the list has the following module "
                             f"twice:\n{twice}")
    return found


def not_sharded_by_torch(module, within, subject):
    """module: none of ours. within: the modules that it is one of or below, to say which it is."""
    if not isinstance(module, TorchFSDPModule):
        return
    function = next((name for name in ("fully_shard", "replicate") if name in module.__dict__.get(REGISTRY_KEY, {})), None)
    if function:
        name = next((name for root in within for name, below in root.named_modules() if below is module), "")
        which = f"module {name!r}, {type(module).__name__}," if name else f"the {type(module).__name__}"
        raise ValueError(f"{subject}: {which} is sharded by torch's own {function}, and one model cannot use both; "
                         f"import {function} from fsdp, or call fsdp.replace_torch(), before any of it is sharded")


def mesh(value, caller):
    if not isinstance(value, DeviceMesh):
        raise TypeError(f"{caller}: expected a DeviceMesh as mesh, found {value!r} ({_kind(value)}); make one with "
                        "torch.distributed.device_mesh.init_device_mesh")


def policies(mp_policy, offload_policy, caller):
    if not isinstance(mp_policy, AnyMixedPrecisionPolicy):
        raise TypeError(f"{caller}: expected mp_policy to be a MixedPrecisionPolicy, found "
                        f"{mp_policy!r} ({_kind(mp_policy)})")
    # None is what programs pass that offload on demand, and FSDP2 takes for no offloading.
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"{caller}: expected offload_policy to be an OffloadPolicy, such as CPUOffloadPolicy(), "
                        f"found {offload_policy!r} ({_kind(offload_policy)})")
    for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
        dtype(getattr(mp_policy, name, None), f"mp_policy.{name}")
    function(getattr(mp_policy, "is_exempt", None), "mp_policy.is_exempt")
    function(getattr(mp_policy, "param_dtype_override_fn", None), "mp_policy.param_dtype_override_fn")


def function(value, subject):
    if value is not None and not callable(value):
        raise TypeError(f"{subject}: expected a function or None, found {value!r} ({_kind(value)})")


def comm(value, subject):
    """A custom collective, or None."""
    if value is not None and not (callable(value) and callable(getattr(value, "allocate", None))):
        raise TypeError(f"{subject}: expected None, or what can be called and has a method allocate(size, *, dtype, device), "
                        f"found {value!r} ({_kind(value)})")
    return value


def instance(value, kind, subject):
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{subject}: expected a {kind.__name__} or None, found {value!r} ({_kind(value)})")


def parameter_set(value, subject):
    return _set_of(value, subject, torch.Tensor, "parameters")


def module_set(value, subject):
    return _set_of(value, subject, nn.Module, "modules")


def _set_of(value, subject, kind, what):
    """Without those that are there twice, in the order given."""
    if value is None:
        return {}
    if isinstance(value, (str, nn.Module, torch.Tensor)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{subject}: expected a set of {what}, found {_kind(value)}")
    found = list(value)
    for each in found:
        if not isinstance(each, kind):
            raise TypeError(f"{subject}: expected {what}, found {each!r} ({_kind(each)}) among them")
    return dict.fromkeys(found)


class ParameterNames:
    """A context: in what is raised inside, "a parameter" becomes the path, below the modules of the call, of the one that it is
    at."""

    def __init__(self, modules):
        self._modules = modules
        self._at = None

    def at(self, param):
        self._at = param
        return self

    def each(self, params):
        """Goes through them."""
        for self._at in params:
            yield self._at
        self._at = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if not isinstance(error, (AssertionError, RuntimeError, TypeError, ValueError)):
            return
        paths = (path for module in self._modules for path, found in module.named_parameters(remove_duplicate=False)
                 if found is self._at)
        path = next(paths, None)
        if path is not None and error.args and isinstance(error.args[0], str):
            error.args = (error.args[0].replace("a parameter", f"parameter {path!r}", 1), *error.args[1:])


def params(named, caller):
    """named: (name, parameter) of those to be sharded, as they are registered."""
    for name, param in named:
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"{caller}: expected parameter {name!r} to be a tensor, found {_kind(param)}")
        if isinstance(param, nn.parameter.UninitializedTensorMixin):
            raise RuntimeError(f"{caller}: parameter {name!r} is not initialized yet; run a lazy module once before "
                               "it is sharded")
        if param.layout is not torch.strided or param.is_quantized:
            raise NotImplementedError(f"{caller}: expected parameter {name!r} to be a dense tensor, found "
                                      f"{'a quantized one' if param.is_quantized else param.layout}")
        if not param.is_leaf:
            raise RuntimeError(f"{caller}: parameter {name!r} is the result of an operator, not a leaf; register an "
                               "nn.Parameter")


def placement(result, param):
    """What shard_placement_fn returned where that is no placement with a mesh of its own."""
    if not isinstance(result, Shard):
        raise ValueError(f"Invalid shard_placement_fn result: {result!r}; for a parameter expected Shard(dim) or None")
    if isinstance(result.dim, bool) or not isinstance(result.dim, int):
        raise ValueError(f"Invalid shard_placement_fn result: {result!r}; for a parameter expected an int as its dimension")
    if not -param.dim() <= result.dim < param.dim():
        raise AssertionError(f"Invalid shard_placement_fn result: {result!r} for a parameter of shape "
                             f"{tuple(param.shape)}; expected a dimension in [{-param.dim()}, {param.dim()})")
    return result.dim


def dtype_override(policy):
    """The policy's param_dtype_override_fn, with what it returns checked; None if there is none."""
    asked = getattr(policy, "param_dtype_override_fn", None)
    if asked is None:
        return None

    def checked(param):
        result = asked(param)
        if result is not None and not isinstance(result, torch.dtype):
            raise ValueError(f"param_dtype_override_fn must return a torch.dtype or None, found {result!r} "
                             f"({_kind(result)})")
        if result not in (None, policy.param_dtype, param.dtype):
            raise ValueError("param_dtype_override_fn must return None, param_dtype or the parameter's own dtype, "
                             f"found {result} for a parameter of {param.dtype} with param_dtype {policy.param_dtype}")
        return result

    return checked


def exemption(policy):
    """The policy's is_exempt, with what it returns checked; None where there is none, or nothing to be exempt from."""
    asked = getattr(policy, "is_exempt", None)
    if asked is None or policy.param_dtype is None and policy.param_dtype_override_fn is None:
        return None
    return lambda module: flag(asked(module), "mp_policy.is_exempt: its result")


def fsdp_modules(modules, kind):
    """kind: the class FSDPModule, which this file does not know."""
    if isinstance(modules, type) or not hasattr(modules, "__iter__"):
        raise TypeError(f"expected a list of FSDPModules, found {modules!r} ({_kind(modules)})")
    found = list(modules)
    for module in found:
        if not isinstance(module, kind):
            raise ValueError(f"expected FSDPModules, found {type(module)}: {module}; call fully_shard on it first")
    return found
