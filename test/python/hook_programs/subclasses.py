"""Tensor subclasses that say how they are gathered."""

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten
KEEP = {aten.detach.default, aten.clone.default, aten.split.Tensor, aten.slice.Tensor, aten.view.default,
        aten.as_strided.default, aten.new_zeros.default, aten.new_empty.default, aten._to_copy.default,
        aten.empty_like.default, aten._pin_memory.default}
seen = set()  # what the hooks were told, as text


class Wrapped(torch.Tensor):
    """A wrapper of one tensor. Operators that FSDP2 shards with keep the class, all others compute with the tensor."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, held.stride(), dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    def __repr__(self):
        return f"{type(self).__name__}({self.held})"

    def __tensor_flatten__(self):
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _, outer_size, outer_stride):
        return cls(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        def inner(each):
            return each.held if isinstance(each, Wrapped) else each

        result = function(*torch.utils._pytree.tree_map(inner, args), **torch.utils._pytree.tree_map(inner, kwargs))
        if function is aten.copy_.default:
            return args[0]
        if function not in KEEP:
            return result
        wrapped = torch.utils._pytree.tree_map_only(torch.Tensor, cls, result)
        return return_and_correct_aliasing(function, args, kwargs, wrapped)


def fill(out, values):
    """Below autograd, which has saved `out` for backward: the same values as before come back."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(values)


class Halved(Wrapped):
    """Gathered as bfloat16, computed with in the parameter's dtype; padded where rows are not even."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        seen.add(f"{mesh.ndim} {mesh.size()} {tuple(outer_size)} {tuple(outer_stride)} {type(module).__name__} "
                 f"{mp_policy.param_dtype}")
        rows = -(-outer_size[0] // mesh.size())
        sent = self.held.new_zeros(rows, *outer_size[1:], dtype=torch.bfloat16)
        sent[:self.held.size(0)].copy_(self.held)
        return (sent,), ("metadata", self.held.size(1))

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        seen.add(f"{metadata} {tuple(gathered.shape)} {gathered.dtype} {param_dtype}")
        if out is not None:
            fill(out, gathered.view(-1)[:out.numel()].view(out.shape))
            return None
        values = gathered.to(param_dtype)
        return values, (values,)


class WithScales(Wrapped):
    """Gathered as int8 with a scale for each row: two tensors of two dtypes and sizes; the older signature."""

    def fsdp_pre_all_gather(self, mesh):
        scales = self.held.abs().amax(1).clamp(min=1e-12) / 127
        return ((self.held / scales[:, None]).round().to(torch.int8), scales), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        seen.add(f"{metadata} {[(tuple(each.shape), str(each.dtype)) for each in outputs]} {param_dtype}")
        values = (outputs[0] * outputs[1][:, None]).to(param_dtype)
        if out is not None:
            fill(out, values)
            return None
        return values, (values,)

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self):
        return True


class _Scaled(torch.autograd.Function):
    """A linear layer over a gathered Quantized."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.values().t() + bias

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.values(), gradient.t() @ x, gradient.sum(0)


class Quantized(torch.Tensor):
    """Kept, gathered and computed with as int8 and a scale for each row; its memory is what was gathered."""

    @staticmethod
    def __new__(cls, data, scales):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scales.dtype, device=data.device)

    def __init__(self, data, scales):
        self.data_, self.scales = data, scales

    def __repr__(self):
        return f"Quantized({self.data_}, {self.scales})"

    @classmethod
    def of(cls, values):
        scales = values.abs().amax(1).clamp(min=1e-12) / 127
        return cls((values / scales[:, None]).round().to(torch.int8), scales)

    def values(self):
        return self.data_ * self.scales[:, None]

    def __tensor_flatten__(self):
        return ["data_", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _, outer_size, outer_stride):
        return cls(inner["data_"], inner["scales"])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            return _Scaled.apply(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0]
        if function in (aten.detach.default, aten.clone.default, aten.slice.Tensor):
            made = cls(function(first.data_, *args[1:], **kwargs), function(first.scales, *args[1:], **kwargs))
            return return_and_correct_aliasing(function, args, kwargs, made)
        if function in (aten.view.default, aten.as_strided.default):
            return return_and_correct_aliasing(function, args, kwargs, cls(first.data_, first.scales))
        if function is aten.split.Tensor:
            return [cls(*parts) for parts in zip(function(first.data_, *args[1:]), function(first.scales, *args[1:]))]
        if function is aten.new_zeros.default:
            return cls(first.data_.new_zeros(args[1]), first.scales.new_zeros(args[1][0]))
        if function is aten.empty_like.default:
            kwargs = {**kwargs, "dtype": None}
            return cls(function(first.data_, **kwargs), function(first.scales, **kwargs))
        if function is aten.copy_.default and isinstance(first, Quantized):
            other = args[1] if isinstance(args[1], Quantized) else cls.of(args[1])
            first.data_.copy_(other.data_)
            first.scales.copy_(other.scales)
            return first
        plain = [each.values() if isinstance(each, Quantized) else each for each in args]
        result = function(*plain, **kwargs)
        return first.copy_(result) if function in (aten.add_.Tensor, aten.mul_.Tensor) else result

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.data_, self.scales.to(mp_policy.param_dtype)), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        seen.add(f"{[(tuple(each.shape), str(each.dtype)) for each in outputs]} {param_dtype}")
        if out is None:
            return Quantized(*outputs), outputs
        assert out.data_.data_ptr() == outputs[0].data_ptr()
        return None


class SavesItself(Wrapped):
    """The gathered one is the class again, over what was gathered."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.held,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is None:
            return SavesItself(outputs[0]), outputs
        assert out.held.data_ptr() == outputs[0].data_ptr()
        return None


class Forgetful(Halved):
    """Is a plain tensor once memory is made for it."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is aten.empty_like.default:
            return function(args[0].held, **(kwargs or {}))
        return super().__torch_dispatch__(function, types, args, kwargs)


class WithoutHooks(Wrapped):
    pass


class OnlyPre(Wrapped):
    fsdp_pre_all_gather = Halved.fsdp_pre_all_gather


class OnlyPost(Wrapped):
    fsdp_post_all_gather = Halved.fsdp_post_all_gather


class OnlyRelease(Wrapped):
    fsdp_should_release_all_gather_outputs_after_post_all_gather = (
        WithScales.fsdp_should_release_all_gather_outputs_after_post_all_gather)


class WrongRelease(Halved):
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self):
        return 1


class WrongSignature(Halved):
    def fsdp_pre_all_gather(self, mesh, outer_size):
        raise RuntimeError("is not called")


def parts(tensor):
    """Of a local tensor: its class, and what it holds."""
    if isinstance(tensor, Quantized):
        return {"class": "Quantized", "data": tensor.data_, "scales": tensor.scales}
    if isinstance(tensor, Wrapped):
        return {"class": type(tensor).__name__, "held": tensor.held}
    return {"class": type(tensor).__name__, "held": tensor}
