"""Python's side of gloo_step: one training step with FSDP2, with the extension, with DDP, or of one plain process."""

import torch

import models
import worker


class Trainer:
    def __init__(self, request):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = models.make(request)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        if request["impl"] in ("fsdp2", "python"):
            worker.init_gloo()
            from torch.distributed.device_mesh import init_device_mesh

            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            models.shard(self.model, mesh, worker.fully_shard_of(request["impl"]), reshard_after_forward=not request["kept"])
        elif request["impl"] == "ddp":
            worker.init_gloo()
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.tokens = torch.arange(request["tokens"]) % request["vocabulary"]
        self.loss = None

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.tokens)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()


def answer(trainer, request):
    times = [worker.seconds(trainer.step) for _ in range(request["steps"])]
    return {"seconds": times, "loss": trainer.loss}


if __name__ == "__main__":
    worker.serve_one(Trainer, lambda trainer: {"parameters": trainer.parameters}, answer)
