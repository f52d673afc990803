"""Buffers that a policy keeps in another dtype: state dicts and checkpoints have them in their own."""

from ._names import without_wrappers
from ._states import state_of


def save_in_own_dtypes(state, modules, managed, mp_policy, is_exempt, undo):
    """Before the buffers of the managed modules are cast: remembers what they are in, for the state dicts of `modules`."""
    if getattr(mp_policy, "buffer_dtype", None) is None:
        return
    exempt = {below for module in managed if is_exempt is not None and is_exempt(module) for below in module.modules()}
    state.buffer_dtypes = [(module, name, buffer.dtype) for module in managed for name, buffer in module._buffers.items()
                           if buffer is not None and buffer.is_floating_point() and module not in exempt]
    handles = []
    undo.callback(lambda: [handle.remove() for handle in handles])
    for module in modules:
        handles.append(module._register_state_dict_hook(_save_in_own_dtypes))


def saved_dtypes(module):
    """By name, of the buffers below that are kept in another dtype than they are saved in."""
    paths = {below: f"{path}." if path else "" for path, below in module.named_modules()}
    states = dict.fromkeys(state for below in paths if (state := state_of(below)) is not None)
    return {paths[below] + name: dtype for state in states for below, name, dtype in state.buffer_dtypes if below in paths}


def _save_in_own_dtypes(module, state_dict, prefix, _):
    keys = {without_wrappers(key): key for key in state_dict}
    for name, dtype in saved_dtypes(module).items():
        if (key := keys.get(without_wrappers(prefix + name))) is not None:
            state_dict[key] = state_dict[key].to(dtype)
