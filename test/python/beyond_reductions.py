"""Checks of test_beyond_fsdp2.py: when reductions begin that have a communicator of their own."""

import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from beyond_fsdp2 import batches_of, check, train_both

STARTS = ["by_size", "first_after_all_gather", "first_after_next_backward"]


def stack():
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def shard_apart(model, mesh):
    for layer in model:
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    model.set_separate_reduce_scatter_group()
    return model


def raises(kind, what, call):
    try:
        call()
    except kind as error:
        assert what in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} with {what!r}")


@check
def reductions_that_start_later_train_as_the_plain_model_does(rank, ranks):
    for start in STARTS:
        def shard(model, mesh, start=start):
            shard_apart(model, mesh).set_reduce_scatter_start(start)

        train_both(stack, shard, rank, ranks, steps=3)


@check
def the_start_is_chosen_for_the_slowest_rank(rank, ranks):
    model = shard_apart(stack(), init_device_mesh("cpu", (ranks,)))
    x = batches_of(rank)[0]
    steps = []

    def time_step():
        model(x).sum().backward()
        steps.append(len(steps))
        # Each rank alone would take another one than the second.
        return 0 if steps[-1] < 2 else [1.0 if rank else 9.0, 4, 9.0 if rank else 1.0][(steps[-1] - 2) % 3]

    assert model.choose_reduce_scatter_start(time_step, rounds=2) == "first_after_all_gather"
    assert len(steps) == 8, steps


@check
def a_time_that_is_none_on_one_rank_is_an_error_on_all_of_them(rank, ranks):
    model = shard_apart(stack(), init_device_mesh("cpu", (ranks,)))
    x = batches_of(rank)[0]

    def time_step():
        model(x).sum().backward()
        return 1.0 if rank == 0 else None

    expected = (ValueError, "finite number") if rank == 0 else (TypeError, "None")
    raises(*expected, lambda: model.choose_reduce_scatter_start(time_step, rounds=1))
    time_step()


@check
def a_start_that_is_not_one_is_refused(rank, ranks):
    model = shard_apart(stack(), init_device_mesh("cpu", (ranks,)))
    raises(ValueError, "\"by_size\"", lambda: model.set_reduce_scatter_start("soon"))
    raises(TypeError, "str", lambda: model.set_reduce_scatter_start(None))
    raises(RuntimeError, "root", lambda: model[0].set_reduce_scatter_start("by_size"))
    raises(TypeError, "function", lambda: model.choose_reduce_scatter_start(3))
    raises(ValueError, "1 round", lambda: model.choose_reduce_scatter_start(lambda: 1.0, rounds=0))
    raises(TypeError, "number", lambda: model.choose_reduce_scatter_start(lambda: "fast", rounds=1))
    raises(ZeroDivisionError, "zero", lambda: model.choose_reduce_scatter_start(lambda: 1 / 0))
