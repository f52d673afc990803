"""The dtype that gradients arrive in, are reduced in and are kept in: mixed operands, and `grad_dtype`."""

import torch
import torch.nn as nn

from .common import INPUTS, batches, error_of, gradients, mesh_of, program

HAS_IT = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)
MISSING = "FSDP2 of this torch rounds gradients, and does not know grad_dtype"
FLOAT, LOW, DOUBLE = torch.float32, torch.bfloat16, torch.float64


class Scales(nn.Module):
    """Weights that meet what they are given element by element: where dtypes differ, autograd makes the weight's
    gradient in the larger one."""

    def __init__(self, dtype=FLOAT):
        super().__init__()
        self.first = nn.Parameter(torch.linspace(0.5, 1.5, INPUTS).to(dtype))
        self.second = nn.Parameter(torch.linspace(1.5, 2.5, INPUTS).to(dtype))
        self.linear = nn.Linear(INPUTS, INPUTS, dtype=dtype)

    def forward(self, x):
        x = self.linear(x.to(self.linear.weight.dtype)).float()
        return (x * self.first).tanh() + x.square() * self.second


def seen(model):
    return {
        "dtypes": [str(parameter.grad_dtype) for parameter in model.parameters()],
        "found": [None if parameter.grad is None else str(parameter.grad.dtype) for parameter in model.parameters()],
        "gradients": gradients(model),
    }


def run(model, x):
    model(x).float().square().mean().backward()


def step(model, x):
    model.zero_grad()
    run(model, x)
    return seen(model)


POLICIES = {
    "none": {},
    "reduced_in_float32": dict(param_dtype=LOW, reduce_dtype=FLOAT),
    "reduced_in_bfloat16": dict(param_dtype=LOW, reduce_dtype=LOW),
    "reduce_unset": dict(param_dtype=LOW),
}


def low_policies(function):
    return program(ranks=(2,), variants=[(name,) for name in POLICIES])(function)


@low_policies
def gradients_of_mixed_operands(api, ranks, name):
    if not HAS_IT:
        return MISSING
    policy = api.MixedPrecisionPolicy(cast_forward_inputs=False, **POLICIES[name])
    model = api.fully_shard(Scales(), mesh=mesh_of(ranks), mp_policy=policy)
    return [step(model, x) for x in batches(2)]


@low_policies
def mixed_operands_added_up_without_reduction(api, ranks, name):
    if not HAS_IT:
        return MISSING
    policy = api.MixedPrecisionPolicy(cast_forward_inputs=False, **POLICIES[name])
    model = api.fully_shard(Scales(), mesh=mesh_of(ranks), mp_policy=policy)
    for index, x in enumerate(batches(3)):
        model.set_requires_gradient_sync(index == 2)
        run(model, x)
    return seen(model)


GRAD_DTYPES = {"float32": FLOAT, "bfloat16": LOW, "float64": DOUBLE, "None": None}


def given(model, dtypes):
    for parameter, dtype in zip(model.parameters(), dtypes):
        if dtype != "unset":
            parameter.grad_dtype = dtype
    return model


def with_grad_dtypes(function):
    return program(ranks=(2,), variants=[(kept, name) for kept in ("float32", "bfloat16") for name in GRAD_DTYPES])(
        function)


@with_grad_dtypes
def grad_dtype_before_fully_shard(api, ranks, kept, name):
    if not HAS_IT:
        return MISSING
    model = given(Scales(GRAD_DTYPES[kept]), [GRAD_DTYPES[name]] * 4)
    api.fully_shard(model, mesh=mesh_of(ranks))
    return [seen(model), *(step(model, x) for x in batches(2))]


@with_grad_dtypes
def grad_dtype_before_the_first_forward(api, ranks, kept, name):
    if not HAS_IT:
        return MISSING
    model = api.fully_shard(Scales(GRAD_DTYPES[kept]), mesh=mesh_of(ranks))
    given(model, [GRAD_DTYPES[name]] * 4)
    return [seen(model), *(step(model, x) for x in batches(2))]


@with_grad_dtypes
def grad_dtype_through_another_dtype(api, ranks, kept, name):
    if not HAS_IT:
        return MISSING
    model = given(Scales(GRAD_DTYPES[kept]), [GRAD_DTYPES[name]] * 4)
    api.fully_shard(model, mesh=mesh_of(ranks))
    model.to(torch.bfloat16 if kept == "float32" else torch.float32)
    return [seen(model), *(step(model, x) for x in batches(2))]


@program(ranks=(2,))
def grad_dtype_set_after_fully_shard_through_another_dtype(api, ranks):
    if not HAS_IT:
        return MISSING
    model = api.fully_shard(Scales(), mesh=mesh_of(ranks))
    given(model, [FLOAT] * 4)
    model.to(torch.bfloat16)
    return [seen(model), *(step(model, x) for x in batches(2))]


@program(ranks=(2,))
def gradients_that_are_there_keep_their_grad_dtype(api, ranks):
    if not HAS_IT:
        return MISSING
    model = given(Scales(), [FLOAT, "unset", FLOAT, "unset"])
    api.fully_shard(model, mesh=mesh_of(ranks))
    run(model, batches(1)[0])
    model.to(torch.bfloat16)
    return seen(model)


@low_policies
def grad_dtype_beside_a_policy(api, ranks, name):
    if not HAS_IT:
        return MISSING
    model = given(Scales(), [LOW, "unset", FLOAT, None])
    policy = api.MixedPrecisionPolicy(cast_forward_inputs=False, **POLICIES[name])
    api.fully_shard(model, mesh=mesh_of(ranks), mp_policy=policy)
    return [seen(model), *(step(model, x) for x in batches(2))]


@program(ranks=(2,))
def grad_dtypes_of_one_group(api, ranks):
    """Reduced in the one that all promote to."""
    if not HAS_IT:
        return MISSING
    model = given(Scales(LOW), [FLOAT, "unset", LOW, "unset"])
    api.fully_shard(model, mesh=mesh_of(ranks))
    return [step(model, x) for x in batches(2)]


@program(ranks=(2,), variants=[("float32",), ("bfloat16",), ("None",)])
def grad_dtype_added_up_without_reduction(api, ranks, name):
    if not HAS_IT:
        return MISSING
    model = given(Scales(LOW), [GRAD_DTYPES[name]] * 4)
    api.fully_shard(model, mesh=mesh_of(ranks))
    for index, x in enumerate(batches(3)):
        model.set_requires_gradient_sync(index == 2)
        run(model, x)
    return seen(model)


@program(ranks=(2,))
def grad_dtype_offloaded(api, ranks):
    if not HAS_IT:
        return MISSING
    model = given(Scales(LOW), [FLOAT, "unset", None, FLOAT])
    api.fully_shard(model, mesh=mesh_of(ranks), offload_policy=api.CPUOffloadPolicy(pin_memory=False))
    return [step(model, x) for x in batches(2)]


@program(ranks=(2,))
def grad_dtype_of_none_with_unused_parameters(api, ranks):
    if not HAS_IT:
        return MISSING
    model = given(Scales(LOW), [None] * 4)
    api.fully_shard(model, mesh=mesh_of(ranks))
    model.set_reduce_scatter_unused_params(True)
    # What is thrown in a backward of the library's comes as RuntimeError, of whichever kind it was.
    return error_of(lambda: run(model, batches(1)[0])) in ("ValueError", "RuntimeError")


@program(ranks=(2,))
def grad_dtype_of_a_loaded_parameter(api, ranks):
    """assign=True registers parameters without one."""
    if not HAS_IT:
        return MISSING
    model = given(Scales(), [LOW, FLOAT, LOW, "unset"])
    api.fully_shard(model, mesh=mesh_of(ranks))
    values = {name: nn.Parameter(value.detach().clone()) for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    return [seen(model), *(step(model, x) for x in batches(2))]


@program(ranks=(2,))
def grad_dtype_before_a_parameter_is_loaded(api, ranks):
    """assign=True keeps what was set since fully_shard."""
    if not HAS_IT:
        return MISSING
    model = Scales()
    api.fully_shard(model, mesh=mesh_of(ranks))
    given(model, [DOUBLE, FLOAT, LOW, "unset"])
    values = {name: nn.Parameter(value.detach().clone()) for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    return [seen(model), *(step(model, x) for x in batches(2))]
