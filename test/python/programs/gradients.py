"""Gradients: accumulation, frozen and unused parameters, several passes."""

import torch
import torch.distributed.fsdp

from shared_mesh import shared_mesh

from .common import INPUTS, Model, adam, batches, gradients, mesh_of, program, shard, shown, train, weights


@program
def accumulation_without_sync(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    optimizer, seen = adam(model), []
    for step in range(2):
        for micro, x in enumerate(batches(3)):
            model.set_requires_gradient_sync(micro == 2)
            model(x).square().mean().backward()
            seen.append([parameter.grad is None for parameter in model.parameters()])
        seen.append(gradients_copy(model))
        optimizer.step()
        optimizer.zero_grad()
    return {"seen": seen, "weights": weights(model)}


def gradients_copy(model):
    return {name: None if p.grad is None else p.grad.full_tensor().clone() for name, p in model.named_parameters()}


class Branches(torch.nn.Module):
    """`kept` is ignored by fully_shard; `drawn` is used in some batches."""

    def __init__(self):
        super().__init__()
        self.kept = torch.nn.Parameter(torch.randn(INPUTS))
        self.drawn = torch.nn.Parameter(torch.randn(INPUTS))

    def forward(self, x, is_drawn):
        return x * self.kept + (x * self.drawn if is_drawn else 0)


@program(variants=[(control, reshard) for control in ("set_requires_gradient_sync", "set_is_last_backward")
                   for reshard in (None, True)])
def accumulation_whose_last_backward_needs_no_parameter(api, ranks, control, reshard):
    """The outputs tell of it alone: what it is computed with is not sharded."""
    model, seen = Branches(), []
    api.fully_shard(model, mesh=mesh_of(ranks), ignored_params={model.kept}, reshard_after_forward=reshard)
    for used in ([True, False], [False, True], [True, True], [False, False], [True, True, False]):
        for micro, (x, is_drawn) in enumerate(zip(batches(3), used)):
            getattr(model, control)(micro + 1 == len(used))
            model(x, is_drawn).square().mean().backward()
            seen.append(shown(model))
        seen.append(None if model.drawn.grad is None else model.drawn.grad.to_local().clone())
        model.zero_grad()
    return seen


@program(ranks=(2, 4) if hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params") else ())
def backwards_that_need_a_parameter_on_some_ranks(api, ranks):
    """Also where two forwards are behind: the second backward comes when the first has ended the step."""
    rank, x = torch.distributed.get_rank(), batches(1)[0]
    model, seen = Branches(), []
    api.fully_shard(model, mesh=mesh_of(ranks), ignored_params={model.kept})
    model.set_reduce_scatter_unused_params(True)
    for used in (rank == 0, rank > 0, False, True):
        for is_retained in (False, True):
            first, second = model(x, True).square().mean(), model(x, used).square().mean()
            first.backward()
            second.backward(retain_graph=is_retained)
            if is_retained:
                second.backward()
            seen.append(model.drawn.grad.to_local().clone())
            model.zero_grad()
    return seen


@program
def accumulation_with_sync(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    optimizer, seen = adam(model), []
    for step in range(2):
        for x in batches(3):
            model(x).square().mean().backward()
            seen.append(gradients_copy(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    return {"seen": seen, "weights": weights(model), "gradients": gradients(model)}


@program
def last_backward(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    for micro, x in enumerate(batches(3)):
        model.set_is_last_backward(micro == 2)
        model(x).square().mean().backward()
    return gradients(model)


@program(ranks=(4,))
def all_reduce_at_last(api, ranks):
    mesh = shared_mesh(2, 2, names=("replicate", "shard"))
    model = shard(api, Model(), mesh=mesh)
    for micro, x in enumerate(batches(3)):
        model.set_requires_all_reduce(micro == 2)
        model(x).square().mean().backward()
    return gradients(model)


@program
def gradients_scaled_in_place_and_replaced(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    first, second = batches(2)
    model(first).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        model.enter.weight.grad = model.enter.weight.grad * 3
        model.head.bias.grad = None
    model(second).square().mean().backward()
    return gradients(model)


@program
def a_kept_gradient_stays(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    first, second = batches(2)
    model(first).square().mean().backward()
    kept = model.enter.weight.grad
    model.zero_grad()
    model(second).square().mean().backward()
    return {"kept": kept, "now": model.enter.weight.grad}


@program
def frozen(api, ranks):
    model = Model()
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    model.head.weight.requires_grad_(False)
    shard(api, model, mesh=mesh_of(ranks))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return {"before": shown(model), "trained": train(model, optimizer, batches(3))}


@program
def unused_parameters(api, ranks):
    class Skips(Model):
        def forward(self, x):
            return self.head(self.blocks[1](self.enter(x)))

    model = shard(api, Skips(), mesh=mesh_of(ranks))
    model(batches(1)[0]).square().mean().backward()
    return gradients(model)


@program
def two_forwards_then_backward(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    first, second = batches(2)
    (model(first).square().mean() + 2 * model(second).square().mean()).backward()
    return gradients(model)


@program
def backward_twice_over_one_graph(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    loss = model(batches(1)[0]).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


# FSDP2 leaves the root's gradients to the end, where they are one sum.
@program(tolerance=1e-6)
def manual_finalization(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_manual_backward_finalization"):
        return "not in this torch"
    model.set_manual_backward_finalization(True)
    for x in batches(2):
        model(x).square().mean().backward()
    model.finalize_backward()
    return gradients(model)
