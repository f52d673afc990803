"""A torch optimizer in a checkpoint: the section "optimizer" has its tensors as "PARAMETER.FIELD"; optimizer.json has
its class, the options and parameters of its groups, and what else it keeps for a parameter ("values")."""

import json
import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import _C
from ._checkpoint_parts import entry
from ._names import Members
from ._optimizer_state import _cut, _is_by_element

OPTIMIZER_FILE = "optimizer.json"
STEP = "step"
_NO_OPTIONS = ("params", "param_names")


def optimizer_parts(named, optimizer) -> tuple[list[dict[str, Any]], str]:
    """(the section's tensors, which share the optimizer's memory, and the text of optimizer.json)."""
    members = Members(named)
    entries, values, groups = [], {}, []
    for index, group in enumerate(optimizer.param_groups):
        names = []
        for tensor in group["params"]:
            for part in members.of(tensor):
                name = members.name(part)
                if name in names:
                    continue  # a plain tied parameter that was given twice
                names.append(name)
                found = _saved_state(name, part, tensor, optimizer.state.get(tensor, {}))
                entries += found[0]
                if found[1]:
                    values[name] = found[1]
        options = {key: _to_json(value, f"the option {key!r} of the optimizer's group {index}")
                   for key, value in group.items() if key not in _NO_OPTIONS}
        groups.append({"options": options, "params": names})
    document = {"optimizer": type(optimizer).__name__, "groups": groups}
    return entries, json.dumps({**document, "values": values} if values else document)


def _saved_state(name, part, tensor, fields):
    """(entries, other values) of one parameter. tensor: the optimizer's, the parameter or its local shard."""
    entries, values = [], {}
    for key, value in fields.items():
        subject = f"the optimizer's state {key!r} of '{name}'"
        if not isinstance(key, str) or not key or "." in key:
            raise ValueError(f"save_checkpoint: {subject}: expected a name without dots")
        if not isinstance(value, torch.Tensor):
            values[key] = _to_json(value, subject)
        elif tensor is not part.parameter and value.dim() > 0:
            if value.shape != tensor.shape:
                raise ValueError(f"save_checkpoint: {subject} has sizes {tuple(value.shape)} for {tensor.numel()} "
                                 "elements of a local shard, so that it cannot be told which belong to a parameter; "
                                 "give this optimizer the parameters instead")
            entries.append(entry(f"{name}.{key}", _cut(value, part), like=part.parameter))
        elif isinstance(part.parameter, DTensor) and value.dim() > 0 and not isinstance(value, DTensor):
            raise ValueError(f"save_checkpoint: {subject} is a plain tensor of sizes {tuple(value.shape)} for a "
                             "sharded parameter, so that the ranks may hold different ones; expected a DTensor")
        else:
            entries.append(entry(f"{name}.{key}", value))
    return entries, values


class Saved:
    """What a checkpoint has of an optimizer, by the names that the model has for the parameters."""

    def __init__(self, document, tensors, rename):
        self.kind, self.groups = document["optimizer"], document["groups"]
        self._group_of = {rename(name): index for index, group in enumerate(self.groups) for name in group["params"]}
        self._values = {rename(name): fields for name, fields in document.get("values", {}).items()}
        self._tensors = {}
        for info in tensors:
            name, _, key = info["name"].rpartition(".")
            self._tensors.setdefault(name, {})[key] = info

    def of(self, names):
        """(the name of these that it is saved under, its group, its tensors, its other values); None: there is none."""
        states = [name for name in names if name in self._tensors or name in self._values]
        known = states or [name for name in names if name in self._group_of]
        if not known:
            return None
        name = known[0]
        return name, self._group_of.get(name), self._tensors.get(name, {}), self._values.get(name, {})


class OptimizerLoad:
    """An optimizer that is loaded: first what it needs from the checkpoint, then, with that in place, the change."""

    def __init__(self, named, optimizer, reader, options):
        """Changes nothing. options: of load_checkpoint."""
        self.entries = []
        self.misfits = {"missing": [], "unexpected": [], "wrong": []}
        self._members, self._optimizer = Members(named), optimizer
        self._is_strict, self._converts = options["strict"], options["convert_dtypes"]
        self._states = []  # by the optimizer's tensor; None: it stays as it is
        self._shared = []  # of local shards: what is of which part, and of others
        self._absent = []  # of local shards: what has no state in the checkpoint
        text = reader.document(OPTIMIZER_FILE)
        self._saved = None
        if text is not None:
            self._saved = Saved(_parsed(text), reader.tensors("optimizer"), options["rename"] or (lambda name: name))
        self.is_planned = self._is_such_an_optimizer()
        if self.is_planned:
            for index, group in enumerate(optimizer.param_groups):
                self._states += [self._plan(tensor, index) for tensor in group["params"]]

    def _is_such_an_optimizer(self):
        if self._saved is None:
            self.misfits["missing"].append(f"the optimizer ('{OPTIMIZER_FILE}')")
            return False
        wrong = self.misfits["wrong"]
        ours, groups = type(self._optimizer).__name__, len(self._optimizer.param_groups)
        if self._saved.kind != ours:
            wrong.append(f"the optimizer's state is {self._saved.kind}'s, expected {ours}'s")
        if len(self._saved.groups) != groups:
            wrong.append(f"the optimizer has {len(self._saved.groups)} parameter groups, expected {groups}")
        return not wrong

    def _plan(self, tensor, group):
        """The state that `tensor` is to have; its tensors are still to be loaded."""
        current = self._optimizer.state.get(tensor, {})
        state = {}
        entries, parts = [], []
        for part in self._members.of(tensor):
            saved = self._saved.of(self._members.names(part))
            if saved is None:
                self.misfits["missing"].append(f"the optimizer's '{self._members.name(part)}'")
                entries.append(None)
                continue
            name, its_group, tensors, values = saved
            if its_group not in (group, None):
                self.misfits["wrong"].append(f"'{name}' is in the optimizer's group {its_group}, expected {group}")
                entries.append(None)
            for key, value in values.items():
                self._agree(state, part, key, _from_json(value, current.get(key)))
            entries += [self._place(part, tensor, key, info, current, state) for key, info in tensors.items()]
            parts.append((part, tensors))
        if None in entries and not self._is_strict:
            return None
        self.entries += [place for place in entries if place is not None]
        self._absent += [_cut(value, part) for part, tensors in parts for key, value in state.items()
                         if tensor is not part.parameter and _is_by_element(value) and key not in tensors]
        return state

    def _place(self, part, tensor, key, info, current, state):
        """Where one tensor of the checkpoint goes, as an entry of the section; None: nowhere."""
        sizes, parameter = tuple(info["sizes"]), part.parameter
        there = current.get(key)
        there = there if isinstance(there, torch.Tensor) else None
        if sizes == tuple(parameter.shape) and not (key == STEP and sizes == ()):
            dtype = there.dtype if there is not None else self._dtype_like(parameter, info["dtype"])
            if tensor is not parameter:
                if key not in state:
                    is_kept = there is not None and there.shape == tensor.shape
                    state[key] = there if is_kept else torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
                return entry(info["name"], _cut(state[key], part), like=parameter)
            is_kept = there is not None and there.shape == parameter.shape
            is_kept = is_kept and isinstance(there, DTensor) == isinstance(parameter, DTensor)
            state[key] = there if is_kept else _empty_like(parameter, dtype)
        elif there is not None and tuple(there.shape) == sizes and tensor is parameter and sizes:
            state[key] = there
        elif sizes == () or (tensor is parameter and not isinstance(parameter, DTensor)):
            dtype = there.dtype if there is not None else torch.float32 if key == STEP else info["dtype"]
            loaded = torch.zeros(sizes, dtype=dtype)
            self._agree(state, part, key, loaded)
            # Counters are of one dtype here and of another there.
            return entry(info["name"], loaded, dtype=info["dtype"])
        else:
            self.misfits["wrong"].append(f"'{info['name']}' has sizes {sizes}, which are not its parameter's, "
                                         f"{tuple(parameter.shape)}; take a step before loading, so that the optimizer "
                                         "says how it is spread")
            return None
        return entry(info["name"], state[key])

    def _dtype_like(self, parameter, saved):
        converts = self._converts and saved.is_floating_point and parameter.is_floating_point()
        return parameter.dtype if converts else saved

    def _agree(self, state, part, key, value):
        """A value that all parts of a local shard share: compared when it is there."""
        state.setdefault(key, value)
        if value is not state[key]:
            self._shared.append((f"{key!r} of {part.name!r}", value, state[key]))

    def finish(self):
        """The section's tensors have been loaded: gives them to the optimizer, with the groups' options."""
        for subject, value, other in self._shared:
            if not _equal(value, other):
                raise ValueError(f"load_checkpoint: {subject} is {value}, but {other} for others in its local shard; give "
                                 "them different labels in local_shards, or the optimizer the parameters")
        for elements in self._absent:
            elements.zero_()
        tensors = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        states = [self._optimizer.state.get(tensor, {}) if state is None else state
                  for tensor, state in zip(tensors, self._states)]
        groups, index = [], 0
        for group, saved in zip(self._optimizer.param_groups, self._saved.groups):
            ours = {key: value for key, value in group.items() if key != "params"}
            options = {key: _from_json(value, group.get(key)) for key, value in saved["options"].items()}
            groups.append({**ours, **options, "params": list(range(index, index + len(group["params"])))})
            index += len(group["params"])
        self._optimizer.load_state_dict({"state": {at: state for at, state in enumerate(states) if state},
                                         "param_groups": groups})
        # It casts to the parameter's dtype, and would lose what was kept in a wider one.
        for tensor, state in zip(tensors, states):
            for key, value in state.items():
                if _is_by_element(value):
                    self._optimizer.state[tensor][key] = value


def _empty_like(parameter, dtype):
    if not isinstance(parameter, DTensor):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    return _C.dtensor_like(torch.empty_like(parameter._local_tensor.detach(), dtype=dtype), parameter)


def _parsed(text):
    document = json.loads(text)
    try:
        is_right = isinstance(document["optimizer"], str) and all(
            isinstance(group["options"], dict) and all(isinstance(name, str) for name in group["params"])
            for group in document["groups"]) and all(
            isinstance(fields, dict) for fields in document.get("values", {}).values())
    except (AttributeError, KeyError, TypeError):
        is_right = False
    if not is_right:
        raise ValueError(f"load_checkpoint: {OPTIMIZER_FILE} is not what save_checkpoint writes")
    return document


def _to_json(value, subject):
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # JSON has no infinities
    if isinstance(value, (list, tuple)):
        return [_to_json(each, subject) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _to_json(each, subject) for key, each in value.items()}
    raise ValueError(f"save_checkpoint: {subject} is a {type(value).__name__}; expected what JSON has, or a tensor")


def _from_json(value, now):
    """now: what the optimizer has in its place."""
    if isinstance(now, torch.Tensor):
        return torch.full_like(now, float(value))
    if isinstance(now, float) and isinstance(value, str):
        return float(value)
    if isinstance(now, tuple) and isinstance(value, list):
        return tuple(_from_json(each, old) for each, old in zip(value, (*now, *[None] * len(value))))
    return value


def _equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
