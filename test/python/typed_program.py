"""A user's program as a type checker sees it (test_typing.py); it is not run. Lines that end in `# wrong` are
mistakes, which it is to find."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp
from fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard

mesh = init_device_mesh("cpu", (2,))
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model:
    fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=2,
                shard_placement_fn=lambda parameter: Shard(0))
root: FSDPModule = fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(), ignored_params=set())
both: list[FSDPModule] = fully_shard([nn.Linear(4, 4), nn.Linear(4, 4)], mesh=mesh)

root.set_requires_gradient_sync(False, recurse=False)
root.set_modules_to_forward_prefetch(both)
handle: UnshardHandle | None = root.unshard(async_op=True)
if handle is not None:
    handle.wait()
reduction = root.finalize_backward(async_op=True)
reduction.wait()
fsdp.register_fsdp_forward_method(model, "forward")
fsdp.share_comm_ctx([root, *both])
counts: dict[str, float] = root.statistics()
with fsdp.timeline(model, path="rank{rank}.json") as seen:
    slices: list[fsdp.TimelineEvent] = seen.events
told: fsdp.Report = fsdp.report(model)
told.to_html("report.html")
peak: int = told.last_step.peak_bytes
optimizer = torch.optim.AdamW(model.parameters())
fsdp.save_checkpoint("run/step-1", model, optimizer, {"epoch": 1}, dtype=torch.bfloat16, keep_last=3)
latest: str | None = fsdp.latest_checkpoint("run")
epoch = fsdp.load_checkpoint("run/step-1", model, rename={"module.": ""}, verify="never").extra["epoch"]
saver = fsdp.CheckpointSaver(when_saving="refuse")
begun: bool = saver.start_save("run/step-2", model, rng_state=False)
with fsdp.replace_torch() as replacement:
    replaced: list[str] = replacement.replaced
fsdp.restore_torch()

fully_shard(3)  # wrong
fully_shard(model, mesh)  # wrong
fully_shard(model, mesh="cpu")  # wrong
fully_shard(model, reshard_after_forward="yes")  # wrong
fully_shard(model, mp_policy=CPUOffloadPolicy())  # wrong
fully_shard(model, shard_placement_fn=Shard(0))  # wrong
fully_shard(model, reshard=True)  # wrong
root.set_requires_gradient_sync("no")  # wrong
root.set_requires_gradient_sync(True, False)  # wrong
root.set_modules_to_backward_prefetch([model])  # wrong
root.set_gradient_divide_factor("2")  # wrong
root.set_symm_mem_for_comm("MPI")  # wrong
root.no_such_control(True)  # wrong
text: str = root.statistics()  # wrong
fsdp.timeline(path="trace.json").events  # wrong
told.to_html()  # wrong
told.groups[0].bytes  # wrong
fsdp.register_fsdp_forward_method(model, 3)  # wrong
fsdp.share_comm_ctx(root)  # wrong
fsdp.no_such_function()  # wrong
fsdp.replace_torch(model)  # wrong
fsdp.save_checkpoint("run", model, keep=3)  # wrong
fsdp.save_checkpoint("run", optimizer)  # wrong
fsdp.load_checkpoint("run", model, verify="sometimes")  # wrong
fsdp.load_checkpoint("run", model, optimizer, False)  # wrong
