"""What users attach to modules and parameters: hooks, scalers, overrides."""

import torch
import torch.nn as nn

from .common import Model, adam, batches, gradients, mesh_of, program, shard, train, weights


@program
def hooks_with_keywords(api, ranks):
    class Takes(Model):
        def forward(self, x, *, times):
            return super().forward(x) * times

    model = shard(api, Takes(), mesh=mesh_of(ranks))
    seen = []
    model.register_forward_pre_hook(lambda m, args, kwargs: (args, {"times": kwargs["times"] + 1}), with_kwargs=True)
    model.register_forward_hook(lambda m, args, kwargs, y: seen.append((kwargs["times"], y.detach().clone())),
                                with_kwargs=True)
    model.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model(batches(1)[0], times=2).square().mean().backward()
    return {"seen": seen, "gradients": gradients(model)}


@program
def backward_hooks_on_sharded_modules(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    for module in (model, *model.blocks):
        module.register_full_backward_pre_hook(lambda m, outer: (outer[0] * 2,))
        module.register_full_backward_hook(lambda m, inner, outer: None if inner[0] is None else (inner[0] * 0.5,))
    return train(model, adam(model), batches(2))


@program
def hooks_on_all_modules(api, ranks):
    seen = []
    handles = [nn.modules.module.register_module_forward_pre_hook(lambda m, args: seen.append(type(m).__name__)),
               nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(tuple(y.shape)))]
    try:
        model = shard(api, Model(), mesh=mesh_of(ranks))
        trained = train(model, adam(model), batches(1))
    finally:
        for handle in handles:
            handle.remove()
    return {"seen": seen, "trained": trained}


@program
def hooks_on_tensors(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    seen = []
    model.blocks[1].register_forward_hook(
        lambda m, args, y: y.register_hook(lambda gradient: seen.append(gradient.clone())) and None)
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor()))
    return {"trained": train(model, adam(model), batches(2)), "seen": seen}


@program
def optimizer_in_backward(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for x in batches(3):
        model(x).square().mean().backward()
    return {"weights": weights(model), "gradients": gradients(model)}


@program
def hooks_behind_gradients_in_the_order_of_backward(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    seen = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad.clone())))
    for x in batches(2):
        model(x).square().mean().backward()
    return seen


@program
def state_dict_hooks(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    model.register_state_dict_post_hook(lambda m, saved, prefix, meta: saved.update(more=torch.ones(1)))
    saved = model.state_dict()
    missing = model.load_state_dict(saved, strict=False)
    return {"saved": saved, "missing": missing.missing_keys, "unexpected": missing.unexpected_keys}


@program
def an_infinite_loss_is_skipped(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    seen = []
    for step, x in enumerate(batches(3)):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 else 1.0
        scaler.scale(model(x).square().mean() * factor).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return {"scales": seen, "weights": weights(model)}


@program
def functional_call_with_its_own_parameters(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    y = torch.func.functional_call(model, dict(model.named_parameters()), (batches(1)[0],))
    y.square().mean().backward()
    return {"y": y, "gradients": gradients(model)}


@program
def autocast_within_and_cached(api, ranks):
    class Casts(Model):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.blocks[0](self.enter(x))
                with torch.autocast("cpu", enabled=False):
                    x = self.blocks[1](x.float())
                return self.head(self.blocks[2](x)).float()

    model = shard(api, Casts(), mesh=mesh_of(ranks))
    return train(model, adam(model), batches(2))


@program
def accumulated_in_mixed_precision(api, ranks):
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(api, Model(), mesh=mesh_of(ranks), mp_policy=policy)
    for micro, x in enumerate(batches(3)):
        model.set_requires_gradient_sync(micro == 2)
        model.set_reshard_after_backward(micro == 2)
        model(x).float().square().mean().backward()
    return gradients(model)


@program
def accumulated_with_offload(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks), offload_policy=api.CPUOffloadPolicy(pin_memory=False))
    optimizer = adam(model)
    for step in range(2):
        for micro, x in enumerate(batches(3)):
            model.set_requires_gradient_sync(micro == 2)
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@program
def some_blocks_without_synchronization(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    seen = []
    for micro, x in enumerate(batches(2)):
        model.set_requires_gradient_sync(micro == 1, recurse=False)  # the root's own alone
        model.blocks[1].set_requires_gradient_sync(micro == 1)
        model(x).square().mean().backward()
        seen.append([parameter.grad is None for parameter in model.parameters()])
    return {"seen": seen, "gradients": gradients(model)}
