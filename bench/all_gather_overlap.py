"""How much communication hides behind compute, beside the least time that any schedule needs.

A stack of layers, each with its own compute time and bytes, runs a forward and a backward with the real scheduler.
Every line tells the step's time, the time of computing, of the collectives (each with the network to itself) and of
that what is exposed, and the bound: no schedule without a clock is shorter within the same memory, and with one queue
none with a clock either (bench/overlap_bound.py). The memory is the byte budget; without one it is the most unsharded
bytes that the step had, and the bound gathers again what the layers' default, to be released after forward, has it
release.

--network nvlink, infiniband: simulated (bench/networks.py), on a virtual clock that host work does not move: what is
  seen is the schedule alone. With --clock real the same in the machine's time, where compute spins.
--network gloo: that many processes on this machine, with FSDP2 beside it in turns. Compute spins rather than
  multiplies matrices, so that gloo's own use of the cores and memory does not change its time; the bound comes from
  raw collectives that are timed alone, and is an estimate.
--network nccl: the same over the library's own NCCL communicator, and c10d's for FSDP2: a GPU for each rank, or two ranks
  on one (bench/overlap_processes.py). It has not been run on a GPU yet.

--network stream: simulated too, but with the time of one GPU: its collectives keep a stream of their own busy for as
  long as they take on the network of --preset, and copy this rank's own part, while layers keep the current stream
  busy (bench/stream_link.hpp). Kernels, copies and launches are real, transfers are not: other ranks' parts are
  whatever the memory held. Tensors have their whole size. FSDP2 is not beside it: torch's fake process group
  takes no time. It has one queue; two would share the bandwidth, which streams cannot. It has not been run on a GPU
  yet. With --device cpu the host does all of it, one thing after another: that shows the program, and no overlap.

Options that a network does not take are refused. Over processes all layers are alike, in one queue: no --shapes,
--separate-reductions, --reduce-buffers, --clock, --trace or --plot. --preset and --device are for a stream alone, and
--repeats for what the machine's clock times.

--separate-reductions gives reductions a communicator of their own (FSDPModule::set_separate_reduce_scatter_group). On a
simulated network that is a queue of its own, which shares the bandwidth: two that had all of it each would be
two networks. In one queue a gather waits for the reductions launched before it. Both are shown: where compute is
short beside a reduction the second is faster, else they are alike. What reductions wait for is then chosen by measuring
(FSDPModule::choose_reduce_scatter_start): `start` names it, and by_size_us is the least time with the default. With two
queues floor_us is what no schedule with a clock undercuts either: one that shifts equal collectives of both queues against
each other comes near it, as then the one sends while the other's latency passes.

A byte budget says how much may be unsharded, whatever the prefetch distance, so its line is that of the best distance of
--prefetch, as one would measure and keep it; by_prefetch_us has all of them. Gradients that wait to be reduced come beside
it, with a distance more a buffer more: peak_live_bytes counts them too.

Reductions get one buffer more than groups are gathered ahead. With the library's default of one the backward of a layer
waits for the reduction of the layer before the last, whatever their order; and what is held back keeps its buffer.
"""

import argparse
from dataclasses import replace

import arguments
import conductor
import harness
import networks
import stack

MEGABYTE = 1 << 20
WORLDS = {"nvlink": [8, 64], "infiniband": [16, 128, 1024]}
RATIOS = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0]  # of communication to compute
SHAPES = ("equal", "alternating", "large-first")
PROCESSES = ("gloo", "nccl")
QUICK = {}  # settle: they depend on the network
NOT_TAKEN = {"processes": ("preset", "device", "shapes", "reduce_buffers", "clock", "trace", "plot"),
             "stream": ("clock",),
             "simulated": ("preset", "device")}


def add_options(parser):
    parser.add_argument("--network", choices=(*networks.PRESETS, "stream", *PROCESSES),
                        help="default: nvlink and infiniband")
    parser.add_argument("--preset", choices=(*networks.PRESETS,), help="what --network stream simulates (default nvlink)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="of --network stream (default cuda)")
    parser.add_argument("--worlds", type=arguments.wholes(2),
                        help="ranks; default 8,64 and 16,128,1024, for gloo 2, for a stream the first")
    parser.add_argument("--layers", type=arguments.whole(1), help="default 12")
    parser.add_argument("--megabytes", type=arguments.positives, help="of parameters a layer; default 64, for gloo 4")
    parser.add_argument("--ratios", type=arguments.positives,
                        help="of communication to compute, which sets the layers' compute time; of a step that gathers all "
                             "but the last layer twice (default 1/4 to 4)")
    parser.add_argument("--prefetch", type=arguments.wholes(0),
                        help="distances (default 1,2, for gloo and NCCL 1); of a budget each is tried, and the faster shown "
                             "(for gloo and NCCL each)")
    parser.add_argument("--budgets", type=arguments.wholes(1),
                        help="byte budgets, in layers (default 4, for gloo and NCCL none)")
    parser.add_argument("--shapes", type=arguments.names(SHAPES),
                        help=f"of bytes and times over the layers (default {','.join(SHAPES)})")
    parser.add_argument("--separate-reductions", action=argparse.BooleanOptionalAction,
                        help="default: without, then with")
    parser.add_argument("--reduce-buffers", type=arguments.whole(1),
                        help="set_reduce_scatter_max_input_buffers; default: one more than groups are gathered ahead")
    parser.add_argument("--clock", choices=("virtual", "real"), help="default virtual")
    parser.add_argument("--repeats", type=arguments.whole(1), help="steps where the machine's time counts (default 10)")
    parser.add_argument("--trace", type=arguments.new_file(),
                        help="write the last step's timeline here, in the Chrome trace format")
    parser.add_argument("--plot", type=arguments.new_file(".png"),
                        help="draw exposed communication over the ratio here (PNG)")


def option(name):
    return "--" + name.replace("_", "-")


def settle(options):
    """Fills in what was not asked for; refuses what this network does not take."""
    kind = {"stream": "stream", "gloo": "processes", "nccl": "processes"}.get(options.network, "simulated")
    refused = [name for name in NOT_TAKEN[kind] if getattr(options, name) is not None]
    if kind == "processes" and options.separate_reductions:
        refused.append("separate_reductions")
    if kind == "simulated" and options.clock != "real" and options.repeats is not None:
        refused.append("repeats")  # every step is as the first
    if refused:
        raise SystemExit(f"all_gather_overlap: {', '.join(option(name) for name in refused)}: not for --network "
                         f"{options.network or 'nvlink'}; leave it out")
    if options.plot:
        import overlap_plot  # noqa: F401  what it needs is found missing now
    quick = {"layers": 4 if kind == "processes" else 12, "ratios": [0.5, 1.0, 2.0], "shapes": ["equal"], "repeats": 2}
    default = {"preset": "nvlink", "device": "cuda", "layers": 12, "ratios": RATIOS, "shapes": list(SHAPES), "repeats": 10,
               "prefetch": [1] if kind == "processes" else [1, 2], "budgets": [] if kind == "processes" else [4],
               "clock": "virtual", **(quick if options.quick else {})}
    for name, value in default.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def weights(shape, layers):
    """How large each layer is beside the mean one (of more than 3 layers)."""
    if shape == "equal":
        return [1.0] * layers
    if shape == "alternating":  # mixture-of-experts layers between dense ones
        return [(0.5, 1.5)[i % 2] for i in range(layers)]
    rest = (layers - 3) / (layers - 1) if layers > 3 else 1.0
    return [3.0] + [rest] * (layers - 1)  # an embedding first


def communication_us(network, layers, size):
    """Of a step that gathers all but the last layer twice, as most do."""
    one = network.latency_of_us() + network.sending_us(size)
    return (3 * layers - 1) * one


def make_stacks(network, options, case):
    """case: shape, size in bytes, ratio, and fields of Stack. One stack for each distance that is to be tried."""
    case = dict(case)
    shape, size, ratio = (case.pop(key) for key in ("shape", "size", "ratio"))
    shares = weights(shape, options.layers)
    compute = communication_us(network, options.layers, size) / ratio
    # Time goes with bytes, but for an embedding, which computes next to nothing.
    times = [0.05] + [1.0] * (options.layers - 1) if shape == "large-first" else shares
    forward = [compute / 3 * share / sum(times) for share in times]
    distances = [case.pop("prefetch")] if "prefetch" in case else options.prefetch
    budget = case.pop("budget_layers", None)
    in_stream = options.network == "stream"
    made = stack.Stack(forward_us=tuple(round(us, 3) for us in forward), bytes=tuple(int(size * w) for w in shares),
                       world=network.world, network=network, stream=options.device if in_stream else None,
                       clock=options.clock, **case)
    if budget:
        made = replace(made, budget=budget * max(made.layer_bytes(i) for i in range(options.layers)))
    return [replace(made, prefetch=distance, reduce_buffers=options.reduce_buffers or distance + 1)
            for distance in distances]


def cases(options):
    """Every case of the sweep but its ratio."""
    in_stream = options.network == "stream"
    sizes = [int(size * MEGABYTE) for size in options.megabytes or [64]]
    separations = [options.separate_reductions]
    if options.separate_reductions is None:
        separations = [False] if in_stream else [False, True]
    memories = [{"prefetch": distance} for distance in options.prefetch]
    memories += [{"budget_layers": layers} for layers in options.budgets]
    chosen = options.preset if in_stream else options.network
    for name in [chosen] if chosen else ["nvlink", "infiniband"]:
        few = options.quick or in_stream
        for world in options.worlds or (WORLDS[name][:1] if few else WORLDS[name]):
            for size in sizes:
                for shape in options.shapes:
                    for separate in separations:
                        for memory in memories:
                            yield name, world, {"shape": shape, "size": size, "separate": separate, **memory}


def describe(case):
    memory = f"budget {case['budget_layers']} layers" if "budget_layers" in case else f"prefetch {case['prefetch']}"
    return f"{case['shape']}, {memory}, {'two queues' if case['separate'] else 'one queue'}"


def check_stream(options):
    if options.separate_reductions:
        raise SystemExit("all_gather_overlap: --network stream has one queue: two would share the bandwidth, and streams "
                         "cannot; leave out --separate-reductions, or take --network nvlink")
    if options.trace:
        raise SystemExit("all_gather_overlap: --network stream knows no moments to --trace; take a "
                         "profiler")
    options.clock = "virtual" if options.device == "cpu" else "real"  # a GPU's time is no other
    if options.device == "cpu":
        return
    if not harness.has_gpu():
        raise SystemExit("all_gather_overlap: --network stream needs a CUDA device, found none; --device cpu shows the "
                         "program without overlap, and simulated networks run anywhere")


def run_simulated(options, report):
    in_stream = options.network == "stream"
    if in_stream:
        check_stream(options)
    steps = options.repeats if in_stream or options.clock == "real" else 1
    report.setting(layers=options.layers, ratios=list(options.ratios),
                   clock=options.clock, dtype="float32", backward="twice the forward",
                   warm_up_steps=3, repeats=steps,
                   device=f"{options.device}, a simulated network in a stream" if in_stream else "simulated network")
    if in_stream:
        report.note("  FSDP2 is not beside it: torch's fake process group takes no time")
    rows, points, last = [], [], None
    with conductor.Workers() as workers:
        worker = workers.start("overlap", conductor.overlap_command(harness.build_dir()))
        for name, world, case in cases(options):
            network = networks.PRESETS[name](world)
            worst = None
            for ratio in options.ratios:
                stacks = make_stacks(network, options, {**case, "ratio": ratio})
                result = last = stack.simulate(worker, *stacks, steps=steps)
                spread = {"stream": options.device, **harness.spread(result.totals_us, "us")} if in_stream else {}
                report.case(network=name, world=world, **{**result.line(), "ratio": ratio, **case},
                            is_reachable=result.is_reachable, **spread)
                points.append((name, world, case, ratio, result))
                if worst is None or result.over_bound > worst[1].over_bound:
                    worst = (ratio, result)
            ratio, result = worst
            rows.append([name, world, case["size"] // MEGABYTE, describe(case), ratio, result.total_us,
                         result.bound_us, f"{100 * result.over_bound:.2f}", f"{result.overlap_percent:.1f}"])
    report.note("\nthe worst ratio of each case: microseconds, and percent over the bound and of the possible overlap")
    report.table(["network", "world", "MiB", "case", "ratio", "total", "bound", "over", "overlap"], rows)
    over = [point for point in points if point[4].over_bound > 0.05]
    report.note(f"\n{len(points)} points, {len(over)} of them more than 5% over the bound")
    if options.trace and last:
        options.trace.write_text(stack.chrome_trace(last.step, "all_gather_overlap"))
    if options.plot:
        import overlap_plot

        overlap_plot.draw(points, options.plot)


def run(options, report):
    settle(options)
    if options.network in PROCESSES:
        harness.build(options, [harness.OVERLAP_PROGRAM, *filter(harness.has_target, [harness.EXTENSION])])
        import overlap_processes

        return overlap_processes.run(options, report)
    harness.build(options, [harness.OVERLAP_PROGRAM])
    return run_simulated(options, report)
