"""What this machine is, and what it lacks for a part."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass

ABOUT_TORCH = """
import json, os, torch
gpu = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "torch_root": os.path.dirname(torch.__file__), "cuda": torch.version.cuda or "",
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "",
    "gpus": torch.cuda.device_count() if gpu else 0,
    "gpu": torch.cuda.get_device_name(0) if gpu else "",
    "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if gpu else 0.0}))
"""


COMPILERS = ("g++", "c++", "clang++")


@dataclass
class Machine:
    device: str = "cuda"  # what the stages are to run on
    gpu: str = ""
    gpus: int = 0
    memory_gib: float = 0.0
    driver: str = ""  # empty: no driver answers
    torch: str = ""  # empty: python3 has none
    torch_root: str = ""
    cuda: str = ""  # that torch was built for
    nccl: str = ""
    toolkit: str = ""  # nvcc's version
    sanitizer: str = ""  # where compute-sanitizer is
    python: str = ""
    cores: int = 1
    glibc: str = ""
    compiler: str = ""  # where one is that C++ and Triton's kernels are compiled by

    def facts(self):
        return asdict(self)


def output_of(command, limit_s=120):
    """None where it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def glibc():
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    except (OSError, ValueError):  # another C library
        return ""


def look(device):
    found = Machine(device=device, python=sys.version.split()[0], cores=len(os.sched_getaffinity(0)), glibc=glibc(),
                    compiler=next(filter(None, map(shutil.which, COMPILERS)), ""))
    about = output_of([sys.executable, "-c", ABOUT_TORCH])
    if about:
        for name, value in json.loads(about.splitlines()[-1]).items():
            setattr(found, name, value)
    driver = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    found.driver = driver.split()[0] if driver and driver.strip() else ""
    nvcc = output_of([shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "--version"])
    release = re.search(r"release ([\d.]+)", nvcc or "")
    found.toolkit = release.group(1) if release else ""
    found.sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer") or ""
    return found


def why_no_gpu(machine):
    if machine.gpus and machine.driver:
        return ""
    if machine.device == "cpu":
        return "needs a GPU, and --device cpu was asked for"
    if not machine.driver:
        return "no driver: nvidia-smi does not answer"
    if not machine.cuda:
        return f"torch {machine.torch} was built without CUDA"
    return f"no GPU that torch {machine.torch} (CUDA {machine.cuda}) can use, though driver {machine.driver} answers"


def notes(machine):
    """What is no reason to skip anything, but has to be known to whoever reads the figures."""
    said = []
    if machine.gpu and not re.search("H100|H200", machine.gpu):
        said.append(f"the GPU is a {machine.gpu}, not an H200 or H100: limits and sizes were chosen for those")
    if machine.torch and machine.device == "cuda" and not machine.cuda.startswith("13."):
        said.append(f"torch is built for CUDA {machine.cuda or '(none)'}, not 13: the library's CUDA part is built only where "
                    "that wheel's headers are")
    if machine.device == "cuda" and not machine.toolkit:
        said.append("no CUDA toolkit (nvcc): no file of libfsdp needs it, compute-sanitizer comes with it")
    return said


class Needs:
    """Answers what a part lacks here: an empty text, or the reason why it is skipped. record: of what has passed before.
    build: where the programs are. unfit: why those that were packed are of no use here. no_extension: why Python's is not."""

    def __init__(self, machine, record, build, unfit="", no_extension=""):
        self.machine, self.record, self.build, self.unfit, self.no_extension = machine, record, build, unfit, no_extension

    def missing(self, need):
        kind, _, value = need.partition(":")
        return getattr(self, "_" + kind)(value)

    def _torch(self, _):
        return "" if self.machine.torch else "python3 has no torch"

    def _gpu(self, _):
        return why_no_gpu(self.machine)

    def _gpus(self, value):
        if self.machine.gpus >= int(value):
            return ""
        return f"needs {value} GPUs, here {'is 1' if self.machine.gpus == 1 else f'are {self.machine.gpus}'}"

    def _nodes(self, value):
        return f"needs {value} nodes; run its command there by hand"

    def _memory(self, value):
        """Of the GPU, in GiB. On a CPU sizes are tiny."""
        if self.machine.device == "cpu" or self.machine.memory_gib >= float(value):
            return ""
        return why_no_gpu(self.machine) or f"needs {value} GiB of GPU memory, here are {self.machine.memory_gib:g}"

    def _sanitizer(self, _):
        return "" if self.machine.sanitizer else "no CUDA toolkit: compute-sanitizer is not on the PATH"

    def _compiler(self, _):
        return "" if self.machine.compiler else "no C++ compiler is on the PATH"

    def _unfit(self, _):
        return "" if self.unfit else "the packed binaries fit, so nothing has to be built"

    def _no_extension(self, _):
        return "" if self.no_extension else "there is no need for it"

    def _passed(self, value):
        """stage/part"""
        stage, _, part = value.partition("/")
        if self.record.has_passed(stage, part):
            return ""
        last = self.record.last(stage, part)
        if not last:
            return f"needs {value}, which has not run"
        return f"needs {value}, found it {last['status']}{': ' + last['why'] if last.get('why') else ''}"

    def _built(self, value):
        if (self.build / value).exists():
            return ""
        return f"{value} is not there: {self.unfit or self.no_extension or 'it was not packed'}"

    def _two_ranks(self, _):
        """Two ranks over NCCL (on a CPU over gloo)."""
        if self.machine.device == "cpu" or self.machine.gpus >= 2:
            return ""
        return why_no_gpu(self.machine) or self._passed("first/two_ranks")
