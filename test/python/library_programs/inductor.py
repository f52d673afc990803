"""torch.compile with its default backend, which compiles C++."""

import torch
import torch._dynamo.utils

from programs.common import Model, adam, batches, mesh_of, shard, train

from .table import program


@program(ranks=(2,), variants=[("blocks",), ("model",), ("wrapped",)])
def compiled_by_inductor(api, ranks, part):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Model(blocks=2)
    if part == "blocks":
        for block in model.blocks:
            block.compile()
    shard(api, model, mesh=mesh_of(ranks))
    if part == "model":
        model.compile()
    optimizer = adam(model)
    called = torch.compile(model) if part == "wrapped" else model
    trained = train(called, optimizer, batches(2))
    counters = torch._dynamo.utils.counters
    return {"trained": trained, "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values())}
