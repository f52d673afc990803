"""Checks of test_beyond_fsdp2.py: when reductions begin that have a communicator of their own, and what comes behind
reductions."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import fsdp
from beyond_fsdp2 import batches_of, check, raises, train_both, whole

STARTS = ["by_size", "first_after_all_gather", "first_after_next_backward"]


def stack():
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def shard_apart(model, mesh):
    for layer in model:
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    model.set_separate_reduce_scatter_group()
    return model


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

    expected = (ValueError, "no finite time") if rank == 0 else (TypeError, "None")
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


def layers(ranks):
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    for each in (*model, model):
        fsdp.fully_shard(each, mesh=init_device_mesh("cpu", (ranks,)))
    return model


@check
def a_hook_behind_a_gradient_fires_before_the_backward_of_the_layer_after_the_next(rank, ranks):
    model, events = layers(ranks), []
    for index, layer in enumerate(model):
        layer.register_full_backward_pre_hook(lambda *_, index=index: events.append(f"backward {index}"))
        layer.weight.register_post_accumulate_grad_hook(lambda _, index=index: events.append(f"gradient {index}"))
    for x in batches_of(rank):
        events.clear()
        model(x).sum().backward()
        for index in (4, 3, 2):
            assert events.index(f"gradient {index}") < events.index(f"backward {index - 2}"), events


@check
def an_optimizer_in_backward_holds_the_gradients_of_one_group(rank, ranks):
    model = layers(ranks)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    parameters = dict(model.named_parameters())
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    plain.load_state_dict({name: whole(tensor) for name, tensor in model.state_dict().items()})
    stepped = []

    def step(index):
        stepped.append([name for name, parameter in parameters.items() if parameter.grad is not None])
        optimizers[index].step()
        optimizers[index].zero_grad()

    for index, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, index=index: step(index))  # the bias's is there, too
    for number in range(3):
        stepped.clear()
        model(batches_of(rank)[number]).sum().backward()
        assert stepped == [[f"{index}.weight", f"{index}.bias"] for index in reversed(range(5))], stepped
        assert all(parameter.grad is None for parameter in parameters.values())

        plain.zero_grad()
        sum(plain(batches_of(each)[number]).sum() for each in range(ranks)).div(ranks).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * parameter.grad
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), plain.get_parameter(name).detach(), msg=name)


@check
def what_a_hook_behind_a_gradient_does_to_gradients_stays(rank, ranks):
    model, kept = layers(ranks), []
    x = batches_of(rank)[0]

    def keep_and_drop(parameter):
        kept.append(parameter.grad)
        for each in model[2].parameters():  # the bias has no hook
            assert isinstance(each, DTensor)
            each.grad = None

    model[2].weight.register_post_accumulate_grad_hook(keep_and_drop)
    model[3].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", torch.ones_like(p.detach())))
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        assert model[2].weight.grad is None and model[2].bias.grad is None
        assert torch.equal(whole(model[3].weight.grad), torch.ones(6, 6)), model[3].weight.grad
    assert len(kept) == 2 and torch.equal(kept[0].to_local(), kept[1].to_local())


@check
def a_hook_behind_a_gradient_may_read_parameters_and_compute_with_autograd(rank, ranks):
    model, seen = layers(ranks), []

    def read(parameter):
        x = torch.ones(1, 6, requires_grad=True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad((x * 3).sum(), x)
        seen.append((whole(parameter).norm().item(), (x @ parameter).norm().item(), gradient.sum().item()))

    model[2].weight.register_post_accumulate_grad_hook(read)
    expected = whole(model[2].weight.detach())
    model(batches_of(rank)[0]).sum().backward()
    assert abs(seen[0][0] - expected.norm().item()) < 1e-5, seen
    assert abs(seen[0][1] - (torch.ones(1, 6) @ expected).norm().item()) < 1e-5, seen
    assert seen[0][2] == 18, seen


@check
def a_norm_over_partial_sums_is_refused(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))
    partial = DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()], run_check=False)
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(partial)
    fsdp.fully_shard(model, mesh=mesh["dp"])
    model.weight.grad = torch.ones_like(model.weight)
    raises(ValueError, "Partial", lambda: fsdp.clip_grad_norm_(model.parameters(), 1.0))
    raises(ValueError, "Partial", lambda: fsdp.clip_grad_norm_(fsdp.local_shards(model), 1.0))
