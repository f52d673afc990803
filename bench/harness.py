"""What the benchmarks share: options, building, statistics, and how results are shown and kept."""

import argparse
import datetime
import fcntl
import json
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
EXTENSION = "bench/fsdp_bench_extension" + sysconfig.get_config_var("EXT_SUFFIX")
SIMULATED_DEVICE = "bench/fsdp_bench_simulated_device" + sysconfig.get_config_var("EXT_SUFFIX")
PROGRAM = "bench/fsdp_bench"
OVERLAP_PROGRAM = "bench/fsdp_bench_overlap"
PACKAGE = ["python_package"]
BUILT, PACKED = "build.ninja", "packed.json"  # of a build folder, and of what tools/gpu_check has brought along


def add_common_options(parser):
    parser.add_argument("--json", action="store_true", help="print one JSON line per case and nothing else")
    parser.add_argument("--quick", action="store_true",
                        help="other defaults: few, small cases, which show that each part runs to its end")
    parser.add_argument("--save", action="store_true", help="also write the JSON lines to bench/results/")
    parser.add_argument("--no-build", action="store_true", help="measure what is built already")


def build_dir():
    path = os.environ.get("FSDP_BUILD_DIR")
    if not path or not any((Path(path) / name).exists() for name in (BUILT, PACKED)):
        raise SystemExit("FSDP_BUILD_DIR must name a configured build folder; tools/bench sets it")
    return Path(path)


def has_target(name):
    """False: the build was configured where something was missing that the target needs."""
    if (build_dir() / PACKED).exists():
        return (build_dir() / name).exists()
    return name in (build_dir() / BUILT).read_text()


def build(options, targets):
    if options.no_build:
        return
    # The environment's ninja, also where it calls Meson to configure again, which looks for one on the path: another version
    # would find the log of no use, and build everything anew.
    ninja = Path(sys.executable).with_name("ninja")
    environment = {**os.environ, "PATH": f"{ninja.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    with (build_dir() / "benchmarks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # benchmarks that run side by side build one after another
        done = subprocess.run([ninja, "-C", str(build_dir()), *targets], env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"building {' '.join(targets)} failed:\n{done.stdout[-4000:]}")


def targets_for(impls):
    """What has to be built to measure these implementations."""
    return (([PROGRAM] if "fsdp" in impls else []) + ([EXTENSION] if set(impls) != {"fsdp"} else [])
            + (PACKAGE if "python" in impls else []))


def percentile(samples, fraction):
    """Linear between the two nearest samples."""
    import numpy  # here, as a benchmark tells its options where only Python's own modules are

    return float(numpy.quantile(samples, fraction))


def median(samples):
    return percentile(samples, 0.5)


def progress(items, what):
    """The items, with a bar for people who wait: on a terminal alone, and where tqdm is, which a GPU's bare machine may lack."""
    try:
        import tqdm
    except ImportError:
        return items
    return tqdm.tqdm(items, desc=what, disable=None, leave=False, file=sys.stderr)


def spread(samples, unit, scale=1.0):
    """{median, p10, p90} with the unit in the names."""
    return {
        f"median_{unit}": round(median(samples) * scale, 4),
        f"p10_{unit}": round(percentile(samples, 0.1) * scale, 4),
        f"p90_{unit}": round(percentile(samples, 0.9) * scale, 4),
    }


def paired_ratio(ours, theirs):
    """Each pair's, of measurements taken in turns: what the machine did meanwhile cancels out."""
    return spread([mine / other for mine, other in zip(ours, theirs)], "ratio")


def parse(parser, benchmark, arguments):
    """The benchmark's options. With --quick its QUICK are the defaults; what is asked for counts all the same."""
    benchmark.add_options(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        parser.set_defaults(**benchmark.QUICK)
        options = parser.parse_args(arguments)
    return options


def options_of(benchmark, arguments, quick):
    """The options of another benchmark, which is a part of this one."""
    parser = argparse.ArgumentParser()
    add_common_options(parser)
    return parse(parser, benchmark, [*arguments, *(["--quick"] if quick else [])])


def has_gpu():
    import torch

    return torch.cuda.is_available()


def gpus():
    import torch

    return torch.cuda.device_count()


def torch_version():
    from importlib.metadata import version

    return version("torch")


def commit():
    """Of the tree that is measured; with a + where tracked files differ, but for records and pages, which a run writes."""
    git = ["git", "-C", HERE]
    said = subprocess.run([*git, "rev-parse", "--short", "HEAD"], text=True, capture_output=True).stdout.strip()
    measured = [":/", *(f":(exclude,top){path}" for path in ("bench/results", "docs", "*.md"))]
    differs = said and subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *measured], capture_output=True).returncode != 0
    return said + "+" * bool(differs) or "unknown"


def machine():
    model = "unknown CPU"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        model = platform.processor() or model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch_version(),
    }


class Report:
    """Collects the cases of one run and shows them as JSON lines or as a table."""

    def __init__(self, name, options):
        self._name = name
        self._options = options
        self._cases = []
        self._settings = []
        self.part = None  # of a benchmark of several: told in every case

    def note(self, text):
        """A line for people; silent with --json."""
        if not self._options.json:
            print(text, flush=True)

    def setting(self, **facts):
        """What was measured and how: shapes, dtype, bytes, world, device, warm-up, repeats."""
        about = machine()
        if not self._settings:
            self.note(f"{self._name}: torch {about['torch']}, {about['cpu']}, {about['cores']} cores, "
                      f"load {about['load_1min']}")
        self.note("  " + "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in facts.items()))
        self._settings.append(facts)

    def case(self, **fields):
        if self.part:
            fields = {"part": self.part, **fields}
        self._cases.append(fields)
        if self._options.json:
            print(json.dumps(fields), flush=True)

    def table(self, headers, rows):
        cells = [headers] + [[text(value) for value in row] for row in rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
        for row in cells:
            self.note("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)))

    def save(self):
        if not self._options.save:
            return
        folder = HERE / "results"
        folder.mkdir(exist_ok=True)
        now = datetime.datetime.now(datetime.timezone.utc)
        head = {
            "benchmark": self._name,
            "command": "tools/bench " + shlex.join(sys.argv[1:]),
            "date": now.isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine(),
            "setting": self._settings[0] if len(self._settings) == 1 else self._settings,
        }
        path = folder / f"{self._name}-{now:%Y%m%d-%H%M%S}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in [head, *self._cases]))
        self.note(f"  written to {path}")


def text(value):
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
