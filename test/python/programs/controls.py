"""FSDPModule's methods one by one: what each acts on, and what it raises."""

import torch
import torch.distributed.fsdp
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shared_mesh import shared_mesh

from .common import Model, adam, batches, gradients, mesh_of, program, shard, shown, train, weights


def has(method):
    return hasattr(torch.distributed.fsdp.FSDPModule, method)


def error_of(function):
    """The kind of error; classes derived from Python's own count as those."""
    try:
        function()
    except Exception as error:
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return "no error"


def backward(model, x):
    model(x).square().mean().backward()


@program(ranks=(2,), variants=[("root",), ("block",), ("each",)])
def divide_factor(api, ranks, where):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    for module in {"root": [model], "block": [model.blocks[1]], "each": [*model.blocks, model]}[where]:
        module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
        module.set_gradient_divide_factor(5.0)
    backward(model, batches(1)[0])
    return gradients(model)


class Picks(Model):
    """Of each block, only what `uses` names."""

    uses = (0, 1, 2)

    def forward(self, x):
        x = self.enter(x)
        for index in self.uses:
            x = self.blocks[index](x)
        return self.head(x) * self.scale


@program(variants=[("root", True), ("root", False), ("block", False)])
def unused_parameters_reduced(api, ranks, where, recurse):
    if not has("set_reduce_scatter_unused_params"):
        return "not in this torch"
    model = Picks()
    model.blocks[1].extra = nn.Linear(4, 4)
    model.extra = nn.Linear(4, 4)
    shard(api, model, mesh=mesh_of(ranks))
    backward(model, batches(1)[0])
    model.zero_grad()
    module = model if where == "root" else model.blocks[1]
    module.set_reduce_scatter_unused_params(True, recurse=recurse)
    backward(model, batches(1)[0])
    first = gradients(model)
    module.set_reduce_scatter_unused_params(False)
    return {"first": first, "zeros": [name for name, g in first.items() if g is not None and not g.to_local().any()]}


@program(ranks=(4,), variants=[(True,), (False,)])
def gradient_sync_turns_all_reduce_on(api, ranks, again):
    mesh = shared_mesh(2, 2, names=("replicate", "shard"))
    model = shard(api, Model(), mesh=mesh)
    model.set_requires_all_reduce(False)
    if again:
        model.set_requires_gradient_sync(True)
    for x in batches(2):
        backward(model, x)
    return gradients(model)


@program
def last_backward_set_on_a_block(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    backward(model, batches(1)[0])
    for micro, x in enumerate(batches(3)):
        model.blocks[0].set_is_last_backward(micro == 2)
        backward(model, x)
    return gradients(model)


@program
def a_group_unused_in_the_last_micro_batch(api, ranks):
    model = shard(api, Picks(), mesh=mesh_of(ranks))
    first, second = batches(2)
    model.set_requires_gradient_sync(False)
    backward(model, first)
    model.set_requires_gradient_sync(True)
    model.uses = (0, 2)
    backward(model, second)
    return gradients(model)


@program(ranks=(4,))
def partial_sums_of_other_parameters(api, ranks):
    if not hasattr(FSDPParamGroup, "_get_partial_reduce_grad"):
        return "this torch loses the sums of a group that the last micro-batch does not use"
    mesh = shared_mesh(2, 2, names=("replicate", "shard"))
    model = shard(api, Picks(), mesh=mesh)
    first, second = batches(2)
    model.set_requires_all_reduce(False)
    model.uses = (0, 1)
    backward(model, first)
    model.set_requires_all_reduce(True)
    model.uses = (0, 2)
    backward(model, second)
    return gradients(model)


@program
def zero_grad_between_micro_batches(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    first, second = batches(2)
    model.set_requires_gradient_sync(False)
    backward(model, first)
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    backward(model, second)
    return gradients(model)


@program
def unsharded_gradients_are_seen(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    first, second = batches(2)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    backward(model, first)
    seen = {"shown": shown(model), "unsharded": {name: p.grad.clone() for name, p in model.named_parameters()}}
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    backward(model, second)
    return {**seen, "gradients": gradients(model)}


@program
def input_gradients(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    x, y = (batch.requires_grad_() for batch in batches(2))
    backward(model, x)
    [of_y] = torch.autograd.grad(model(y).square().mean(), [y])
    return {"x": x.grad, "y": of_y, "gradients": gradients(model)}


@program
def chunked_loss(api, ranks):
    class Chunks(Model):
        def forward(self, x):
            x = self.enter(x)
            for block in self.blocks[:-1]:
                x = block(x)
            return self.blocks[-1](x)

    model = Chunks()
    for block in model.blocks[:-1]:
        api.fully_shard(block, mesh=mesh_of(ranks))
    api.fully_shard([model.blocks[-1], model.head], mesh=mesh_of(ranks))
    api.fully_shard(model, mesh=mesh_of(ranks))
    optimizer, losses = adam(model), []
    for x in batches(2):
        hidden = model(x)
        loss = sum(model.head(chunk).square().mean() for chunk in hidden.chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, "weights": weights(model), "after": shown(model)}


@program
def a_frozen_integer_parameter(api, ranks):
    class Table(Model):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(10), requires_grad=False)

        def forward(self, x):
            return super().forward(x) * self.table.sum()

    if error_of(lambda: shard(torch.distributed.fsdp, Table(), mesh=mesh_of(ranks))) != "no error":
        return "not in this torch"
    model = shard(api, Table(), mesh=mesh_of(ranks))
    return {"before": shown(model), "trained": train(model, torch.optim.SGD(list(model.parameters())[1:], 0.1),
                                                     batches(2))}


@program
def a_parameter_replaced_before_the_first_forward(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    model.enter.weight = nn.Parameter(model.enter.weight.detach() * 2)
    model.blocks[0].norm.bias = nn.Parameter(model.blocks[0].norm.bias.detach() + 1, requires_grad=False)
    return {"before": shown(model), "y": model(batches(1)[0]), "after": shown(model)}


@program
def storage_kept(api, ranks):
    if not has("set_keep_unsharded_storage"):
        return "not in this torch"
    model = shard(api, Model(), mesh=mesh_of(ranks))
    model.set_keep_unsharded_storage(True)
    addresses = []
    for x in batches(2):
        backward(model, x)
        model.unshard()
        addresses.append(model.head.weight.data_ptr())
        model.reshard()
    return {"same": addresses[0] == addresses[1], "gradients": gradients(model)}


@program
def handles(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    handle = model.unshard(async_op=True)
    is_one = isinstance(handle, torch.distributed.fsdp.UnshardHandle), isinstance(handle, api.UnshardHandle)
    waited = [handle.wait(), handle.wait()]
    none = model.blocks[0].unshard()
    model._set_unshard_async_op(True)
    return {"is one": is_one, "waited": waited, "none": none, "trained": train(model, adam(model), batches(2))}


@program
def finalization_handles(api, ranks):
    if not has("finalize_backward"):
        return "not in this torch"
    model = shard(api, Model(), mesh=mesh_of(ranks))
    before = [type(model.finalize_backward()).__name__, isinstance(model.finalize_backward(async_op=True),
                                                                   torch.distributed.fsdp.GradientReductionHandle)]
    backward(model, batches(1)[0])
    without = error_of(lambda: model.finalize_backward())
    model.set_manual_backward_finalization(True)
    model.zero_grad()
    backward(model, batches(1)[0])
    on_a_block = [error_of(lambda: model.blocks[0].finalize_backward()),
                  error_of(lambda: model.blocks[0].set_manual_backward_finalization(False))]
    handle = model.finalize_backward(async_op=True)
    early = [error_of(lambda: model(batches(1)[0])), error_of(lambda: model.finalize_backward())]
    handle.wait()
    return {"before": before, "without": without, "block": on_a_block, "early": early, "gradients": gradients(model)}


@program
def errors_of_methods(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    with torch.device("meta"):
        meta = Model()
    shard(api, meta, mesh=mesh_of(ranks))
    backward(model, batches(1)[0])
    return [
        error_of(lambda: api.register_fsdp_forward_method(model, "no_such_method")),
        error_of(lambda: api.register_fsdp_forward_method(nn.Linear(2, 2), "no_such_method")),
        error_of(lambda: meta(batches(1)[0].to("meta"))),
        error_of(lambda: api.share_comm_ctx([])),
        error_of(lambda: model.set_modules_to_backward_prefetch([nn.Linear(2, 2)])),
        error_of(lambda: model.set_modules_to_backward_prefetch([])),
        error_of(lambda: model.blocks[0].reset_iter_state() if has("reset_iter_state") else [][0]),
    ]


@program(ranks=(2,))
def gradient_dtype_of_their_own_dtype(api, ranks):
    model = Model().bfloat16()
    if not hasattr(torch.Tensor, "grad_dtype"):
        return "not in this torch"
    for parameter in model.parameters():
        parameter.grad_dtype = torch.bfloat16
    shard(api, model, mesh=mesh_of(ranks))
    backward(model, batches(1, dtype=torch.bfloat16)[0])
    return gradients(model)
