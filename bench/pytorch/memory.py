"""Python's side of memory: live bytes of the plain model's step, and of FSDP2's or the extension's."""

import torch

import models
import worker

extension = worker.extension()


def make_model(request):
    torch.manual_seed(0)
    return models.make(request)


def make_tokens(request):
    return torch.arange(request["tokens"]) % request["vocabulary"]


def step(model, tokens):
    model(tokens).backward()


def plain(request):
    """What the model is made of, and its activations and temporaries: the peak without parameters and gradients."""
    model, tokens = make_model(request), make_tokens(request)
    parameter_bytes = models.parameter_bytes(model)
    block_bytes = models.parameter_bytes(model.blocks[0])
    at_start = extension.live_bytes()
    extension.start_recording()
    step(model, tokens)
    gradients = [parameter.grad.data_ptr() for parameter in model.parameters()]
    return {
        "parameter_bytes": parameter_bytes,
        "block_bytes": block_bytes,
        "root_bytes": parameter_bytes - len(model.blocks) * block_bytes,
        "activation_bytes": extension.peak_without(gradients, at_start) - parameter_bytes,
    }


def sharded(request):
    """The peaks of the steps after the warm-up, gradients dropped before each."""
    from torch.distributed.device_mesh import init_device_mesh

    model, tokens = make_model(request), make_tokens(request)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    models.shard(model, mesh, worker.fully_shard_of(request["impl"]))
    if request.get("prefetch") is not None:
        model.set_prefetch_distance(request["prefetch"])
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
        "local_bytes": sum(parameter.to_local().nbytes for parameter in model.parameters()),
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
