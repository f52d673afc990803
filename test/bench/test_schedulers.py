"""FSDP2, DDP and the library on the simulated device: what their steps take, told by hand."""

import importlib.util
import os
import random
import sys
import unittest
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "bench"), str(Path(__file__).resolve().parents[1] / "processes")]

import closing_line
import conductor
import networks
from overlap_schedulers import IMPLS, Schedulers
from stack import Stack

LAYER = 64 * 8 * 4  # bytes
FORWARD, BACKWARD = 100.0, 200.0
GATHER = 10.0
# 8/7 of a byte passes for each byte of a layer: a layer takes 10 us.
NETWORK = networks.Network(world=8, latency_us=0, launch_us=0, bandwidth_gb_per_s=7 / 8 * LAYER * 1e-3 / GATHER)
FREE = networks.Network(world=8, latency_us=0, launch_us=0, bandwidth_gb_per_s=1e12)
LAYERS = 3
COMPUTE = LAYERS * (FORWARD + BACKWARD)


def fsdp2_has(method):
    """Asks the source: to import torch takes longer than these tests."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    return f"def {method}(" in (torch / "distributed/fsdp/_fully_shard/_fully_shard.py").read_text()


def three_layers(network=NETWORK):
    return Stack(forward_us=(FORWARD,) * LAYERS, bytes=(LAYER,) * LAYERS, world=8, network=network)


def times(step, name):
    """(begin, end) of all that has this name, in order."""
    return [(round(slice_["begin_us"], 6), round(slice_["end_us"], 6)) for slice_ in step.slices if slice_["name"] == name]


class OnTheSimulatedDevice(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.workers = conductor.Workers()
        cls.schedulers = Schedulers(cls.workers)
        cls.core = cls.workers.start("overlap", conductor.overlap_command(os.environ["FSDP_BUILD_DIR"]))

    @classmethod
    def tearDownClass(cls):
        cls.workers.__exit__()

    def test_gathers_and_reductions_of_fsdp2_pass_beside_compute(self):
        step = self.schedulers.step("fsdp2", three_layers())
        # Only the first gather and the last reduction are seen.
        self.assertAlmostEqual(step.total_us, GATHER + COMPUTE + GATHER)
        self.assertEqual([times(step, f"forward {layer}") for layer in range(3)],
                         [[(10, 110)], [(110, 210)], [(210, 310)]])
        self.assertEqual([times(step, f"backward {layer}") for layer in (2, 1, 0)],
                         [[(310, 510)], [(510, 710)], [(710, 910)]])
        # Layer 1's while layer 0 computes, and the layers' again for backward: FSDP2 gathers the last one, too. The last
        # gather of all waits for the reduction that was launched before it.
        self.assertEqual(times(step, "all_gather"), [(0, 10), (10, 20), (20, 30), (210, 220), (310, 320), (520, 530)])
        # Layer 2's while layer 1 computes its backward.
        self.assertEqual(times(step, "reduce_scatter"), [(510, 520), (710, 720), (910, 920)])

    def test_with_one_stream_nothing_of_fsdp2_overlaps(self):
        step = self.schedulers.step("fsdp2", three_layers(), one_stream=True)
        self.assertAlmostEqual(step.total_us, COMPUTE + (6 + 3) * GATHER)

    def test_over_a_free_network_a_step_takes_what_its_layers_compute(self):
        for impl in IMPLS:
            self.assertAlmostEqual(self.schedulers.step(impl, three_layers(FREE)).total_us, COMPUTE, places=3)

    def test_the_buckets_of_ddp_are_reduced_beside_backward(self):
        # All three layers are in one bucket of 25 MB; at a size of 64 MiB each has one of its own.
        together = self.schedulers.step("ddp", three_layers())
        self.assertAlmostEqual(together.total_us, COMPUTE + 3 * 2 * GATHER)
        large = Stack(forward_us=(FORWARD,) * LAYERS, bytes=(64 << 20,) * LAYERS, world=8,
                      network=NETWORK.scaled(LAYER / (64 << 20)))
        each = self.schedulers.step("ddp", large)
        self.assertAlmostEqual(each.total_us, COMPUTE + 2 * GATHER, places=3)
        self.assertEqual([(round(begin), round(end)) for begin, end in times(each, "all_reduce")],
                         [(500, 520), (700, 720), (900, 920)])

    def test_collectives_take_what_the_presets_say(self):
        for preset, world in ((networks.nvlink, 8), (networks.infiniband, 16), (networks.infiniband, 1024)):
            made = Stack(forward_us=(1.0, 1.0), bytes=(8 << 20,) * 2, network=preset(world), world=world)
            expected = preset(world).latency_of_us() + preset(world).sending_us(made.layer_bytes(0))
            for impl in ("fsdp2", "fsdp"):
                alone = {round(slice_["alone_us"], 3) for slice_ in self.schedulers.step(impl, made).slices if slice_["bytes"]}
                self.assertEqual(alone, {round(expected, 3)})

    def test_the_library_s_step_is_that_of_a_host_that_computes_itself(self):
        # There one thread moves the clock of SimulatedNetwork; here the host runs ahead of its streams.
        draw = random.Random(7)
        for case in range(12):
            count = draw.randint(2, 6)
            made = Stack(forward_us=tuple(draw.choice((30.0, 90.0, 300.0)) for _ in range(count)),
                         bytes=tuple(draw.choice((1, 2, 3)) * (16 << 20) for _ in range(count)), network=networks.nvlink(8),
                         world=8, separate=draw.random() < 0.5)
            with self.subTest(case=case, made=made):
                self.core.ask(made.request())
                (expected,) = self.core.ask({"do": "run", "warmup": 3, "steps": 1})["steps"]
                self.assertAlmostEqual(self.schedulers.step("fsdp", made).total_us, expected["total_us"], delta=0.1)

    @unittest.skipUnless(fsdp2_has("set_separate_reduce_scatter_group"), "FSDP2 of this torch has one group for all")
    def test_with_a_group_of_their_own_reductions_of_fsdp2_share_the_link_with_gathers(self):
        step = self.schedulers.step("fsdp2", replace(three_layers(), separate=True))
        # Layer 2's reduction and layer 0's gather begin together, and take twice as long.
        self.assertEqual(times(step, "all_gather")[-1], (510, 530))
        self.assertEqual(times(step, "reduce_scatter"), [(510, 530), (710, 720), (910, 920)])

    def test_a_step_leaves_nothing_to_the_next_model(self):
        # Autograd's thread lets go of a buffer now and then after the next one has been made: the least of some steps.
        peaks = [self.schedulers.step("fsdp2", replace(three_layers(), forward_us=(FORWARD, FORWARD, FORWARD + i)))
                 .peak_live_bytes for i in range(8)]
        self.assertEqual(min(peaks[:4]), min(peaks[4:]), peaks)


if __name__ == "__main__":
    closing_line.main()
