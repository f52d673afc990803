"""What the shards of parameters that are tensor subclasses are cut from: their own values, or the first rank's.

A subclass's values are its inner tensors' (`__tensor_flatten__`), which travel as bytes.
"""

import pickle

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def own(parameter, mesh, name):
    if mesh.device_type != parameter.device.type and not parameter.is_meta:
        return parameter.to(mesh.device_type)
    return parameter


def first_ranks(parameter, mesh, name):
    """sync_from_rank0. A collective call; the same error on all ranks. The parameter stays what it is; other ranks' may be
    on the meta device."""
    is_first = all(index == 0 for index in mesh.get_coordinate())
    _check_alike(parameter, mesh, name)
    values = own(parameter, mesh, name) if is_first else _with_memory(parameter, mesh.device_type)
    inner = list(_inner_tensors(values))
    sent = torch.cat([each.detach().contiguous().reshape(-1).view(torch.uint8) for each in inner])
    for group in reversed(mesh.get_all_groups()):  # in the shard group first, then over replicas
        dist.broadcast(sent, dist.get_global_rank(group, 0), group)
    if not is_first:
        for each, received in zip(inner, sent.split([each.nbytes for each in inner])):
            each.copy_(received.clone().view(each.dtype).view(each.shape))
    return values


def _inner_tensors(tensor):
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _inner_tensors(getattr(tensor, name))


def _with_memory(tensor, device):
    """Like it, on the device, for other values."""
    if not is_traceable_wrapper_subclass(tensor):
        return torch.empty_like(tensor.detach(), device=device)
    names, context = tensor.__tensor_flatten__()
    inner = {name: _with_memory(getattr(tensor, name), device) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def _form(tensor):
    """What the ranks' have to have in common, and whether its values can be sent."""
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        return (type(tensor).__name__, _as_bytes(context), tuple((name, _form(getattr(tensor, name))) for name in names))
    if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
        return (type(tensor).__name__, "has no __tensor_flatten__")
    return (type(tensor).__name__, tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype))


def _as_bytes(context):
    try:
        return pickle.dumps(context)
    except Exception:  # then it is not compared
        return b""


def _is_sendable(form):
    return len(form) == 4 or len(form) == 3 and all(_is_sendable(inner) for _, inner in form[2])


def _check_alike(parameter, mesh, name):
    here = (_form(parameter), parameter.is_meta)
    found = [here]
    for group in mesh.get_all_groups():
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, found, group=group)
        found = [each for of_rank in gathered for each in of_rank]
    forms = [form for form, _ in found]
    if not all(_is_sendable(form) for form in forms):
        raise NotImplementedError(f"fully_shard with sync_from_rank0: {name} is a {type(parameter).__name__}, a tensor "
                                  "subclass without __tensor_flatten__ and __tensor_unflatten__, so that its values cannot be sent; "
                                  "define them, or leave sync_from_rank0 out")
    if any(form != forms[0] for form in forms):
        raise ValueError(f"fully_shard with sync_from_rank0: {name} differs between the ranks; here it is a "
                         f"{type(parameter).__name__} of sizes {tuple(parameter.shape)} and {parameter.dtype}. Shard the same "
                         "modules in the same order on all ranks")
    if found[0][1]:  # the first rank's, by the order of groups and of ranks in them
        raise ValueError(f"fully_shard with sync_from_rank0: {name} is on the meta device on the first rank, whose values "
                         "would be given to the others; give it values there")
