"""`Tensor.new` and `Tensor.new_tensor` of sharded modules' parameters.

torch reads off a tensor's dispatch keys where these two are to make the new one, and stumbles over the library's key
(Note [Residency key]). Parameters, and views of them, have a tensor without it stand in for them there.
"""

import functools

import torch

from . import _C


def install():
    for name in ("new", "new_tensor"):
        setattr(torch.Tensor, name, _on_plain(getattr(torch._C.TensorBase, name)))


def _on_plain(constructor):
    @functools.wraps(constructor)
    def method(self, *args, **kwargs):
        return constructor(_C.plain_like(self), *args, **kwargs)

    return method
