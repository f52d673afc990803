"""Random calls of every entry point of the binding for some seconds, and what such runs have found before.

A longer run: test/python/fuzz_binding.py --seconds 3600, with PYTHONPATH=build/bindings. What is below dies of a
signal, or hangs, where it fails.
"""

import copy
import gc
import os
import unittest

import rank_results
from closing_line import main

os.environ["PYTHONPATH"] = str(rank_results.PACKAGE)
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
import fuzz_binding
from fsdp import _C

SECONDS = 20


def setUpModule():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def tearDownModule():
    dist.destroy_process_group()


def mesh():
    return init_device_mesh("cpu", (1,))


def sharded(module):
    return fsdp.fully_shard(module, mesh=mesh())


def core_of(module):
    return fsdp.fully_shard.state(module).core


class Returns(nn.Module):
    """Its output, put into something by a function."""

    def __init__(self, put):
        super().__init__()
        self.linear, self.put = nn.Linear(4, 4), put

    def forward(self, x):
        return self.put(self.linear(x))


def deep(y):
    for _ in range(100_000):
        y = [y]
    return y


def in_itself(y):
    y = [y]
    y.append(y)
    return y


class Findings(unittest.TestCase):
    def test_an_output_that_is_nested_too_deep_is_a_recursion_error(self):
        for put in (deep, in_itself):
            model = sharded(Returns(put))
            with self.assertRaises(RecursionError):
                model(torch.ones(2, 4))
            model.put = lambda y: y
            model(torch.ones(2, 4)).sum().backward()

    def test_a_tree_of_modules_that_is_too_deep_is_a_recursion_error(self):
        model = nn.Linear(4, 4)
        for _ in range(5000):
            model = nn.Sequential(model)
        with self.assertRaises(RecursionError):
            _C.fully_shard([model], self.placer(), self.arguments())
        with self.assertRaises(RecursionError):
            sharded(model)

    def placer(self):
        return fsdp._placer.Placer(fsdp._placer.data_parallel(mesh(), None), None, [], lambda module: False)

    def arguments(self):
        named = dict.fromkeys(("reshard_after_forward", "param_dtype", "reduce_dtype", "output_dtype",
                               "param_dtype_override_fn", "buffer_dtype", "is_exempt", "apply_to_tensors", "sanitizer",
                               "all_gather_extension_fn"))
        return {**named, "ignored_params": [], "replicated_params": [], "cast_forward_inputs": True,
                "reduce_in_own_dtype": True, "full_precision_in_eval": False, "ignored_modules": [], "sync_from_rank0": False,
                "offloads": False, "pin_memory": False}

    def test_modules_that_lead_back_up_are_followed_once(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].around = model
        sharded(model[1])
        sharded(nn.ModuleDict({"all": model})["all"])
        model(torch.ones(2, 4)).sum().backward()

    def test_classes_of_the_extension_are_not_made_by_python(self):
        for kind in (value for value in vars(_C).values() if isinstance(value, type)):
            if issubclass(kind, BaseException):
                continue
            below = type("Below", (kind,), {"__init__": lambda self: None})
            for make in (kind, lambda: kind.__new__(kind), lambda: object.__new__(kind), below,
                         lambda: below.__new__(below)):
                with self.assertRaises(TypeError):
                    make()

    def test_none_is_no_communicator_and_no_sharded_module(self):
        core = core_of(sharded(nn.Linear(4, 4)))
        for call in (lambda: _C.mesh_of_groups([None], []), lambda: _C.share_comm_ctx([None]),
                     lambda: _C.local_shards([None], None),
                     lambda: _C.copy_sharded(nn.Linear(1, 1), nn.Linear(1, 1), [None], {}),
                     lambda: _C.borrowed_group(None, [0], "cpu", 1.0, None),
                     lambda: core.set_modules_to_forward_prefetch([None]),
                     lambda: core.set_modules_to_backward_prefetch([None])):
            with self.assertRaises(TypeError):
                call()
        with self.assertRaises(ValueError):
            _C.mesh_of_groups([], [])

    def test_a_module_that_is_not_there_is_an_index_error(self):
        core = core_of(sharded(nn.Linear(4, 4)))
        with self.assertRaises(IndexError):
            core.pre_forward(7, (torch.ones(2, 4),), {})
        self.assertIsNone(core.post_forward(0, None))  # nothing is under way

    def test_a_module_may_go_before_the_one_around_it_is_sharded(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        inner = nn.Sequential(model)
        sharded(inner)
        del model[1]
        outer = nn.Sequential(inner, nn.Linear(4, 4))
        sharded(outer)
        gc.collect()
        garbage = [{str(each): each} for each in range(10_000)]  # where its table was
        outer(torch.ones(2, 4)).sum().backward()
        self.assertEqual(garbage[7], {"7": 7})


    def test_a_module_sharded_together_with_one_that_is_gone_is_not_copied(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sharded([model[0], model[1]])
        sharded(model)
        del model[1]
        with self.assertRaisesRegex(ValueError, "no longer in the module"):
            copy.deepcopy(model)


class Fuzz(unittest.TestCase):
    def test_random_calls_end_in_exceptions_at_worst(self):
        found = []
        draws, _ = fuzz_binding.fuzz(SECONDS, report=lambda each, **_: found.append(each))
        self.assertEqual(found, [])
        self.assertGreater(draws, 0)


if __name__ == "__main__":
    main()
