"""What fuzz_binding.py does to the package: functions (draw, pool), each one call or a few of any public entry point.

fuzz_native_actions.py has those for the extension below it.
"""

import copy
import gc
import pickle
import threading
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import fsdp
import fuzz_values as values
from fsdp import _meshes

ACTIONS = []


def action(function=None, *, weight=3):
    if function is None:
        return lambda function: action(function, weight=weight)
    ACTIONS.extend([function] * weight)
    return function


class Pool:
    """What the calls of one draw work on."""

    def __init__(self, draw, mesh):
        self.draw, self.mesh = draw, mesh
        self.core_mesh = _meshes.core_mesh(mesh)
        self.models, self.handles, self.optimizers = [values.model(draw)], [None], []

    @property
    def cores(self):
        found = [state.core for model in self.models for module in of(model)
                 if (state := fsdp.fully_shard.state(module)) is not None]
        return found or [None]

    def parameters(self):
        return (parameter for model in self.models for parameter in model.parameters())

    def module(self):
        """One of the models, or a module in one."""
        return self.draw.choice(of(self.draw.choice(self.models)))


def of(model):
    try:
        return list(model.modules())
    except Exception:
        return [model]


def right_or_odd(draw, pool, right):
    return right() if draw.random() < 0.85 else values.odd(draw, pool)


def shard_options(draw, pool):
    def maybe(name, right):
        if draw.random() < 0.25:
            options[name] = right_or_odd(draw, pool, right)

    options = {"mesh": right_or_odd(draw, pool, lambda: pool.mesh)}
    maybe("reshard_after_forward", lambda: draw.choice([True, False, None, 1, 2]))
    maybe("shard_placement_fn", lambda: values.callback(draw))
    maybe("mp_policy", lambda: values.policy(draw))
    maybe("offload_policy", lambda: draw.choice([fsdp.OffloadPolicy(), fsdp.CPUOffloadPolicy(pin_memory=False)]))
    maybe("ignored_params", lambda: set(list(pool.parameters())[:draw.randrange(3)]))
    maybe("dp_mesh_dims", lambda: fsdp.DataParallelMeshDims(shard=draw.choice(["x", ("x",), 3])))
    return options


@action(weight=8)
def shard(draw, pool):
    some = pool.module() if draw.random() < 0.7 else [pool.module() for _ in range(draw.randrange(3))]
    fsdp.fully_shard(right_or_odd(draw, pool, lambda: some), **shard_options(draw, pool))


@action(weight=6)
def make(draw, pool):
    pool.models.append(values.model(draw))
    if draw.random() < 0.8:
        for module in of(pool.models[-1])[1:]:
            if draw.random() < 0.3:
                fsdp.fully_shard(module, mesh=pool.mesh)
        fsdp.fully_shard(pool.models[-1], mesh=pool.mesh)


@action(weight=12)
def step(draw, pool):
    model = draw.choice(pool.models)
    x = right_or_odd(draw, pool, lambda: torch.randn(2, values.WIDTH, requires_grad=draw.random() < 0.5))
    if draw.random() < 0.1:
        y = checkpoint(model, x, use_reentrant=draw.random() < 0.5)
    elif draw.random() < 0.1:
        y = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    else:
        y = model(x)
    if draw.random() < 0.85:
        y.float().square().mean().backward(retain_graph=draw.random() < 0.1)
    else:
        pool.handles.append(y)


@action
def step_under_a_mode(draw, pool):
    mode = draw.choice([torch.no_grad, torch.inference_mode, torch.enable_grad, lambda: torch.device("meta"),
                        lambda: torch.autocast("cpu", torch.bfloat16)])
    with mode():
        step(draw, pool)


@action(weight=4)
def late_backward(draw, pool):
    draw.choice(pool.handles).float().sum().backward()


@action(weight=4)
def optimize(draw, pool):
    if not pool.optimizers or draw.random() < 0.3:
        kind = draw.choice([torch.optim.SGD, torch.optim.AdamW])
        pool.optimizers.append(kind(draw.choice(pool.models).parameters(), lr=0.1, foreach=draw.choice([True, False])))
    optimizer = draw.choice(pool.optimizers)
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=draw.random() < 0.7)


METHODS = sorted(name for name in vars(fsdp.FSDPModule) if not name.startswith("__"))


@action(weight=16)
def method(draw, pool):
    module, name = pool.module(), draw.choice(METHODS)
    arguments = [right_or_odd(draw, pool, lambda: draw.choice([True, False, 1, [module]]))
                 for _ in range(draw.choice([0, 1, 1, 1, 2]))]
    named = {"recurse": values.odd(draw, pool)} if draw.random() < 0.1 else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool.handles.append(getattr(module, name)(*arguments, **named))


@action(weight=4)
def wait(draw, pool):
    draw.choice(pool.handles).wait()


@action
def public_function(draw, pool):
    name = draw.choice(fsdp.__all__)
    arguments = [values.odd(draw, pool) for _ in range(draw.randrange(4))]
    pool.handles.append(getattr(fsdp, name)(*arguments))


@action
def forward_method(draw, pool):
    module = pool.module()
    fsdp.register_fsdp_forward_method(module, right_or_odd(draw, pool, lambda: draw.choice(["other", "forward"])))
    module.other(torch.randn(2, values.WIDTH)).sum().backward()


@action
def share(draw, pool):
    fsdp.share_comm_ctx(right_or_odd(draw, pool, lambda: [draw.choice(pool.models) for _ in range(draw.randrange(3))]))


@action(weight=6)
def hooks(draw, pool):
    """Hooks that raise, or call what they should not."""
    module = pool.module()
    left = [3]

    def hook(*args):
        left[0] -= 1
        if left[0] < 0:
            return
        if draw.random() < 0.3:
            raise values.Raised("hook")
        draw.choice(ACTIONS)(draw, pool)

    kind = draw.randrange(7)
    if kind == 0:
        pool.handles.append(module.register_forward_pre_hook(hook, prepend=draw.random() < 0.5))
    elif kind == 1:
        pool.handles.append(module.register_forward_hook(hook, prepend=draw.random() < 0.5))
    elif kind == 2:
        pool.handles.append(module.register_full_backward_hook(hook))
    elif kind == 3:
        next(pool.parameters()).register_post_accumulate_grad_hook(hook)
    elif kind == 4:
        next(pool.parameters()).register_hook(hook)
    elif kind == 5:
        module.register_state_dict_pre_hook(hook)
    else:
        y = module(torch.randn(2, values.WIDTH))
        y.register_hook(hook)
        y.sum().backward()


@action(weight=4)
def states(draw, pool):
    model = draw.choice(pool.models)
    state = model.state_dict()
    for name in list(state):
        if draw.random() < 0.1:
            state[name] = values.odd(draw, pool)
    model.load_state_dict(state, strict=draw.random() < 0.5, assign=draw.random() < 0.3)


@action(weight=4)
def move(draw, pool):
    model = pool.module()
    draw.choice([lambda: model.to(torch.float64), lambda: model.to(torch.bfloat16), lambda: model.to("cpu"),
                 lambda: model.to_empty(device="cpu"), lambda: model.to("meta"), lambda: model.float(),
                 lambda: model.eval(), lambda: model.train(), lambda: model._apply(lambda t: t),
                 lambda: model._apply(values.callback(draw)),  # not share_memory: torch itself dies on any DTensor
                 lambda: model.requires_grad_(draw.random() < 0.5), lambda: model.zero_grad()])()


@action(weight=4)
def copies(draw, pool):
    what = draw.choice([draw.choice(pool.models), draw.choice(pool.cores), draw.choice(pool.handles), pool.core_mesh])
    draw.choice([copy.copy, copy.deepcopy, pickle.dumps, repr, hash, dir, lambda v: v == what])(what)


@action(weight=6)
def change_the_tree(draw, pool):
    module = pool.module()
    change = draw.randrange(10)
    if change == 0:
        del module._parameters[draw.choice(list(module._parameters))]
    elif change == 1:
        module._parameters[draw.choice([*module._parameters, "new", 3])] = values.odd(draw, pool)
    elif change == 2:
        module.weight = nn.Parameter(torch.randn(values.WIDTH, values.WIDTH))
    elif change == 3:
        module.add_module("more", draw.choice([nn.Linear(values.WIDTH, values.WIDTH), pool.module(), None]))
    elif change == 4:
        del module._modules[draw.choice(list(module._modules))]
    elif change == 5:
        module._parameters = dict(module._parameters)
    elif change == 6:
        module.__class__ = draw.choice([nn.Module, nn.Linear, type(pool.module())])
    elif change == 7:
        module.__dict__.pop(draw.choice(list(module.__dict__)))
    elif change == 8:
        module._buffers["odd"] = values.odd(draw, pool)
    else:
        module._parameters.clear()


@action(weight=6)
def change_a_parameter(draw, pool):
    parameter = draw.choice(list(pool.parameters()))
    change = draw.randrange(9)
    if change == 0:
        parameter.data = values.tensor(draw)
    elif change == 1:
        parameter.grad = values.odd(draw, pool)
    elif change == 2:
        parameter.requires_grad_(draw.random() < 0.5)
    elif change == 3:
        parameter._local_tensor = values.tensor(draw)  # torch itself dies of anything else
    elif change == 4:
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape))
    elif change == 5:
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.randn(parameter.shape)))
    elif change == 6:  # not its storage's resize_: torch reads the plain tensor of an unsharded model there, and dies
        parameter.grad = None
    elif change == 7:
        parameter.to_local().set_(torch.randn(3))
    else:
        pool.handles.append(parameter.full_tensor() if values.is_sharded(parameter) else parameter * 2)


@action(weight=5)
def let_go(draw, pool):
    for things in (pool.models, pool.handles, pool.optimizers):
        if len(things) > 1:
            del things[draw.randrange(len(things))]
    if draw.random() < 0.5:
        gc.collect()


@action(weight=2)
def threads(draw, pool):
    """Other threads, each with models of its own, beside this one."""
    def run(own):
        try:
            for _ in range(4):
                with_signals_quiet(draw.choice(ACTIONS), draw, own)
        except BaseException:
            pass

    running = [threading.Thread(target=run, args=(Pool(draw, pool.mesh),), daemon=True) for _ in range(2)]
    for thread in running:
        thread.start()
    run(Pool(draw, pool.mesh))
    for thread in running:
        thread.join()


def with_signals_quiet(function, draw, pool):
    try:
        function(draw, pool)
    except (Exception, SystemExit):
        pass


@action(weight=1)
def a_thread_on_the_same(draw, pool):
    thread = threading.Thread(target=with_signals_quiet, args=(draw.choice([step, wait, late_backward]), draw, pool))
    thread.start()
    thread.join()


@action(weight=1)
def deep_recursion(draw, pool):
    model = pool.module()

    def deeper(depth):
        return model(torch.randn(2, values.WIDTH)) if depth == 0 else deeper(depth - 1)

    deeper(draw.choice([100, 900, 940, 960, 980, 990, 995, 2000]))


@action(weight=1)
def collective(draw, pool):
    dist.all_reduce(torch.ones(2))
    dist.barrier()
