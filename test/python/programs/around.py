"""What goes around forward and backward: checkpointing, autocast, hooks, exceptions."""

import torch
import torch._dynamo.utils
from torch.utils.checkpoint import checkpoint

from .common import Block, Model, adam, batches, error_of, gradients, mesh_of, program, shard, train, weights


@program(variants=[(True,), (False,)])
def checkpointed(api, ranks, use_reentrant):
    class Checkpointed(Model):
        def forward(self, x):
            x = self.enter(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return self.head(x)

    model = shard(api, Checkpointed(), mesh=mesh_of(ranks))
    return train(model, adam(model), batches(3))


@program
def checkpoint_wrapper(api, ranks):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = Model()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    shard(api, model, mesh=mesh_of(ranks))
    return train(model, adam(model), batches(3))


@program
def evaluation_between_steps(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    optimizer, seen = adam(model), []
    for x in batches(3):
        train(model, optimizer, [x])
        model.eval()
        with torch.no_grad():
            seen.append(model(x))
        with torch.inference_mode():
            seen.append(model(x).clone())
        model.train()
        model.reshard()
    return seen


@program
def autocast(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))

    def loss_of(y):
        return y.float().square().mean()

    optimizer = adam(model)
    losses = []
    for x in batches(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, "gradients": gradients(model)}


@program
def hooks_of_the_user(api, ranks):
    model, seen = Model(), []
    model.blocks[0].register_forward_pre_hook(lambda m, args: seen.append(args[0].detach().clone()))
    shard(api, model, mesh=mesh_of(ranks))
    model.blocks[1].register_forward_hook(lambda m, args, y: y * 2)
    model.blocks[2].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    model.blocks[2].register_full_backward_pre_hook(lambda m, go: seen.append(go[0].clone()))
    return {"trained": train(model, adam(model), batches(2)), "seen": seen}


@program
def functional_call(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    x = batches(1)[0]
    y = torch.func.functional_call(model, {"scale": torch.tensor(2.0)}, (x,))
    y.square().mean().backward()
    return {"y": y, "gradients": gradients(model)}


@program
def exception_in_forward(api, ranks):
    class Fails(Model):
        fails = False

        def forward(self, x):
            y = super().forward(x)
            if self.fails:
                raise ArithmeticError("asked for")
            return y

    model = shard(api, Fails(), mesh=mesh_of(ranks))
    train(model, adam(model), batches(1))
    model.zero_grad()
    model.fails = True
    raised = error_of(lambda: model(batches(1)[0]))
    model.fails = False
    if hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"):
        model.reset_iter_state()
    return {"raised": raised, "after": train(model, adam(model), batches(2))}


@program
def forward_method(api, ranks):
    class Encodes(Model):
        def encode(self, x):
            return self.enter(x)

    model = shard(api, Encodes(), mesh=mesh_of(ranks))
    api.register_fsdp_forward_method(model, "encode")
    model.encode(batches(1)[0]).square().mean().backward()
    return gradients(model)


@program
def loss_scaling(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for x in batches(3):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


@program(ranks=(2,), variants=[(backend, part) for backend in ("eager", "aot_eager") for part in ("blocks", "model")])
def compiled(api, ranks, backend, part):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Model()
    if part == "blocks":
        for block in model.blocks:
            block.compile(backend=backend)
    shard(api, model, mesh=mesh_of(ranks))
    if part == "model":
        model.compile(backend=backend)
    trained = train(model, adam(model), batches(3))
    counters = torch._dynamo.utils.counters
    return {"trained": trained, "graphs": counters["stats"]["unique_graphs"], "breaks": len(counters["graph_break"])}
