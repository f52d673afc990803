"""The simulated device (bench/extension/simulated_device) as `torch.simulated`, and a process group over a simulated link."""

import contextlib
import importlib
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

NAME = "simulated"
DEVICE = f"{NAME}:0"


def load():
    """The extension, with its device known to torch."""
    sys.path.insert(0, str(Path(os.environ["FSDP_BUILD_DIR"]) / "bench"))
    extension = importlib.import_module("fsdp_bench_simulated_device")
    extension.register_device()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return extension


def new_stream(device=DEVICE, priority=0):
    return torch.Stream(device, priority=priority)


def only_stream(device=DEVICE, priority=0):
    return torch.accelerator.current_stream()


def device_module(extension):
    """What FSDP2 and DDP ask of a device's module."""
    module = types.ModuleType(f"torch.{NAME}")
    module.Stream = new_stream
    module.Event = lambda **options: torch.Event(DEVICE, **options)
    module.stream = lambda stream: stream or contextlib.nullcontext()
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.synchronize = lambda device=None: extension.synchronize()
    module.set_device = lambda device: None
    module.device = lambda device: contextlib.nullcontext()
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float32]
    return module


def register_backend(extension, network):
    """network: what the extension's make_backend takes beside rank and size, looked at when a group is made."""
    dist.Backend.register_backend(
        NAME, lambda store, rank, size, timeout: extension.make_backend(rank, size, **network), devices=[NAME])


def join(world):
    """This process as the first of `world` ranks."""
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=world)
