"""Checks: what consumes a sharded parameter outside forward without being an operator."""

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from beyond_fsdp2 import batches_of, check, raises
from beyond_outside_forward import compare_gradients, plain_and_sharded


class Times(torch.autograd.Function):
    """x @ w.t(), as a fused kernel has it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.t() @ x


class TimesLater(torch.autograd.Function):
    """The same with setup_context."""

    @staticmethod
    def forward(x, w):
        return x @ w.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = Times.backward


class Rounded(torch.autograd.Function):
    """Of one tensor, with a gradient that passes straight through: fake quantization."""

    @staticmethod
    def forward(ctx, w):
        return (w * 8).round() / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def product(x, w):
    return x @ w.t()


CONSUMERS = {
    "a function": lambda model, x: Times.apply(x, model.weight),
    "a function with a context of its own": lambda model, x: TimesLater.apply(x, model.weight),
    "a function of a view": lambda model, x: Times.apply(x, model.weight[1:4]),
    "a function of a parameter and what is computed from it": lambda model, x: Times.apply(x, model.weight * 2) + x[:, :5],
    "a function of the parameter alone": lambda model, x: x @ Rounded.apply(model.weight).t(),
    "two functions": lambda model, x: Times.apply(x, Rounded.apply(model.weight)),
    "a function behind forward": lambda model, x: Times.apply(model(x) @ model.weight, model.inner[2].weight),
    "a function of a view and an operator on another": lambda model, x: (Times.apply(x, model.weight[1:4]) @ model.weight[:3]
                                                                         + x * model.weight[4]),
    "a function and an operator": lambda model, x: Times.apply(x, model.weight) + x @ model.weight.t(),
    "a function twice": lambda model, x: Times.apply(Times.apply(x, model.inner[0].weight), model.inner[0].weight),
    "a reentrant checkpoint": lambda model, x: checkpoint(product, x, model.weight, use_reentrant=True),
    "a reentrant checkpoint of a function": lambda model, x: checkpoint(Times.apply, x, model.weight, use_reentrant=True),
    "a reentrant checkpoint of a forward": lambda model, x: checkpoint(lambda x, w: model(x) @ w, x, model.weight,
                                                                       use_reentrant=True),
}


def run_step(plain, sharded, consume, batches, rank):
    for model in (plain, sharded):
        model.zero_grad()
    losses = [consume(plain, x).square().mean() for x in batches]
    (sum(losses) / len(batches)).backward()
    loss = consume(sharded, batches[rank]).square().mean()
    loss.backward()
    torch.testing.assert_close(loss, losses[rank])
    compare_gradients(plain, sharded)
    with torch.no_grad():
        for model in (plain, sharded):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad


@check
def functions_that_are_given_parameters_train_them(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    # A reentrant checkpoint records where an input needs a gradient.
    batches = [[x.requires_grad_() for x in batches_of(each)] for each in range(ranks)]
    for name, consume in CONSUMERS.items():
        for step in range(3):
            try:
                run_step(plain, sharded, consume, [each[step] for each in batches], rank)
            except Exception as error:
                raise AssertionError(f"{name}, step {step}: {error}") from error
        sharded.reshard()


@check
def a_function_on_parameters_alone_gives_a_dtensor(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    for model in (plain, sharded):
        rounded = Rounded.apply(model.weight)
        assert isinstance(rounded, DTensor) == (model is sharded)
        penalty = rounded.square().sum()
        (penalty.full_tensor() if model is sharded else penalty).backward()
    compare_gradients(plain, sharded)


@check
def a_copy_that_is_given_requires_grad_has_its_own_gradient(rank, ranks):
    plain, sharded = plain_and_sharded(ranks)
    x = batches_of(rank)[0]
    for model in (plain, sharded):
        model.copy = model.weight.detach().requires_grad_()
        (x @ model.copy.t()).square().mean().backward()
        assert model.weight.grad is None
    torch.testing.assert_close(sharded.copy.grad, plain.copy.grad)


@check
def gradients_that_autograd_is_asked_for_are_no_part_of_the_parameter(rank, ranks):
    _, sharded = plain_and_sharded(ranks)
    loss = Times.apply(batches_of(rank)[0], sharded.weight).sum()
    raises(RuntimeError, "not have been used", lambda: torch.autograd.grad(loss, [sharded.weight]))
    assert sharded.weight.grad is None
