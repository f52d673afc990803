"""Checks of test_beyond_fsdp2.py: parameters that are gathered in another form than their values."""

import copy

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp
from beyond_fsdp2 import batches_of, check, raises, train_both, whole
from beyond_options import Net


class Int8(fsdp.AllGatherExtension):
    """In blocks with a scale each, as fsdp.int8_all_gather."""

    def __init__(self, block_numel=4):
        self.block_numel = block_numel

    def blocks(self, numel):
        return -(-numel // self.block_numel)

    def encoded_bytes(self, numel, dtype):
        return 4 * self.blocks(numel) + numel

    def pre_all_gather(self, piece, encoded):
        numel, count = piece.numel(), self.blocks(piece.numel())
        blocks = torch.zeros(count * self.block_numel)
        blocks[:numel] = piece
        blocks = blocks.view(count, self.block_numel)
        scales = blocks.abs().amax(dim=1) / 127
        values = torch.where(scales[:, None] > 0, blocks / scales[:, None], 0).round().to(torch.int8).flatten()[:numel]
        encoded[:4 * count].copy_(scales.view(torch.uint8))
        encoded[4 * count:].copy_(values.view(torch.uint8))

    def post_all_gather(self, encoded, dtype, values):
        numel = values.size(1)
        count = self.blocks(numel)
        for rank, sent in enumerate(encoded):
            scales = sent[:4 * count].clone().view(torch.float32).repeat_interleave(self.block_numel)[:numel]
            values[rank].copy_(sent[4 * count:].clone().view(torch.int8) * scales)


class Bytes(fsdp.AllGatherExtension):
    """Changes no value."""

    def encoded_bytes(self, numel, dtype):
        return numel * dtype.itemsize

    def pre_all_gather(self, piece, encoded):
        encoded.copy_(piece.view(torch.uint8))

    def post_all_gather(self, encoded, dtype, values):
        values.copy_(torch.stack([sent.clone().view(dtype) for sent in encoded]))


def sharded_twins(ranks, *extensions):
    torch.manual_seed(0)
    made = []
    first = Net()
    for extension in extensions:
        model = copy.deepcopy(first)
        for module in (model.first, model):
            fsdp.fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)),
                             all_gather_extension_fn=lambda name, parameter: extension if parameter.dim() > 1 else None)
        made.append(model)
    return made


@check
def an_extension_that_changes_no_value_trains_as_the_plain_model(rank, ranks):
    asked = []

    def shard(model, mesh):
        def choose(name, parameter):
            asked.append((name, type(parameter), tuple(parameter.shape)))
            return Bytes()

        fsdp.fully_shard(model.first, mesh=mesh, all_gather_extension_fn=choose)
        fsdp.fully_shard(model, mesh=mesh, all_gather_extension_fn=choose)

    train_both(Net, shard, rank, ranks)
    assert ("last.bias", nn.Parameter, (3,)) in asked and len(asked) == 6, asked


@check
def int8_written_in_python_and_the_librarys_give_the_same(rank, ranks):
    ours, theirs, exact = sharded_twins(ranks, Int8(4), fsdp.int8_all_gather(block_numel=4), None)
    for _ in range(2):
        for x in batches_of(rank):
            outputs = [model(x) for model in (ours, theirs, exact)]
            assert torch.equal(outputs[0], outputs[1]), (outputs[0] - outputs[1]).abs().max()
            torch.testing.assert_close(outputs[0], outputs[2], rtol=0.05, atol=0.05)
            assert not torch.equal(outputs[0], outputs[2])
            for output, model in zip(outputs, (ours, theirs, exact)):
                output.square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
    for one, other in zip(ours.parameters(), theirs.parameters()):
        assert isinstance(one, DTensor) and torch.equal(whole(one.detach()), whole(other.detach()))
    bytes_ = [model.statistics()["gathered_bytes"] for model in (ours, theirs, exact)]
    assert bytes_[0] == bytes_[1] < bytes_[2], bytes_
    with fsdp.FullParameters(ours):  # never encoded
        full = ours.middle.weight.detach().clone()
    assert torch.equal(full, whole(ours.middle.weight.detach()))


@check
def int8_of_the_library_can_be_called(rank, ranks):
    piece = torch.linspace(-1, 1, 10)
    for extension in (Int8(4), fsdp.int8_all_gather(block_numel=4)):
        count = extension.encoded_bytes(10, torch.float32)
        encoded = torch.empty(1, 32, dtype=torch.uint8)[:, :count]  # each rank's begin at a multiple of 16
        values = torch.empty(1, 10)
        extension.pre_all_gather(piece, encoded[0])
        extension.post_all_gather(encoded, torch.float32, values)
        assert count == 22 and (values[0] - piece).abs().max() < 1 / 127, values
        assert extension.accepts(torch.bfloat16) and not extension.accepts(torch.int32) and extension.name()


@check
def an_extension_that_fails_leaves_the_module_sharded_and_usable(rank, ranks):
    class Fails(Bytes):
        fails = False

        def pre_all_gather(self, piece, encoded):
            if self.fails:
                raise KeyError("no scale")
            super().pre_all_gather(piece, encoded)

    extension = Fails()
    model, = sharded_twins(ranks, extension)
    extension.fails = True
    raises(KeyError, "no scale", lambda: model(batches_of(rank)[0]))
    extension.fails = False
    model.reset_iter_state()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model(batches_of(rank)[0]).sum().backward()


@check
def wrong_extensions_leave_the_module_as_it_was(rank, ranks):
    class Undefined(fsdp.AllGatherExtension):
        pass

    class NoCount(Bytes):
        def encoded_bytes(self, numel, dtype):
            return "many"

    class Refuses(Bytes):
        def accepts(self, dtype):
            return False

    model, mesh = Net(), init_device_mesh("cpu", (ranks,))
    for kind, what, function in (
        (TypeError, "all_gather_extension_fn", Bytes()),
        (TypeError, "first.weight", lambda *_: "int8"),
        (NotImplementedError, "encoded_bytes", lambda *_: Undefined()),
        (TypeError, "encoded_bytes", lambda *_: NoCount()),
        (ValueError, "Refuses", lambda *_: Refuses()),
        (ZeroDivisionError, "", lambda *_: 1 / 0),
    ):
        raises(kind, what, lambda: fsdp.fully_shard(model, mesh=mesh, all_gather_extension_fn=function))
        assert type(model) is Net and all(type(each) is nn.Parameter for each in model.parameters()), what
    raises(ValueError, "int8_all_gather", lambda: fsdp.int8_all_gather(block_numel=0))
    fsdp.fully_shard(model, mesh=mesh)
    model(batches_of(rank)[0]).sum().backward()
