"""How much communication hides behind compute, beside the least time that any schedule needs.

A stack of layers, each with its own compute time and bytes, runs a forward and a backward with the real scheduler.
Every line tells the step's time, the time of computing, of the collectives (each with the network to itself) and of
that what is exposed, and the bound: no schedule without a clock is shorter within the same memory, and with one queue
none with a clock either (bench/overlap_bound.py). The memory is the byte budget; without one it is the most unsharded
bytes that the step had, and the bound gathers again what the layers' default, to be released after forward, has it
release.

--network nvlink, infiniband: simulated (bench/networks.py), on a virtual clock that host work does not move: what is
  seen is the schedule alone. Beside the library stand FSDP2 and DDP, with their own schedulers on a device that exists only
  in time (bench/overlap_schedulers.py). The lines `defaults` are those to compare: nobody has set anything there. They tell
  at how many points the library's exposed communication is within 10% of the bound's, and at how many it is at most
  FSDP2's. Its step is that of its Python package on the same device; `host_clock_us` is the core's, where the host itself
  computes and waits. DDP keeps all parameters, so the bound and the memory are not its own. With --clock real the library
  alone, in the machine's time, where compute spins.
--network gloo: that many processes on this machine, with FSDP2 beside it in turns. Compute spins rather than
  multiplies matrices, so that gloo's own use of the cores and memory does not change its time; the bound comes from
  raw collectives that are timed alone, and is an estimate.
--network nccl: the same over the library's own NCCL communicator, and c10d's for FSDP2: a GPU for each rank, or two ranks
  on one (bench/overlap_processes.py). It has not been run on a GPU yet.

--network cluster: the library, FSDP2 and DDP over real TCP between network namespaces with a rate each, beside what the
  simulator says for the same (bench/overlap_cluster.py). Needs root.

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

import arguments
import harness
import networks
import overlap_simulated

RATIOS = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0]  # of communication to compute
PROCESSES = ("gloo", "nccl")
QUICK = {}  # see QUICK_ON: they depend on the network
NOT_TAKEN = {"processes": ("preset", "device", "shapes", "reduce_buffers", "clock", "trace", "plot", "rates"),
             "cluster": ("preset", "device", "shapes", "reduce_buffers", "clock", "trace", "plot", "prefetch", "budgets"),
             "stream": ("clock", "rates"),
             "simulated": ("preset", "device", "rates")}
# Where they differ from those of simulated networks.
DEFAULTS = {"processes": {"prefetch": [1], "budgets": []},
            "cluster": {"layers": 4, "ratios": [0.5, 1.0, 2.0], "worlds": [2, 4, 8], "rates": ["100mbit", "1gbit", "10gbit"],
                        "repeats": 5}}
QUICK_ON = {"processes": {"layers": 4},
            "cluster": {"layers": 3, "ratios": [1.0], "worlds": [2], "rates": ["1gbit"]}}


def add_options(parser):
    parser.add_argument("--network", choices=(*networks.PRESETS, "stream", *PROCESSES, "cluster"),
                        help="default: nvlink and infiniband")
    parser.add_argument("--preset", choices=(*networks.PRESETS,), help="what --network stream simulates (default nvlink)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="of --network stream (default cuda)")
    parser.add_argument("--rates", type=arguments.rates,
                        help="of a cluster's links (default 100mbit,1gbit,10gbit)")
    parser.add_argument("--worlds", type=arguments.wholes(2),
                        help="ranks; default 8,64 and 16,128,1024, for gloo 2, for a stream the first, for a cluster 2,4,8")
    parser.add_argument("--layers", type=arguments.whole(1), help="default 12, for a cluster 4")
    parser.add_argument("--megabytes", type=arguments.positives,
                        help="of parameters a layer; default 64, for gloo 4, for a cluster what its link carries in 40 ms, at "
                             "most 16")
    parser.add_argument("--ratios", type=arguments.positives,
                        help="of communication to compute, which sets the layers' compute time; of a step that gathers all "
                             "but the last layer twice (default 1/4 to 4)")
    parser.add_argument("--prefetch", type=arguments.wholes(0),
                        help="distances (default 1,2, for gloo and NCCL 1); of a budget each is tried, and the faster shown "
                             "(for gloo and NCCL each)")
    parser.add_argument("--budgets", type=arguments.wholes(1),
                        help="byte budgets, in layers (default 4, for gloo and NCCL none)")
    parser.add_argument("--shapes", type=arguments.names(overlap_simulated.SHAPES),
                        help=f"of bytes and times over the layers (default {','.join(overlap_simulated.SHAPES)})")
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
    kind = {"stream": "stream", "cluster": "cluster", "gloo": "processes", "nccl": "processes"}.get(options.network,
                                                                                                    "simulated")
    refused = [name for name in NOT_TAKEN[kind] if getattr(options, name) is not None]
    if kind in ("processes", "cluster") and options.separate_reductions:
        refused.append("separate_reductions")
    if kind == "simulated" and options.clock != "real" and options.repeats is not None:
        refused.append("repeats")  # every step is as the first
    if refused:
        raise SystemExit(f"all_gather_overlap: {', '.join(option(name) for name in refused)}: not for --network "
                         f"{options.network or 'nvlink'}; leave it out")
    if options.plot:
        import overlap_plot  # noqa: F401  what it needs is found missing now
    quick = {"layers": 12, "ratios": [0.5, 1.0, 2.0], "shapes": ["equal"], "repeats": 2, **QUICK_ON.get(kind, {})}
    default = {"preset": "nvlink", "device": "cuda", "layers": 12, "ratios": RATIOS, "shapes": list(overlap_simulated.SHAPES),
               "repeats": 10, "prefetch": [1, 2], "budgets": [4], "clock": "virtual", **DEFAULTS.get(kind, {}),
               **(quick if options.quick else {})}
    for name, value in default.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def run(options, report):
    settle(options)
    if options.network in PROCESSES:
        harness.build(options, [harness.OVERLAP_PROGRAM, *filter(harness.has_target, [harness.EXTENSION])])
        import overlap_processes

        return overlap_processes.run(options, report)
    if options.network == "cluster":
        harness.build(options, [harness.OVERLAP_PROGRAM, harness.SIMULATED_DEVICE, *harness.PACKAGE])
        import overlap_cluster

        return overlap_cluster.run(options, report)
    others = [harness.SIMULATED_DEVICE, *harness.PACKAGE] if overlap_simulated.has_others(options) else []
    harness.build(options, [harness.OVERLAP_PROGRAM, *others])
    overlap_simulated.run(options, report)
