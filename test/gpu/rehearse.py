#!/usr/bin/env python3
"""Rehearses tools/gpu_check as it will run on a machine with a GPU and no network, on what a CPU can do.

Usage: rehearse.py [--environment DIR] [--folder DIR] [--jobs N] [--keep]
It makes an environment with torch 2.11.0 and, where there is one, Python 3.12 (a download of 3 GB, the first time), packs
the Debian packages, and copies the commit and the packed folder into an empty folder. From there alone it runs gpu_check in
a namespace without a network, in which this machine's own copies of those packages and its CUDA toolkit are hidden: first a
call that is cut short, then calls that go on until nothing is left. It needs root. Time limits are as many times longer as
this machine has fewer cores than 16, and the build's time of all processors must fit into 8 minutes of 16 cores.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "gpu"))

from command_line import ALL_PASSED, SOME_FAILED, SOME_SKIPPED, TIME_IS_UP  # noqa: E402
from record import Record  # noqa: E402
from report import last_ends  # noqa: E402

TORCH = "2.11.0"
PACKAGES = (f"torch=={TORCH}", "numpy", "meson", "ninja", "pybind11", "pytest")
CORES = 16  # of the machine that this is for
BUILD_LIMIT_S = 480
CALL_S = 570
FIRST_CALL_S = 60
HIDDEN_FOLDERS = ("fmt", "spdlog", "CLI", "nlohmann", "catch2", "isa-l")
HIDDEN_FILES = ("/usr/include/isa-l.h", "/usr/bin/pkg-config", "/usr/bin/pkgconf", "/usr/bin/ctags", "/usr/bin/ccache")
HIDDEN_LIBRARIES = ("libfmt", "libspdlog", "libisal")


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = ROOT / ".cache" / "gpu_rehearsal"
    parser.add_argument("--environment", type=Path, default=folder / "environment", help="made where there is none")
    parser.add_argument("--folder", type=Path, default=folder / "machine", help="emptied first")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--keep", action="store_true", help="leave the folder with its build")
    return parser.parse_args()


def python_to_use():
    """3.12, as there; else this one."""
    pyenv = sorted(Path.home().glob(".pyenv/versions/3.12*/bin/python3"))
    found = [str(path) for path in pyenv] + [shutil.which("python3.12") or ""]
    for python in filter(None, found):
        if subprocess.run([python, "-c", "import venv, sysconfig, pathlib, sys; sys.exit(not pathlib.Path("
                           "sysconfig.get_path('include'), 'Python.h').exists())"], capture_output=True).returncode == 0:
            return python
    print(f"rehearse: no Python 3.12 with headers here, so with {sys.version.split()[0]}", flush=True)
    return sys.executable


def make_environment(folder):
    python = folder / "bin" / "python3"
    if python.exists() and subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0:
        return
    print(f"rehearse: making {folder} with torch {TORCH}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python_to_use(), "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES], check=True)


def make_machine(folder):
    """The commit and the packed folder, and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "repository").mkdir(parents=True)
    archive = subprocess.Popen(["git", "-C", ROOT, "archive", "HEAD"], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", folder / "repository"], stdin=archive.stdout, check=True)
    if archive.wait() != 0:
        raise SystemExit("rehearse: git archive failed")
    subprocess.run([sys.executable, ROOT / "tools" / "gpu_check", "--pack", folder / "packages"], check=True)


def hide():
    """Shell commands that put nothing in the place of this machine's packages."""
    folders = [*(f"/usr/include/{name}" for name in HIDDEN_FOLDERS), os.path.realpath("/usr/local/cuda")]
    libraries = [str(path) for name in HIDDEN_LIBRARIES for path in Path("/usr/lib/x86_64-linux-gnu").glob(f"{name}.so*")
                 if not path.is_symlink()]
    lines = [f"mount -t tmpfs none {path}" for path in folders if Path(path).is_dir()]
    # Not executable: what looks for a command finds none.
    lines += [f"mount --bind /dev/null {os.path.realpath(path)}" for path in (*HIDDEN_FILES, *libraries) if Path(path).exists()]
    return lines


def call(options, seconds, more=()):
    """One call there, as the exit code of gpu_check."""
    repository = options.folder / "repository"
    command = [str(options.environment / "bin" / "python3"), "tools/gpu_check", "--device", "cpu",
               "--packages", str(options.folder / "packages"),
               "--slower", str(max(1, CORES / options.jobs)), "--jobs", str(options.jobs), "--seconds", str(seconds), *more]
    environment = {"PATH": f"{options.environment / 'bin'}:/usr/bin:/bin:/usr/sbin:/sbin",
                   "HOME": str(options.folder), "LANG": "C.UTF-8"}
    lines = ["set -e", *hide(), "ip link set lo up", f"cd {shlex.quote(str(repository))}", f"exec {shlex.join(command)}"]
    return subprocess.call(["unshare", "--net", "--mount", "bash", "-c", "\n".join(lines)], env=environment)


def check_network_is_gone():
    code = subprocess.call(["unshare", "--net", "bash", "-c", "exec 3<>/dev/tcp/1.1.1.1/53"], stderr=subprocess.DEVNULL)
    if code == 0:
        raise SystemExit("rehearse: there is a network in a namespace without one")


def wrong(lines, codes):
    """What is not as it should be, in words."""
    ends = last_ends(lines)
    found = [f"{'/'.join(part)}: {line['status']}: {line.get('why', '')}" for part, line in ends.items()
             if line["status"] in ("failed", "cut")]
    if codes[0] != TIME_IS_UP:
        found.append(f"the first call, of {FIRST_CALL_S} s, ended with {codes[0]} and not with {TIME_IS_UP}")
    if codes[-1] not in (ALL_PASSED, SOME_SKIPPED):
        found.append(f"the last call ended with {codes[-1]}")
    built_s = sum(line.get("cpu_seconds", 0) for line in lines if line["stage"] == "build")
    print(f"the build took {built_s:.0f} s of all processors, {built_s / CORES:.0f} s of {CORES} cores at once", flush=True)
    if built_s > BUILD_LIMIT_S * CORES:
        found.append(f"the build is too long for {BUILD_LIMIT_S} s of {CORES} cores")
    counts = [sum(line["status"] == status for line in ends.values()) for status in ("passed", "skipped")]
    return found, counts


def main():
    options = read_arguments()
    for name in ("environment", "folder"):
        setattr(options, name, getattr(options, name).resolve())
    make_environment(options.environment)
    make_machine(options.folder)
    check_network_is_gone()
    begin, slower = time.monotonic(), max(1, CORES / options.jobs)
    codes = [call(options, FIRST_CALL_S)]
    while codes[-1] == TIME_IS_UP and len(codes) < 8:
        codes.append(call(options, CALL_S * slower))
    results = options.folder / "repository" / ".cache" / "gpu_check" / "cpu"
    found, counts = wrong(Record(results).lines(), codes)
    report = results / "report.md"
    if report.exists():
        shutil.copy(report, options.folder.parent / "report.md")
    print(f"rehearsed in {len(codes)} calls and {time.monotonic() - begin:.0f} s: {options.folder.parent / 'report.md'}")
    for text in found:
        print(f"wrong: {text}")
    print(f"{counts[0]} passed, {len(found)} failed, {counts[1]} skipped", flush=True)
    if not options.keep and not found:
        shutil.rmtree(options.folder)
    return SOME_FAILED if found else ALL_PASSED


if __name__ == "__main__":
    sys.exit(main())
