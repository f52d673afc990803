"""Programs for FSDP2's public interface. Each is run with torch's fully_shard and with ours, unchanged, and what
they return is compared: losses, gradients, registered parameters, state dicts, errors.

A program is a function (api, ranks) -> a nested value of tensors, DTensors, numbers, strings, lists and dicts.
`api` has the public names of torch.distributed.fsdp, from one side or the other.
"""

import contextlib
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

PROGRAMS = {}
WIDTH, INPUTS, OUTPUTS = 9, 7, 3


class Program:
    def __init__(self, function, arguments, ranks, tolerance):
        self.function, self.arguments, self.ranks, self.tolerance = function, arguments, ranks, tolerance

    def run(self, api, ranks):
        torch.manual_seed(0)
        return self.function(api, ranks, *self.arguments)


def program(function=None, *, ranks=(2, 4), variants=((),), tolerance=0.0):
    """Registers a program, once for each tuple of arguments behind (api, ranks).

    tolerance: relative, where FSDP2 adds the same numbers up in another order.
    """
    if function is None:
        return functools.partial(program, ranks=ranks, variants=variants, tolerance=tolerance)
    for arguments in variants:
        name = function.__name__ + "".join(f"_{argument}" for argument in arguments)
        PROGRAMS[name.replace(" ", "_")] = Program(function, arguments, ranks, tolerance)
    return function


# --- what the programs are made of


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.enter = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def batches(steps, rank=None, dtype=torch.float32):
    rank = torch.distributed.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 + rank)
    return [torch.randn(5, INPUTS, generator=generator, dtype=dtype) for _ in range(steps)]


def mesh_of(ranks):
    return init_device_mesh("cpu", (ranks,))


def shard(api, model, **options):
    for block in model.blocks:
        api.fully_shard(block, **options)
    api.fully_shard(model, **options)
    return model


def shown(model):
    """What is registered: whether sharded, with which placements, dtypes and sizes."""
    return [describe(name, parameter) for name, parameter in model.named_parameters()]


def describe(name, parameter):
    kind = "DTensor" if isinstance(parameter, DTensor) else "Tensor"
    placements = str(parameter.placements) if isinstance(parameter, DTensor) else ""
    return f"{name}: {kind} {tuple(parameter.shape)} {parameter.dtype} {placements} {parameter.requires_grad}"


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def weights(model):
    return dict(model.named_parameters())


def train(model, optimizer, inputs, loss_of=lambda y: y.square().mean(), max_norm=None):
    losses, norms = [], []
    for x in inputs:
        loss = loss_of(model(x))
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, "norms": norms, "gradients": gradients(model), "weights": weights(model)}


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def error_of(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return "no error"


# --- arguments of fully_shard


@program
def training(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    before = shown(model)
    return {"before": before, "trained": train(model, adam(model), batches(4)), "after": shown(model)}


@program
def mesh_omitted(api, ranks):
    model = shard(api, Model())
    return train(model, adam(model), batches(2))


@program
def root_alone(api, ranks):
    model = api.fully_shard(Model(), mesh=mesh_of(ranks))
    return train(model, adam(model), batches(3))


@program(variants=[(True,), (False,), (2,)])
def reshard_after_forward(api, ranks, value):
    model = shard(api, Model(), mesh=mesh_of(ranks), reshard_after_forward=value)
    return train(model, adam(model), batches(3))


@program(variants=[(1,), (2,)])
def hybrid(api, ranks, replicas):
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
    model = shard(api, Model(), mesh=mesh)
    return {"before": shown(model), "trained": train(model, adam(model), batches(3), max_norm=0.5)}


@program
def shard_placement(api, ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))

    def place(parameter):
        from torch.distributed.tensor import Shard

        return Shard(parameter.dim() - 1)

    api.fully_shard(model, mesh=mesh_of(ranks), shard_placement_fn=place)
    inputs = [torch.nn.functional.pad(x, (0, 1)) for x in batches(3)]
    return {"before": shown(model), "trained": train(model, adam(model), inputs)}


@program
def ignored_params(api, ranks):
    model = Model()
    ignored = {model.head.weight, model.blocks[0].norm.weight}
    shard(api, model, mesh=mesh_of(ranks), ignored_params=ignored)
    return {"before": shown(model), "trained": train(model, adam(model), batches(2))}


@program
def list_of_modules(api, ranks):
    model = Model()
    for block in model.blocks[:-1]:
        api.fully_shard(block, mesh=mesh_of(ranks))
    returned = api.fully_shard([model.blocks[-1], model.head], mesh=mesh_of(ranks))
    api.fully_shard(model, mesh=mesh_of(ranks))
    return {"returned": len(returned), "before": shown(model), "trained": train(model, adam(model), batches(3))}


@program
def tied_within_a_group(api, ranks):
    model = Model()
    model.blocks[0].down.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))
    model.blocks[1].down.weight = model.blocks[0].down.weight
    api.fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh_of(ranks))
    api.fully_shard(model, mesh=mesh_of(ranks))
    trained = train(model, adam(model), batches(3))
    return {"trained": trained, "same": model.blocks[0].down.weight is model.blocks[1].down.weight}


POLICIES = {
    "bf16": dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16_sums": dict(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "reduce_unset": dict(param_dtype=torch.bfloat16),
    "output": dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32),
    "reduce_only": dict(reduce_dtype=torch.bfloat16),
}


@program(ranks=(2,), variants=[(name,) for name in POLICIES])
def mixed_precision(api, ranks, name):
    policy = api.MixedPrecisionPolicy(**POLICIES[name])
    inner = api.MixedPrecisionPolicy(**{**POLICIES[name], "output_dtype": None})
    model, dtypes = Model(), []
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh_of(ranks), mp_policy=inner)
    api.fully_shard(model, mesh=mesh_of(ranks), mp_policy=policy)
    model.blocks[1].register_forward_hook(lambda m, args, y: dtypes.extend([str(args[0].dtype), str(y.dtype)]))
    return {"trained": train(model, adam(model), batches(3), lambda y: y.float().square().mean()), "dtypes": dtypes,
            "output": str(model(batches(1)[0]).dtype)}


@program(ranks=(2,))
def inputs_not_cast(api, ranks):
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    model = shard(api, Model(), mesh=mesh_of(ranks), mp_policy=policy)
    return train(model, adam(model), batches(2, dtype=torch.bfloat16), lambda y: y.float().square().mean())


@program
def nested_inputs_are_cast(api, ranks):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(INPUTS, OUTPUTS)

        def forward(self, pair, *, more):
            return {"y": self.linear(pair["x"][0]) + self.linear(more), "kept": more.dtype == torch.bfloat16}

    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = api.fully_shard(Takes(), mesh=mesh_of(ranks), mp_policy=policy)
    x = batches(1)[0]
    output = model({"x": (x, 3)}, more=x)
    return {"kept": output["kept"], "y": output["y"], "dtype": str(output["y"].dtype)}


@program(variants=[(True,), (False,)])
def cpu_offload(api, ranks, pin_memory):
    if pin_memory and not torch.cuda.is_available():
        pin_memory = False  # torch's own cannot pin without a GPU
    model = shard(api, Model(), mesh=mesh_of(ranks), offload_policy=api.CPUOffloadPolicy(pin_memory=pin_memory))
    return train(model, adam(model), batches(2))


# --- gradients


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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
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
    if not hasattr(model, "set_manual_backward_finalization"):
        return "not in this torch"
    model.set_manual_backward_finalization(True)
    for x in batches(2):
        model(x).square().mean().backward()
    model.finalize_backward()
    return gradients(model)


# --- what is registered when


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
    inside = shown(model)
    return {"inside": inside, "trained": train(model, adam(model), batches(2))}


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


# --- optimizers, clipping, state dicts

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@program(variants=[(name,) for name in OPTIMIZERS])
def optimizer(api, ranks, name):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    made = OPTIMIZERS[name](model.parameters())
    trained = train(model, made, batches(3))
    return {"trained": trained, "state": [dict(made.state[p]) for p in model.parameters()]}


@program(ranks=(2,), variants=[(float("inf"),)])  # torch has no such norm of an empty shard, as four ranks have
@program(variants=[(1.0,), (2.0,)])
def clipping(api, ranks, norm_type):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    model(batches(1)[0]).square().mean().backward()
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
    clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type)
    return {"total": full(total), "clipped": full(clipped), "gradients": gradients(model)}


@program
def state_dict_of_dtensors(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    train(model, adam(model), batches(1))
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, adam(model), batches(2))
    model.load_state_dict(saved)
    return {"saved": saved, "after": train(model, adam(model), batches(2))}


@program
def state_dict_assigned(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    saved = {key: value.detach().clone() * 2 for key, value in model.state_dict().items()}
    model.load_state_dict(saved, assign=True)
    return {"shown": shown(model), "after": train(model, adam(model), batches(2))}


@program
def state_dict_between_forward_and_backward(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    loss = model(batches(1)[0]).square().mean()
    saved = {key: value.detach().clone() for key, value in model.state_dict().items()}
    loss.backward()
    return {"saved": saved, "gradients": gradients(model)}


@program
def full_state_dicts(api, ranks):
    from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict,
                                                         get_optimizer_state_dict, set_model_state_dict,
                                                         set_optimizer_state_dict)

    model = shard(api, Model(), mesh=mesh_of(ranks))
    optimizer = adam(model)
    train(model, optimizer, batches(2))
    options = StateDictOptions(full_state_dict=True)
    saved = get_model_state_dict(model, options=options)
    saved_optimizer = get_optimizer_state_dict(model, optimizer, options=options)
    other = Model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    shard(api, other, mesh=mesh_of(ranks))
    other_optimizer = adam(other)
    set_model_state_dict(other, saved, options=options)
    set_optimizer_state_dict(other, other_optimizer, saved_optimizer, options=options)
    return {"saved": saved, "optimizer": saved_optimizer, "after": train(other, other_optimizer, batches(2))}


# --- around forward and backward


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


# --- construction


@program
def meta_device(api, ranks):
    with torch.device("meta"):
        model = Model()
    shard(api, model, mesh=mesh_of(ranks))
    before = shown(model)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.scale.fill_(0.5)
    after = shown(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.full_like(parameter, 0.1))
    return {"before": before, "after": after, "trained": train(model, adam(model), batches(2))}


@program
def to_another_dtype(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    model.double()
    return {"shown": shown(model), "trained": train(model, adam(model), batches(2, dtype=torch.float64))}


@program
def class_and_indexing(api, ranks):
    model = api.fully_shard(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]), mesh=mesh_of(ranks))
    return [type(model).__name__, type(model[:2]).__name__, isinstance(model, nn.Sequential),
            isinstance(model, torch.distributed.fsdp.FSDPModule)]


@program(ranks=(2,))
def wrong_arguments(api, ranks):
    mesh = mesh_of(ranks)
    three = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    linear = functools.partial(nn.Linear, 4, 4)
    sharded = api.fully_shard(linear(), mesh=mesh)
    model = Model()
    return [
        error_of(lambda: api.fully_shard(nn.ModuleList([linear()]), mesh=mesh)),
        error_of(lambda: api.fully_shard(linear(), mesh=three)),
        error_of(lambda: api.fully_shard(linear(), mesh=mesh, reshard_after_forward=3)),
        error_of(lambda: api.fully_shard(linear(), mesh=mesh, reshard_after_forward="yes")),
        error_of(lambda: api.fully_shard(sharded, mesh=mesh)),
        error_of(lambda: sharded.set_modules_to_forward_prefetch([model])),
        error_of(lambda: api.share_comm_ctx([model])),
        shown(model),
    ]
