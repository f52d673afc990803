"""What modules' own initialisers write to while a model is materialised: tensors without memory, which hand what is done to
them to the core. It draws each element's numbers by themselves, so a rank computes its own part alone."""

import contextlib
import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.init


class StandIn(torch.Tensor):
    """Of a parameter or buffer, or of a run of rows of it."""

    _run: Any
    _place: tuple[nn.Module, str]
    _where: str  # for messages
    _rows: tuple[int, int] | None  # of a part: its first element, and the one behind its last
    _is_param: bool

    @staticmethod
    def of(like, run, module, entry, where):
        # Of the whole parameter's sizes, also where `like` is a DTensor.
        made = torch.Tensor._make_subclass(StandIn, torch.empty(like.shape, dtype=like.dtype, device="meta"))
        made._run, made._place, made._where = run, (module, entry), where
        made._rows = None
        made._is_param = isinstance(like, nn.Parameter)
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _HANDLERS:
            return _HANDLERS[func](*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if any(isinstance(each, torch.Tensor) for each in (result if isinstance(result, (tuple, list)) else (result,))):
            given = next(each for each in (*args, *kwargs.values()) if isinstance(each, StandIn))
            raise ValueError(_refusal(given, getattr(func, "__name__", str(func))))
        return result


def _refusal(tensor, what):
    return (f"materialize: {tensor._where} is initialised by '{what}', which cannot be done element by element. Nothing has "
            "changed; pass initializers=[fsdp.initializer(Class, function)] with a function for this class that uses "
            "torch.nn.init, fill_, zero_ and copy_, or init.whole_(tensor, function) for the whole parameter at once")


def _draw(tensor, method, *arguments):
    if tensor._rows is not None:
        raise ValueError(_refusal(tensor, f"{method} of a part of it"))
    getattr(tensor._run, method)(*tensor._place, *arguments)
    return tensor


def _no_generator(tensor, generator, what):
    if generator is not None:
        raise ValueError(_refusal(tensor, f"{what} with a generator of its own"))


def _uniform(tensor, a=0.0, b=1.0, generator=None):
    _no_generator(tensor, generator, "uniform_")
    return _draw(tensor, "uniform_", float(a), float(b))


def _uniform_method(tensor, *args, **kwargs):
    return _uniform(tensor, *args, **{{"from": "a", "to": "b"}.get(name, name): value for name, value in kwargs.items()})


def _normal(tensor, mean=0.0, std=1.0, generator=None):
    _no_generator(tensor, generator, "normal_")
    return _draw(tensor, "normal_", float(mean), float(std))


def _fill(tensor, value):
    if tensor._rows is None:
        return _draw(tensor, "constant_", float(value))
    tensor._run.fill_range_(*tensor._place, *tensor._rows, float(value))
    return tensor


def _copy(tensor, source, non_blocking=False):
    if isinstance(source, StandIn) or source.is_meta:
        raise ValueError(_refusal(tensor, "copy_ of what has no values yet"))
    return _draw(tensor, "copy_", source.detach().to("cpu").expand(tensor.shape).contiguous())


def _kaiming_uniform(tensor, a=0, mode="fan_in", nonlinearity="leaky_relu", generator=None):
    _no_generator(tensor, generator, "kaiming_uniform_")
    fan = torch.nn.init._calculate_correct_fan(tensor, mode)
    bound = math.sqrt(3.0) * torch.nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    return _uniform(tensor, -bound, bound)


def _rows(tensor, index):
    """weight[3], weight[1:3], weight[2, 4]: elements that lie one behind the other; None: others."""
    index = index if isinstance(index, tuple) else (index,)
    begin, numel, step = (tensor._rows[0] if tensor._rows else 0), tensor.numel(), None
    for dim, each in enumerate(index):
        if dim >= tensor.dim() or step is not None:
            return None  # only the last may be a slice
        size = tensor.shape[dim]
        inner = math.prod(tensor.shape[dim + 1:])
        if isinstance(each, slice):
            first, last, step = each.indices(size)
            if step != 1:
                return None
            begin, numel = begin + first * inner, max(last - first, 0) * inner
        elif isinstance(each, int) and not isinstance(each, bool) and -size <= each < size:
            begin, numel = begin + (each % size) * inner, inner
        else:
            return None
    return begin, begin + numel


def _part(tensor, index):
    if isinstance(index, torch.Tensor) or index is Ellipsis or _rows(tensor, index) is None:
        raise ValueError(_refusal(tensor, f"an index {index!r}"))
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.Tensor.__getitem__(tensor, index)
    part = StandIn.of(like, tensor._run, *tensor._place, tensor._where)
    part._rows = _rows(tensor, index)
    return part


def _write_part(tensor, index, value):
    if isinstance(value, torch.Tensor) and value.dim() > 0 or isinstance(value, StandIn):
        raise ValueError(_refusal(tensor, f"values written at {index!r}"))
    _fill(_part(tensor, index), value)


def _same(tensor, *_, **__):
    return tensor


_HANDLERS = {
    torch.Tensor.uniform_: _uniform_method,
    torch.Tensor.normal_: _normal,
    torch.Tensor.fill_: _fill,
    torch.Tensor.zero_: lambda tensor: _fill(tensor, 0.0),
    torch.Tensor.copy_: _copy,
    torch.Tensor.__getitem__: _part,
    torch.Tensor.__setitem__: _write_part,
    torch.Tensor.detach: _same,
    torch.Tensor.data.__get__: _same,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: lambda tensor, values: _copy(tensor, values) and None,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_: _same,
    # Where torch finds no memory it draws nothing, and says nothing.
    torch.Tensor.is_meta.__get__: lambda tensor: False,  # type: ignore[attr-defined]
    torch.nn.init.uniform_: _uniform,
    torch.nn.init.normal_: _normal,
    torch.nn.init.constant_: lambda tensor, val: _fill(tensor, val),
    torch.nn.init.kaiming_uniform_: _kaiming_uniform,
}


# torch.nn.init's functions that look at values, or draw for the tensor as a whole.
_OF_CORE = {
    "_no_grad_trunc_normal_": lambda tensor, mean, std, a, b, generator=None: (
        _no_generator(tensor, generator, "trunc_normal_"),
        _draw(tensor, "trunc_normal_", float(mean), float(std), float(a), float(b)))[1],
    "orthogonal_": lambda tensor, gain=1, generator=None: (
        _no_generator(tensor, generator, "orthogonal_"), _draw(tensor, "orthogonal_", float(gain)))[1],
    "sparse_": lambda tensor, sparsity, std=0.01, generator=None: (
        _no_generator(tensor, generator, "sparse_"), _draw(tensor, "sparse_", float(sparsity), float(std)))[1],
    "eye_": lambda tensor: _draw(tensor, "eye_"),
    "dirac_": lambda tensor, groups=1: _draw(tensor, "dirac_") if groups == 1 else _refuse(tensor, "dirac_ with groups"),
}


def _refuse(tensor, what):
    raise ValueError(_refusal(tensor, what))


def _for_stand_ins(ours, torchs):
    def function(tensor, *args, **kwargs):
        return (ours if isinstance(tensor, StandIn) else torchs)(tensor, *args, **kwargs)

    return function


@contextlib.contextmanager
def core_draws():
    """While it lives, those functions of torch.nn.init know stand-ins."""
    before = {name: getattr(torch.nn.init, name) for name in _OF_CORE if hasattr(torch.nn.init, name)}
    for name, function in before.items():
        setattr(torch.nn.init, name, _for_stand_ins(_OF_CORE[name], function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch.nn.init, name, function)


@contextlib.contextmanager
def stand_ins_in(module, run, describe):
    """In the place of all that the module and those below it hold; one for each tensor. describe: (module, entry) -> str."""
    tables = [table for below in module.modules() for table in (below._parameters, below._buffers)]
    owners = [below for below in module.modules() for _ in range(2)]
    before = [dict(table) for table in tables]
    made = {}
    for owner, table in zip(owners, tables):
        for entry, tensor in table.items():
            if tensor is None:
                continue
            if id(tensor) not in made:
                made[id(tensor)] = StandIn.of(tensor, run, owner, entry, describe(owner, entry))
            table[entry] = made[id(tensor)]
    try:
        yield
    finally:
        for table, entries in zip(tables, before):
            table.clear()
            table.update(entries)
