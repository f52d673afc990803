"""Checks of test_beyond_fsdp2.py: what fully_shard takes beyond FSDP2's arguments."""

import copy
import os
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import fsdp
from beyond_fsdp2 import batches_of, check, raises, train_both, whole
from hook_programs.subclasses import Halved, Quantized, Wrapped


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.relu(self.first(x))))) * self.scale


def placements(model):
    return {name: getattr(parameter, "placements", None) for name, parameter in model.named_parameters()}


@check
def replicated_parameters_and_modules_stay_whole_and_train_as_the_plain_model(rank, ranks):
    def shard(model, mesh):
        fsdp.fully_shard(model.first, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh, replicated_params=[model.last.bias], replicated_modules=[model.middle, model.first])

    found = placements(train_both(Net, shard, rank, ranks))
    whole_ones = {"middle.weight", "middle.bias", "last.bias"}
    assert found == {name: (Replicate(),) if name in whole_ones else (Shard(0),) for name in found}, found


@check
def replicated_parameters_in_replicas_of_shards(rank, ranks):
    def shard(model, _):
        mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
        fsdp.fully_shard(model, mesh=mesh, replicated_params={model.middle.weight})

    found = placements(train_both(Net, shard, rank, ranks))
    assert found["middle.weight"] == (Replicate(), Replicate()) and found["first.weight"] == (Replicate(), Shard(0)), found


@check
def ignored_modules_are_left_alone_but_for_what_is_sharded_in_them(rank, ranks):
    torch.manual_seed(0)
    model, mesh = nn.Sequential(Net(), nn.Linear(3, 3)), init_device_mesh("cpu", (ranks,))
    fsdp.fully_shard(model[0].middle, mesh=mesh)
    plain = dict(model[0].first.named_parameters())
    fsdp.fully_shard(model, mesh=mesh, ignored_modules=[model[0]])
    sharded = {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    assert sharded == {"0.middle.weight", "0.middle.bias", "1.weight", "1.bias"}, sharded
    assert all(parameter is plain[name] for name, parameter in model[0].first.named_parameters())
    twin = copy.deepcopy(model[0].first)
    model(batches_of(rank)[0]).square().mean().backward()
    assert isinstance(model[1].weight.grad, DTensor) and not isinstance(model[0].first.weight.grad, DTensor)
    assert torch.equal(twin.weight, model[0].first.weight)


@check
def the_first_ranks_values_are_everyones_with_sync_from_rank0(rank, ranks):
    torch.manual_seed(0)
    of_first = Net()
    with torch.device("cpu" if rank == 0 else "meta"):
        model = Net()
    if rank == 0:
        model.load_state_dict(of_first.state_dict())
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), sync_from_rank0=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(whole(tensor), of_first.state_dict()[name]), name
    model(batches_of(rank)[0]).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


@check
def the_first_ranks_tensor_subclasses_are_everyones_with_sync_from_rank0(rank, ranks):
    shards = init_device_mesh("cpu", (ranks,))
    hybrid = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
    for wrap in (Halved, Quantized.of):
        for mesh in (shards, hybrid):
            for on_meta in (True, False):
                torch.manual_seed(0)
                of_first = wrap(torch.randn(6, 6))
                torch.manual_seed(rank)
                model = Net()
                others = wrap(torch.randn(6, 6, device="meta" if on_meta else "cpu"))
                model.middle.weight = given = nn.Parameter(wrap(of_first.values()) if wrap is not Halved and rank == 0
                                                           else of_first if rank == 0 else others)
                before = [each.clone() for each in inner(given)]
                fsdp.fully_shard(model, mesh=mesh, sync_from_rank0=True)
                for mine, whole_one in zip(inner(model.middle.weight.to_local()), inner(of_first)):
                    rows = whole_one.chunk(ranks)[rank] if mesh is shards else whole_one
                    assert torch.equal(mine, rows), (wrap, mine, rows)
                if rank == 0 or not on_meta:
                    assert all(map(torch.equal, before, inner(given))), "the module's own is as it was"
                model(batches_of(rank)[0]).sum().backward()


def inner(tensor):
    return [getattr(tensor, name).detach() for name in tensor.__tensor_flatten__()[0]]


class Closed(Halved):
    """What it holds cannot be told."""

    __tensor_flatten__ = property()


@check
def tensor_subclasses_that_cannot_be_sent_are_refused_on_all_ranks_with_sync_from_rank0(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))

    def shard(weight):
        model = Net()
        model.middle.weight = nn.Parameter(weight)
        fsdp.fully_shard(model, mesh=mesh, sync_from_rank0=True)

    raises(NotImplementedError, "Linear.weight is a Closed, a tensor subclass without __tensor_flatten__",
           lambda: shard(Closed(torch.ones(6, 6))))
    raises(ValueError, "Linear.weight differs between the ranks",
           lambda: shard((Halved if rank == 0 else Wrapped)(torch.ones(6, 6))))
    raises(ValueError, "Linear.weight is on the meta device on the first rank",
           lambda: shard(Halved(torch.ones(6, 6, device="meta" if rank == 0 else "cpu"))))
    model = Net()
    fsdp.fully_shard(model, mesh=mesh, sync_from_rank0=True)
    model(batches_of(rank)[0]).sum().backward()


@check
def replicas_take_the_first_ranks_values_with_sync_from_rank0(rank, ranks):
    torch.manual_seed(0)
    of_first = Net()
    torch.manual_seed(rank)
    model = Net()
    fsdp.replicate(model, mesh=init_device_mesh("cpu", (ranks,)), sync_from_rank0=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(whole(tensor), of_first.state_dict()[name]), name
    model(batches_of(rank)[0]).sum().backward()


@check
def the_sanitizer_changes_no_result(rank, ranks):
    options = fsdp.SanitizerOptions(seed=3, quarantine_bytes=2**20, max_delay=timedelta(microseconds=50))
    train_both(Net, lambda model, mesh: (fsdp.fully_shard(model.first, mesh=mesh, sanitizer=options),
                                         fsdp.fully_shard(model, mesh=mesh, sanitizer=options)), rank, ranks)


@check
def the_sanitizer_finds_a_write_past_the_library(rank, ranks):
    model = Net()
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), sanitizer=fsdp.SanitizerOptions())
    model.first.register_forward_hook(lambda module, args, output: module.weight.detach().numpy().fill(7) or None)
    raises(RuntimeError, "first.weight", lambda: model(batches_of(rank)[0]).sum().backward())


@check
def ranks_that_do_not_agree_get_a_schedule_error(rank, ranks):
    # Over groups of its own, which are unusable afterwards.
    mesh = fsdp._meshes.DeviceMesh.from_group(dist.new_group(list(range(ranks))), "cpu")
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in model:
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    raises(TypeError, "late_after", lambda: fsdp.set_schedule_check(model, late_after=3))
    raises(ValueError, "call fully_shard", lambda: fsdp.set_schedule_check(nn.Linear(2, 2)))
    fsdp.set_schedule_check(model, before_every_collective=True, late_after=timedelta(seconds=20))
    first, other = (model[0], model[1]) if rank == 0 else (model[1], model[0])

    def go():
        first(torch.ones(1, 6))
        other(torch.ones(1, 6))

    error = raises(fsdp.ScheduleError, "", go)
    assert error.collective == 0 and sorted(error.launched) == list(range(ranks)), (error.collective, error.launched)
    assert error.launched[0].startswith("all_gather of 0") and error.launched[1].startswith("all_gather of 1"), error.launched
    assert issubclass(fsdp.ScheduleError, fsdp.CommError)
    assert fsdp.ScheduleError("of a program").launched == {} and fsdp.CommError("of a program").rank == -1


@check
def wrong_options_leave_the_module_as_it_was(rank, ranks):
    model, mesh = Net(), init_device_mesh("cpu", (ranks,))
    before = (type(model), placements(model))
    for kind, what, options in (
        (TypeError, "ignored_modules", {"ignored_modules": model.first}),
        (TypeError, "ignored_modules", {"ignored_modules": [3]}),
        (TypeError, "replicated_params", {"replicated_params": [model.first]}),
        (TypeError, "replicated_modules", {"replicated_modules": ["first"]}),
        (TypeError, "sanitizer", {"sanitizer": True}),
        (TypeError, "sync_from_rank0", {"sync_from_rank0": "yes"}),
        (AssertionError, "for parameter 'first.bias' of shape", {"shard_placement_fn": lambda parameter: Shard(1)}),
        (ValueError, "for parameter 'first.weight' expected Shard", {"shard_placement_fn": lambda parameter: 0}),
    ):
        raises(kind, what, lambda: fsdp.fully_shard(model, mesh=mesh, **options))
        assert (type(model), placements(model)) == before, options
    fsdp.fully_shard(model, mesh=mesh)
    model(batches_of(rank)[0]).sum().backward()


@check
def a_parameter_that_is_refused_is_named(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    model = Net()
    model.first.bias = nn.Parameter(Wrapped(torch.ones(6)))
    fsdp.fully_shard(model, mesh=mesh)  # it may get hooks yet
    raises(NotImplementedError, "Linear.bias is a Wrapped, a tensor subclass that fsdp cannot gather",
           lambda: model(batches_of(rank)[0]))
    model = Net()
    model.first.weight = nn.Parameter(DTensor.from_local(Wrapped(torch.ones(6, 6)), mesh, run_check=False))
    raises(NotImplementedError, "parameter 'first.weight' is a DTensor over a Wrapped",
           lambda: fsdp.fully_shard(model, mesh=mesh))
    model = Net()
    elsewhere = DeviceMesh("cuda", [rank], mesh_dim_names=("tp",), _init_backend=False, _rank=rank)
    spec = DTensorSpec(elsewhere, (Shard(0),), tensor_meta=TensorMeta(torch.Size((6, 6)), (6, 1), torch.float32))
    model.first.weight = nn.Parameter(DTensor(torch.ones(6, 6), spec, requires_grad=False))
    raises(ValueError, "parameter 'first.weight' is a DTensor on the device type cuda, but the mesh is on cpu",
           lambda: fsdp.fully_shard(model, mesh=mesh))
    outer = Net()
    fsdp.fully_shard(outer, mesh=mesh)
    raises((RuntimeError, TypeError), "parameter 'weight' is a DTensor on", lambda: fsdp.fully_shard(outer.first, mesh=mesh))
    model = Net()
    raises(ValueError, "parameter 'first.weight' is neither", lambda: fsdp.fully_shard(
        model, mesh=init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp")),
        dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp")))


@check
def a_custom_collective_without_its_methods_is_refused_at_once(rank, ranks):
    model = fsdp.fully_shard(Net(), mesh=init_device_mesh("cpu", (ranks,)))

    class WithoutAllocate:
        def __call__(self, **arguments):
            return None

    for control in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
        raises(TypeError, f"{control.__name__}: expected None, or what can be called and has a method allocate",
               lambda: control(WithoutAllocate()))
    model(batches_of(rank)[0]).sum().backward()


@check
def errors_of_the_core_name_what_python_has(rank, ranks):
    model, mesh = nn.Sequential(Net()), init_device_mesh("cpu", (ranks,))
    fsdp.fully_shard(model[0], mesh=mesh)
    with fsdp.FullParameters(model[0]):
        raises(fsdp.Error, "shows full parameters (fsdp.FullParameters)", lambda: fsdp.fully_shard(model, mesh=mesh))
    loss = model(batches_of(rank)[0]).sum()
    raises(fsdp.Error, "a forward without backward belongs under torch.no_grad()",
           lambda: fsdp.FullParameters(model[0]).__enter__())
    loss.backward()


@check
def roots_and_sharded_modules_are_told(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    model, other = nn.Sequential(Net(), Net(), nn.Linear(3, 3)), Net()
    fsdp.fully_shard([model[0].first, model[0].middle], mesh=mesh)
    fsdp.fully_shard(model[0], mesh=mesh)
    fsdp.fully_shard(model[1].last, mesh=mesh)
    assert fsdp.roots(model) == [model[0], model[1].last]
    assert model[0].is_root() and not model[0].first.is_root() and model[1].last.is_root()
    assert model[0].sharded_modules() == [model[0], model[0].first, model[0].middle]
    fsdp.fully_shard(model, mesh=mesh)
    fsdp.replicate(other, mesh=mesh)
    assert fsdp.roots(nn.ModuleList([model, other])) == [model, other] and fsdp.roots(nn.Linear(2, 2)) == []
    assert model.is_root() and not model[0].is_root()
    assert model.sharded_modules() == [model, model[0], model[0].first, model[0].middle, model[1].last]
    assert model[0].middle.sharded_modules() == [model[0].middle]


@check
def a_hybrid_mesh_shards_within_a_node(rank, ranks):
    mesh = fsdp.hybrid_mesh()
    assert mesh.mesh_dim_names == ("replicate", "shard") and tuple(mesh.mesh.shape) == (1, ranks), mesh
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}):
        mesh = fsdp.hybrid_mesh()
    assert tuple(mesh.mesh.shape) == (ranks, 1), mesh
    model = fsdp.fully_shard(Net(), mesh=mesh)
    assert model.first.weight.placements == (Replicate(), Shard(0))
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(1 + rank), "LOCAL_RANK": "0"}):
        raises(ValueError, "same number of ranks", fsdp.hybrid_mesh)
