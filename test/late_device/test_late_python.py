"""The Python package on a device whose streams run later (late_device.hpp): a root's inputs go there, as torch's FSDP moves
them.
"""

import collections
import ctypes
import dataclasses
import os
import sys
import types
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import rank_results  # noqa: F401  (finds the package)
from closing_line import main

import torch
import torch.distributed as dist
from torch.distributed.utils import _to_kwargs
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import fsdp

DEVICE = torch.device("cpu")  # until setUpModule
Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Held:
    tensor: torch.Tensor


def setUpModule():
    global DEVICE
    torch.ops.load_library(os.environ["FSDP_LATE_DEVICE"])
    ctypes.CDLL(os.environ["FSDP_LATE_DEVICE"]).make_late_devices()
    module = types.ModuleType("torch.late")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.set_device = lambda device: None
    module.get_amp_supported_dtype = lambda: []
    torch._register_device_module("late", module)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    DEVICE = torch.device("late", 0)


def tearDownModule():
    dist.destroy_process_group()


class Looks(torch.nn.Module):
    """Keeps what its forward is called with."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return args[0] * self.weight


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Looks()

    def forward(self, x):
        return self.inner(x, torch.ones(1))


class Recomputed(Outer):
    def forward(self, x):
        return checkpoint(self.inner, x, torch.ones(1), use_reentrant=False, preserve_rng_state=False)


def sharded(module, **options):
    mesh = dist.init_device_mesh("late", (1,))
    for child in module.children():
        fsdp.fully_shard(child, mesh=mesh, **options)
    return fsdp.fully_shard(module, mesh=mesh, **options)


def inputs():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    listed = [torch.ones(1), (torch.ones(1), "text")]
    args = (torch.ones(2, 4), listed, Pair(torch.ones(2), 3), packed, Held(torch.ones(1)), None)
    return args, {"named": collections.OrderedDict(a=torch.ones(2), b=[])}


def places(value):
    """What it is made of, and where its tensors are."""
    if isinstance(value, torch.Tensor):
        return value.device
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return "packed", value.data.device
    if isinstance(value, Held):
        return "held", value.tensor.device
    if isinstance(value, (tuple, list)):
        return type(value), [places(each) for each in value]
    if isinstance(value, dict):
        return type(value), {key: places(each) for key, each in value.items()}
    return value


class RootInputs(unittest.TestCase):
    def test_inputs_go_to_the_device_in_what_torch_moves(self):
        module = sharded(Looks())
        args, kwargs = inputs()
        output = module(*args, **kwargs)
        moved_args, moved_kwargs = _to_kwargs(args, kwargs, DEVICE, False)
        self.assertEqual(places(module.args), places(moved_args[0]))
        self.assertEqual(places(module.kwargs), places(moved_kwargs[0]))
        self.assertEqual(module.args[0].device, DEVICE)
        self.assertEqual(output.cpu().tolist(), torch.ones(2, 4).tolist())

    def test_they_are_cast_there_too(self):
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        module = sharded(Looks(), mp_policy=policy)
        module(torch.ones(2, 4), [torch.ones(1)])
        self.assertEqual((module.args[1][0].device, module.args[1][0].dtype), (DEVICE, torch.bfloat16))

    def test_what_is_there_is_passed_as_it_is(self):
        module = sharded(Looks())
        x, listed = torch.ones(2, 4).to(DEVICE), [torch.ones(1).to(DEVICE)]
        module(x, listed, count=1)
        self.assertIs(module.args[0], x)
        self.assertIs(module.args[1], listed)

    def test_a_module_inside_gets_what_the_root_passes(self):
        module = sharded(Outer())
        module(torch.ones(2, 4))
        self.assertEqual(module.inner.args[0].device, DEVICE)
        self.assertEqual(module.inner.args[1].device, torch.device("cpu"))

    def test_a_module_inside_gets_it_again_in_backward(self):
        module = sharded(Recomputed())
        output = module(torch.ones(2, 4))
        module.inner.args = None
        output.sum().backward()
        self.assertEqual(module.inner.args[0].device, DEVICE)
        self.assertEqual(module.inner.args[1].device, torch.device("cpu"))

    def test_a_step_with_batches_of_the_host_gives_the_plain_gradients(self):
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        torch.manual_seed(0)
        module = sharded(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
        for step in range(3):
            batch = torch.full((2, 4), 1.0 + step)
            plain(batch).square().mean().backward()
            module(batch).square().mean().backward()
        for wanted, found in zip(plain.parameters(), module.parameters()):
            torch.testing.assert_close(found.grad.full_tensor().cpu(), wanted.grad)


if __name__ == "__main__":
    main()
