"""Wrong arguments: the same kinds of errors as FSDP2's, and nothing has changed after them.

Each case is tried on a module of its own. What is compared: the built-in exception that was raised, what the module
shows afterwards, and the training of the module after the error.
"""

import sys

import torch
import torch.nn as nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shared_mesh import shared_mesh

from .common import WIDTH, Block, adam, mesh_of, program, shown, train
from .controls import has
from .meshes import HAS_DIMS


class OfTheUser(Exception):
    """An exception that the package knows nothing of."""


def kind_of(function):
    """Which built-in exception, or one of the user's, with its text if it is the user's."""
    try:
        function()
    except BaseException as error:
        if isinstance(error, (OfTheUser, SystemExit)):
            return f"{type(error).__name__} {error.args}"
        return next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins")
    return "no error"


def inputs(steps=2):
    torch.manual_seed(3)
    return [torch.randn(2, WIDTH) for _ in range(steps)]


def raise_it(*args):
    raise OfTheUser("from a callback", 7)


OPTIONS = {
    "mesh_of_three_dimensions": lambda api, ranks: {
        "mesh": shared_mesh(1, 1, ranks, names=("a", "b", "c"))},
    "unnamed_mesh_of_two": lambda api, ranks: {"mesh": shared_mesh(1, ranks)},
    "unknown": lambda api, ranks: {"reshard": True},
    **{f"reshard_{value}": lambda api, ranks, value=value: {"reshard_after_forward": value}
       for value in ("yes", 3, 0, -1, 2.0, [], 10**30, -10**30)},
    **{f"placement_{name}": lambda api, ranks, function=function: {"shard_placement_fn": function}
       for name, function in {
           "is_a_number": lambda p: 3, "is_a_text": lambda p: "x", "is_true": lambda p: True,
           "is_a_list": lambda p: [Shard(0)], "is_replicate": lambda p: Replicate(), "is_partial": lambda p: Partial(),
           "is_too_large": lambda p: Shard(7), "is_huge": lambda p: Shard(10**30), "is_too_small": lambda p: Shard(-7),
           "takes_nothing": lambda: None, "divides_by_zero": lambda p: 1 // 0, "exits": lambda p: sys.exit(3),
           "raises": raise_it, "raises_late": lambda p: Shard(0) if p.dim() == 2 else raise_it(),
           "is_wrong_before_it_raises": lambda p: 0 if p.dim() == 2 else raise_it()}.items()},
    "no_placement_function": lambda api, ranks: {"shard_placement_fn": 3},
    **{f"policy_{name}": lambda api, ranks, value=value: {"mp_policy": value}
       for name, value in {"none": None, "number": 3, "text": "x"}.items()},
    "another_policy": lambda api, ranks: {"mp_policy": api.OffloadPolicy()},
    **{f"override_{name}": lambda api, ranks, function=function: {"mp_policy": api.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, param_dtype_override_fn=function)}
       for name, function in {
           "is_a_text": lambda p: "x", "is_another_dtype": lambda p: torch.float16, "takes_nothing": lambda: None,
           "raises": raise_it, "exits": lambda p: sys.exit(3)}.items()},
    "no_override_function": lambda api, ranks: {"mp_policy": api.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, param_dtype_override_fn=3)},
    "ignored_number": lambda api, ranks: {"ignored_params": 3},
}


IS_2_15 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)
CHECKED_FROM_2_15 = {
    "another_policy", *(f"policy_{name}" for name in ("none", "number", "text")),
    *(f"placement_is_{name}" for name in ("a_number", "a_text", "true", "a_list", "replicate", "partial",
                                        "wrong_before_it_raises"))}


def is_checked(option):
    """FSDP2 of older torches has fewer options, and lets some wrong values pass."""
    if "override" in option:
        return "param_dtype_override_fn" in torch.distributed.fsdp.MixedPrecisionPolicy.__dataclass_fields__
    return IS_2_15 or option not in CHECKED_FROM_2_15


@program(ranks=(2,), variants=[(name,) for name in OPTIONS if is_checked(name)])
def wrong_option(api, ranks, name):
    torch.manual_seed(0)
    model = Block()
    before = shown(model)
    options = {"mesh": mesh_of(ranks), **OPTIONS[name](api, ranks)}
    kind = kind_of(lambda: api.fully_shard(model, **options))
    assert kind != "no error" and shown(model) == before and type(model) is Block, (kind, shown(model))
    # FSDP2 is left half made: what follows can be seen of ours alone.
    if api is not torch.distributed.fsdp:
        api.fully_shard(model, mesh=mesh_of(ranks))
        train(model, adam(model), inputs())
    return kind


@program(ranks=(2,))
def wrong_modules(api, ranks):
    mesh, linear = mesh_of(ranks), nn.Linear(4, 4)
    sharded = api.fully_shard(nn.Linear(4, 4), mesh=mesh)
    given = [None, 3, nn.Linear, object(), nn.ModuleList([linear]), nn.ModuleDict({"a": linear}), sharded,
             [linear, sharded], [linear, linear]]
    kinds = [kind_of(lambda: api.fully_shard(each, mesh=mesh)) for each in given]
    return [*kinds, shown(linear), kind_of(lambda: api.fully_shard()),
            kind_of(lambda: api.fully_shard(nn.Linear(4, 4), mesh))]


@program(ranks=(2,))
def wrong_parameters(api, ranks):
    def of(parameter):
        module = nn.Linear(4, 4)
        module._parameters["odd"] = parameter
        kind = kind_of(lambda: api.fully_shard(module, mesh=mesh_of(ranks)))
        # FSDP2 has sharded the others by then.
        assert api is torch.distributed.fsdp or type(module.weight) is nn.Parameter
        return [kind, type(module).__name__]

    no_leaf = [of((torch.ones(3, requires_grad=True) * 2))] if IS_2_15 else []
    return [of(nn.Parameter(torch.eye(4).to_sparse())), *no_leaf,
            kind_of(lambda: api.fully_shard(nn.LazyLinear(4), mesh=mesh_of(ranks)))]


CONTROLS = {
    **{f"{name}_without_a_value": (name, ()) for name in (
        "set_is_last_backward", "set_manual_backward_finalization", "set_requires_gradient_sync",
        "set_requires_all_reduce", "set_reshard_after_backward", "set_keep_unsharded_storage",
        "set_force_sum_reduction_for_comms", "set_unshard_in_backward", "set_reduce_scatter_unused_params",
        "set_allocate_memory_from_process_group_for_comm", "set_gradient_divide_factor",
        "set_reduce_scatter_max_input_buffers", "set_modules_to_forward_prefetch", "set_reshard_after_forward")},
    **{f"reshard_after_forward_{value}": ("set_reshard_after_forward", (value,))
       for value in ("x", None, 2.5, [], 3)},
    **{f"input_buffers_{value}": ("set_reduce_scatter_max_input_buffers", (value,))
       for value in ("x", None, 0, -1, True, 2.0, -10**30)},
    **{f"forward_prefetch_{index}": ("set_modules_to_forward_prefetch", (value,))
       for index, value in enumerate((3, None, "x", [3], [None], [nn.Linear(2, 2)]))},
    **{f"backward_prefetch_{index}": ("set_modules_to_backward_prefetch", (value,))
       for index, value in enumerate((3, None, "x", [3], [None], [nn.Linear(2, 2)]))},
    **{f"divide_factor_{value}": ("set_gradient_divide_factor", (value,)) for value in ("x", [])},
    **{f"unshard_{index}": ("unshard", (value,)) for index, value in enumerate(("x", [], ""))},
    "unshard_with_two": ("unshard", (True, True)),
    "reshard_with_one": ("reshard", (True,)),
    "symmetric_memory": ("set_symm_mem_for_comm", ()),
    "symmetric_memory_by_another_name": ("set_symm_mem_for_comm", ("x",)),
    "synchronisation_by_position": ("set_requires_gradient_sync", (True, True)),
}


@program(ranks=(2,), variants=[(name,) for name, (method, _) in CONTROLS.items() if has(method)])
def wrong_control(api, ranks, name):
    """FSDP2 sees some of it first when the value is used."""
    method, arguments = CONTROLS[name]
    model = nn.Sequential(Block(), Block())
    api.fully_shard(model[0], mesh=mesh_of(ranks))
    api.fully_shard(model, mesh=mesh_of(ranks))

    def use():
        getattr(model, method)(*arguments)
        if api is torch.distributed.fsdp:
            model(inputs(1)[0]).sum().backward()

    kind = kind_of(use)
    if api is not torch.distributed.fsdp:
        train(model, adam(model), inputs())
    return kind


@program(ranks=(2,), variants=[()] if has("reset_iter_state") else [])
def controls_of_the_root(api, ranks):
    model = nn.Sequential(Block(), Block())
    api.fully_shard(model[0], mesh=mesh_of(ranks))
    api.fully_shard(model, mesh=mesh_of(ranks))
    train(model, adam(model), inputs())
    kinds = [kind_of(model[0].reset_iter_state), kind_of(lambda: model[0].set_manual_backward_finalization(True)),
             kind_of(lambda: model[0].finalize_backward()), kind_of(lambda: model.finalize_backward())]
    return {"kinds": kinds, "trained": train(model, adam(model), inputs())}


@program(ranks=(2,))
def wrong_functions(api, ranks):
    sharded = api.fully_shard(nn.Linear(4, 4), mesh=mesh_of(ranks))
    plain, register = nn.Linear(4, 4), api.register_fsdp_forward_method
    return [
        *[kind_of(lambda: api.share_comm_ctx(value)) for value in (None, 3, "x", [3], [None], [plain], [], ())],
        *[kind_of(lambda: register(sharded, name)) for name in ("nothing", "", 3, None, "weight")],
        *[kind_of(lambda: register(module, "nothing")) for module in (plain, 3, None)],
        kind_of(lambda: api.fully_shard.state(None)), kind_of(lambda: api.fully_shard.state(plain)),
        kind_of(lambda: api.FSDPModule.unshard(plain)), kind_of(lambda: api.UnshardHandle(3)),
        kind_of(lambda: api.UnshardHandle().wait()), kind_of(lambda: api.MixedPrecisionPolicy(a=1)),
        kind_of(lambda: api.CPUOffloadPolicy(True, True)),
        *([kind_of(lambda: api.DataParallelMeshDims())] if HAS_DIMS else []),
    ]


def raise_in(model, place):
    """A user's hook that raises there, once."""
    def hook(*args):
        handle.remove()
        raise_it()

    module = model[1]
    if place == "before_forward":
        handle = module.register_forward_pre_hook(hook)
    elif place == "after_forward":
        handle = module.register_forward_hook(hook)
    elif place == "before_backward":
        handle = module.register_full_backward_pre_hook(hook)
    elif place == "after_backward":
        handle = module.register_full_backward_hook(hook)
    elif place == "gradient_of_the_output":
        handle = module.register_forward_hook(lambda m, args, y: y.register_hook(hook) and None)
    else:
        handle = next(module.parameters()).register_post_accumulate_grad_hook(hook)


@program(ranks=(2,), variants=[(place,) for place in (
    "before_forward", "after_forward", "before_backward", "after_backward", "gradient_of_the_output",
    "accumulated_gradient") if has("reset_iter_state")])
def a_hook_raises(api, ranks, place):
    """It arrives with type and arguments, and after reset_iter_state the model trains as if nothing had been."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    for block in model:
        api.fully_shard(block, mesh=mesh_of(ranks))
    api.fully_shard(model, mesh=mesh_of(ranks))
    optimizer = adam(model)
    train(model, optimizer, inputs(1))
    raise_in(model, place)
    kind = kind_of(lambda: model(inputs(1)[0]).square().mean().backward())
    for _, hooks in ((m, m._forward_hooks) for m in model):
        for key, hook in list(hooks.items()):
            if "raise_in" in getattr(hook, "__qualname__", ""):
                del hooks[key]
    model.reset_iter_state()
    optimizer.zero_grad()
    return {"kind": kind, "shown": shown(model), "trained": train(model, optimizer, inputs())}


@program(ranks=(2,))
def a_forward_fails(api, ranks):
    """torch's own errors come through forward as they are."""
    model = api.fully_shard(Block(), mesh=mesh_of(ranks))
    kinds = [kind_of(lambda: model(*arguments)) for arguments in ((), (torch.ones(2, 3),), (1, 2), (None,))]
    model.reset_iter_state() if api is not torch.distributed.fsdp else model.reshard()
    return kinds
