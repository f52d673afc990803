"""With FSDP_REPLACE_TORCH=1, `fsdp.replace_torch()` when a program first asks for one of the names of torch's fully_shard.

`python -m fsdp enable` writes this file into an environment as the module _fsdp_replace_torch, and a .pth file that
calls `install` where the variable is set. It stands alone, so that Python's start imports neither torch nor fsdp.

Not when torch's module has been imported: torch's own modules import it half-way through their own import (as
torch.distributed.checkpoint does), where fsdp, which needs them, could not be imported.
"""

import importlib.abc
import os
import sys
import threading
import types

MODULE = "_fsdp_replace_torch"
# The .pth file. Python runs it at its start: without the variable, it is no more than a look for that.
LINE = f'import os; os.environ.get("FSDP_REPLACE_TORCH", "0") != "0" and __import__("{MODULE}").install()\n'

# Where torch 2.11 to 2.15 have the names.
PLACES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed._composable.replicate_with_fsdp",
)
NAMES = frozenset({
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicateModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
})
_YES = ("1", "true", "yes", "on", "y")
_NO = ("", "0", "false", "no", "off", "n")


def asked_for():
    """What FSDP_REPLACE_TORCH says, in the words that the library's other variables are read in."""
    text = os.environ.get("FSDP_REPLACE_TORCH", "")
    if text.lower() not in _YES + _NO:
        raise RuntimeError(f"FSDP_REPLACE_TORCH: expected 0 or 1, found '{text}'")
    return text.lower() in _YES


class _Waiting(types.ModuleType):
    """The class of torch's modules until one of the names is asked for."""

    def __getattribute__(self, name):
        if name in NAMES:
            _hook.act()
        return types.ModuleType.__getattribute__(self, name)  # it may have its own class again


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _hook.wait_in(module)


class _Hook(importlib.abc.MetaPathFinder):
    """Finds torch's modules as those behind it do, and has them wait. Another thread that asks for a name while one
    replaces them waits for it."""

    def __init__(self):
        self._lock = threading.RLock()
        self._modules = []
        self._is_acting = self._is_over = False

    def install(self):
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name in PLACES:
            if name in sys.modules:
                self.wait_in(sys.modules[name])

    def find_spec(self, name, path, target=None):
        if name not in PLACES:
            return None
        behind = (finder.find_spec(name, path, target) for finder in list(sys.meta_path)
                  if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for found in behind if found is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec

    def wait_in(self, module):
        if not self._is_over:
            module.__class__ = _Waiting
            self._modules.append(module)

    def act(self):
        if _is_being_imported("torch") or _is_being_imported("fsdp"):
            return  # these get torch's own names, and what asks for one next is not among them
        with self._lock:
            if self._is_acting or self._is_over:
                return
            self._is_acting = True
            try:
                self._replace()
            finally:
                self._is_acting = False

    def _replace(self):
        try:
            if asked_for():
                import fsdp

                fsdp.replace_torch()
        except Exception as error:
            # No ImportError: programs take that for a torch without the name, and go on.
            raise RuntimeError(f"FSDP_REPLACE_TORCH={os.environ.get('FSDP_REPLACE_TORCH')}: the names of torch's fully_shard "
                               f"are not replaced: {error}; unset the variable to run with torch's own") from error
        self._is_over = True
        for module in self._modules:
            module.__class__ = types.ModuleType
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _is_being_imported(package):
    return any(name.partition(".")[0] == package and getattr(getattr(module, "__spec__", None), "_initializing", False)
               for name, module in list(sys.modules.items()))


_hook = _Hook()
install = _hook.install
