"""What fuzz_binding.py does to the extension: its functions and classes, called as the package never would."""

import copy
import tempfile

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
            core.post_forward(draw.choice([0, 0, 1, 7]), values.odd(draw, pool))


@action(weight=6)
def native_function(draw, pool):
    name = draw.choice([name for name in dir(_C) if not name.startswith("__") and name != "set_python_side"])
    arguments = [values.odd(draw, pool) for _ in range(draw.choice([0, 1, 2, 3, 4, 4]))]
    pool.handles.append(getattr(_C, name)(*arguments))


@action
def native_shard(draw, pool):
    modules = [pool.module() for _ in range(draw.randrange(3))]
    arguments = {"reshard_after_forward": None, "ignored_params": [], "replicated_params": [], "param_dtype": None,
                 "reduce_dtype": None, "reduce_in_own_dtype": True, "output_dtype": None, "cast_forward_inputs": True,
                 "param_dtype_override_fn": None, "apply_to_tensors": _fully_shard._apply_to_tensors, "offloads": False,
                 "buffer_dtype": None, "full_precision_in_eval": False, "is_exempt": None,
                 "pin_memory": False, "ignored_modules": [], "sync_from_rank0": False, "sanitizer": None,
                 "all_gather_extension_fn": None}
    for name in list(arguments):
        if draw.random() < 0.15:
            arguments[name] = values.odd(draw, pool)
        if draw.random() < 0.03:
            del arguments[name]
    params = [parameter for module in modules for parameter in module.parameters()]
    placer = _placer.Placer(_placer.data_parallel(pool.mesh, None), None, params[:draw.choice([0, 1, None, None, None])],
                            lambda module: False)
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


PYTHON_SIDE = ["dtensor", "in_dtype", "make_unsharded", "make_post_forward", "local_gradient", "replicates_ordinary", "mirrors",
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


@action(weight=3)
def native_checkpoint(draw, pool):
    """A checkpoint with something wrong in what is asked for, saved, read and loaded."""
    tensor = torch.arange(6.0)
    entry = {"name": "w", "local": tensor, "sizes": [6], "ranges": draw.choice([None, [(0, 6)], [(0, 2), (2, 6)]]),
             "other_names": [], "dtype": None}
    options = {"max_file_bytes": 1 << 20, "keep_last": 0, "rng_state": draw.random() < 0.5, "strict": True,
               "convert_dtypes": False, "verify": "while_loading", "readers": "all_ranks", "max_extra_bytes": 4 << 20,
               "rename": draw.choice([None, None, str, lambda name: values.odd(draw, pool)]), "follow_symlinks": False}
    misfits = {"missing": [], "unexpected": [], "wrong": []}

    def with_mistakes(given):
        found = {key: values.odd(draw, pool) if draw.random() < 0.02 else value for key, value in given.items()}
        if draw.random() < 0.03:
            del found[draw.choice(list(found))]
        return found

    def sections():
        return right_or_odd(draw, pool, lambda: {"model": [with_mistakes(entry)]})

    with tempfile.TemporaryDirectory() as folder:
        saver = _C.checkpoint_saver(None, draw.random() < 0.5, draw.choice([None, 0]))
        saver.start_save(f"{folder}/c", lambda: (sections(), {"extra.json": "{}"}), with_mistakes(options))
        saver.wait()
        _C.save_checkpoint(None, f"{folder}/c", lambda: (sections(), {}), with_mistakes(options))
        reader = _C.open_checkpoint(None, f"{folder}/c", with_mistakes(options))
        name = draw.choice([name for name in dir(reader) if not name.startswith("__")])
        reader.load(lambda: (sections(), with_mistakes(misfits)), draw.random() < 0.5)
        getattr(reader, name)(*[values.odd(draw, pool) for _ in range(draw.randrange(3))])
