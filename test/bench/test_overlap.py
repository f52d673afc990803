"""all_gather_overlap and scale: their figures where they can be told by hand, and what they print."""

import argparse
import contextlib
import importlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(Path(__file__).resolve().parents[1] / "processes")]

import closing_line
import cluster_case
import conductor
import harness
import launch
import llamas
import networks
import published
import run
import stack
from stack import Stack

MEGABYTE = 1 << 20


def bench(*arguments):
    return subprocess.run([sys.executable, str(BENCH / "run.py"), *arguments, "--no-build"], capture_output=True,
                          text=True, timeout=500)


def refusal(*arguments):
    """(exit code, what standard error says) of a benchmark that ends before it starts a process.

    In this process: a start takes a sixth of a second of a processor, and two where the benchmark imports torch.
    """
    with mock.patch.object(sys, "argv", ["run.py", *arguments, "--no-build"]), \
            contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = run.main()
        except SystemExit as ended:
            code = ended.code
    if isinstance(code, str):  # which the interpreter would print
        return 1, said.getvalue() + code
    return code, said.getvalue()


def lines_of(test, *arguments):
    done = bench(*arguments, "--json")
    test.assertEqual(done.returncode, 0, done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


class Simulation(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.worker = conductor.Worker("overlap", conductor.overlap_command(os.environ["FSDP_BUILD_DIR"]))

    @classmethod
    def tearDownClass(cls):
        cls.worker.close()

    def simulate(self, **about):
        return stack.simulate(self.worker, Stack(**about))

    def test_with_compute_to_spare_only_the_first_gather_and_the_last_reduction_are_seen(self):
        # A byte a nanosecond: layers of 1 MiB over 8 ranks take 7/8 MiB in ns each way.
        network = networks.Network(world=8, latency_us=0, bandwidth_gb_per_s=1, launch_us=0)
        for separate in (False, True):
            result = self.simulate(forward_us=(5000.0,) * 4, bytes=(MEGABYTE,) * 4, network=network, world=8,
                                   separate=separate)
            one_us = 7 / 8 * MEGABYTE / 1000
            self.assertAlmostEqual(result.compute_us, 4 * 15000)
            self.assertAlmostEqual(result.total_us, 4 * 15000 + 2 * one_us, places=2)
            self.assertAlmostEqual(result.communication_us, 11 * one_us, places=2)
            self.assertAlmostEqual(result.bound_us, result.total_us, places=2)
            self.assertAlmostEqual(result.overlap_percent, 100, places=3)

    def test_collectives_take_what_the_presets_say(self):
        for preset, world in ((networks.nvlink, 8), (networks.infiniband, 16), (networks.infiniband, 1024)):
            network = preset(world)
            made = Stack(forward_us=(1.0, 1.0), bytes=(8 * MEGABYTE, 16 * MEGABYTE), network=network, world=world)
            for transfer in stack.simulate(self.worker, made).step["transfers"]:
                layer = int(transfer["subject"].split(".")[-1])
                expected = network.latency_of_us() + network.sending_us(made.layer_bytes(layer))
                self.assertAlmostEqual(transfer["alone_us"], expected, places=3)

    def test_over_a_host_without_streams_nothing_overlaps_and_the_bound_is_the_simulated_network_s(self):
        for preset, world in ((networks.nvlink, 8), (networks.infiniband, 16)):
            about = {"forward_us": (40.0, 60.0, 20.0), "bytes": (1 << 16, 1 << 17, 1 << 16), "network": preset(world),
                     "world": world}
            simulated = self.simulate(**about)
            result = stack.simulate(self.worker, Stack(**about, stream="cpu"), steps=3)
            self.assertEqual(len(result.totals_us), 3)
            self.assertAlmostEqual(result.compute_us, 3 * 120)
            self.assertAlmostEqual(result.communication_us, simulated.communication_us)
            self.assertAlmostEqual(result.total_us, result.compute_us + result.communication_us, delta=0.1)
            self.assertAlmostEqual(result.exposed_us, result.communication_us, delta=0.1)
            self.assertEqual(result.memory, simulated.memory)
            self.assertEqual(result.bound_us, simulated.bound_us)
            self.assertGreater(result.total_us, simulated.total_us)
            network = about["network"]
            for transfer in result.step["transfers"]:
                size = about["bytes"][int(transfer["subject"].split(".")[-1])]
                self.assertAlmostEqual(transfer["alone_us"], network.latency_of_us() + network.sending_us(size), places=3)

    def test_no_schedule_beats_its_bound(self):
        draw = random.Random(5)
        for case in range(60):
            count = draw.randint(1, 6)
            sizes = tuple(draw.choice((1, 2, 3)) * MEGABYTE for _ in range(count))
            network = networks.nvlink(8)
            budget = draw.choice((None, draw.randint(2, 6)))
            about = {"forward_us": tuple(draw.choice((3.0, 30.0, 90.0)) for _ in range(count)), "bytes": sizes,
                     "network": network, "world": 8, "prefetch": draw.randint(0, 3),
                     "separate": draw.random() < 0.5, "reduce_buffers": draw.randint(1, 3),
                     "budget": budget and budget * 3 * MEGABYTE}
            with self.subTest(case=case, about=about):
                result = self.simulate(**about)
                self.assertGreaterEqual(result.total_us, result.bound_us - 0.01)
                if about["budget"]:
                    self.assertLessEqual(result.peak, about["budget"])

    def test_a_measurement_takes_the_start_of_reductions_that_is_fastest(self):
        # Gathers and reductions of about a layer's compute time: those that begin together would keep in step.
        about = {"bytes": (64 * MEGABYTE,) * 12, "network": networks.nvlink(8), "world": 8, "reduce_buffers": 2,
                 "separate": True}
        for forward_us, prefetch in ((159.372, 1), (50.0, 1), (99.607, 2), (2000.0, 1)):
            result = self.simulate(**about, forward_us=(forward_us,) * 12, prefetch=prefetch)
            self.assertLessEqual(result.total_us, result.by_size_us)
            self.assertLess(result.over_bound, 0.05)
            if forward_us == 159.372:
                self.assertEqual(result.start, "first_after_all_gather")
                self.assertGreater(result.by_size_us, 1.05 * result.bound_us)
                self.assertLess(result.over_bound, 0.001)
        self.assertEqual(self.simulate(**{**about, "separate": False}, forward_us=(50.0,) * 12).start, "by_size")

    def test_within_a_budget_a_measurement_takes_the_distance_that_is_fastest(self):
        # Layers of half and of one and a half times the mean; and equal ones, where it is the other way round.
        alternating = Stack(forward_us=(100.0, 300.0) * 6, bytes=(32 * MEGABYTE, 96 * MEGABYTE) * 6,
                            network=networks.nvlink(8), world=8, separate=True, budget=400 * MEGABYTE)
        equal = Stack(forward_us=(202.657,) * 12, bytes=(64 * MEGABYTE,) * 12, network=networks.nvlink(64), world=64,
                      separate=True, budget=256 * MEGABYTE)
        for made, best in ((alternating, 2), (equal, 1)):
            stacks = [replace(made, prefetch=distance, reduce_buffers=distance + 1) for distance in (1, 2)]
            alone = {one.prefetch: stack.simulate(self.worker, one) for one in stacks}
            result = stack.simulate(self.worker, *stacks)
            self.assertEqual({distance: one.total_us for distance, one in result.by_prefetch.items()},
                             {distance: one.total_us for distance, one in alone.items()})
            self.assertEqual(result.prefetch, best)
            self.assertEqual(result.total_us, alone[best].total_us)
            self.assertEqual(result.bound_us, alone[3 - best].bound_us)

    def test_the_real_clock_takes_as_long_as_the_virtual_one_says_and_hardly_longer(self):
        about = {"forward_us": (20000.0,) * 3, "bytes": (64 * MEGABYTE,) * 3, "network": networks.nvlink(8), "world": 8}
        expected, measured = self.simulate(**about), self.simulate(**about, clock="real")
        self.assertGreaterEqual(measured.total_us, expected.total_us - 1)
        self.assertLess(measured.total_us, 3 * expected.total_us)  # on a busy machine

    def test_the_trace_holds_what_computes_and_what_travels(self):
        result = self.simulate(forward_us=(10.0,) * 3, bytes=(MEGABYTE,) * 3, network=networks.nvlink(8), world=8)
        events = json.loads(stack.chrome_trace(result.step, "three layers"))["traceEvents"]
        slices = [event for event in events if event["ph"] == "X"]
        self.assertEqual(len(slices), 6 + len(result.step["transfers"]))
        self.assertEqual({event["tid"] for event in slices}, {0, 1, 2})  # compute, gathers, reductions
        self.assertAlmostEqual(max(event["ts"] + event["dur"] for event in slices), result.total_us, places=3)


class QuickRuns(unittest.TestCase):
    def options(self, name, *arguments):
        parser = argparse.ArgumentParser()
        harness.add_common_options(parser)
        return vars(harness.parse(parser, importlib.import_module(name), arguments))

    def test_quick_changes_defaults_alone(self):
        self.assertEqual((self.options("memory")["blocks"], self.options("memory")["ranks"]), (8, 4))
        quick = self.options("memory", "--quick", "--ranks", "3")
        self.assertEqual((quick["blocks"], quick["ranks"]), (2, 3))

    def test_what_quick_changes_are_options(self):
        for name in run.BENCHMARKS:
            self.assertEqual(set(self.options(name, "--quick")), set(self.options(name)), name)


class Programs(unittest.TestCase):
    def test_all_gather_overlap_prints_a_line_a_point_draws_them_and_writes_a_trace(self):
        with tempfile.TemporaryDirectory() as folder:
            plot, trace = Path(folder) / "plot.png", Path(folder) / "trace.json"
            lines = lines_of(self, "all_gather_overlap", "--quick", "--plot", str(plot), "--trace", str(trace))
            self.assertEqual(plot.read_bytes()[:4], b"\x89PNG")
            self.assertIn("traceEvents", json.loads(trace.read_text()))
        self.assertEqual(len(lines), 2 * 3 * (1 + 2 * 3))  # networks, ratios, the defaults, queues, memories
        self.assertEqual({(line["network"], line["world"]) for line in lines}, {("nvlink", 8), ("infiniband", 16)})
        for line in lines:
            self.assertEqual(list(line)[:7], ["network", "world", "total_us", "compute_us", "communication_us",
                                              "exposed_us", "bound_us"])
            self.assertAlmostEqual(line["exposed_us"], line["total_us"] - line["compute_us"], places=2)
            self.assertGreaterEqual(line["total_us"], line["bound_us"] - 0.01)
            self.assertLess(line["over_bound_percent"], 5, line)
            self.assertGreater(line["fsdp2_exposed_us"], 0)
            self.assertGreater(line["ddp_exposed_us"], 0)
            self.assertLessEqual(line["floor_us"], line["bound_us"] + 0.01)
            if "defaults" in line:
                self.assertAlmostEqual(line["host_clock_us"], line["total_us"], delta=0.1)
                continue
            distances = line["by_prefetch_us"]
            self.assertEqual(len(distances), 2 if "budget_layers" in line else 1)
            self.assertEqual(line["total_us"], min(distances.values()))
            self.assertEqual(distances[str(line["prefetch"])], line["total_us"])

    def test_where_layers_differ_and_latency_counts_steps_are_within_5_percent_of_their_bound(self):
        # Of the whole sweep the ratios that are the worst.
        sweeps = [("nvlink", "64", "2")]
        if launch.is_thorough():
            sweeps = [("infiniband", "16,128", "1.25,2"), ("nvlink", "64", "1.5,2")]
        for network, worlds, ratios in sweeps:
            lines = lines_of(self, "all_gather_overlap", "--network", network, "--worlds", worlds, "--ratios", ratios,
                             "--shapes", "equal,alternating,large-first")
            # Worlds, ratios, shapes; the defaults, queues, memories.
            self.assertEqual(len(lines), len(worlds.split(",")) * len(ratios.split(",")) * 3 * (1 + 2 * 3))
            for line in lines:
                if "defaults" in line:
                    continue
                self.assertGreaterEqual(line["total_us"], line["bound_us"] - 0.01)
                self.assertLess(line["over_bound_percent"], 5, line)

    def test_bad_options_are_refused_by_name_before_anything_runs(self):
        overlap, scale = ["all_gather_overlap"], ["scale"]
        for command, option, value, why in (
                (overlap, "--ratios", "0", "numbers above 0"), (overlap, "--ratios", "nan", "numbers above 0"),
                (overlap, "--megabytes", "-1", "numbers above 0"), (overlap, "--layers", "0", "1 or more"),
                (overlap, "--worlds", "8,1", "2 or more"), (overlap, "--budgets", "0", "1 or more"),
                (overlap, "--prefetch", "one", "0 or more"), (overlap, "--shapes", "equal,foo", "some of equal, alternating"),
                (overlap, "--plot", "/no/such/plot.png", "no folder"), (overlap, "--plot", "plot.foo", "ends in .png"),
                (overlap, "--trace", "/", "a folder"), (overlap, "--preset", "nvlink", "not for"),
                (overlap, "--repeats", "5", "not for"),
                (overlap, "--rates", "1gbit", "not for"), ([*overlap, "--network", "cluster"], "--rates", "fast", "1gbit"),
                ([*overlap, "--network", "cluster"], "--budgets", "4", "not for"),
                (["gather_bandwidth"], "--dims", "x", "1 or more"),
                (["checkpoint"], "--folder", "/no/such", "no folder"), (["memory"], "--prefetch", "x", "0 or more"),
                ([*overlap, "--network", "gloo"], "--shapes", "equal", "not for"), (scale, "--achieved", "2", "1 at most"),
                (scale, "--models", "9B", "some of 7B"), (scale, "--worlds", "12", "whole nodes"),
                (scale, "--budget-gb", "0.1", "0.4 or more"), (["cuda_step"], "--steps", "0", "1 or more")):
            with self.subTest(option=option, value=value):
                code, said = refusal(*command, "--quick", f"{option}={value}")
                self.assertNotEqual(code, 0)
                self.assertIn(option, said)
                self.assertIn(why, said)

    def test_each_program_tells_its_options_and_the_version(self):
        for name in ("fsdp_bench_overlap", "fsdp_bench_cuda_step"):
            for options, expected in ((("-h", "--help"), "--version"), (("--version",), r"^libfsdp \d+\.\d+\.\d+\n$")):
                for option in options:
                    with self.subTest(program=name, option=option):
                        told = launch.run([launch.BUILD / "bench" / name, option])
                        self.assertEqual((told.returncode, told.stderr), (0, ""))
                        self.assertRegex(told.stdout, expected)

    @unittest.skipIf(torch.cuda.is_available(), "there is a CUDA device")
    def test_cuda_step_says_that_it_needs_a_device(self):
        code, said = refusal("cuda_step", "--quick")
        self.assertEqual(code, 1)
        self.assertIn("needs a CUDA device", said)

    def test_over_a_cluster_each_step_stands_beside_what_the_simulator_says(self):
        cluster_case.skip_if_refused()
        lines = lines_of(self, "all_gather_overlap", "--quick", "--network", "cluster", "--rates", "200mbit")
        self.assertEqual([line["impl"] for line in lines], ["fsdp", "fsdp2", "ddp"])
        for line in lines:
            self.assertEqual((line["rate"], line["world"]), ("200mbit", 2))
            self.assertGreaterEqual(line["total_us"], line["compute_us"])
            self.assertGreater(line["predicted_us"], line["compute_us"])
            self.assertGreater(line["raw_percent_of_rate"], 10)
        ours, fsdp2, _ = lines
        self.assertLess(ours["predicted_us"], fsdp2["predicted_us"])  # which has no streams on a CPU

    def test_over_gloo_fsdp2_stands_beside_it(self):
        lines = lines_of(self, "all_gather_overlap", "--quick", "--network", "gloo", "--ratios", "1")
        self.assertEqual([line["impl"] for line in lines], ["fsdp", "fsdp2"])
        for line in lines:
            self.assertGreaterEqual(line["total_us"], line["compute_us"])
            self.assertGreaterEqual(line["total_us"], line["host_us"] - 1)
            if line["peak_live_bytes"] is not None:  # FSDP2's is counted where the benchmarks' extension is built
                self.assertGreater(line["peak_live_bytes"], line["bound_memory_bytes"])
            self.assertTrue(line["peak_live_bytes"] is not None or line["impl"] == "fsdp2")

    @unittest.skipIf(torch.cuda.is_available(), "there is a CUDA device")
    def test_nccl_and_a_stream_say_that_they_need_a_device(self):
        for network in ("nccl", "stream"):
            code, said = refusal("all_gather_overlap", "--network", network)
            self.assertEqual(code, 1)
            self.assertIn("needs a CUDA device", said)

    def test_over_a_stream_it_prints_the_same_line_and_how_the_steps_spread(self):
        lines = lines_of(self, "all_gather_overlap", "--quick", "--network", "stream", "--device", "cpu", "--megabytes",
                         "0.125")
        self.assertEqual(len(lines), 3 * 3)  # memories, ratios
        simulated = lines_of(self, "all_gather_overlap", "--quick", "--network", "nvlink", "--no-separate-reductions",
                             "--megabytes", "0.125")
        # Beside a stream there are neither FSDP2 and DDP nor the lines that compare with them.
        simulated = [{name: value for name, value in line.items() if not name.startswith(("fsdp2_", "ddp_"))}
                     for line in simulated if "defaults" not in line]
        for line, other in zip(lines, simulated, strict=True):
            self.assertEqual(list(line)[:len(other)], list(other))
            for name in ("network", "world", "compute_us", "communication_us", "bound_us", "floor_us", "memory_bytes"):
                self.assertEqual(line[name], other[name], name)
            self.assertEqual(line["median_us"], round(line["total_us"], 4))
            self.assertEqual(line["stream"], "cpu")

    def test_a_stream_is_refused_two_queues_and_a_trace(self):
        for option, reason in ((["--separate-reductions"], "has one queue"), (["--trace", "x"], "knows no moments")):
            code, said = refusal("all_gather_overlap", "--network", "stream", "--device", "cpu", *option)
            self.assertEqual(code, 1)
            self.assertIn(reason, said)

    def test_scale_predicts_time_and_memory(self):
        all_lines = lines_of(self, "scale", "--quick")
        lines = {(line["world"], line["scheme"]): line for line in all_lines if "scheme" in line}
        self.assertEqual(set(lines), {(8, "fsdp"), (8, "flat"), (8, "budget"), (8, "fsdp2"), (64, "fsdp"), (64, "flat"),
                                      (64, "hsdp"), (64, "node"), (64, "budget"), (64, "fsdp2")})
        model = llamas.LLAMAS["7B"]
        for line in lines.values():
            self.assertGreaterEqual(line["exposed_ms"], 0)
            self.assertTrue(line["fits"])
            self.assertEqual(line["global_tokens"], line["world"] * 2 * 4096)
        for world in (8, 64):
            ours, theirs = lines[world, "fsdp"], lines[world, "fsdp2"]
            self.assertLessEqual(ours["exposed_ms"], theirs["exposed_ms"] + 0.01)
            # It gathers the head twice. As many rows are shared and padded on both sides.
            self.assertAlmostEqual(theirs["gathered_gb"], ours["gathered_gb"] + 2 * 32000 * 4096 / 1e9, delta=0.1)
            self.assertAlmostEqual(theirs["memory_gb"], ours["memory_gb"], delta=0.3)
        published = [line for line in all_lines if "comparison" in line]
        self.assertEqual(len(published), 2)
        for line in published:
            self.assertLess(abs(line["error_percent"]), 10, line)
        # Everything but the head twice, in bfloat16; with room for all of it once.
        once = 2 * model.parameters / 1e9
        self.assertAlmostEqual(lines[8, "fsdp"]["gathered_gb"], 2 * once - 2 * 32000 * 4096 / 1e9, delta=0.1)
        self.assertAlmostEqual(lines[8, "budget"]["gathered_gb"], once, delta=0.1)
        self.assertAlmostEqual(lines[8, "budget"]["unsharded_gb"], once, delta=0.1)
        self.assertLess(lines[64, "fsdp"]["memory_gb"], lines[8, "fsdp"]["memory_gb"])
        # Eight ranks' shards, whatever the number of replicas.
        self.assertAlmostEqual(lines[64, "hsdp"]["memory_gb"], lines[8, "fsdp"]["memory_gb"], delta=0.2)

    def test_scale_predicts_the_largest_world_where_most_of_what_fsdp_gathers_is_padding(self):
        lines = {line.get("scheme"): line for line in lines_of(
            self, "scale", "--models", "7B", "--worlds", "16384", "--schemes", "fsdp,flat,hsdp,node,budget")}
        self.assertEqual(set(lines) - {None}, {"fsdp", "flat", "hsdp", "node", "budget"})
        # Parameters of 4,096 or 11,008 rows and a vocabulary of 32,000 over 16,384 ranks, a row or two each.
        model = llamas.LLAMAS["7B"]
        layer = sum(columns for _, columns in model.layer_shapes())
        padded = 2 * 16384 * (2 * model.layers * layer + 3 * 2 * model.hidden) / 1e9  # all but the head twice
        self.assertAlmostEqual(lines["fsdp"]["gathered_gb"], padded, delta=0.1)
        # A group of eight gathers what it would alone, and no padding.
        self.assertAlmostEqual(lines["hsdp"]["gathered_gb"], 26.7, delta=0.1)
        # Nor does the flat layout, but for pieces of 16 bytes, each of which stands for 32 here.
        self.assertAlmostEqual(lines["flat"]["gathered_gb"], 26.7, delta=0.5)
        self.assertLess(lines["flat"]["step_ms"], lines["fsdp"]["step_ms"])
        self.assertLess(lines["hsdp"]["step_ms"], lines["fsdp"]["step_ms"] / 3)

    def test_the_share_that_gives_a_published_figure(self):
        for share in (0.1, 0.348, 0.9):
            found = published.share_that_gives(100 / (1 / share + 3), lambda tried: 100 / (1 / tried + 3))
            self.assertAlmostEqual(found, share, delta=1e-3)
        with self.assertRaisesRegex(ValueError, "the peak allows, found 30"):
            published.share_that_gives(30, lambda tried: 100 / (1 / tried + 3))

    def test_scale_refuses_half_a_node(self):
        code, said = refusal("scale", "--worlds", "12")
        self.assertNotEqual(code, 0)
        self.assertIn("whole nodes of 8 GPUs, found 12", said)


class StandIns(unittest.TestCase):
    def test_models_have_the_parameters_that_they_are_named_for(self):
        for name, billions in (("7B", 6.7), ("70B", 70.5), ("405B", 405.8)):
            self.assertAlmostEqual(llamas.LLAMAS[name].parameters / 1e9, billions, delta=0.1)

    def test_columns_are_divided_without_a_rest_and_pieces_stay_aligned(self):
        for model in llamas.LLAMAS.values():
            factor = model.stand_in_factor()
            self.assertGreater(factor, 1)
            narrow = llamas.narrowed(model.layer_shapes(), factor)
            self.assertEqual(llamas.elements(narrow) * factor, llamas.elements(model.layer_shapes()))
            for _, columns in narrow:
                self.assertEqual(columns * llamas.BF16_BYTES % llamas.PIECE_BYTES, 0)


if __name__ == "__main__":
    closing_line.main()
