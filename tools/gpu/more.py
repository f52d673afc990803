"""The stages, in order, and the parts of each."""

import sys
from pathlib import Path

import figures
from parts import Part

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("build", "nccl", "cases", "steps", "overlap", "memory", "offload", "graphs", "symmetric", "sanitizer")
GPU_TESTS = ROOT / "test" / "gpu"
# Of bench and test programs only those that the stages run.
NATIVE, RUNTIME = "test/gpu/native/fsdp_test_gpu", "test/runtime/fsdp_test_runtime"
OVERLAP, TRAIN, CUDA_STEP = "bench/fsdp_bench_overlap", "tools/llama/fsdp_train", "bench/fsdp_bench_cuda_step"
PACKAGE = "python_package"
TARGETS = (PACKAGE, NATIVE, RUNTIME, OVERLAP, TRAIN, CUDA_STEP)
PACKAGE_IS_BUILT = "built:bindings/fsdp/_api.py"


def script(path, *arguments):
    return (sys.executable, str(ROOT / path), *map(str, arguments))


def all_stages(options):
    makers = (build, nccl, cases, steps, overlap, memory, offload, graphs, symmetric, sanitizer)
    return {name: make(options) for name, make in zip(NAMES, makers)}


def build(options):
    def part(name, what, limit_s, *targets):
        command = script("tools/gpu/build.py", what, ROOT, options.build, options.packages, options.jobs or 0, *targets)
        return Part(name, command, limit_s, needs=("torch",), shows="it builds against this torch, without a network")

    return [part("configure", "configure", 120), part("programs", "build", 480, *TARGETS)]


def nccl(options):
    return [
        Part("two_ranks", script("tools/gpu/two_ranks.py", "{out}", "{limit}"), 90,
             needs=("torch",) if options.device == "cpu" else ("gpu",),
             shows="two ranks on one GPU gather, reduce and average over torch's NCCL group"),
    ]


def python_cases(name, limit_s, *arguments, needs=(), shows=""):
    return Part(name, script("test/gpu/test_cases.py", "--limit", "{limit}", "--out", "{out}", *arguments), limit_s,
                needs=(PACKAGE_IS_BUILT, *needs), shows=shows)


def native(name, processes, limit_s, *arguments, needs=(), shows="", environment=None):
    """C++ tests whose ranks are processes."""
    shares = ("two_ranks",) if processes > 1 else ()
    return Part(name, script("test/gpu/run_native.py", "--processes", processes, "--limit", "{limit}", "--out", "{out}",
                             *arguments), limit_s, needs=(f"built:{NATIVE}", *shares, *needs), shows=shows,
                environment=environment or {})


# What has a stage of its own.
ELSEWHERE = "graph,peak,released,offload"


def cases(options):
    gpu = () if options.device == "cpu" else ("gpu",)
    train = "a sharded model trains as the plain one does"
    return [
        python_cases("one", 240, "--world", "one", "--without", ELSEWHERE, needs=gpu, shows=f"{train}, one rank; late streams"),
        python_cases("fake", 60, "--world", "fake", "--without", ELSEWHERE, needs=gpu, shows="no step waits on the host"),
        native("native_one", 1, 60, "~[symmetric]~[offload]", needs=gpu,
               shows="the library's own NCCL communicator, alone; hybrid meshes of one"),
        native("native_two", 2, 180, "~[symmetric]~[offload]", needs=gpu,
               shows="connecting, values, averages in the collective, hybrid 1x2 and 2x1, replicas, checkpoints, timeouts, "
                     "aborts and ranks that die, over real NCCL"),
        python_cases("nccl", 240, "--world", "nccl", "--without", ELSEWHERE, needs=(*gpu, "two_ranks"),
                     shows=f"{train}, two ranks over NCCL"),
        native("runtime", 2, 240, "--program", RUNTIME, "--together", needs=(*gpu, f"built:{RUNTIME}"),
               shows="the runtime's own C++ tests with CUDA tensors, on worlds of two processes"),
        Part("train", script("test/gpu/train_losses.py", "--seconds", "{limit}", "--out", "{out}"), 120,
             needs=(*gpu, f"built:{TRAIN}", "two_ranks"),
             shows="tools/train's losses on two ranks over the native communicator beside those of the plain model"),
        python_cases("gloo", 240, "--world", "gloo", "--without", ELSEWHERE, needs=gpu,
                     shows=f"{train}, CUDA tensors over a user's gloo group"),
        *several_gpus(options.device),
    ]


def ranks_of(program, name, limit_s, device, *, needs=(), shows="", processes=2):
    """A program whose ranks torchrun starts."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
               str(ROOT / "bench" / "pytorch" / program), "--device", device, "--out", "{out}")
    return Part(name, command, limit_s, needs=(PACKAGE_IS_BUILT, *needs), shows=shows)


def several_gpus(device):
    """What only several GPUs or nodes show."""
    start = "which start of reductions is fastest on a real network (choose_reduce_scatter_start)"
    links = "NCCL's latencies and bandwidths beside the simulated networks'"
    return [
        native("native_two_gpus", 2, 240, needs=("gpus:2",), shows="all of native_two and symmetric, a GPU for each rank"),
        ranks_of("reduction_start.py", "start_of_reductions_two_gpus", 120, device, needs=("gpus:2",), shows=start),
        ranks_of("link_times.py", "link_times_two_gpus", 90, device, needs=("gpus:2",), shows=f"{links}: NVLink"),
        ranks_of("link_times.py", "link_times_eight_gpus", 90, device, needs=("gpus:8",), processes=8,
                 shows=f"{links}: NVLink, eight ranks"),
        # On each of them: torchrun --nnodes N --rdzv-endpoint HOST:PORT --nproc-per-node 8 bench/pytorch/link_times.py
        ranks_of("link_times.py", "link_times_nodes", 90, device, needs=("nodes:2",), shows=f"{links}: InfiniBand"),
    ]


def steps(options):
    return figures.parts(options.device)


def overlap(options):
    gpu = () if options.device == "cpu" else ("gpu",)
    built = f"built:{OVERLAP}"
    device = () if options.device == "cuda" else ("--device", "cpu")
    few = ("--quick",) if options.device == "cpu" else ("--ratios", "0.5,1,2", "--shapes", "equal", "--repeats", "5")
    bench = ("bench/run.py", "all_gather_overlap", "--no-build", "--json")
    shown = "collectives run beside compute, and a step is near its bound"
    over, ranks = ("gloo", ()) if options.device == "cpu" else ("nccl", ("gpus:2",))
    return [
        Part("stream", script(*bench, "--network", "stream", *device, *few), 120, needs=(*gpu, built), shows=shown),
        Part("stream_infiniband", script(*bench, "--network", "stream", "--preset", "infiniband", *device, *few), 120,
             needs=(*gpu, built), shows=f"{shown}, with the times of InfiniBand"),
        Part(over, script(*bench, "--network", over, "--quick"), 120, needs=(*gpu, built, PACKAGE_IS_BUILT, *ranks),
             shows="a step over NCCL beside its bound and FSDP2"),
    ]


def memory(options):
    gpu = () if options.device == "cpu" else ("gpu",)
    return [python_cases(f"peak_{world}", 120, "--world", world, "-k", "peak", "-k", "released",
                         needs=(*gpu, *(("two_ranks",) if world == "nccl" else ())),
                         shows="peak bytes of a step are at most FSDP2's, and nothing is left behind by one")
            for world in ("one", "fake", "nccl")]


def offload(options):
    gpu = () if options.device == "cpu" else ("gpu",)
    return [
        python_cases("right", 120, "--world", "one", "-k", "offload", needs=gpu, shows="offloaded training is right"),
        Part("timeline", script("bench/pytorch/offload_timeline.py", "--device", options.device, "--out", "{out}"), 120,
             needs=(*gpu, PACKAGE_IS_BUILT), shows="how much of the copies to and from pinned memory runs beside compute"),
        native("native", 1, 60, "[offload]", needs=gpu, shows="the same from C++"),
    ]


def graphs(options):
    gpu = () if options.device == "cpu" else ("gpu",)
    return [python_cases(world, 120, "--world", world, "-k", "graph",
                         needs=(*gpu, *(("two_ranks",) if world == "nccl" else ())),
                         shows="a captured step replays with the results of an eager one")
            for world in ("one", "fake", "nccl")]


def symmetric(options):
    gpu = () if options.device == "cpu" else ("gpu",)
    refused = "where windows cannot be made, training goes on in LibTorch's memory, with a line in the log"
    return [
        native("slots", 2, 120, "[symmetric]", needs=gpu, shows="gathers and reductions in symmetric memory, and their values; "
               "a captured step; bandwidth and compute beside them"),
        native("without_cumem", 2, 60, "[symmetric_training]", needs=gpu, environment={"NCCL_CUMEM_ENABLE": "0"},
               shows=refused),
        native("without_windows", 2, 60, "[symmetric_training]", needs=gpu, environment={"NCCL_WIN_ENABLE": "0"},
               shows=refused),
        native("copy_engine", 2, 60, "[symmetric_training]", "--nccl-log", needs=("gpu",),
               environment={"FSDP_TEST_COPY_ENGINE": "1"}, shows="gathers into slots by copy engines"),
        native("kernels", 2, 60, "[symmetric_training]", "--nccl-log", needs=gpu,
               shows="which kernels NCCL takes for gathers into slots and reductions out of them"),
        native("two_gpus", 2, 120, "[symmetric]", needs=("gpus:2",), shows="the same over NVLink"),
    ]


def sanitizer(options):
    """The suffix of a case's name makes the choice: each runs ten to a hundred times slower under it."""
    def wrapped(name, limit_s, part, *flags):
        command = ("compute-sanitizer", "--target-processes", "all", "--error-exitcode", "9", *flags, *part.command)
        return Part(name, command, limit_s, needs=("gpu", "sanitizer", *part.needs), shows="compute-sanitizer finds nothing",
                    environment=part.environment)

    one = python_cases("one", 240, "--world", "one", "-k", "reshard_after_forward_True", "-k", "optimizer_fused",
                       "-k", "cpu_offload_True", "-k", "mixed_precision_bfloat16_float32")
    fake = python_cases("fake", 120, "--world", "fake", "-k", "no_synchronization")
    alone = native("native", 1, 120, "~[symmetric]~[offload]")
    return [wrapped("memcheck_one", 240, one), wrapped("memcheck_fake", 120, fake), wrapped("memcheck_native", 120, alone),
            wrapped("racecheck_fake", 120, fake, "--tool", "racecheck"),
            wrapped("synccheck_fake", 120, fake, "--tool", "synccheck")]
