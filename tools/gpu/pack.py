"""Packs what the stages run, for a machine with a GPU that has neither network nor compiler.

The archive is a build folder with nothing in it but what runs: library, Python package, programs, and Debian's fmt, spdlog
and ISA-L beside them. They find one another by where they lie, and torch by LD_LIBRARY_PATH. The headers of Debian's
packages are in it, too, for a machine that the binaries do not fit.
"""

import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import elf
import extension
import packages
from archive import ARCHIVE, HEADERS, MANIFEST, ROOT, PackError, ask

TORCH, PYTHON = "2.11.0", "3.12"  # there
VENV, BUILD = ROOT / f".venv-{TORCH}", ROOT / f"build-{TORCH}"
NEWEST_GLIBC = "2.36"
LIMIT_BYTES = 40 << 20  # of 64 MiB that a working tree may have with it
# What the stages run, by where it is in a build folder.
NATIVE, TRAIN, CUDA_STEP = "test/gpu/native/fsdp_test_gpu", "tools/llama/fsdp_train", "bench/fsdp_bench_cuda_step"
RUNTIME, OVERLAP = "test/runtime/fsdp_test_runtime", "bench/fsdp_bench_overlap"
PROGRAMS, OF_MORE = (NATIVE, TRAIN, CUDA_STEP), (RUNTIME, OVERLAP)
PACKAGE = "python_package"
LIBRARIES = ("lib/libfsdp.so", "test/gpu/native/libfsdp_test_gpu_device.so")
DEBIAN = ("libfmt", "libspdlog", "libisal")
TORCHS = re.compile(r"lib(torch|c10|cud|nccl|gomp|shm|caffe2)")
SYSTEMS = re.compile(r"lib(stdc\+\+|m|c|gcc_s|dl|rt|pthread)\.so|ld-linux")


def python_folder():
    """Where `python3` is the Python that is there; None where this machine has none with headers."""
    found = [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/{PYTHON}.*/bin"))]
    for folder in [*found, *os.get_exec_path()]:
        python = Path(folder) / "python3"
        about = ("import sys, sysconfig, pathlib, venv; sys.exit(sys.version_info[:2] != "
                 f"{tuple(elf.numbers(PYTHON))} or not pathlib.Path(sysconfig.get_path('include'), 'Python.h').exists())")
        if python.exists() and subprocess.run([python, "-c", about], capture_output=True).returncode == 0:
            return folder
    return None


def build(programs):
    """By tools/setup, whose environment has the Python that is there where this machine has it."""
    folder = python_folder()
    path = os.pathsep.join(filter(None, [folder, os.environ["PATH"]]))
    subprocess.run([ROOT / "tools" / "setup", "--torch", TORCH, PACKAGE, *programs], check=True,
                   env={**os.environ, "PATH": path})


def pack(folder, build=BUILD, python=VENV / "bin" / "python", programs=PROGRAMS, with_cuda=True, preset=6):
    """Fills the folder anew with the archive and, beside it, its manifest, which is returned. preset: of xz."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise PackError(f"{folder} has something else in it; name a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary)
        copy_build(build, tree, programs)
        copy_debian(tree)
        make_movable(tree, Path(python).parent)
        try:
            packages.pack(tree / HEADERS, with_cuda)
        except packages.PackError as error:
            raise PackError(str(error)) from error
        for header in extension.made_headers(build):
            copy(header, tree / header.relative_to(build))
        manifest = {**about(build, python), **asked_of_the_machine(tree), "extension": extension.flags_of(build, Path(python))}
        (tree / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        with tarfile.open(folder / ARCHIVE, "w:xz", preset=preset) as archive:
            for path in sorted(tree.iterdir()):
                archive.add(path, path.name)
    size = (folder / ARCHIVE).stat().st_size
    if size > LIMIT_BYTES:
        raise PackError(f"{folder / ARCHIVE} has {size:,} bytes, more than {LIMIT_BYTES:,}")
    (folder / MANIFEST).write_text(json.dumps({**manifest, "bytes": size}, indent=1) + "\n")
    return {**manifest, "bytes": size}


def copy_build(build, tree, programs):
    missing = [name for name in programs if not (build / name).exists()]
    if missing:
        raise PackError(f"{build} lacks {', '.join(missing)}; build them first")
    for name in programs:
        copy(build / name, tree / name)
    for name in LIBRARIES:  # under the name that programs look for
        (wanted,) = re.findall(r"\(SONAME\)\s+Library soname: \[(.*)\]", elf.read("-d", build / name))
        copy(build / name, (tree / name).with_name(wanted))
    for path in sorted((build / "bindings" / "fsdp").glob("*")):
        if path.is_file() and path.suffix in (".py", ".so"):
            copy(path, tree / "bindings" / "fsdp" / path.name)


def copy_debian(tree):
    listed = dict(re.findall(r"^\s*(\S+) .*=> (\S+)$", ask("ldconfig", "-p"), re.MULTILINE))
    wanted = {name for path in elves(tree) for name in elf.needed(path) if name.startswith(DEBIAN)}
    for name in sorted(wanted):
        if name not in listed:
            raise PackError(f"no {name} on this machine; tools/setup installs its package")
        copy(Path(listed[name]), tree / "lib" / name)


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source.resolve(), target)


def elves(tree):
    """Without those for a build there."""
    return [path for path in sorted(tree.rglob("*"))
            if path.is_file() and elf.is_elf(path) and tree / HEADERS not in path.parents]


def make_movable(tree, commands):
    """Without symbols for a debugger, and with paths that begin where a file is."""
    patchelf = commands / "patchelf" if (commands / "patchelf").exists() else "patchelf"
    folders = sorted({path.parent for path in elves(tree) if ".so" in path.name and "bindings" not in path.parts})
    for path in elves(tree):
        ask("strip", "--strip-unneeded", path)
        ask(patchelf, "--set-rpath", ":".join(f"$ORIGIN/{os.path.relpath(folder, path.parent)}" for folder in folders), path)


def about(build, python):
    made = (build / "bindings" / "fsdp" / "_build.py").read_text()
    (torch,) = re.findall(r"(\d+\.\d+\.\d+)", "".join(re.findall(r"^TORCH.*$", made, re.MULTILINE))) or [""]
    code = "import json, sys, torch.version as v; print(json.dumps([v.__version__, v.cuda or '', sys.version.split()[0]]))"
    loaded, cuda, version = json.loads(ask(python, "-c", code))
    if torch and not loaded.startswith(torch):
        raise PackError(f"{build} is built for torch {torch}, and {python} has {loaded}")
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout
    return {"commit": commit.strip(), "torch": loaded.split("+")[0], "cuda": cuda, "python": ".".join(version.split(".")[:2])}


def asked_of_the_machine(tree):
    """Refuses what no machine but this one can give."""
    files = elves(tree)
    there = {path.name for path in files}
    for path in files:
        for name in elf.needed(path):
            if name not in there and not TORCHS.match(name) and not SYSTEMS.match(name):
                raise PackError(f"{path.relative_to(tree)} needs {name}, which is neither packed nor torch's nor the system's")
    versions = elf.newest_versions(files)
    if elf.numbers(versions["GLIBC"]) > elf.numbers(NEWEST_GLIBC):
        raise PackError(f"the binaries need glibc {versions['GLIBC']}, and are to run with {NEWEST_GLIBC}; build on Debian 12")
    return {"glibc": versions["GLIBC"], "glibcxx": versions.get("GLIBCXX", ""),
            "files": {str(path.relative_to(tree)): path.stat().st_size for path in files}}
