"""The names of torch's fully_shard for this package's functions and classes, wherever libraries import them from."""

import sys
import threading
import types

import fsdp

from ._import_hook import PLACES
from ._torch_names import OWN

# torch makes replicate where libraries import it from: what it does there goes on with torch's other names.
_MAKER, _MADE = "torch.distributed._composable.replicate_with_fsdp", ("replicate",)
_lock = threading.RLock()
_active: list["TorchReplacement"] = []
_loaded_before: set[str] = set()  # torch's modules, when the first of the active ones began


class TorchReplacement:
    """What `replace_torch` returns: what it replaced, to be undone. `with` undoes it at the end of the block."""

    def __init__(self, changes):
        self._changes = changes  # (module, attribute, torch's, ours)

    @property
    def replaced(self) -> list[str]:
        """The attributes that were torch's, as "torch.distributed.fsdp.fully_shard"."""
        return [f"{module.__name__}.{attribute}" for module, attribute, _, _ in self._changes]

    def restore(self) -> None:
        """Gives each of these attributes torch's object back, but one that something else has been assigned to since.

        A module that was imported meanwhile keeps ours, unless it is torch's. A second time it does nothing.
        """
        with _lock:
            for module, attribute, torchs, ours in self._changes:
                if vars(module).get(attribute) is ours:
                    vars(module)[attribute] = torchs
            self._changes = []
            if self in _active:
                _active.remove(self)
                if not _active:
                    _clear_torch()

    def __enter__(self) -> "TorchReplacement":
        return self

    def __exit__(self, *_):
        self.restore()


def replace_torch() -> TorchReplacement:
    """Makes torch's names `fully_shard`, `replicate`, `FSDPModule`, `MixedPrecisionPolicy` and so on this package's, for
    libraries that import them from torch: in `torch.distributed.fsdp` and wherever else torch has them, and in each module that
    is loaded and has imported one by name. Sharded modules are instances of torch's FSDPModule as before.

    torch's other modules that are loaded, and what holds torch's function elsewhere than in a module's attribute, keep
    torch's. A second call replaces what has been loaded with torch's since, and its result undoes only that.

    Raises RuntimeError, with nothing replaced, where an attribute of torch's is neither torch's nor ours, as another
    library has replaced it, and NotImplementedError for a name of torch's that this package does not have.
    """
    with _lock:
        _check_ours()
        _check_places()
        if not _active:
            _loaded_before.clear()
            _loaded_before.update(name for name in sys.modules if _is_torchs(name))
        changes = _found({id(torchs): (torchs, getattr(fsdp, name)) for name, torchs in OWN.items()},
                         lambda name: name in PLACES or not (_is_torchs(name) or _is_ours(name)))
        for module, attribute, _, ours in changes:
            vars(module)[attribute] = ours
        replacement = TorchReplacement(changes)
        _active.append(replacement)
        return replacement


def restore_torch() -> None:
    """Undoes every `replace_torch` that is not undone; without one it does nothing. Modules stay sharded."""
    with _lock:
        for replacement in reversed(list(_active)):
            replacement.restore()


def _is_torchs(name):
    return name.partition(".")[0] == "torch"


def _is_ours(name):
    return name.partition(".")[0] == fsdp.__name__


def _found(wanted, may_change):
    """(module, attribute, what is there, what is to be) of each attribute that is an object of `wanted`, once."""
    modules = {id(module): module for name, module in list(sys.modules.items())
               if isinstance(module, types.ModuleType) and may_change(name)}
    changes = []
    for module in modules.values():
        for attribute, value in list(vars(module).items()):
            there, to_be = wanted.get(id(value), (None, None))
            if module.__name__ == _MAKER and attribute not in _MADE:
                continue
            if there is not to_be:  # policies are torch's own classes
                changes.append((module, attribute, there, to_be))
    return changes


def _clear_torch():
    """torch's modules that were imported while its names were ours have these from there."""
    changes = _found({id(getattr(fsdp, name)): (getattr(fsdp, name), torchs) for name, torchs in OWN.items()},
                     lambda name: _is_torchs(name) and name not in _loaded_before)
    for module, attribute, _, torchs in changes:
        vars(module)[attribute] = torchs


def _check_ours():
    missing = [name for name in OWN if name not in fsdp.__all__]
    if missing:
        raise NotImplementedError(f"replace_torch: torch has {', '.join(missing)} beside its fully_shard, and this version of "
                                  "fsdp does not; install a newer fsdp, or import fully_shard from torch")


def _check_places():
    for name, torchs in OWN.items():
        maker = _other_maker(torchs)
        if maker:
            _refuse(f"torch.distributed.fsdp._fully_shard's {name}", maker)
    for place in PLACES:
        for name, torchs in OWN.items():
            value = vars(sys.modules[place]).get(name, torchs) if place in sys.modules else torchs
            if value is not torchs and value is not getattr(fsdp, name):
                _refuse(f"{place}.{name}", _other_maker(value) or repr(value))


def _refuse(subject, maker):
    raise RuntimeError(f"replace_torch: {subject} is not torch's own, but {maker}, so nothing is replaced; call replace_torch "
                       "before that is imported, or use only one of the two")


def _other_maker(value):
    """Who made a function or class that is not torch's own, or a wrapper around one that is; None: torch."""
    while True:
        module = value.__module__ if isinstance(value, type) else getattr(value, "__globals__", {}).get("__name__")
        if module is None:
            return f"{value!r} of {type(value).__module__}"
        if not _is_torchs(module):
            file = getattr(sys.modules.get(module), "__file__", None)
            kind = "class" if isinstance(value, type) else "function"
            return f"the {kind} {value.__qualname__} of {module}" + (f" ({file})" if file else "")
        if isinstance(value, type) or not hasattr(value, "__wrapped__"):
            return None
        value = value.__wrapped__
