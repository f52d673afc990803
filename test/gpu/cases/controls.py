"""The module's controls: what they change is when things happen, not what comes out."""

import torch

from .common import adam, batch, case, compare, make_model, shard, train, train_plain


def against_plain(place, prepare, after_step=None, **options):
    mesh = place.mesh()
    plain = make_model(place)
    model = shard(place, make_model(place), mesh=mesh, **options)
    prepare(model)
    found = train(place, model, adam(model), after_step=after_step)
    return compare(found, train_plain(place, plain, adam(plain)), mesh)


@case(variants=[(0,), (1,), (2,), (10,)])
def prefetch_distance(place, groups):
    return against_plain(place, lambda model: model.set_prefetch_distance(groups))


@case
def explicit_prefetch(place):
    def prepare(model):
        blocks = list(model.blocks)
        for at, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[at + 1 : at + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, at - 2) : at][::-1])

    return against_plain(place, prepare)


@case
def byte_budget(place):
    def prepare(model):
        largest = sum(parameter.numel() * 4 for parameter in model.blocks[0].parameters())
        model.set_unsharded_byte_budget(4 * largest)

    return against_plain(place, prepare)


@case(variants=[("by_size",), ("first_after_all_gather",), ("first_after_next_backward",)])
def separate_reductions(place, start):
    def prepare(model):
        model.set_separate_reduce_scatter_group()
        model.set_reduce_scatter_max_input_buffers(2)
        model.set_reduce_scatter_start(start)

    return against_plain(place, prepare)


@case
def memory_of_the_process_group(place):
    return against_plain(place, lambda model: model.set_allocate_memory_from_process_group_for_comm(True))


@case
def kept_storage(place):
    """The unsharded parameters have the same address in every step."""
    addresses = set()

    def note(model):
        modules = [*model.blocks, model]
        for module in modules:
            module.unshard()
        addresses.add(tuple(parameter.data_ptr() for parameter in model.parameters()))
        for module in modules:
            module.reshard()

    found = against_plain(place, lambda model: model.set_keep_unsharded_storage(True), after_step=note)
    assert len(addresses) == 1, f"{len(addresses)} sets of addresses in as many steps"
    return found


@case
def post_optim_event(place):
    place.needs_gpu()

    def record(model):
        model.set_post_optim_event(torch.cuda.current_stream().record_event())

    return against_plain(place, lambda model: None, after_step=record)


@case
def evaluation_between_steps(place):
    """A forward without autograd between steps changes nothing, and sees the current values."""
    mesh = place.mesh()
    plain, model = make_model(place), shard(place, make_model(place), mesh=mesh)

    def evaluate(model):
        with torch.no_grad():
            seen.append(model(batch(place, place.rank, 77)).item())
        if model is not plain:
            model.reshard()  # the root stays gathered

    seen = []
    found = train(place, model, adam(model), after_step=evaluate)
    result = compare(found, train_plain(place, plain, adam(plain)), mesh)
    evaluate(plain)
    assert abs(seen[-1] - seen[-2]) < 1e-5 * abs(seen[-1]), f"{seen[-2]}, the plain model {seen[-1]}"
    return result
