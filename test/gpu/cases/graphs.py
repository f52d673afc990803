"""A whole training step as a CUDA graph, replayed with the results of steps that are not."""

import torch

from .common import batch, case, compare, make_model, result_of, shard

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=True),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, capturable=True, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, capturable=True, fused=True),
}
WARM_UP, REPLAYS = 3, 4


class Stepper:
    """Steps on one batch in memory that stays where it is."""

    def __init__(self, place, model, optimizer):
        self.place, self.model, self.optimizer = place, model, optimizer
        self.tokens = torch.zeros_like(batch(place, 0, 0))
        self.losses = []

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.tokens)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def warm_up(self):
        """As capture asks for: on another stream, with everything allocated that stays."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for index in range(WARM_UP):
                self.tokens.copy_(batch(self.place, self.place.rank, index))
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def run(self, step):
        for index in range(WARM_UP, WARM_UP + REPLAYS):
            self.tokens.copy_(batch(self.place, self.place.rank, index))
            self.losses.append(step().clone())
        torch.cuda.synchronize()
        return result_of(self.model, self.losses)


def captured(stepper):
    stepper.warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = stepper.step()

    def replay():
        graph.replay()
        return loss

    return stepper.run(replay)


def eager(stepper):
    stepper.warm_up()
    return stepper.run(stepper.step)


@case(worlds=("one",), variants=[(name,) for name in OPTIMIZERS])
def graph_of_plain(place, optimizer):
    """The plain model, to know what this torch can capture."""
    place.needs_gpu()
    models = [make_model(place) for _ in range(2)]
    wanted, found = (run(Stepper(place, model, OPTIMIZERS[optimizer](model.parameters())))
                     for run, model in zip((eager, captured), models))
    return compare(found, wanted, None)


class Untrained:
    """The optimizer of a fake world, whose reductions leave no numbers to train with."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def zero_grad(self, set_to_none):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        pass


@case(worlds=("fake",), variants=[("kept",), ("released",), ("resident",)])
def graph_of_gathers(place, storage):
    """With one rank alone nothing is gathered; here it is, and losses are of what was."""
    place.needs_gpu()
    models = [shard(place, make_model(place), reshard_after_forward=storage != "resident") for _ in range(2)]
    for model in models:
        model.set_keep_unsharded_storage(storage == "kept")
    wanted, found = (run(Stepper(place, model, Untrained(model.parameters()))).losses
                     for run, model in zip((eager, captured), models))
    assert found == wanted, f"losses of replays: {found}, of steps: {wanted}"
    assert len(set(found)) > 1, f"the loss stays {found[0]}: replays do nothing"
    return {"losses": found}


@case(worlds=("one", "nccl"),
      variants=[(optimizer, storage) for optimizer in OPTIMIZERS for storage in ("kept", "released", "resident")])
def graph_of_sharded(place, optimizer, storage):
    place.needs_gpu()
    options = {"reshard_after_forward": storage != "resident"}
    models = [shard(place, make_model(place), **options) for _ in range(2)]
    for model in models:
        model.set_keep_unsharded_storage(storage == "kept")
    wanted, found = (run(Stepper(place, model, OPTIMIZERS[optimizer](model.parameters())))
                     for run, model in zip((eager, captured), models))
    assert len(set(found.losses)) > 1, f"the loss stays {found.losses[0]}: replays do nothing"
    return compare(found, wanted, None)
