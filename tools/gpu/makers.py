"""What parts are made of: the programs that they run, and what these need."""

import sys
from pathlib import Path

import extension
import pack
from parts import Part

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_IS_THERE = f"built:{extension.name()}"


def script(path, *arguments):
    return (sys.executable, str(ROOT / path), *map(str, arguments))


def gpu(options):
    return () if options.device == "cpu" else ("gpu",)


def python_cases(options, name, limit_s, world, *arguments, shows, needs=()):
    """Cases of test/gpu. arguments: which ones."""
    shares = ("two_ranks",) if world == "nccl" and options.device == "cuda" else ()
    return Part(name, script("test/gpu/test_cases.py", "--limit", "{limit}", "--out", "{out}", "--world", world, *arguments),
                limit_s, needs=(PACKAGE_IS_THERE, *gpu(options), *shares, *needs), shows=shows)


def chosen(*names):
    return tuple(word for name in names for word in ("-k", name))


def native(options, name, processes, limit_s, *arguments, shows, needs=(), environment=None):
    """C++ tests whose ranks are processes."""
    shares = ("two_ranks",) if processes > 1 else ()
    return Part(name, script("test/gpu/run_native.py", "--processes", processes, "--limit", "{limit}", "--out", "{out}",
                             *arguments), limit_s, needs=(f"built:{pack.NATIVE}", *gpu(options), *shares, *needs), shows=shows,
                environment=environment or {})


def steps(options, name, limit_s, *arguments, shows, needs=()):
    """bench/cuda_step.py: the plain model, FSDP2, the package and the C++ library in turns."""
    needs = (PACKAGE_IS_THERE, f"built:{pack.CUDA_STEP}", *gpu(options), *needs)
    tiny = ("--device", "cpu", "--tokens", "128", "--repeats", "2", "--steps", "1") if options.device == "cpu" else ()
    return Part(name, script("bench/run.py", "cuda_step", "--no-build", *arguments, *tiny, "--limit", "{limit}",
                             "--out", "{out}"), limit_s, needs=needs, shows=shows)


def offload_timeline(options, name, limit_s, shows):
    return Part(name, script("bench/pytorch/offload_timeline.py", "--device", options.device, "--out", "{out}"), limit_s,
                needs=(PACKAGE_IS_THERE, *gpu(options)), shows=shows)


def ranks_of(options, program, name, limit_s, processes, shows, needs):
    """A program whose ranks torchrun starts."""
    return Part(name, (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
                       str(ROOT / "bench" / "pytorch" / program), "--device", options.device, "--out", "{out}"), limit_s,
                needs=(PACKAGE_IS_THERE, *needs), shows=shows)


def under_sanitizer(name, part, limit_s, *flags):
    """Ten to a hundred times slower."""
    command = ("compute-sanitizer", "--target-processes", "all", "--error-exitcode", "9", *flags, *part.command)
    return Part(name, command, limit_s, needs=("gpu", "sanitizer", *part.needs), shows="compute-sanitizer finds nothing",
                environment=part.environment)
