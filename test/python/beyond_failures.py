"""Checks of test_beyond_fsdp2.py: what fully_shard leaves behind when something in it raises."""

import contextlib
from unittest import mock

import torch
import torch.distributed.fsdp
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp
import fsdp._forward_hooks
import fsdp._fully_shard
from beyond_fsdp2 import batches_of, check, train_both


class Injected(Exception):
    pass


def net(first=nn.Linear):
    return nn.Sequential(first(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0)), nn.Linear(6, 3))


def looks(model):
    """All that is to be as it was, hooks and parameters by which objects they are."""
    def of(value):
        return [(key, id(entry)) for key, entry in value.items()] if isinstance(value, dict) else id(value)

    return [(type(module), [(name, of(value)) for name, value in vars(module).items()]) for module in model.modules()]


def shard(modules, ranks, **options):
    return fsdp.fully_shard(modules, mesh=init_device_mesh("cpu", (ranks,)), **options)


def expect_as_it_was(model, kind, attempt):
    """`attempt` raises that kind of error, and the model is what it was."""
    before, values = looks(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        attempt()
    except kind as error:
        raised = error
    else:
        raise AssertionError("nothing was raised")
    assert looks(model) == before, f"after {raised!r}"
    for name, tensor in model.state_dict().items():
        assert type(tensor) is torch.Tensor and torch.equal(tensor, values[name]), f"{name} after {raised!r}"


def expect_to_train(model, rank):
    model(batches_of(rank)[0]).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


def looked_up(module):
    """The functions and classes that code of this file finds by their names when it runs."""
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("__")]


@check
def whatever_raises_in_fully_shard_leaves_the_module_as_it_was(rank, ranks):
    module, raised = fsdp._fully_shard, []
    others = [(module._C, "fully_shard"), (fsdp._states, "post_forward_mesh"), (fsdp._forward_hooks, "_hooks")]
    for owner, name in [(module, name) for name in looked_up(module)] + others:
        if (owner, name) == (module, "fully_shard"):
            continue
        model = net()
        with mock.patch.object(owner, name, side_effect=Injected) as replaced:
            if name in ("FSDPModule", "DTensor", "CPUOffloadPolicy"):  # asked with isinstance
                continue
            try:
                fsdp.fully_shard(net(), mesh=init_device_mesh("cpu", (ranks,)))
            except Injected:
                raised.append(name)
                expect_as_it_was(model, Injected, lambda: shard(model, ranks))
            assert (name in raised) == replaced.called, name
        if name in raised:
            expect_to_train(shard(model, ranks), rank)
    assert {"Placer", "FSDPState", "_check_class", "_remember_state", "_mark_as_managed", "register_hooks", "_hooks",
            "post_forward_mesh"} <= set(raised), raised


@check
def what_a_module_of_the_list_refuses_leaves_all_as_they_were(rank, ranks):
    class WithoutHooks(nn.Linear):
        def register_load_state_dict_post_hook(self, hook):
            raise Injected

    class NoSubclasses(nn.Linear):
        def __init_subclass__(cls):
            raise Injected

    for kind in (WithoutHooks, NoSubclasses):
        model = nn.Sequential(nn.Linear(6, 6), kind(6, 3))
        expect_as_it_was(model, Injected, lambda: shard(list(model), ranks))
        expect_to_train(shard(nn.Sequential(model[0], shard(nn.Linear(6, 3), ranks)), ranks), rank)


@check
def what_a_users_function_raises_leaves_the_module_as_it_was(rank, ranks):
    def after(calls):
        left = [None] * calls

        def function(parameter):
            if not left:
                raise Injected
            return left.pop()

        return function

    for calls in range(6):
        model = net()
        expect_as_it_was(model, Injected, lambda: shard(model, ranks, shard_placement_fn=after(calls)))
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=after(calls))
        expect_as_it_was(model, Injected, lambda: shard(model, ranks, mp_policy=policy))
        expect_to_train(shard(model, ranks), rank)


@check
def attributes_that_a_module_does_not_let_be_set_are_in_nobodys_way(rank, ranks):
    class Frozen(nn.Linear):
        is_frozen = False

        def __setattr__(self, name, value):
            if self.is_frozen and not isinstance(value, torch.Tensor):
                raise AttributeError(f"{name} is not to be set")
            super().__setattr__(name, value)

    def make():
        model = net(Frozen)
        Frozen.is_frozen = True
        return model

    train_both(make, lambda model, mesh: (fsdp.fully_shard(model[0], mesh=mesh), fsdp.fully_shard(model, mesh=mesh)),
               rank, ranks)


@check
def torchs_own_names_may_be_given_to_this_packages(rank, ranks):
    names = ["fully_shard", "FSDPModule", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx",
             "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"]
    with mock.patch.multiple(torch.distributed.fsdp, **{name: getattr(fsdp, name) for name in names}):
        model = net()
        torch.distributed.fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        assert torch.distributed.fsdp.fully_shard.state(model) is model._get_fsdp_state()
        model.to(torch.float64)
        model.unshard(async_op=True).wait()
        model(batches_of(rank)[0].double()).sum().backward()
        assert [type(model[:2]), type(model[1])] == [nn.Sequential, nn.Sequential]
        assert len(fsdp.optimizer_state_dict(model, torch.optim.SGD(model.parameters()))) > 0
    assert torch.distributed.fsdp.fully_shard.state(model) is model._get_fsdp_state()


@check
def export_of_a_model_that_has_not_run_is_refused(rank, ranks):
    """Its tensors have no memory, and what was read from there was a crash."""
    model = net()
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    try:
        torch.export.export(model, (torch.ones(2, 6),), strict=False)
    except RuntimeError as error:
        assert "FakeTensorMode" in str(error), error
    else:
        raise AssertionError("it was exported")
    model(torch.ones(2, 6)).sum().backward()


class Work:
    """It goes when the library lets go of it, which may be where nobody has the interpreter's lock."""

    gone = 0

    def __init__(self, work):
        self._work = work

    def wait(self):
        self._work.wait()

    def __del__(self):
        Work.gone += 1


class Gather:
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return Work(torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True))


@check
def what_a_custom_gather_returns_is_let_go(rank, ranks):
    model = net()
    for layer in (model[0], model[2], model):
        fsdp.fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
        layer.set_custom_all_gather(Gather())
    before = Work.gone
    for _ in range(3):
        with torch.no_grad():
            model(torch.ones(2, 6))
    assert Work.gone > before


class Fallback(nn.Module):
    """Computes alone where the module that it is sharded with cannot be called."""

    def __init__(self, partner):
        super().__init__()
        self.own = nn.Linear(6, 6)
        self.partner = partner

    def forward(self, x):
        try:
            with self.around():
                x = self.partner[0](x)
        except (Injected, RuntimeError):
            self.failed += 1
        return self.own(x.to(self.own.weight.dtype))

    failed = 0
    around = contextlib.nullcontext


def refuse(*_):
    raise Injected


@check
def a_call_that_fails_before_it_begins_leaves_the_forward_around_it_under_way(rank, ranks):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for fails_in in ("a hook of the user's", "ours"):
        torch.manual_seed(3)
        partner = nn.Linear(6, 6)
        model = Fallback([partner])  # no child: both are in one call of fully_shard
        fsdp.fully_shard([model, partner], mesh=init_device_mesh("cpu", (ranks,)), mp_policy=policy)
        if fails_in == "ours":
            model.around = FakeTensorMode
        else:
            hook = partner.register_forward_pre_hook(refuse, prepend=True)
        for step in range(2):
            output = model(batches_of(rank)[step])
            assert model.failed == step + 1 and output.dtype == torch.float32, f"{fails_in}: {model.failed}, {output.dtype}"
            output.sum().backward()
            assert isinstance(model.own.weight, DTensor) and model.own.weight.grad is not None, fails_in
        model.around = contextlib.nullcontext
        if fails_in != "ours":
            hook.remove()
        assert model(batches_of(rank)[2]).dtype == torch.float32 and model.failed == 2
