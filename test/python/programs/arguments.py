"""The arguments of fully_shard."""

import torch
import torch.nn as nn

from shared_mesh import shared_mesh

from .common import INPUTS, OUTPUTS, WIDTH, Model, adam, batches, mesh_of, program, shard, shown, train


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
    mesh = shared_mesh(replicas, ranks // replicas, names=("replicate", "shard"))
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
    return {"before": shown(model), "trained": train(model, adam(model, fused=False), batches(2))}


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
