"""What is alive at each operator of a step of the plain model."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorLog(TorchDispatchMode):
    """Of each operator: the most bytes alive during it, the addresses that it allocated, the groups that it reads.

    Below autograd. What a view looks at is read by who reads the view."""

    def __init__(self, extension, groups):
        """groups: of parameters. extension: its allocator counts."""
        super().__init__()
        self._extension = extension
        self._group_of = {parameter.untyped_storage().data_ptr(): index
                          for index, parameters in enumerate(groups) for parameter in parameters}
        self.operators = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        reads = set() if function.is_view else self._groups_in((args, kwargs))
        self._extension.start_recording()
        out = function(*args, **kwargs)
        self.operators.append((self._extension.peak_bytes(), reads, set(self._extension.allocated_addresses())))
        return out

    def _groups_in(self, values):
        storages = (leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
        return {self._group_of[storage] for storage in storages if storage in self._group_of}


def operators_of(step, groups, extension):
    """What memory_bound.Operator takes, of each operator of `step`, which leaves a gradient at every parameter. groups:
    lists of parameters, which share no memory."""
    parameter_bytes = sum(parameter.nbytes for parameters in groups for parameter in parameters)
    with OperatorLog(extension, groups) as log:
        step()
    made_in = {}  # the last that allocated there: before, the address was another tensor's
    for index, (_, _, allocated) in enumerate(log.operators):
        made_in.update(dict.fromkeys(allocated, index))
    made = {}
    for group, parameters in enumerate(groups):
        for parameter in parameters:
            made.setdefault(made_in[parameter.grad.data_ptr()], []).append((group, parameter.grad.nbytes))
    found, gradients_so_far = [], 0
    for index, (peak, reads, _) in enumerate(log.operators):
        gradients = made.get(index, [])
        gradients_so_far += sum(size for _, size in gradients)
        found.append({"alive": peak - parameter_bytes - gradients_so_far, "reads": sorted(reads), "gradients": gradients})
    return found
