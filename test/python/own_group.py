"""A process group of a user's own: derived in Python, it sends over gloo and writes down what is launched."""

import torch.distributed as dist

from shared_gloo import gloo_over_one_thread


class OwnGroup(dist.ProcessGroup):
    launched = []  # what, how many ranks, elements of the larger side, dtype

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = gloo_over_one_thread(store, rank, size, timeout)

    def getBackendName(self):
        return "own"

    def _set_group_name(self, name):
        self.name_in_world = name

    @property
    def group_name(self):
        return self.name_in_world

    def note(self, what, tensor):
        OwnGroup.launched.append(f"{what} over {self.gloo.size()}: {tensor.numel()} {tensor.dtype}")

    def allgather(self, outputs, inputs, *options):
        self.note("all_gather of a list", inputs[0])
        return self.gloo.allgather(outputs, inputs, *options)

    def all_gather_single(self, output, input, *options):
        self.note("all_gather", output)
        return self.gloo._allgather_base(output, input, *options)

    def all_gather_single_coalesced(self, outputs, inputs, *options):
        return [self.all_gather_single(output, input) for output, input in zip(outputs, inputs)][-1]

    def reduce_scatter_single(self, output, input, *options):
        self.note("reduce_scatter", input)
        return self.gloo._reduce_scatter_base(output, input, *options)

    def reduce_scatter_single_coalesced(self, outputs, inputs, *options):
        return [self.reduce_scatter_single(output, input, *options) for output, input in zip(outputs, inputs)][-1]

    def allreduce(self, tensors, *options):
        self.note("all_reduce", tensors[0])
        return self.gloo.allreduce(tensors, *options)

    def allreduce_coalesced(self, tensors, options):
        sums = dist.AllreduceOptions()
        sums.reduceOp = options.reduceOp
        return [self.allreduce([tensor], sums) for tensor in tensors][-1]

    def broadcast(self, tensors, *options):
        self.note("broadcast", tensors[0])
        return self.gloo.broadcast(tensors, *options)

    def scatter(self, outputs, inputs, *options):
        return self.gloo.scatter(outputs, inputs, *options)

    def barrier(self, *options):
        return self.gloo.barrier(*options)

    # Their names before torch 2.15.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


dist.Backend.register_backend("own", OwnGroup, devices=["cpu"])
