"""What runs around a sharded module's forward, and around its state dicts."""

import functools
import sys
import types

import torch.nn as nn
from torch._C._dynamo import eval_frame
from torch.distributed._composable.contract import STATE_KEY

from . import _checks, _spmd_types
from ._module import FSDPModule
from ._states import FSDPState, _core_of, state_of


def register_hooks(modules, undo):
    handles = []
    undo.callback(_remove, handles)
    for index, module in enumerate(modules):
        pre, post = _hooks(index)
        handles.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(post, always_call=True))
        handles.append(module.register_state_dict_pre_hook(_reshard))
        handles.append(module._register_load_state_dict_pre_hook(_reshard, with_module=True))
        handles.append(module.register_load_state_dict_post_hook(_take_over_loaded))


def _remove(handles):
    for handle in handles:
        handle.remove()


# Hooks ask the module for its core, and so serve a copy of the module, too.
def _reshard(module, *_):
    _core_of(module).reshard()


def _take_over_loaded(module, *_):
    _core_of(module).applied()


def _pre_forward(module, index, args, kwargs):
    if _spmd_types.is_checking():
        return _spmd_types.pre_forward(state_of(module), index, args, kwargs)
    return _core_of(module).pre_forward(index, args, kwargs)


def _post_forward(module, index, output):
    with _spmd_types.paused():
        return _core_of(module).post_forward(index, output)


# Recursive: what they call is not traced, either.
_NOT_TRACED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def _untraced(hook):
    """As torch._dynamo.disable, which would wrap it in a function of 3,000 instructions a call: Dynamo breaks a graph at the
    call, and the frame is left alone."""
    hook._torchdynamo_disable = True
    hook._torchdynamo_disable_msg = "fsdp's hooks"
    eval_frame.set_code_exec_strategy(hook.__code__, _NOT_TRACED)
    return hook


@functools.cache
def _hooks(index):
    # Every forward of every module comes through these: no call more than needed where spmd_types cannot be checking.
    @_untraced
    def pre(module, args, kwargs):
        if "spmd_types" in sys.modules:
            return _pre_forward(module, index, args, kwargs)
        return module.__dict__[STATE_KEY][FSDPState].core.pre_forward(index, args, kwargs)

    @_untraced
    def post(module, args, output):
        if "spmd_types" in sys.modules:
            return _post_forward(module, index, output)
        return module.__dict__[STATE_KEY][FSDPState].core.post_forward(index, output)

    return pre, post


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """`method_name` gathers and releases the module's parameters as its forward does."""
    if not isinstance(module, FSDPModule):
        _checks.not_sharded_by_torch(module, [module], "register_fsdp_forward_method")
        return
    if not hasattr(module, method_name):
        raise ValueError(f"register_fsdp_forward_method: {type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)
    if not callable(method):
        raise TypeError(f"register_fsdp_forward_method: {method_name} of {type(module)} is no method but "
                        f"{type(method)}")
    # Of a copy of the module it is the copy's.
    if getattr(method, "__self__", None) is module:
        function = method.__func__
    else:
        def function(_, *args, **kwargs):
            return method(*args, **kwargs)

    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        self._core()  # AssertionError where the state has gone
        output = None
        try:
            replaced = _pre_forward(self, 0, args, kwargs)
            if replaced is not None:
                args, kwargs = replaced
            output = function(self, *args, **kwargs)
        finally:
            cast = _post_forward(self, 0, output)
        return output if cast is None else cast

    del wrapped.__wrapped__  # the bound method, which would keep the module for its copies
    setattr(module, method_name, types.MethodType(wrapped, module))
