"""Which parameters are registered at which moment; unshard, reshard and prefetch."""

import torch

from .common import Model, adam, batches, gradients, mesh_of, program, shard, shown, train


@program(variants=[(None,), (True,), (False,)])
def registered_at_every_moment(api, ranks, reshard):
    model = shard(api, Model(blocks=2), mesh=mesh_of(ranks), reshard_after_forward=reshard)
    seen = {"sharded": shown(model)}
    model.blocks[0].up.register_forward_hook(lambda *_: seen.update(inside=shown(model)))
    model.blocks[1].register_forward_hook(lambda *_: seen.update(between=shown(model)))
    loss = model(batches(1)[0]).square().mean()
    seen["after_forward"] = shown(model)
    loss.backward()
    seen["after_backward"] = shown(model)
    model.unshard()
    seen["unsharded"] = shown(model)
    model.reshard()
    seen["resharded"] = shown(model)
    return seen


@program
def unshard_ahead(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    handle = model.unshard(async_op=True)
    handles = [block.unshard(async_op=True) for block in model.blocks]
    for one in [handle, *handles]:
        one.wait()
    seen = {"inside": shown(model)}
    loss = model(batches(1)[0]).square().mean()
    seen["after_forward"] = shown(model)
    loss.backward()
    seen["after_backward"] = shown(model)
    return {"seen": seen, "trained": train(model, adam(model), batches(2))}


@program
def explicit_prefetch(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    blocks = list(model.blocks)
    for this, following in zip(blocks, blocks[1:]):
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])
    return train(model, adam(model), batches(3))


@program
def parameters_kept_after_backward(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    model.set_reshard_after_backward(False)
    model(batches(1)[0]).square().mean().backward()
    return {"shown": shown(model), "gradients": [p.grad is None for p in model.parameters()]}


@program
def set_reshard_after_forward(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    model.set_reshard_after_forward(False)
    y = model(batches(1)[0])
    seen = shown(model)
    y.square().mean().backward()
    return {"seen": seen, "gradients": gradients(model)}


@program(variants=[(None,), (True,), (False,)])
def registered_around_evaluation(api, ranks, reshard):
    model = shard(api, Model(blocks=2), mesh=mesh_of(ranks), reshard_after_forward=reshard)
    x, seen = batches(1)[0], {"outputs": []}
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            seen["outputs"].append(model(x).clone())
        seen[f"after_{len(seen)}"] = shown(model)
    loss = model(x).square().mean()
    seen["in_training"] = shown(model)
    loss.backward()
    seen["after_backward"] = shown(model), gradients(model)
    with torch.no_grad():
        seen["outputs"].append(model(x))
    model.state_dict()
    seen["saved"] = shown(model)
    seen["trained"] = train(model, adam(model), batches(2))
    with torch.no_grad():
        seen["outputs"].append(model(x))
    model.reshard()
    seen["resharded"] = shown(model)
    return seen


@program(ranks=(4,))
def registered_over_fewer_ranks(api, ranks):
    model = shard(api, Model(blocks=2), mesh=mesh_of(ranks), reshard_after_forward=2)
    seen = {"meshes": []}
    for x in batches(2):
        loss = model(x).square().mean()
        seen["between"] = shown(model)
        seen["meshes"].append([(p.device_mesh.mesh, p.to_local().shape) for p in model.parameters()
                               if p.shape[0] % ranks == 0])
        loss.backward()
        seen["after"] = shown(model)
    return {**seen, "gradients": gradients(model)}
