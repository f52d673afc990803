"""The names that the plain module has for its tensors, also where the modules are sharded or wrapped."""

from ._local_shards import LocalShardPart
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
            raise ValueError(f"the optimizer holds a parameter {part.name!r} of sizes {tuple(part.parameter.shape)} "
                             "that is not the module's now; if it was replaced (load_state_dict with assign=True), "
                             "call local_shards again, or build the optimizer again")
        return self._names[id(part.parameter)]

    def name(self, part):
        return self.names(part)[0]
