"""torch.utils.data with worker processes."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from programs.common import INPUTS, Model, adam, batches, gradients, mesh_of, shard, train, weights

from .table import program


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        torch.manual_seed(index)
        return torch.randn(INPUTS), index


class Stream(IterableDataset):
    """Each worker its own part."""

    def __iter__(self):
        worker = get_worker_info()
        for index in range(worker.id, 12, worker.num_workers):
            yield Rows()[index]


def train_on(model, loader, sampler=None, epochs=2):
    optimizer, losses = adam(model), []
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, index in loader:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append((loss.detach(), index))
    return {"losses": losses, "weights": weights(model), "gradients": gradients(model)}


# Processes that are forked have none of the threads that a sharded module has, here after a step that used them all.
@program(ranks=(2,), variants=[(True,), (False,)])
def loader_with_workers(api, ranks, persistent):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    train(model, adam(model), batches(1))
    sampler = DistributedSampler(Rows(), shuffle=True)
    loader = DataLoader(Rows(), batch_size=4, sampler=sampler, num_workers=2, multiprocessing_context="fork",
                        persistent_workers=persistent)
    return train_on(model, loader, sampler)


@program(ranks=(2,))
def streamed_with_workers(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    train(model, adam(model), batches(1))
    return train_on(model, DataLoader(Stream(), batch_size=3, num_workers=2, prefetch_factor=1))


@program(ranks=(2,))
def a_worker_that_ends_between_forward_and_backward(api, ranks):
    """A forked process holds copies of all handles and of the step under way, and must leave both alone."""
    model = shard(api, Model(), mesh=mesh_of(ranks))
    loss = model(batches(1)[0]).square().mean()
    rows = [x for x, _ in DataLoader(Rows(), batch_size=12, num_workers=1)]
    loss.backward()
    dist.barrier()
    return {"rows": rows, "gradients": gradients(model)}
