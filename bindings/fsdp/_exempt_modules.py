"""Modules that mixed precision leaves alone: casts around their forward, as FSDP1 makes them."""

import torch
from torch.distributed.utils import _apply_to_tensors


def register_casts(managed, is_exempt, undo):
    """managed: the modules of a call. is_exempt: (module) -> bool, or None."""
    handles = []
    undo.callback(lambda: [handle.remove() for handle in handles])
    for module in managed if is_exempt is not None else ():
        if is_exempt(module):
            handles.append(module.register_forward_pre_hook(_cast_up, with_kwargs=True))
            # Before the hook of a sharded module, which knows an output_dtype.
            handles.append(module.register_forward_hook(_cast_back, prepend=True))


def _own_dtype(module):
    return next((param.dtype for param in module.parameters() if param.is_floating_point()), torch.get_default_dtype())


def _cast_up(module, args, kwargs):
    own, came_in = _own_dtype(module), None

    def cast(tensor):
        nonlocal came_in
        if not tensor.is_floating_point() or tensor.dtype == own:
            return tensor
        came_in = tensor.dtype
        return tensor.to(own)

    args, kwargs = _apply_to_tensors(cast, args), _apply_to_tensors(cast, kwargs)
    module._fsdp_cast_from = came_in
    return args, kwargs


def _cast_back(module, args, output):
    came_in = module._fsdp_cast_from
    if came_in is None:
        return output
    return _apply_to_tensors(lambda tensor: tensor.to(came_in) if tensor.is_floating_point() else tensor, output)
