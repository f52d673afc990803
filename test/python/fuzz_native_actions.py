"""What fuzz_binding.py does to the extension: its functions and classes, called as the package never would."""

import copy

import torch

import fuzz_values as values
from fsdp import _C, _dtensors, _fully_shard, _placer
from fuzz_actions import action, make, right_or_odd, shard, step


@action(weight=8)
def native_method(draw, pool):
    core = draw.choice(pool.cores)
    name = draw.choice([name for name in dir(_C.ShardedModule) if not name.startswith("__")])
    arguments = [values.odd(draw, pool) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
    pool.handles.append(getattr(core, name)(*arguments))


@action
def native_hooks(draw, pool):
    core = draw.choice(pool.cores)
    x = torch.randn(2, values.WIDTH)
    for _ in range(draw.randrange(1, 4)):
        if draw.random() < 0.5:
            core.pre_forward(draw.choice([0, 0, 1, 7]), (x,), draw.choice([{}, {"x": x}]))
        else:
            core.post_forward(values.odd(draw, pool))


@action(weight=6)
def native_function(draw, pool):
    name = draw.choice([name for name in dir(_C) if not name.startswith("__") and name != "set_python_side"])
    arguments = [values.odd(draw, pool) for _ in range(draw.choice([0, 1, 2, 3, 4, 4]))]
    pool.handles.append(getattr(_C, name)(*arguments))


@action
def native_shard(draw, pool):
    modules = [pool.module() for _ in range(draw.randrange(3))]
    arguments = {"reshard_after_forward": None, "ignored_params": [], "replicated_params": [], "param_dtype": None,
                 "reduce_dtype": None, "output_dtype": None, "cast_forward_inputs": True,
                 "param_dtype_override_fn": None, "apply_to_tensors": _fully_shard._apply_to_tensors, "offloads": False,
                 "pin_memory": False}
    for name in list(arguments):
        if draw.random() < 0.15:
            arguments[name] = values.odd(draw, pool)
        if draw.random() < 0.03:
            del arguments[name]
    params = [parameter for module in modules for parameter in module.parameters()]
    placer = _placer.Placer(_placer.data_parallel(pool.mesh, None), None, params[:draw.choice([0, 1, None, None, None])])
    pool.handles.append(_C.fully_shard(right_or_odd(draw, pool, lambda: modules),
                                       right_or_odd(draw, pool, lambda: placer), arguments))


@action
def native_instance(draw, pool):
    """An instance that no constructor has made."""
    kind = draw.choice([value for value in vars(_C).values() if isinstance(value, type)])
    made = draw.choice([lambda: kind(), lambda: kind.__new__(kind), lambda: object.__new__(kind),
                        lambda: type("Below", (kind,), {"__init__": lambda self: None})(),
                        lambda: copy.copy(draw.choice(pool.cores)), lambda: copy.deepcopy(pool.core_mesh)])()
    pool.handles.append(made)
    name = draw.choice([name for name in dir(made) if not name.startswith("__")])
    getattr(made, name)(*[values.odd(draw, pool) for _ in range(draw.randrange(3))])


PYTHON_SIDE = ["make_gradient", "make_unsharded", "make_post_forward", "local_gradient", "replicates_ordinary", "mirrors",
               "is_left_out", "local_tensors"]


@action(weight=1)
def python_side(draw, pool):
    """What the extension asks Python for fails."""
    try:
        side = {name: values.odd(draw, pool) for name in draw.sample(PYTHON_SIDE, draw.randrange(len(PYTHON_SIDE) + 1))}
        _C.set_python_side(draw.choice([side, {**dict.fromkeys(PYTHON_SIDE, abs), **side}]))
        draw.choice([shard, step, make])(draw, pool)
    finally:
        _dtensors.install()
