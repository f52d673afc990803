"""Python's side of memory: live bytes of the plain model's step, and of FSDP2's, DDP's or the extension's."""

import torch

import models
import worker
from operator_memory import operators_of

extension = worker.extension()


def make_model(request):
    torch.manual_seed(0)
    return models.make(request)


def make_tokens(request):
    return torch.arange(request["tokens"]) % request["vocabulary"]


def step(model, tokens):
    model(tokens).backward()


def groups_of(model):
    """The parameters of each block, and those of the root."""
    blocks = [list(block.parameters()) for block in model.blocks]
    in_blocks = {id(parameter) for block in blocks for parameter in block}
    return [*blocks, [parameter for parameter in model.parameters() if id(parameter) not in in_blocks]]


def plain(request):
    """What the model is made of, and what its step has alive at each operator."""
    model, tokens = make_model(request), make_tokens(request)
    groups = groups_of(model)
    return {"group_bytes": [sum(parameter.nbytes for parameter in group) for group in groups],
            "operators": operators_of(lambda: step(model, tokens), groups, extension)}


def make_sharded(request):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = models.shard(make_model(request), mesh, worker.fully_shard_of(request["impl"]))
    if request.get("prefetch") is not None:
        model.set_prefetch_distance(request["prefetch"])
    return model


def replicated(request):
    return torch.nn.parallel.DistributedDataParallel(make_model(request))


def local(parameter):
    return getattr(parameter, "_local_tensor", parameter)


def sharded(request):
    """The peaks of the steps after the warm-up, gradients dropped before each."""
    tokens = make_tokens(request)
    model = replicated(request) if request["impl"] == "ddp" else make_sharded(request)
    peaks = []
    for index in range(request["warmup"] + request["repeats"]):
        model.zero_grad(set_to_none=True)
        if index >= request["warmup"]:
            worker.quiet_collector()
        between_steps = extension.live_bytes()
        extension.start_recording()
        step(model, tokens)
        peaks.append(extension.peak_bytes())
    return {
        "local_bytes": [sum(local(parameter).nbytes for parameter in group)
                        for group in groups_of(getattr(model, "module", model))],
        "between_steps_bytes": between_steps,
        "peak_bytes": peaks[request["warmup"]:],
        "largest_at_peak": largest_at_peak(),
    }


def largest_at_peak():
    """What was live at the last peak, largest first."""
    sizes = sorted(extension.sizes_at_peak().items(), reverse=True)
    return [{"bytes": size, "count": count} for size, count in sizes[:12]]


if __name__ == "__main__":
    extension.install_counting_allocator()
    worker.init_gloo()
    worker.serve(lambda request: {"plain": plain, "sharded": sharded}[request["do"]](request))
