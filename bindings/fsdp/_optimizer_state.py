"""An optimizer's state by the parameters' names, also where the optimizer holds local shards."""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor, Replicate

from . import _C
from ._names import Members, named_tensors


def optimizer_state_dict(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state in the form of torch.distributed.checkpoint's get_optimizer_state_dict: keys are the
    parameters' names, and what belongs to a parameter's elements is a DTensor as the parameter is, whether the
    optimizer holds the parameters or their local shards. So it can be saved by torch.distributed.checkpoint, and
    loaded into either kind.

    The tensors are the optimizer's own memory. As in torch's, an optimizer without any state is given one, by a step
    with zeros for gradients and a learning rate of 0. No communication.

    ValueError for a parameter that is not the module's.
    """
    _init_optim_state(optimizer)
    members = Members(named_tensors(module))
    plain = optimizer.state_dict()
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    state = {}
    for index, fields in plain["state"].items():
        for part in members.of(tensors[index]):
            state[members.name(part)] = {key: _field_of(part, tensors[index], key, value)
                                         for key, value in fields.items()}
    groups = [{**group, "params": [members.name(part) for index in group["params"]
                                   for part in members.of(tensors[index])]}
              for group in plain["param_groups"]]
    return {"state": state, "param_groups": groups}


def load_optimizer_state_dict(module: nn.Module, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """The reverse: state and options of the groups, from `optimizer_state_dict` or get_optimizer_state_dict, whichever
    of the two kinds the optimizer was that it came from; or from a plain optimizer's `state_dict()`, whose keys are positions:
    in the optimizer's groups, one after another, or, where it holds local shards, among the module's parameters that are
    theirs. Values may be DTensors or whole tensors.

    Parameters of a local shard that have no state in the dict get zeros. Communicates only for DTensors with other
    placements than the parameters have: a collective call then.
    ValueError, with nothing changed, for names that are missing or unknown, and for parameters of one local shard
    (or group of the optimizer) whose steps (options) differ.
    """
    named = named_tensors(module)
    members = Members(named)
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    state_dict = _by_name(state_dict, _names_by_position(named, members, tensors))
    _check_names([members.name(part) for tensor in tensors for part in members.of(tensor)], state_dict)
    state = {}
    for index, tensor in enumerate(tensors):
        found = {part: state_dict["state"][members.name(part)] for part in members.of(tensor)
                 if members.name(part) in state_dict["state"]}
        if found:
            state[index] = {key: _joined(tensor, key, {part: fields[key] for part, fields in found.items()})
                            for key in next(iter(found.values()))}
    groups, index = [], 0
    for group in optimizer.param_groups:
        names = [members.name(part) for tensor in group["params"] for part in members.of(tensor)]
        indices = list(range(index, index + len(group["params"])))
        groups.append({**_options_of(names, state_dict["param_groups"]), "params": indices})
        index += len(indices)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _is_shard(tensor):
    return hasattr(tensor, "parts")


def _is_by_element(value):
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _cut(value, part):
    """The part's elements of a tensor like its local shard, in the same memory, as the DTensor's local tensor."""
    local = part.parameter._local_tensor
    return value.as_strided(local.size(), local.stride(), value.storage_offset() + part.offset)


def _field_of(part, tensor, key, value):
    if not _is_by_element(value):
        return value.clone() if isinstance(value, torch.Tensor) else value
    if not _is_shard(tensor):
        return value
    if value.shape != tensor.shape:
        raise ValueError(f"optimizer_state_dict: {key!r} of the local shard with {part.name!r} has sizes "
                         f"{tuple(value.shape)} for {tensor.numel()} elements, so it cannot be told which belong to a "
                         "parameter; give this optimizer the parameters instead")
    return _C.dtensor_like(_cut(value, part), part.parameter)


def _joined(tensor, key, values):
    """A field of the optimizer's tensor from those of its parts."""
    first = next(iter(values.values()))
    # A parameter without dimensions has state like its counter's, which is a DTensor as the parameter is.
    parameter = next(iter(values)).parameter
    is_scalars = (isinstance(parameter, DTensor) and parameter.dim() == 0 and isinstance(first, torch.Tensor)
                  and key != "step")
    if not _is_by_element(first) and not is_scalars:
        for part, value in values.items():
            if value != first:
                raise ValueError(f"load_optimizer_state_dict: {key!r} is {first} for {next(iter(values)).name!r} and "
                                 f"{value} for {part.name!r}, which lie in one local shard; give them different "
                                 "labels in local_shards, or the optimizer the parameters")
        return first.clone() if isinstance(first, torch.Tensor) else first
    locals_ = {part: _local_of(value, part, key) for part, value in values.items()}
    if not _is_shard(tensor):
        (part, local), = locals_.items()
        return _C.dtensor_like(local.clone(), tensor) if isinstance(tensor, DTensor) else local.clone()
    whole = torch.zeros(tensor.shape, dtype=first.dtype, device=tensor.device)
    for part, local in locals_.items():
        _cut(whole, part).copy_(local)
    return whole


def _local_of(value, part, key):
    parameter = part.parameter
    if value.shape != parameter.shape:
        raise ValueError(f"load_optimizer_state_dict: {key!r} of a parameter of sizes {tuple(parameter.shape)} has "
                         f"sizes {tuple(value.shape)}")
    if not isinstance(parameter, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    mesh, placements = parameter.device_mesh, parameter.placements
    if isinstance(value, DTensor) and value.device_mesh != mesh:
        value = value.full_tensor()
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return value.redistribute(mesh, placements)._local_tensor


def _names_by_position(named, members, tensors):
    held = [members.name(part) for tensor in tensors for part in members.of(tensor)]
    if not any(_is_shard(tensor) for tensor in tensors):
        return held
    return [names[0] for names, _ in named if names[0] in held]


def _by_name(state_dict, names):
    """The dict with names for keys, where they are positions. names: by position."""
    groups = state_dict["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        return state_dict
    own_names = [name for group in groups for name in group.get("param_names", ())]
    if len(own_names) == len(keys) and set(own_names) == set(names):
        names = own_names
    if len(names) != len(keys):
        raise ValueError(f"load_optimizer_state_dict: the dict holds {len(keys)} parameters by their positions, the optimizer "
                         f"{len(names)}; give it a dict by names (get_optimizer_state_dict), or one of an optimizer over the "
                         "same parameters")
    name_of = dict(zip(keys, names))
    unknown = [key for key in state_dict["state"] if key not in name_of]
    if unknown:
        raise ValueError(f"load_optimizer_state_dict: the dict has state for {unknown}, which none of its groups lists")
    position = iter(names)
    return {"state": {name_of[key]: fields for key, fields in state_dict["state"].items()},
            "param_groups": [{**group, "params": [next(position) for _ in group["params"]]} for group in groups]}


def _options_of(names, saved):
    """Of the saved groups that these parameters are in."""
    found = {index: group for index, group in enumerate(saved) if not set(names).isdisjoint(group["params"])}
    options = [{key: value for key, value in group.items() if key not in ("params", "param_names")}
               for group in found.values()]
    for other in options[1:]:
        if other != options[0]:
            raise ValueError(f"load_optimizer_state_dict: {names[0]!r} and others of its group in the optimizer were "
                             f"saved with different options: {options[0]} and {other}")
    return options[0] if options else {}


def _check_names(names, state_dict):
    saved = [name for group in state_dict["param_groups"] for name in group["params"]]
    missing, unknown = set(names) - set(saved), (set(saved) | set(state_dict["state"])) - set(names)
    if missing or unknown:
        raise ValueError("load_optimizer_state_dict: the dict and the optimizer do not hold the same parameters; "
                         f"missing in the dict: {sorted(missing)}, not in the optimizer: {sorted(unknown)}")
