"""Memory that such parameters take beside their own."""

import torch.distributed.fsdp

from .subclasses import Quantized
from .table import program
from .trained import WIDTH, Net, sgd, sharded, train


@program(ranks=(2,))
def only_biases_are_unsharded_by_the_group(api, ranks):
    net = sharded(api, Net(Quantized.of), ranks)
    trained = train(net, sgd(net), steps=2)
    if api is not torch.distributed.fsdp:
        taken = {group.name: group.unsharded_bytes for group in api.report(net).groups}
        bias, weight = 4 * WIDTH, 4 * WIDTH * WIDTH
        assert all(bias <= taken[f"blocks.{i}"] < weight for i in range(3)), taken
    return trained
