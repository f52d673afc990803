"""Checks of test_beyond_fsdp2.py: one rank alone in a call that all have to make, and two threads on one communicator."""

import logging
import tempfile
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp
from beyond_fsdp2 import check, raises


def over_groups_of_its_own(ranks, late_after, timeout=None):
    """A model and its process group, which are unusable afterwards."""
    group = dist.new_group(list(range(ranks)), timeout=timeout)
    mesh = fsdp._meshes.DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in model:
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    fsdp.set_schedule_check(model, late_after=late_after, compare_after=timedelta(milliseconds=50))
    return model, group


def take_steps(model, steps=1000):
    for _ in range(steps):
        model(torch.ones(1, 6)).sum().backward()


@check
def one_rank_alone_in_save_checkpoint_ends_all_ranks_by_its_name(rank, ranks):
    model, group = over_groups_of_its_own(ranks, timedelta(seconds=20))
    take_steps(model, 2)

    def go():
        if rank == 0:
            with tempfile.TemporaryDirectory() as folder:
                fsdp.save_checkpoint(f"{folder}/checkpoint", model, process_group=group)
        take_steps(model)

    error = raises(fsdp.ScheduleError, "save_checkpoint", go)
    assert error.launched[0] == "all_gather of 'save_checkpoint', which belongs to no group of the model", error.launched
    assert error.launched[1].startswith("all_gather of 0"), error.launched


@check
def of_a_rank_that_does_not_come_the_others_are_told_where_it_is(rank, ranks):
    timeout = timedelta(seconds=3)
    model, _ = over_groups_of_its_own(ranks, timeout / 3, timeout)
    alone = distribute_tensor(torch.ones(4, 6), fsdp._meshes.DeviceMesh.from_group(
        dist.new_group(list(range(ranks)), timeout=timeout), "cpu"), [Shard(0)])
    take_steps(model, 1)
    with logging_of("fsdp"):
        if rank == 0:
            raises(RuntimeError, "", lambda: alone.full_tensor())
        else:
            error = raises(fsdp.CommError, "is late: rank 1 has waited", lambda: take_steps(model, 1))
            assert "rank 0: in no collective of this model, in full_tensor, called at beyond_alone.py:" in str(error), error


class logging_of:
    """Keeps the warnings of that logger from the output."""

    def __init__(self, name):
        self.logger = logging.getLogger(name)

    def __enter__(self):
        self.logger.addFilter(self.drop)

    def __exit__(self, *_):
        self.logger.removeFilter(self.drop)

    @staticmethod
    def drop(_):
        return False


@check
def two_threads_that_use_one_process_group_at_once_are_refused_by_name(rank, ranks):
    first, group = over_groups_of_its_own(ranks, timedelta(seconds=20))
    second = nn.Sequential(nn.Linear(6, 6))
    fsdp.fully_shard(second, mesh=fsdp._meshes.DeviceMesh.from_group(group, "cpu"))
    errors, begin = [], threading.Barrier(2)

    def train(model):
        begin.wait()
        try:
            take_steps(model)
        except RuntimeError as error:  # torch's, where it comes out of a backward
            errors.append(error)

    threads = [threading.Thread(target=train, args=(model,)) for model in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2 and all("two threads of rank" in str(error) for error in errors), errors
