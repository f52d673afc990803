"""What tools/gpu_check runs with --more alone: parts that do not fit into the quarter of an hour of its two commands, and those
that need several GPUs. All are in the record `more`.
"""

import figures
import pack
from makers import PACKAGE_IS_THERE, chosen, gpu, native, python_cases, ranks_of, script, under_sanitizer
from parts import Part
from plan import ELSEWHERE, TRAINS

STAGE = "more"
NAMES = ("build", "cases", "steps", "overlap", "symmetric", "sanitizer", "gpus")


def stages(options):
    """{name: parts}"""
    makers = (build, cases, figures.parts, overlap, symmetric, sanitizer, several_gpus)
    return {name: make(options) for name, make in zip(NAMES, makers)}


def build(options):
    """Where the packed binaries do not fit, or Python is another one."""
    def part(name, what, limit_s, *targets):
        command = script("tools/gpu/build.py", what, pack.ROOT, options.build, options.headers, options.jobs or 0, *targets)
        return Part(name, command, limit_s, needs=("torch", "compiler", "unfit"),
                    shows="it builds against this torch, without a network")

    alone = Part("extension", script("tools/gpu/extension.py", options.opened), 300,
                 needs=("torch", "compiler", "no_extension"), shows="the extension compiles for this Python, without a network")
    return [alone, part("configure", "configure", 120),
            part("programs", "build", 480, pack.PACKAGE, *pack.PROGRAMS, *pack.OF_MORE)]


def cases(options):
    return [
        native(options, "failures", 2, 120, "[failures]", shows="timeouts, aborts and ranks that die, over real NCCL"),
        native(options, "checkpoint", 2, 60, "[checkpoint]", shows="a checkpoint of shards is read by replicas"),
        native(options, "offload", 1, 60, "[offload]", shows="offloaded training from C++ is right"),
        native(options, "runtime", 2, 240, "--program", pack.RUNTIME, "--together", needs=(f"built:{pack.RUNTIME}",),
               shows="the runtime's own C++ tests with CUDA tensors, on worlds of two processes"),
        python_cases(options, "gloo", 240, "gloo", *ELSEWHERE, shows=f"{TRAINS}, CUDA tensors over a user's gloo group"),
        python_cases(options, "nccl", 240, "gloo" if options.device == "cpu" else "nccl", *ELSEWHERE,
                     shows=f"{TRAINS}, two ranks over torch's groups: all cases"),
        python_cases(options, "waits_nccl", 40, "nccl", *chosen("host_goes_on", "no_synchronization"),
                     shows="no step of two ranks waits for the device"),
    ]


def overlap(options):
    device = () if options.device == "cuda" else ("--device", "cpu")
    few = ("--quick",) if options.device == "cpu" else ("--ratios", "0.5,1,2", "--shapes", "equal", "--repeats", "5")
    shown = "collectives run beside compute, and a step is near its bound"

    def part(name, limit_s, *arguments, shows, needs=gpu(options)):
        return Part(name, script("bench/run.py", "all_gather_overlap", "--no-build", "--json", *arguments), limit_s,
                    needs=(*needs, f"built:{pack.OVERLAP}", PACKAGE_IS_THERE), shows=shows)

    over, needs = ("gloo", ()) if options.device == "cpu" else ("nccl", ("gpus:2",))
    return [part("stream", 120, "--network", "stream", *device, *few, shows=shown),
            part("stream_infiniband", 120, "--network", "stream", "--preset", "infiniband", *device, *few,
                 shows=f"{shown}, with the times of InfiniBand"),
            part(f"overlap_{over}", 120, "--network", over, "--quick", needs=needs, shows="a step beside its bound and FSDP2")]


def symmetric(options):
    refused = "where windows cannot be made, training goes on in LibTorch's memory"
    return [
        native(options, "slots", 2, 120, "[symmetric]", shows="gathers and reductions in symmetric memory, and their values"),
        native(options, "without_cumem", 2, 60, "[symmetric_training]", environment={"NCCL_CUMEM_ENABLE": "0"}, shows=refused),
        native(options, "without_windows", 2, 60, "[symmetric_training]", environment={"NCCL_WIN_ENABLE": "0"}, shows=refused),
        native(options, "copy_engine", 2, 60, "[symmetric_training]", "--nccl-log", needs=("gpus:2",),
               environment={"FSDP_TEST_COPY_ENGINE": "1"}, shows="gathers into slots by copy engines"),
        native(options, "kernels", 2, 60, "[symmetric_training]", "--nccl-log", needs=("gpus:2",),
               shows="which kernels NCCL takes for gathers into slots and reductions out of them"),
    ]


def sanitizer(options):
    """The suffix of a case's name makes the choice: each runs ten to a hundred times slower under it."""
    one = python_cases(options, "one", 240, "one", *chosen("reshard_after_forward_True", "optimizer_fused", "cpu_offload_True",
                                                           "mixed_precision_bfloat16_float32"), shows="")
    fake = python_cases(options, "fake", 120, "fake", *chosen("no_synchronization"), shows="")
    return [under_sanitizer("memcheck_one", one, 240), under_sanitizer("memcheck_fake", fake, 120),
            under_sanitizer("racecheck_fake", fake, 120, "--tool", "racecheck"),
            under_sanitizer("synccheck_fake", fake, 120, "--tool", "synccheck")]


def several_gpus(options):
    """What only several GPUs or nodes show."""
    start = "which start of reductions is fastest on a real network (choose_reduce_scatter_start)"
    links = "NCCL's latencies and bandwidths beside the simulated networks'"
    return [
        native(options, "native_two_gpus", 2, 240, needs=("gpus:2",), shows="all of the native tests, a GPU for each rank"),
        native(options, "two_gpus", 2, 120, "[symmetric]", needs=("gpus:2",), shows="symmetric memory over NVLink"),
        ranks_of(options, "reduction_start.py", "start_of_reductions_two_gpus", 120, 2, start, ("gpus:2",)),
        ranks_of(options, "link_times.py", "link_times_two_gpus", 90, 2, f"{links}: NVLink", ("gpus:2",)),
        ranks_of(options, "link_times.py", "link_times_eight_gpus", 90, 8, f"{links}: NVLink, eight ranks", ("gpus:8",)),
        # On each of them: torchrun --nnodes N --rdzv-endpoint HOST:PORT --nproc-per-node 8 bench/pytorch/link_times.py
        ranks_of(options, "link_times.py", "link_times_nodes", 90, 2, f"{links}: InfiniBand", ("nodes:2",)),
    ]
