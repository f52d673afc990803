"""torch's replicate on FSDP2's engine, and ours."""

import torch
import torch.nn as nn

from shared_mesh import shared_mesh

from .common import (WIDTH, Block, Model, adam, batches, full, gradients, mesh_of, program, sgd, shown, train, weights)
from .meshes import HAS_DIMS, batches_over, dims_of, kinds, tensor_parallel_over
from .wrong_arguments import kind_of

try:
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
    from torch.distributed._composable.replicate_with_fsdp import replicate as torchs_replicate
except ImportError:
    torchs_replicate = None
# As torch 2.15 has it: earlier ones take other arguments.
RANKS = (2, 4) if torchs_replicate is not None and HAS_DIMS else ()


def replicate_of(api):
    return getattr(api, "replicate", torchs_replicate)


def replicate(api, model, **options):
    for block in model.blocks:
        replicate_of(api)(block, **options)
    replicate_of(api)(model, **options)
    return model


POLICIES = {
    "plain": {},
    "bf16": dict(param_dtype=torch.bfloat16),
    "bf16_fp32": dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "reduce_bf16": dict(reduce_dtype=torch.bfloat16),
}


# Four ranks' sums are rounded to bfloat16 in another order.
@program(ranks=RANKS[:1], variants=[("reduce_bf16",)])
@program(ranks=RANKS, variants=[(name,) for name in POLICIES if name != "reduce_bf16"])
def replicated(api, ranks, policy):
    model = replicate(api, Model(), mesh=mesh_of(ranks), mp_policy=api.MixedPrecisionPolicy(**POLICIES[policy]))
    before = shown(model)
    inside, between = [], []
    model.blocks[1].register_forward_pre_hook(lambda module, args: inside.append(kinds(module)))
    model.register_forward_hook(lambda module, args, output: between.append(kinds(module)))
    trained = train(model, adam(model), batches(4), lambda y: y.float().square().mean(), max_norm=0.1)
    return {"before": before, "inside": inside, "between": between, "trained": trained, "after": shown(model)}


@program(ranks=RANKS)
def replicated_and_shown_as(api, ranks):
    model = replicate(api, Model(), mesh=mesh_of(ranks))
    listed = replicate_of(api)([nn.Linear(3, 3), nn.Linear(3, 2)], mesh=mesh_of(ranks))
    return {"classes": [type(model).__name__, type(model.blocks[0]).__name__, type(model.enter).__name__],
            "is": [isinstance(each, ReplicateModule) for each in (model, model.blocks[0], model.enter)],
            "is_fsdp": [isinstance(each, torch.distributed.fsdp.FSDPModule) for each in (model, model.blocks[0], model.enter)],
            "states": [replicate_of(api).state(each) is not None for each in (model, model.blocks[0], model.enter)],
            "of_fully_shard": [api.fully_shard.state(each) is not None for each in (model, model.blocks[0])],
            "list": [type(each).__name__ for each in listed],
            "part": type(replicate_of(api)(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), mesh=mesh_of(ranks))[:1]).__name__,
            "default": shown(replicate_of(api)(nn.Linear(3, 3))) if torch.accelerator.is_available() else None}


@program(ranks=RANKS)
def replicated_with_accumulation(api, ranks):
    model = replicate(api, Model(), mesh=mesh_of(ranks))
    optimizer, seen = sgd(model), []
    for step, x in enumerate(batches(6)):
        model.set_requires_gradient_sync(step % 3 == 2)
        model(x).square().mean().backward()
        seen.append([parameter.grad is None for parameter in model.parameters()])
        if step % 3 == 2:
            seen.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    return {"seen": seen, "weights": weights(model)}


@program(ranks=RANKS, variants=[("fp32",), ("bf16",)])
def replicated_with_accumulation_of_reductions(api, ranks, dtype):
    policy = api.MixedPrecisionPolicy(**({} if dtype == "fp32" else POLICIES["bf16_fp32"]))
    model = replicate(api, Model(), mesh=mesh_of(ranks), mp_policy=policy)
    for step, x in enumerate(batches(3)):
        last = step == 2
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        model(x).float().square().mean().backward()
    return {"gradients": gradients(model), "after": shown(model)}


@program(ranks=RANKS)
def replicated_blocks_in_a_sharded_model(api, ranks):
    model, mesh = Model(), mesh_of(ranks)
    replicate_of(api)(model.blocks[0], mesh=mesh)
    api.fully_shard(model.blocks[1], mesh=mesh)
    api.fully_shard(model, mesh=mesh)
    before, first = shown(model), train(model, sgd(model), batches(2))
    model.set_requires_gradient_sync(False)
    model(batches(1)[0]).square().mean().backward()
    model.set_requires_gradient_sync(True)
    model(batches(1)[0]).square().mean().backward()
    return {"before": before, "first": first, "gradients": gradients(model)}


@program(ranks=RANKS)
def sharded_blocks_in_a_replicated_model(api, ranks):
    model, mesh = Model(), mesh_of(ranks)
    api.fully_shard(model.blocks[0], mesh=mesh)
    replicate_of(api)(model.blocks[1], mesh=mesh)
    replicate_of(api)(model, mesh=mesh)
    return {"before": shown(model), "trained": train(model, sgd(model), batches(3))}


@program(ranks=RANKS)
def replicated_state_dict(api, ranks):
    model = replicate(api, Model(), mesh=mesh_of(ranks))
    optimizer = adam(model)
    train(model, optimizer, batches(1))
    other = replicate(api, Model(), mesh=mesh_of(ranks))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(model.state_dict())
    moments = adam(other)
    moments.load_state_dict(optimizer.state_dict())
    return {"state": model.state_dict(), "optimizer": optimizer.state_dict(), "trained": train(other, moments, batches(2))}


@program(ranks=RANKS)
def replicated_and_unsharded_by_hand(api, ranks):
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = replicate(api, Model(), mesh=mesh_of(ranks), mp_policy=policy)
    seen = [shown(model)]
    handle = model.unshard(async_op=True)
    handle.wait()
    seen.append(shown(model))
    model.reshard()
    seen.append(shown(model))
    for x in batches(2):
        model.eval()
        with torch.no_grad():
            seen.append([model(x), shown(model)])
    model.reshard()
    return seen


@program(ranks=RANKS)
def replicated_in_part(api, ranks):
    torch.manual_seed(2)
    model, mesh = Model(), mesh_of(ranks)
    model.blocks[0].up.weight.requires_grad_(False)
    model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
    ignored = {model.enter.weight}
    replicate(api, model, mesh=mesh, ignored_params=ignored)
    return {"before": shown(model), "trained": train(model, sgd(model), batches(2))}


@program(ranks=RANKS)
def replicated_with_tied_parameters(api, ranks):
    model, mesh = Model(), mesh_of(ranks)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    replicate_of(api)(model, mesh=mesh)
    return {"before": shown(model), "trained": train(model, sgd(model), batches(3))}


@program(ranks=RANKS)
def replicated_with_controls(api, ranks):
    model = replicate(api, Model(), mesh=mesh_of(ranks))
    model.set_gradient_divide_factor(4.0)
    model.blocks[0].set_force_sum_reduction_for_comms(True)
    model.blocks[1].set_gradient_divide_factor(0.5)
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.set_modules_to_backward_prefetch([model.blocks[2]])
    model.set_unshard_in_backward(False)
    first = train(model, sgd(model), batches(2))
    model.set_requires_all_reduce(False)
    model(batches(1)[0]).square().mean().backward()
    model.set_requires_all_reduce(True)
    model(batches(1)[0]).square().mean().backward()
    return {"first": first, "gradients": gradients(model)}


# torch divides before it adds up here, the library afterwards: by what is no power of two both round.
@program(ranks=RANKS, tolerance=1e-6)
def replicated_with_a_divide_factor_that_rounds(api, ranks):
    model = replicate(api, Model(), mesh=mesh_of(ranks))
    model.set_gradient_divide_factor(3.0)
    model(batches(1)[0]).square().mean().backward()
    return gradients(model)


@program(ranks=RANKS)
def replicated_with_cast_outputs(api, ranks):
    model, mesh = Model(), mesh_of(ranks)
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=True)
    replicate_of(api)(model, mesh=mesh, mp_policy=policy)
    return [model(batches(1)[0]), train(model, sgd(model), batches(2))]


@program(ranks=RANKS)
def replicated_built_on_meta(api, ranks):
    with torch.device("meta"):
        model = Model()
    replicate(api, model, mesh=mesh_of(ranks))
    before = shown(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.ones_like(parameter) * (0.01 * index - 0.1))
        model.scale.fill_(0.5)
    return {"before": before, "trained": train(model, sgd(model), batches(2))}


@program(ranks=RANKS)
def replicated_offloaded(api, ranks):
    model = replicate(api, Model(), mesh=mesh_of(ranks), offload_policy=api.CPUOffloadPolicy(pin_memory=False))
    return train(model, adam(model), batches(3), max_norm=0.1)


@program(ranks=(4,) if RANKS else (), variants=[("data",), ("data_and_more",), ("data_and_more_beside_tp",)],
         long_variants=[("data_and_more_beside_tp",)], tolerance=1e-6)
def replicated_over_named_dims(api, ranks, which):
    names, shape, dims = {"data": (("data", "tp"), (2, 2), "data"),
                          "data_and_more": (("data", "more"), (2, 2), ("data", "more")),
                          "data_and_more_beside_tp": (("data", "more", "tp"), (2, 2, 1), ("data", "more"))}[which]
    mesh = shared_mesh(*shape, names=names)
    model = tensor_parallel_over(mesh)
    options = dict(mesh=mesh, dp_mesh_dims=dims_of(api, replicate=dims))
    replicate_of(api)(model[2], **options)
    replicate_of(api)(model, **options)
    seen = []
    for x in batches_over(mesh, 2):
        y = model(x)
        y.square().mean().backward()
        seen.append(y.full_tensor().detach())
    return {"kinds": kinds(model), "seen": seen, "gradients": {key: full(each) for key, each in gradients(model).items()}}


@program(ranks=RANKS)
def wrong_calls_of_replicate(api, ranks):
    mesh, apply = mesh_of(ranks), replicate_of(api)
    named = shared_mesh(1, ranks, names=("a", "b"))
    sharded, done = api.fully_shard(Block(), mesh=mesh), apply(Block(), mesh=mesh)
    refused = {
        "again": lambda: apply(done, mesh=mesh),
        "sharded": lambda: apply(sharded, mesh=mesh),
        "shard_it": lambda: api.fully_shard(done, mesh=mesh),
        "two_dimensions": lambda: apply(Block(), mesh=named),
        "container": lambda: apply(nn.ModuleList([Block()]), mesh=mesh),
        "dims_that_shard": lambda: apply(Block(), mesh=named, dp_mesh_dims=dims_of(api, shard="b")),
        "dims_that_do_both": lambda: apply(Block(), mesh=named, dp_mesh_dims=dims_of(api, shard="b", replicate="a")),
        "unknown_dims": lambda: apply(Block(), mesh=named, dp_mesh_dims=dims_of(api, replicate="x")),
        "plain_parameters": lambda: apply(Block(), mesh=named, dp_mesh_dims=dims_of(api, replicate="b")),
        "no_module": lambda: apply(3, mesh=mesh),
        "policy": lambda: apply(Block(), mesh=mesh, mp_policy=3),
        "reshard_after_forward": lambda: apply(Block(), mesh=mesh, reshard_after_forward=True),
        "reshard_control": lambda: done.set_reshard_after_forward(True),
        "reshard_control_of_two": lambda: done.set_reshard_after_forward(2),
        "separate_group": lambda: done.set_separate_reduce_scatter_group(True),
        "group_memory": lambda: done.set_allocate_memory_from_process_group_for_comm(True),
    }
    found = {name: kind_of(function) for name, function in refused.items()}
    x = torch.ones(2, WIDTH)
    done(x).sum().backward()
    sharded(x).sum().backward()
    return {"found": found, "gradients": [gradients(done), gradients(sharded)]}
