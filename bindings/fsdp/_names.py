"""The names that the plain module has for its tensors, also where the modules are sharded or wrapped."""

from torch.distributed.tensor import DTensor

from ._local_shards import LocalShardPart
from ._states import live_states
from ._torch_names import FSDPModule

# What wrappers put into names, and state dicts leave out.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def named_tensors(module):
    """(names, tensor) of each parameter and persistent buffer once, a tied one with all its names. Registers the
    DTensors first: a sharded module, of this package or torch's, may be showing whole parameters."""
    for below in module.modules():
        if isinstance(below, FSDPModule):
            below.reshard()
    found = {}
    for prefix, below in module.named_modules(remove_duplicate=False):
        for key, tensor in (*below._parameters.items(), *_persistent_buffers(below)):
            if tensor is not None:
                name = without_wrappers(f"{prefix}.{key}" if prefix else key)
                found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def without_wrappers(name):
    """A module's path, or a tensor's."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _persistent_buffers(module):
    return [(key, tensor) for key, tensor in module._buffers.items() if key not in module._non_persistent_buffers_set]


class Members:
    """Which parameters of the module a tensor of an optimizer stands for, and their names."""

    def __init__(self, named):
        """named: of named_tensors."""
        self._names = {id(tensor): names for names, tensor in named}

    def of(self, tensor):
        """LocalShardParts; one for a parameter itself."""
        parts = getattr(tensor, "parts", None)
        return parts if parts is not None else [LocalShardPart("", tensor, 0, tensor.numel())]

    def names(self, part):
        """All that the parameter has; state dicts and checkpoints go by the first."""
        if id(part.parameter) not in self._names:
            raise ValueError(self._why_unknown(part))
        return self._names[id(part.parameter)]

    def _why_unknown(self, part):
        sizes = tuple(part.parameter.shape)
        if part.name:
            return (f"the optimizer holds a local shard with parameter {part.name!r} of sizes {sizes} that is not the module's "
                    "now; if it was replaced (an assignment, load_state_dict with assign=True), call local_shards again, and "
                    "build the optimizer again")
        if isinstance(part.parameter, DTensor):
            return (f"the optimizer holds a DTensor of sizes {sizes} that is not the module's now; if the parameter was "
                    "replaced (an assignment, load_state_dict with assign=True), build the optimizer again, from "
                    "model.parameters()")
        name = self._name_before(part.parameter)
        if name is not None:
            return (f"the optimizer holds parameter {name!r} as it was before fully_shard, and does not train it; build the "
                    "optimizer behind fully_shard, from model.parameters()")
        return (f"the optimizer holds an ordinary tensor of sizes {sizes}, which is not the module's; build the "
                "optimizer behind fully_shard, from model.parameters()")

    def _name_before(self, parameter):
        """Of what a module held before fully_shard, and computes with."""
        for state in live_states:
            for dtensor, unsharded in state.core.forms():
                if unsharded is parameter and id(dtensor) in self._names:
                    return self._names[id(dtensor)][0]
        return None

    def name(self, part):
        return self.names(part)[0]
